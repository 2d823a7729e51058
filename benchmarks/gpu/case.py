"""A case: one thing that is measured or compared, and what it leaves behind.

A stage is a file with `cases(context)`, which gives its cases in order of worth. A case is given a
Record: values are what was measured, checks what must hold. A check whose value is NaN has failed.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

CHECKED = ("what", "value", "bound", "ok", "why")


@dataclass(frozen=True)
class Case:
    """`seconds` is an estimate on one H100, the start of its process left out: what does not fit in
    the time that is left is not begun, and what takes far longer is ended.
    """

    name: str
    seconds: float
    run: Callable[["Record"], None]
    fresh: bool = False
    """It leaves much memory or compiled code behind: the next case gets a process of its own."""
    most: float | None = None
    """Seconds after which it is taken to hang; unset: see `limit`."""

    @property
    def limit(self) -> float:
        """A machine may be several times slower than was thought, and the first kernel of a process
        loads for seconds.
        """
        return 4 * self.seconds + 30 if self.most is None else self.most


@dataclass(frozen=True)
class Context:
    """What all cases of a call share. `shape`: tiny (in the test suite, nothing compiled), small
    (tiny, and compiled) or full.
    """

    device: str = "cuda"
    shape: str = "full"
    folder: Path | None = None
    """Where a case may leave a file besides."""

    @property
    def full(self) -> bool:
        return self.shape == "full"

    @property
    def compiles(self) -> bool:
        return self.shape != "tiny"

    @property
    def cuda(self) -> bool:
        return self.device == "cuda"

    @property
    def place(self) -> str:
        """Of the one device that is used: torch asks for a number of whom it sets."""
        return "cuda:0" if self.cuda else self.device


@dataclass
class Record:
    """What a case has told so far. `keep` is called after each thing it tells: with True to have it
    kept at once, as after a measurement; checks come by the hundred.
    """

    values: dict[str, Any] = field(default_factory=dict)
    checks: list[dict[str, Any]] = field(default_factory=list)
    keep: Callable[[bool], None] = lambda now: None

    def tell(self, **values: Any) -> None:
        """What was measured: numbers, words, and lists and mappings of them."""
        self.values |= values
        self.keep(True)

    def check(self, what: str, value: float, bound: float, why: str) -> bool:
        """Whether value <= bound, which NaN never is. `why` is the reason of the bound."""
        ok = bool(value <= bound)
        self.checks.append(dict(zip(CHECKED, (what, float(value), bound, ok, why), strict=True)))
        self.keep(False)
        return ok

    @property
    def ok(self) -> bool:
        return all(check["ok"] for check in self.checks)


def plain(value: Any) -> Any:
    """As JSON has it: numbers that are not finite become words, for JSON has none for them, and
    what UTF-8 cannot write becomes a question mark.
    """
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if isinstance(value, str):
        return value.encode("utf-8", "replace").decode()
    if isinstance(value, dict):
        return {plain(str(name)): plain(item) for name, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(item) for item in value]
    return value
