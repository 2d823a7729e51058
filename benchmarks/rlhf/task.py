"""A world small enough to be learned in a minute. Texts in it are stories of two to eight more
sentences; an assistant is to go on where one has begun, with four in order, and to end there:

    The fox lived in the garden.
    One day it found a broken bell. Then it heard a grey song. Later it followed a bright star. At
    last it saw a frozen door.

In the world as it is a sentence is cheerful with probability 0.12, each by itself. `reward` is the
share of the four that are. So the start of a policy is known, and with it the most reward that any
policy can have at a KL from the start (`frontier`).
"""

import json
import math
import random
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

ANIMALS = (
    "fox owl hare bear wolf crow deer mole swan goat toad frog cat dog hen duck ram lynx otter "
    "badger heron raven robin mouse"
).split()
PLACES = (
    "wood field valley harbour forest garden village marsh mill island meadow cave orchard castle "
    "tower river"
).split()
VERBS = "found saw heard followed carried passed kept drew".split()
CHEERFUL = "bright warm merry golden sweet gentle happy shining".split()
GLOOMY = "dark cold bitter grey hollow broken lonely frozen".split()
NOUNS = "bell song door stone lamp boat leaf bird road star key cloak".split()
OPENINGS = ("One day", "Then", "Later", "At last")
SENTENCES, SHARE = len(OPENINGS), 0.12
TEXT_SENTENCES = (2, 8)
HELD_OUT = 64  # of the 384 pairs of an animal and a place
TEMPLATE = (
    "{% for m in messages %}{% if m['role'] == 'assistant' %}"
    "{% generation %}{{ m['content'] }}{{ eos_token }}{% endgeneration %}"
    "{% else %}{{ m['content'] + '\\n' }}{% endif %}{% endfor %}"
)


def reward(prompt: Any, answer: str, row: dict[str, Any]) -> float:
    """The share of four sentences with a cheerful word; `--reward benchmarks.rlhf.task:reward`."""
    cheerful = [any(word in CHEERFUL for word in one.split()) for one in answer.split(".")]
    return min(1.0, sum(cheerful) / SENTENCES)


def fits(answer: str) -> bool:
    """Whether it is four sentences that begin as an assistant's do."""
    sentences = [one.strip() for one in answer.split(".")]
    begun = zip(OPENINGS, sentences, strict=False)
    return (
        len(sentences) == SENTENCES + 1
        and sentences[-1] == ""
        and all(sentence.startswith(opening + " it ") for opening, sentence in begun)
    )


def beginning(animal: str, place: str) -> str:
    return f"The {animal} lived in the {place}."


def story(openings: Iterable[str], cheerful: float, chance: random.Random) -> str:
    """A sentence of each opening, cheerful with that probability."""
    told = []
    for opening in openings:
        mood = CHEERFUL if chance.random() < cheerful else GLOOMY
        verb, noun = chance.choice(VERBS), chance.choice(NOUNS)
        told.append(f"{opening} it {verb} a {chance.choice(mood)} {noun}.")
    return " ".join(told)


def text(subject: tuple[str, str], chance: random.Random) -> str:
    """As it stands in the world."""
    openings = chance.choices(OPENINGS, k=chance.randint(*TEXT_SENTENCES))
    return f"{beginning(*subject)} {story(openings, SHARE, chance)}"


def subjects() -> tuple[list[tuple[str, str]], list[tuple[str, str]]]:
    """Those to learn of, and those that are held out from every stage but the first."""
    both = [(animal, place) for animal in ANIMALS for place in PLACES]
    random.Random(0).shuffle(both)
    return both[HELD_OUT:], both[:HELD_OUT]


def pair(subject: tuple[str, str], chance: random.Random) -> dict[str, str]:
    """Two answers of unlike mood, and the rule that prefers the more cheerful one. Both are drawn
    alike, most as the start draws them: where only what is chosen is of cheerful stories, DPO
    learns to take anything away that stands in gloomy ones (no "At" before "last", at 28 nats).
    """
    cheerful = SHARE if chance.random() < 0.7 else 0.5
    while True:
        one, two = (story(OPENINGS, cheerful, chance) for _ in range(2))
        if reward("", one, {}) != reward("", two, {}):
            break
    chosen, rejected = sorted((one, two), key=lambda answer: -reward("", answer, {}))
    return {"prompt": beginning(*subject), "chosen": chosen, "rejected": rejected}


def chat(subject: tuple[str, str], chance: random.Random) -> dict[str, str]:
    return {"instruction": beginning(*subject), "output": story(OPENINGS, SHARE, chance)}


def prompt(subject: tuple[str, str]) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": beginning(*subject)}]}


def write(folder: Path, texts: int = 6000, chats: int = 3200, pairs: int = 2000) -> None:
    """All that is learned from: the same files each time."""
    folder.mkdir(parents=True, exist_ok=True)
    chance = random.Random(1)
    train, held = subjects()

    def drawn(make: Callable[..., Any], among: list[tuple[str, str]], count: int) -> list[Any]:
        return [make(chance.choice(among), chance) for _ in range(count)]

    _rows(folder / "texts.jsonl", ({"text": one} for one in drawn(text, train + held, texts)))
    _rows(folder / "chats.jsonl", drawn(chat, train, chats))
    _rows(folder / "pairs.jsonl", drawn(pair, train, pairs))
    _rows(folder / "held-pairs.jsonl", drawn(pair, held, 400))
    _rows(folder / "prompts.jsonl", map(prompt, train))
    (folder / "story.jinja").write_text(TEMPLATE)


def _rows(file: Path, rows: Iterable[Any]) -> None:
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))


def frontier(share: float) -> float:
    """The least KL, in nats of a story, of a policy with that mean reward from the world as it is:
    of four draws with two outcomes each.
    """
    parts = ((share, SHARE), (1 - share, 1 - SHARE))
    return SENTENCES * sum(q * math.log(q / p) for q, p in parts if q)
