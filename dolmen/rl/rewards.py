"""How good answers are: built-in checkers, and a function of the user's in a process of its own,
with a time limit (judge.py).

    with judge_of("gsm8k", 10.0) as judge:
        judge(Answer("What is 6 x 7?", "6 x 7 = 42", {"answer": "#### 42"})) -> Judgement(1.0)
"""

import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from dolmen.core.messages import cut
from dolmen.rl.function_worker import Apart, check_name
from dolmen.rl.judge import LARGEST

NUMERIC = re.compile(r"\d+\.?\d*|\.\d+")
NUMBER = re.compile(r"-?\d[\d,]*(?:\.\d+)?")
VOWELS = frozenset("aeiouAEIOU")


class Answer(NamedTuple):
    """What is judged."""

    prompt: str | list[dict[str, Any]]
    """A text, or the messages of a chat."""
    text: str
    row: dict[str, Any]
    """All fields of the prompt's row."""
    tokens: Sequence[int] = ()
    """The prompt's, and then its own: what a reward model scores."""


class Judgement(NamedTuple):
    reward: float | None
    """None: it has failed."""
    why: str = ""
    """It has."""


class NoReward(ValueError):
    """A run is to end where an answer has no reward; the message says why there is none."""


class Judge(ABC):
    """Gives each answer a reward; used within `with`."""

    def begin(self) -> None:
        """What takes time before the first answer. Raises ValueError where nothing can be judged;
        who does not call it is told with the first answer.
        """
        return None

    @abstractmethod
    def __call__(self, answer: Answer) -> Judgement: ...

    def __enter__(self) -> "Judge":
        return self

    def __exit__(self, *_: object) -> None:
        return None


class Checker(Judge):
    """A rule, which takes no time."""

    def __init__(self, rule: Callable[[Answer], float]):
        self.rule = rule

    def __call__(self, answer: Answer) -> Judgement:
        try:
            return Judgement(self.rule(answer))
        except KeyError as error:
            return Judgement(None, f"the row has no field {error}, which the reward compares with")


def exact(answer: Answer) -> float:
    """1 where the answer is the row's, else 0."""
    return float(answer.text.strip() == str(answer.row["answer"]).strip())


def last_number(text: str) -> float | None:
    """The last number of a text, as GSM8K marks answers (2110.14168): behind #### where there is
    that.
    """
    _, _, marked = text.rpartition("####")
    found = NUMBER.findall(marked)
    return float(found[-1].replace(",", "")) if found else None


def gsm8k(answer: Answer) -> float:
    """1 where the last number of the answer is that of the row's, else 0."""
    right, given = last_number(str(answer.row["answer"])), last_number(answer.text)
    return float(given is not None and given == right)


def stub(answer: Answer) -> float:
    """The share of characters that are vowels: something to learn where nothing is to be judged."""
    return sum(char in VOWELS for char in answer.text) / max(1, len(answer.text))


class Function(Judge):
    """MODULE:FUNCTION, which has failed too where it gives no finite number."""

    def __init__(self, name: str, limit: float):
        self.apart = Apart("reward", name, limit)

    def __exit__(self, *_: object) -> None:
        self.apart.end()

    def begin(self) -> None:
        self.apart.begin()

    def __call__(self, answer: Answer) -> Judgement:
        asked = {"prompt": answer.prompt, "answer": answer.text, "row": answer.row}
        reply = self.apart.ask(asked)
        return Judgement(reply.get("reward"), reply.get("failed", ""))


RULES = {"exact": exact, "gsm8k": gsm8k, "stub": stub}
NEEDS_ANSWER = ("exact", "gsm8k")
"""Those that compare with the row's own `answer`."""


def weighted(rewards: Sequence[str]) -> list[tuple[float, str]]:
    """(weight, name) of each, as --reward spells them: 0.7:NAME, or NAME alone, which is 1. Raises
    ValueError for what is no weight.
    """
    found = []
    for asked in rewards:
        weight, _, name = asked.partition(":")
        if NUMERIC.fullmatch(weight) is None:
            found.append((1.0, asked))
        elif 0 < float(weight) <= LARGEST and name:
            found.append((float(weight), name))
        else:
            raise ValueError(
                f"reward is {cut(asked)}: WEIGHT:REWARD has a weight over 0, at most {LARGEST:g}, "
                "and a reward"
            )
    return found


def is_model(name: str) -> bool:
    """Whether --reward names a reward model: a folder, or ORG/NAME of the hub."""
    if name in RULES or name.startswith("regex:"):
        return False
    return "/" in name or Path(name).expanduser().is_dir()


def judge_of(name: str, limit: float) -> Judge:
    """The judge that --reward names. Raises ValueError where there is none of that name."""
    if name in RULES:
        return Checker(RULES[name])
    kind, _, pattern = name.partition(":")
    if kind == "regex":
        try:
            found = re.compile(pattern)
        except re.error as error:
            raise ValueError(f"reward {name}: no regular expression: {error}") from None
        return Checker(lambda answer: float(found.search(answer.text) is not None))
    check_name(
        name, "reward", f"{', '.join(RULES)}, regex:PATTERN, the folder of a reward model or "
    )
    return Function(name, limit)
