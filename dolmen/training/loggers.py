"""Programs of others that get the numbers of metrics.jsonl, row by row (--log.to): TensorBoard, W&B
and trackio. None of them can end a run or hold it up: each has a thread, and where one raises,
hangs or falls behind, that is told once and it gets no more.

W&B works without its service: where no key is known, and nothing else is asked of it (WANDB_MODE),
it writes to ./wandb, for `wandb sync`. trackio writes to this machine. Each asks the environment
itself where to write and whom to tell (WANDB_DIR, WANDB_PROJECT, TRACKIO_DIR, ...).
"""

from collections.abc import Callable, Iterable, Mapping
from importlib.util import find_spec
from pathlib import Path
from queue import Full, Queue
from threading import Thread
from typing import Any, NamedTuple, Protocol

from dolmen.training.config import PROGRAMS
from dolmen.training.metrics import PLACES, TensorBoard

PROJECT = "dolmen"
FOLDER = "tensorboard"
PATIENCE = 60.0
"""Seconds that a program has at the end of a run."""
WAITING = 10_000
"""Rows that it may be behind."""


class Logged(NamedTuple):
    """What a program is told of a run as it begins."""

    out: Path
    name: str
    identity: str
    """The same in all starts of a run, and in no other (history.jsonl)."""
    step: int
    """Where this start begins: rows of later steps, of the start before, come again."""
    config: Mapping[str, Any]


class Logger(Protocol):
    """A program that is given rows."""

    told: str
    """What a user should know, or nothing."""

    def write(self, row: Mapping[str, float]) -> None: ...

    def close(self) -> None: ...


class WandB:
    """Weights & Biases. Steps only rise in it: of what is made again, what it has stays."""

    def __init__(self, run: Logged):
        import wandb

        settings = wandb.setup().settings
        asked = settings.mode != "online"  # which it is by itself
        known = asked or wandb.login(prompt=False, verify=False)
        self.run = wandb.init(
            project=settings.project or PROJECT,
            name=run.name,
            id=run.identity,
            resume="allow" if run.step and known and not asked else None,
            mode=None if known else "offline",
            config=dict(run.config),
            settings=wandb.Settings(console="off", silent=True),
        )
        where = self.run.settings.sync_dir
        self.told = "" if known else f"wandb: there is no key, so this is kept: wandb sync {where}"

    def write(self, row: Mapping[str, float]) -> None:
        self.run.log(_numbers(row), step=int(row["step"]))

    def close(self) -> None:
        self.run.finish()


class Trackio:
    """trackio. Of what is made again it has both."""

    told = ""

    def __init__(self, run: Logged):
        import trackio

        self.run = trackio.init(
            project=PROJECT,
            name=f"{run.name}-{run.identity[:6]}",
            config=dict(run.config),
            resume="allow" if run.step else "never",
            embed=False,
            auto_log_gpu=False,
            auto_log_cpu=False,
        )

    def write(self, row: Mapping[str, float]) -> None:
        self.run.log(_numbers(row), step=int(row["step"]))

    def close(self) -> None:
        import trackio

        trackio.finish()  # of itself, the run would be finished once more as Python ends


def _board(run: Logged) -> Logger:
    return TensorBoard(run.out / FOLDER, run.step)


KNOWN: dict[str, Callable[[Logged], Logger]] = dict(
    zip(PROGRAMS, (_board, WandB, Trackio), strict=True)
)


class Guarded:
    """One of KNOWN in a thread of its own: a run waits for none of them, but for PATIENCE seconds
    at its end. `say` tells, once, why it gets no more.
    """

    def __init__(self, name: str, run: Logged, say: Callable[[str], None]):
        self.name, self.say = name, say
        self.failed = False
        self.rows: Queue[Mapping[str, float] | None] = Queue(WAITING)
        self.thread = Thread(target=self._live, args=(run,), name=f"log to {name}", daemon=True)
        self.thread.start()

    def write(self, row: Mapping[str, float]) -> None:
        if self.failed:
            return
        try:
            self.rows.put_nowait(row)
        except Full:
            self._fail(f"it is {WAITING:,} rows behind")

    def close(self) -> None:
        if self.failed:
            return
        try:
            self.rows.put_nowait(None)
        except Full:
            return self._fail(f"it is {WAITING:,} rows behind")
        self.thread.join(PATIENCE)
        if self.thread.is_alive():
            self._fail(f"it has not ended within {PATIENCE:g} s")

    def _live(self, run: Logged) -> None:
        try:
            logger = KNOWN[self.name](run)
            if logger.told:
                self.say(logger.told)
            while (row := self.rows.get()) is not None:
                logger.write(row)
            logger.close()
        except Exception as error:  # of a program of others, that a run does not depend on
            self._fail(" ".join(f"{type(error).__name__}: {error}".split())[:300])

    def _fail(self, why: str) -> None:
        if not self.failed:
            self.failed = True
            self.say(
                f"WARNING: {self.name} gets no more of this run ({why}); metrics.jsonl has all"
            )


def missing(names: Iterable[str]) -> list[str]:
    """Those that are not installed."""
    return [name for name in names if find_spec(name) is None]


def _numbers(row: Mapping[str, float]) -> dict[str, float]:
    return {name: value for name, value in row.items() if name not in PLACES}
