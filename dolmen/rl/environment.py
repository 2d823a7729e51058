"""Answers in turns: what an environment says behind what the model has said, and the model again,
as one text. The environment's tokens are in the text and are not learned from.

    prompt | model ... end | environment | model ... end | environment | model ...
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

from dolmen.core import agree
from dolmen.core.mesh import Mesh
from dolmen.data.tokenizer import PreTrainedTokenizer
from dolmen.rl.function_worker import Apart
from dolmen.rl.generation import Written
from dolmen.rl.prompts import Prompt
from dolmen.rl.rewards import NoReward

Draw = Callable[[Sequence[Sequence[int]], Sequence[str], Sequence[int]], list[Written]]
"""(texts, names, how many tokens at most) -> what follows each."""


class Turn(NamedTuple):
    """Of an environment."""

    text: str | None
    """None: the answer has ended."""
    why: str = ""
    """It has failed."""


class Environment(Protocol):
    def __call__(self, prompt: Prompt, turns: list[str]) -> Turn: ...


class Function:
    """MODULE:FUNCTION, called as function(prompt, turns, row): `turns` are texts, of the model and
    of the environment in turn, the last the model's.
    """

    def __init__(self, name: str, limit: float):
        self.apart = Apart("turn", name, limit)

    def __enter__(self) -> "Function":
        return self

    def __exit__(self, *_: object) -> None:
        self.apart.end()

    def __call__(self, prompt: Prompt, turns: list[str]) -> Turn:
        asked = {"prompt": prompt.asked, "turns": turns, "row": prompt.row}
        reply: dict[str, Any] = self.apart.ask(asked)
        return Turn(reply.get("turn"), reply.get("failed", ""))


@dataclass(frozen=True, eq=False)
class Turns:
    """An environment, and how its texts become tokens."""

    environment: Environment
    tokenizer: PreTrainedTokenizer
    most: int
    """Times that it is asked for an answer."""
    stop: bool
    """Whether a run ends where it fails; else the answer does."""
    mesh: Mesh
    say: Callable[[str], None] = print

    def answered(
        self, draw: Draw, prompts: Sequence[Prompt], names: Sequence[str], room: int
    ) -> tuple[list[Written], dict[str, float]]:
        """Answers of `room` tokens at most, the environment's among them, in the order of their
        prompts; and what is told of them. Raises NoReward, on every rank.
        """
        found = draw([one.tokens for one in prompts], names, [room] * len(prompts))
        turns = [[self._text(one.tokens)] for one in found]
        failed = asked = 0
        going = [one.number for one in found if one.whole]
        for time in range(1, self.most + 1):
            replies = self._replies([(prompts[i], turns[i]) for i in going])
            failed += sum(bool(reply.why) for reply in replies)
            on = []
            for i, reply in zip(going, replies, strict=True):
                if reply.text is None:
                    continue
                found[i] = found[i].followed(self._tokens(reply.text), room)
                turns[i].append(reply.text)
                asked += 1
                if found[i].whole:
                    on.append(i)
            if not on:
                break
            texts = [[*prompts[i].tokens, *found[i].tokens] for i in on]
            left = [room - len(found[i].tokens) for i in on]
            more = draw(texts, [f"{names[i]}/turn {time}" for i in on], left)
            for i, one in zip(on, more, strict=True):
                found[i] = found[i].joined(one)
                turns[i].append(self._text(one.tokens))
            going = [i for i in on if found[i].whole]
        told = {"rollout/turns": asked / len(prompts), "rollout/failed_turns": float(failed)}
        return found, told

    def _replies(self, asked: Sequence[tuple[Prompt, list[str]]]) -> list[Turn]:
        """Of the first rank, for all."""

        def by_the_first() -> list[Turn]:
            found = []
            for prompt, turns in asked:
                found.append(self.environment(prompt, turns))
                if found[-1].why and self.stop:
                    break
                if found[-1].why:
                    self.say(f"WARNING: {found[-1].why}")
            return found

        found = by_the_first() if self.mesh.size == 1 else agree.once(by_the_first)
        for one in found:
            if one.why and self.stop:
                raise NoReward(f"{one.why} (--rollout.on-failure zero or leave-out goes on)")
        return found

    def _text(self, tokens: list[int]) -> str:
        return self.tokenizer.decode(tokens, skip_special_tokens=True)

    def _tokens(self, text: str) -> list[int]:
        return list(self.tokenizer(text, add_special_tokens=False)["input_ids"])
