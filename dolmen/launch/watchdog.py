"""A rank that hangs, named: where every rank stands, in files of the run's folder, and what each
does when nothing moves.

    <run>/hang/rank-3.json    every few seconds, by a thread: host, pid, how far (points passed),
                              where, and a tick that says the process itself is alive
               rank-3.txt     stacks of all its threads, if it made no progress for `seconds`

All ranks of a group pass the same points, so the rank that has passed fewest is the one the others
wait for; of several, those that do not stand in a collective. A stopped or dead process cannot
report: its tick stands still, so the others name it. Files and not torch's store, as that may be
held by the very rank that hangs, and the folder is shared anyway.
"""

import contextlib
import faulthandler
import json
import os
import signal
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterable, Iterator
from datetime import timedelta
from pathlib import Path
from types import FrameType
from typing import TypeVar

from dolmen.core.torch_private import strings
from dolmen.files import gate, kinds, write
from dolmen.launch.process import END

T = TypeVar("T")
PATIENT = 10  # times `seconds`: start-up and the last save
TORCH = 1800.0  # seconds that torch gives a collective over gloo; over NCCL 600
OURS = "/dolmen/"  # in the path of our own files
MAIN, ALL = "main thread", "all threads:"  # headings in rank-N.txt


def network_limit(seconds: float | None) -> timedelta | None:
    """Return the timeout of torch.distributed's collectives where `Watch` reports a hang after
    `seconds` without progress: 12.5 times `seconds`, as the watch waits up to 10 times as long and
    must name the rank before torch gives up, and at least 30 minutes. Returns None, which leaves
    torch's default, if `seconds` is None (no watch).
    """
    return None if seconds is None else timedelta(seconds=max(TORCH, 1.25 * PATIENT * seconds))


class Watch:
    """Watches this process's main thread once started; `fail(text)` ends the process with a report.
    `seconds` without progress count as a hang; None: watches nothing.
    """

    def __init__(
        self,
        folder: Path,
        rank: int,
        ranks: int,
        seconds: float | None,
        fail: Callable[[str], None],
    ):
        """Prepare the watch of this process, rank `rank` of `ranks`, without starting it (see
        `watching`). `folder`: where every rank has its heartbeat file; `seconds` without progress
        are a hang, None watches nothing; `fail`: called with the report, ends this process.
        """
        self.folder = Path(folder)
        self.rank = rank
        self.ranks = ranks
        self.seconds = seconds
        self.fail = fail
        self.passed = 0
        self.step = 0
        self.phase = "start-up"
        self.pass_point: Callable[[int, str], None] = lambda step, point: None
        self.patient = True
        self.since = time.monotonic()
        self.tick, self.done, self.main = 0, threading.Event(), threading.get_ident()
        self.thread = threading.Thread(target=self._run, name="watch", daemon=True)

    def beat(self, step: int, phase: str, patient: bool = False) -> None:
        """Record that the main thread makes progress, at a point of the program that every rank
        passes: it has made `step` steps and enters `phase` (a text for the report of a hang).
        `patient`: the next point may come 10 times as late as usual before that counts as a hang.
        """
        self.step = step
        self.phase = phase
        self.patient = patient
        self.pass_point(step, phase)
        self.passed = self.passed + 1
        self.since = time.monotonic()

    def through(self, items: Iterable[T], phase: str, patient: bool = False) -> Iterator[T]:
        """Yield `items`, recording progress (`beat`) in `phase` before each. `patient`: what is
        done with the first item may take 10 times as long as usual before it counts as a hang.
        """
        for item in items:
            self.beat(self.step, phase, patient)
            patient = False
            yield item

    @contextlib.contextmanager
    def watching(self) -> Iterator["Watch"]:
        """While the context is entered, a thread watches the main thread's progress and keeps
        writing this rank's heartbeat file. Removed on leaving: this file, that of stacks if none
        were dumped, and their folder if empty. Yields this object; does nothing if `seconds` is
        None.
        """
        if self.seconds is None:
            yield self
            return
        self.folder.parent.mkdir(parents=True, exist_ok=True)
        write.folder(self.folder.parent, self.folder.name)
        # of an earlier start of this run
        self._file().unlink(missing_ok=True)
        self.log = write.append(self._file(kind="txt"))
        self.thread.start()
        try:
            yield self
        finally:
            self.done.set()
            self.thread.join(1)
            faulthandler.cancel_dump_traceback_later()
            self._file().unlink(missing_ok=True)
            if not self.log.tell():
                self._file(kind="txt").unlink(missing_ok=True)
            with contextlib.suppress(OSError):
                self.folder.rmdir()  # by the last, unless there are stacks in it

    def _file(self, rank: int | None = None, kind: str = "json") -> Path:
        """Return the path of a rank's file of heartbeats (`kind` json) or of stacks (txt); `rank`
        None: this rank's.
        """
        return self.folder / f"rank-{self.rank if rank is None else rank}.{kind}"

    def _run(self) -> None:
        """Run the watching thread: write a heartbeat every quarter of `seconds` (at most every
        30 s) until the watch is stopped. Reports a hang and returns if the main thread made no
        progress (`beat`) for `seconds` (10 times as long in a patient phase), or if the whole
        process was suspended for about `seconds`.
        """
        assert self.seconds is not None  # `watching` starts no thread without
        period, last = min(self.seconds / 4, 30), time.monotonic()
        while not self.done.wait(period):
            now, limit = time.monotonic(), self.seconds * (PATIENT if self.patient else 1)
            # the second: this thread did not run for as long, so the whole process was stopped
            if now - self.since > limit or now - last > self.seconds + period:
                return self._report_hang(period)  # late, or it was stopped
            last = now
            # in C: also where this thread cannot run
            faulthandler.dump_traceback_later(limit + 2 * period, file=self.log)
            self._write_heartbeat()

    def _write_heartbeat(self) -> None:
        """Replace this rank's heartbeat file, one JSON object: host, pid and parent, a count of
        heartbeats, points passed, step and phase, seconds without progress, and whether the main
        thread is in a collective. Ignores OSError: a full disk must not end a run by this.
        """
        self.tick += 1
        row = {
            "host": socket.gethostname(),
            "pid": os.getpid(),
            "parent": os.getppid(),
            "tick": self.tick,
            "passed": self.passed,
            "step": self.step,
            "phase": self.phase,
            "still": round(time.monotonic() - self.since, 1),
            "waits": collective_of(sys._current_frames().get(self.main)) is not None,
        }
        with contextlib.suppress(OSError):
            write.replace(self._file(), json.dumps(row), lasting=False)

    def _report_hang(self, period: float) -> None:
        """Report a hang: write the stacks of all threads to this rank's file, read all ranks'
        heartbeats twice to see whose stand still, wake stopped ranks of the same launcher (SIGCONT)
        so that they write their stacks, end these (END), and call `fail` with the text that
        names the ranks to blame. Stops after the wait if the watch ended meanwhile. `period`:
        seconds between heartbeats.
        """
        faulthandler.cancel_dump_traceback_later()
        with contextlib.suppress(OSError):
            print(
                f"{MAIN} of rank {self.rank} on {socket.gethostname()}, {time.ctime()}, step "
                f"{self.step}, {self.phase}:",
                file=self.log,
            )
            traceback.print_stack(sys._current_frames()[self.main], file=self.log)
            print(ALL, file=self.log, flush=True)
            faulthandler.dump_traceback(self.log, all_threads=True)
        # a live rank's tick moves between two reads, whatever its main thread does
        before = self._read_heartbeats()
        for _ in range(4):  # the others' next ticks come within a period
            self._write_heartbeat()
            time.sleep(period / 3)
        now = self._read_heartbeats()
        silent = [
            r
            for r, row in now.items()
            if r != self.rank and row.get("tick") == before[r].get("tick")
        ]
        siblings = [now[r]["pid"] for r in silent if _is_sibling(now[r])]
        for pid in siblings:
            # a process stopped by SIGSTOP can dump its stack only once it runs again
            _send(pid, signal.SIGCONT)
        if siblings:
            time.sleep(2 * period)  # to leave its stack, now that it can
        # the main thread has moved on meanwhile: no hang after all
        if self.done.is_set():
            return
        text = verdict(now, silent, {r: self._read_stack(r) for r in now})
        for pid in siblings:
            _send(pid, END)
        self.fail(f"{text}\n(stacks of all ranks that wrote one: {self.folder})")

    def _read_heartbeats(self) -> dict[int, dict]:
        """Return rank -> its last heartbeat, from its file; {} where that is missing or
        unreadable.
        """
        states = {}
        for rank in range(self.ranks):
            try:
                states[rank] = gate.read_json(self._file(rank), kinds.HEARTBEAT)
            except gate.Refused:
                states[rank] = {}
        return states

    def _read_stack(self, rank: int) -> str:
        """Return, as text, the newest stack of the main thread in a rank's file of stacks (or the
        stacks of all threads, if it does not mark the main one): at most the 12 innermost frames,
        without torch's own but for the last. Returns "" without a readable file.
        """
        try:
            text = gate.read_text(self._file(rank, "txt"), kinds.STACKS_BYTES)
        except gate.Refused:
            return ""
        frames = text[max(0, text.rfind(MAIN)) :].split(ALL)[0].split('\n  File "')[1:]
        shown_frames = [
            frame
            for i, frame in enumerate(frames)
            if strings.TORCH not in frame.split('"')[0] or i == len(frames) - 1
        ]
        return "\n".join('  File "' + frame.rstrip() for frame in shown_frames[-12:])


def collective_of(frame: FrameType | None) -> str | None:
    """Return "NAME in FUNCTION (FILE)": the collective in which a thread with the innermost `frame`
    is (of dolmen's collectives the outermost, otherwise torch's innermost), and the function of
    dolmen that called it; NAME alone without such a caller. None if none of the four innermost
    calls is in torch.distributed or dolmen's collectives.
    """
    for _ in range(4):
        if frame is None or _is_collective(frame):
            break
        frame = frame.f_back
    if frame is None or not _is_collective(frame):
        return None
    name = ""
    while frame is not None and (_is_collective(frame) or OURS not in frame.f_code.co_filename):
        # the outermost call of our own collectives; of torch's the innermost, but for decorators
        in_dolmen = _is_collective(frame) and OURS in frame.f_code.co_filename
        if in_dolmen or (not name and frame.f_code.co_name != "wrapper"):
            name = frame.f_code.co_name
        frame = frame.f_back
    if frame is None:
        return name
    return f"{name} in {frame.f_code.co_name} ({frame.f_code.co_filename.rpartition(OURS)[2]})"


def _is_collective(frame: FrameType) -> bool:
    """Return whether the code of a frame is torch.distributed's or dolmen's collectives (by its
    file).
    """
    file = frame.f_code.co_filename
    return strings.COLLECTIVES in file or file.endswith(
        ("/core/collectives.py", "/core/transfers.py")
    )


def verdict(rows: dict[int, dict], silent: list[int], stacks: dict[int, str]) -> str:
    """Return a text that names the ranks to blame for a hang (at most four, with their stacks), how
    each hangs, and how many ranks hang or wait. `rows`: rank -> last heartbeat ({}: none);
    `silent`: ranks whose heartbeat stands still; `stacks`: rank -> text. Blamed are the silent
    ranks; without any, of the ranks that passed fewest points those that are not in a collective;
    else all that passed fewest.
    """
    heartbeats = {r: row for r, row in rows.items() if row and r not in silent}
    least = min((row["passed"] for row in heartbeats.values()), default=0)
    slowest = [r for r, row in heartbeats.items() if row["passed"] == least]
    # a rank that waits in a collective is a victim, not the cause
    free = [r for r in slowest if not heartbeats[r]["waits"]]
    if silent:
        blamed = silent
        how = "does not respond: its process is stopped or dead, or its machine is unreachable"
    elif not free:
        blamed = slowest
        how = (
            "waits in a collective like all other ranks: the network fails, or ranks called "
            "different collectives"
        )
    else:
        blamed, how = free, "makes no progress"
    lines = []
    for rank in blamed[:4]:
        row = rows[rank] or {
            "host": "unknown host",
            "pid": "unknown",
            "step": 0,
            "phase": "start-up",
        }
        heard = (
            f"last heard of after step {row['step']}, while others are at "
            f"{max(o['step'] for o in heartbeats.values())}"
            if rank in silent and heartbeats
            else f"hangs after step {row['step']}"
        )
        lines.append(
            f"dolmen: rank {rank} ({row['host']}, pid {row['pid']}) {heard}, in {row['phase']}: "
            f"it {how}"
        )
        if stacks.get(rank):
            lines.append(f"stack of rank {rank}:\n{stacks[rank]}")
    waiting = len(rows) - len(blamed)
    return "\n".join(
        [
            *lines,
            f"{waiting} of {len(rows)} ranks are waiting for it"
            if len(blamed) == 1
            else f"{len(blamed)} of {len(rows)} ranks hang",
        ]
    )


def _is_sibling(row: dict) -> bool:
    """Return whether the process of a heartbeat runs on this machine with the same parent process
    as this one, the launcher; checked in /proc, as another process may have its pid by now.
    """
    if row.get("host") != socket.gethostname() or row["parent"] != os.getppid():
        return False
    try:
        return (
            int(Path(f"/proc/{row['pid']}/stat").read_text().rsplit(")", 1)[1].split()[1])
            == os.getppid()
        )
    except OSError:
        return False


def _send(pid: int, what: signal.Signals) -> None:
    """Send the signal `what` to a process; ignore it if the process is gone or another user's."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.kill(pid, what)
