"""Starts each stage as a process of its own, ends what hangs, and keeps what was found.

    runner --+-- stage a     a process and all its children, ended together
             |     case 1, case 2 (hangs: ended, told as `late`)
             +-- stage a     again, from case 3 on
             +-- stage b ...

The process of the stage writes gpu.json while it lives, the runner where there is none; what the
runner has last read stays in its memory, and is written over a file that a stage has broken. A
stage has its share of the minutes, and what it leaves goes to those that follow.
"""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from benchmarks.gpu.results import LOG, Results
from benchmarks.gpu.worker import AGAIN, START
from dolmen.files.gate import Refused

POLL = 0.1
TAIL = 6000  # characters of the log that are told of a process that died
LOG_BYTES = 12 << 20  # of the log that are kept, of its end


@dataclass(frozen=True)
class Stage:
    """`seconds`: what its cases are thought to take on one H100, processes to start included."""

    module: str
    seconds: float
    about: str

    @property
    def name(self) -> str:
        return self.module.rpartition(".")[2]


def share(stage: Stage, rest: Sequence[Stage], left: float) -> float:
    """Seconds that `stage`, the first of `rest`, may take of the `left` that there are: as its
    estimate is to those of the rest, at least half more than its estimate.
    """
    whole = sum(s.seconds for s in rest)
    return min(left, max(left * stage.seconds / whole, 1.5 * stage.seconds))


class Runner:
    """Runs stages into `results` until `deadline` (time.time)."""

    def __init__(self, results: Results, deadline: float, only: str = ""):
        self.results, self.deadline, self.only = results, deadline, only
        self.child: subprocess.Popen | None = None
        self.log = results.file.with_name(LOG)
        self.seen: tuple[int, ...] = ()

    def run(self, stages: Sequence[Stage]) -> None:
        """All of them, in order. What has no time is listed as left."""
        for i, stage in enumerate(stages):
            began = time.time()
            until = began + share(stage, stages[i:], self.deadline - began)
            told = {"about": stage.about, "expected": stage.seconds}
            self._row(stage).update(told)
            state = self._stage(stage, until) if until - began > START / 2 else "left"
            row = self._row(stage)
            row.update(state=state, seconds=row.get("seconds", 0.0) + time.time() - began)
            self.results.save()
        with suppress(OSError):  # of a full disk
            keep_tail(self.log)

    def _stage(self, stage: Stage, until: float) -> str:
        """Start its process until all its cases have a result or time is up: done, left,
        died, or broken (it left no gpu.json that can be read).
        """
        if self._complete(stage):
            return "done"
        while True:
            known = self._finished(stage)
            code, why = self._process(stage, until)
            if (broken := self._read()) is not None:
                self.results.end_running("died", broken)
                self._row(stage)["error"] = broken
                return "broken"
            if why is not None:
                self.results.end_running(*why)
                self.results.save()
            if code == 0:
                return "done"
            if time.time() > until - START / 2:
                return "left"
            if code != AGAIN and self._finished(stage) == known:
                self._row(stage)["error"] = self._tail()
                return "died"  # before its first case, or again in the same way

    def _complete(self, stage: Stage) -> bool:
        """Whether an earlier call has run all its cases: no process needs to say so."""
        cases, state = self.results.of(stage.name), self._row(stage)
        return state.get("state") == "done" and self._finished(stage) == len(cases) > 0

    def _row(self, stage: Stage) -> dict:
        """What gpu.json tells of the stage as a whole."""
        return self.results.content["stages"].setdefault(stage.name, {})

    def _finished(self, stage: Stage) -> int:
        return sum(self.results.done(stage.name, c["name"]) for c in self.results.of(stage.name))

    def _process(self, stage: Stage, until: float) -> tuple[int, tuple[str, str] | None]:
        """Exit code, and where a case did not end by itself its status and what is known of it."""
        words = [stage.module, str(self.results.file), str(until), self.only, str(os.getpid())]
        self.results.save()
        with self.log.open("ab", buffering=0) as log:
            with suppress(OSError):  # of a full disk
                log.write(f"\n=== {stage.name}\n".encode())
            self.child = subprocess.Popen(
                [sys.executable, "-u", "-m", "benchmarks.gpu.worker", *words],
                stdout=log,
                stderr=subprocess.STDOUT,
                stdin=subprocess.DEVNULL,
                start_new_session=True,
            )
        try:
            why = self._watch(until)
        finally:
            end(self.child)
        code = self.child.wait()
        if why is None and code not in (0, AGAIN):
            name = signal.Signals(-code).name if code < 0 else f"exit code {code}"
            why = "died", f"its process ended by {name}; the end of the log:\n{self._tail()}"
        return code, why

    def _watch(self, until: float) -> tuple[str, str] | None:
        """Until the child has ended, None, or is to be ended, why."""
        while self.child.poll() is None:
            time.sleep(POLL)
            if self._read() is not None:
                return None  # it is ended, and the file read again
            now, running = time.time(), self.results.content["running"]
            if now > self.deadline:
                return "cut", f"all time was spent; the end of the log:\n{self._tail()}"
            if running and now > running["since"] + running["limit"]:
                limit = f"over {running['limit']:.0f} s"
                return "late", f"{limit}; the end of the log:\n{self._tail()}"
            if not running and now > until + 10 * START:
                return "late", f"no case was running, long after its time; {self._tail()}"
        return None

    def _read(self) -> str | None:
        """Read what the process of a stage has written, if it has: what is wrong with it, else
        None. What was read before stays where that cannot be read.
        """
        file = self.results.file
        try:
            found = os.stat(file)
            seen = found.st_ino, found.st_mtime_ns, found.st_size
            if seen != self.seen:
                self.results, self.seen = Results.read(file), seen
        except (Refused, OSError) as error:
            return str(error)
        return None

    def _tail(self) -> str:
        return self.log.read_bytes()[-TAIL:].decode(errors="replace") if self.log.exists() else ""


def end(child: subprocess.Popen) -> None:
    """Kill a process and all that it has started."""
    try:
        os.killpg(child.pid, signal.SIGKILL)
    except ProcessLookupError:
        pass


def keep_tail(log: Path, most: int = LOG_BYTES) -> None:
    """Of a longer log, the end."""
    if log.exists() and log.stat().st_size > most:
        log.write_bytes(b"(the beginning was left out)\n" + log.read_bytes()[-most:])
