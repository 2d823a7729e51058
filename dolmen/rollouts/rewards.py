"""How good answers are: built-in checkers, and a function of the user's in a process of its own,
with a time limit (judge.py).

    with judge_of("gsm8k", 10.0) as judge:
        judge(Answer("What is 6 x 7?", "6 x 7 = 42", {"answer": "#### 42"})) -> Judgement(1.0)
"""

import json
import os
import re
import select
import subprocess
import sys
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple, TextIO

NUMERIC = re.compile(r"\d+\.?\d*|\.\d+")
NUMBER = re.compile(r"-?\d[\d,]*(?:\.\d+)?")
VOWELS = frozenset("aeiouAEIOU")
START_SECONDS = 120.0  # for what the function's module imports


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


class Apart(Judge):
    """MODULE:FUNCTION in a process of its own. One that raises, takes longer than `limit` seconds,
    gives no finite number or ends its process has failed, and the next answer is judged by a new
    process where the old one is gone.
    """

    def __init__(self, name: str, limit: float):
        self.name, self.limit = name, limit
        self.process: subprocess.Popen[str] | None = None
        self.replies: TextIO | None = None

    def __enter__(self) -> "Apart":
        return self

    def __exit__(self, *_: object) -> None:
        self._end()

    def __call__(self, answer: Answer) -> Judgement:
        if self.process is None:
            self.begin()
        asked = {"prompt": answer.prompt, "answer": answer.text, "row": answer.row}
        reply = self._asked(json.dumps(asked) + "\n", self.limit)
        if reply is None:
            self._end()
            return Judgement(None, f"{self.name} gave no reward within {self.limit:g} s, or ended")
        if "reward" in reply:
            return Judgement(reply["reward"])
        return Judgement(None, f"{self.name}: {reply['failed']}")

    def begin(self) -> None:
        ours, theirs = os.pipe()
        self.process = subprocess.Popen(
            [sys.executable, "-m", "dolmen.rollouts.judge", self.name, str(theirs)],
            stdin=subprocess.PIPE,
            pass_fds=(theirs,),
            text=True,
        )
        os.close(theirs)
        self.replies = open(ours)  # noqa: SIM115  # closed by _end
        begun = self._read(START_SECONDS)
        if begun is None or "ready" not in begun:
            self._end()
            why = f"it was not ready in {START_SECONDS:g} s" if begun is None else begun["failed"]
            raise ValueError(f"reward {self.name}: {why}")

    def _asked(self, line: str, limit: float) -> dict[str, Any] | None:
        assert self.process is not None and self.process.stdin is not None
        try:
            self.process.stdin.write(line)
            self.process.stdin.flush()
        except BrokenPipeError:
            return None
        return self._read(limit)

    def _read(self, limit: float) -> dict[str, Any] | None:
        """The next reply; None where none comes in time."""
        assert self.replies is not None
        end = time.monotonic() + limit
        while (left := end - time.monotonic()) > 0:
            if select.select([self.replies], [], [], left)[0]:
                line = self.replies.readline()
                return json.loads(line) if line.endswith("\n") else None
        return None

    def _end(self) -> None:
        if self.process is not None:
            self.process.kill()
            assert self.process.stdin is not None
            try:
                self.process.stdin.close()
            except BrokenPipeError:
                pass  # what it had not read is lost with it
            self.process.wait()
        if self.replies is not None:
            self.replies.close()
        self.process = self.replies = None


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
        elif float(weight) > 0 and name:
            found.append((float(weight), name))
        else:
            raise ValueError(f"reward is {asked}: WEIGHT:REWARD has a weight over 0, and a reward")
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
    if not pattern or not all(part.isidentifier() for part in (*kind.split("."), pattern)):
        raise ValueError(
            f"reward is {name}: it must be {', '.join(RULES)}, regex:PATTERN, MODULE:FUNCTION or "
            "the folder of a reward model"
        )
    return Apart(name, limit)
