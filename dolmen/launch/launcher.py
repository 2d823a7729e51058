"""Starting processes on this machine, through torch's launcher API, and what they do when one of
them, or the launcher, ends.

    dolmen train --layout.tp 2    launcher: checks the input, holds the rendezvous store, starts
      |-- rank 0                  2 x `dolmen train`, hands them the checked run as a file, forwards
      `-- rank 1                  Ctrl-C and SIGTERM (as SIGUSR1 and SIGUSR2: save, then end), kills
                                  all at once when one dies, and tells the first cause once. If the
                                  launcher dies, the kernel kills them (process.py).

With --max-restarts the launcher starts the group again after a failure, and the run goes on from
its newest checkpoint. torch's LocalElasticAgent would not do here: it restarts after every failure,
the refused and the hopeless too, and answers SIGTERM by killing.
"""

import os
import shutil
import signal
import sys
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any, NamedTuple

import yaml

from dolmen.core import filesystem
from dolmen.core.torch_private import strings
from dolmen.files import gate, kinds
from dolmen.launch import process
from dolmen.launch.process import HANDED, LAUNCHER, handling

if TYPE_CHECKING:
    from torch.distributed.elastic.multiprocessing.api import PContext, RunProcsResult

PREFIX, OURS = "dolmen_", "dolmen-launcher"  # a folder of reports, and the file that says it is one
STOPPED = {130, 143, -signal.SIGUSR1, -signal.SIGUSR2, -signal.SIGTERM}
"""Exit codes of workers that were asked to end."""


def launch(
    processes: int,
    words: list[str],
    max_restarts: int = 0,
    handed: Mapping[str, Any] | None = None,
) -> int:
    """Run the command `dolmen *words` as `processes` worker processes of one process group on this
    machine, wait for them, and return one exit code: 0 if all ended well; 130 or 143 if they ended
    because this process received SIGINT or SIGTERM; 2 if the workers refused their input; else 1.
    The first failure is printed once, to stderr. After a failure that another start may mend, the
    whole group is started again, at most `max_restarts` times. `handed`: the configuration as plain
    values, checked by this process; workers read it from a file in place of the words after the
    verb (`process.run_file`).
    """
    import logging

    # failures are printed below, once
    logging.getLogger("torch.distributed.elastic").setLevel(logging.CRITICAL)
    handled = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)
    group = _WorkerGroup(processes, words, {s: signal.getsignal(s) for s in handled})
    with handling(group.handlers), _reports() as reports:
        if handed is not None:
            group.more[HANDED] = _write(Path(reports) / "handed.yaml", handed)
        for attempt in range(max_restarts + 1):
            if group.first_signal:
                return 128 + group.first_signal
            end = group.run(attempt, reports)
            if end.code == 0 or group.first_signal or end.final or attempt == max_restarts:
                return end.code
            print(
                f"dolmen: restart {attempt + 1} of {max_restarts}, from the newest complete "
                "checkpoint",
                file=sys.stderr,
                flush=True,
            )
    raise AssertionError("the last attempt returns")


class _End(NamedTuple):
    """How a group ended: its exit code, and whether restarting would be useless (`final`)."""

    code: int
    final: bool


class _WorkerGroup:
    """The workers of one `launch`, over all restarts. `first_signal`: the first signal that told
    this process to end, 0 if none did; `more`: extra environment variables of each worker.
    """

    def __init__(self, processes: int, words: list[str], before: Mapping[signal.Signals, Any]):
        """Prepare `processes` workers that run `dolmen *words`, without starting them. `before`:
        the present handlers of all signals that torch's launcher API would replace; SIGINT and
        SIGTERM are forwarded to the workers instead.
        """
        self.processes, self.words = processes, words
        self.handlers = {**before, signal.SIGINT: self._forward, signal.SIGTERM: self._forward}
        self.first_signal = 0
        self.more: dict[str, str] = {}
        self.workers: PContext | None = None

    def _forward(self, got: int, _: FrameType | None) -> None:
        """Handle a signal `got` of this process: remember it if it is the first, and send it on to
        all workers, SIGINT as SIGUSR1 and SIGTERM as SIGUSR2.
        """
        self.first_signal = self.first_signal or got
        for pid in self.workers.pids().values() if self.workers is not None else ():
            try:
                os.kill(pid, signal.SIGUSR1 if got == signal.SIGINT else signal.SIGUSR2)
            except ProcessLookupError:
                pass

    def run(self, attempt: int, reports: str) -> _End:
        """Start all workers with a new rendezvous store and wait until all have ended or one fails,
        which ends the others. Prints the cause of a failure, once. Return the exit code of the
        whole group and whether a restart would be useless. `attempt`: starts before this one;
        `reports`: folder of the workers' error files.
        """
        # documented as torch.distributed's, where it is imported without being listed
        from torch.distributed import TCPStore  # pyright: ignore[reportPrivateImportUsage]
        from torch.distributed.elastic.multiprocessing import (
            DefaultLogsSpecs,
            SignalException,
            start_processes,
        )

        store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        envs = {
            rank: self._environment(rank, attempt, store.port) for rank in range(self.processes)
        }
        args = {
            rank: (*process.isolated_python_options(), "-m", "dolmen", *self.words)
            for rank in range(self.processes)
        }
        with handling(self.handlers):  # start_processes sets handlers of its own, and leaves them
            try:
                workers = self.workers = start_processes(
                    "dolmen", sys.executable, args, envs, DefaultLogsSpecs(reports)
                )
            except SignalException as stopped:
                return _End(128 + stopped.sigval, True)
            with handling(self.handlers):
                result = workers.wait(period=0.2)
        assert result is not None  # without a timeout, it waits for all
        return self._report_failure(workers, result) if result.is_failed() else _End(0, True)

    def _environment(self, rank: int, attempt: int, port: int) -> dict[str, str]:
        """Return the environment variables of the worker `rank`, beside those it inherits: ranks
        and world sizes, the address of the rendezvous store (`port`, on this machine), the number
        of restarts so far (`attempt`), threads, and this launcher's pid.
        """
        return {
            "RANK": str(rank),
            "LOCAL_RANK": str(rank),
            "WORLD_SIZE": str(self.processes),
            "LOCAL_WORLD_SIZE": str(self.processes),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(port),
            strings.ONE_STORE: "True",
            strings.RESTARTS: str(attempt),
            "OMP_NUM_THREADS": process.threads(self.processes),
            LAUNCHER: str(os.getpid()),
            **self.more,
        }

    def _report_failure(self, workers: "PContext", result: "RunProcsResult") -> _End:
        """Print the cause of a failure of the group (a hang's report, else the first failure) and
        return its exit code and whether a restart would be useless: 2 and True if workers did
        nothing but refuse their input; else 1, and True if a worker said so. If the workers ended
        because this process received a signal: print nothing and return 128 + the signal, and True.
        """
        codes = {failure.exitcode for failure in result.failures.values()}
        if self.first_signal and codes <= STOPPED:
            return _End(128 + self.first_signal, True)
        reports = [_report(file) for file in workers.error_files.values()]
        hangs = [report["message"] for report in reports if report.get("hang")]
        print(hangs[0] if hangs else cause(result.failures), file=sys.stderr, flush=True)
        # every rank that failed by itself refused its input: a restart would refuse again
        if codes <= {2, -signal.SIGTERM} and not hangs:
            return _End(2, True)
        return _End(1, any(report.get("final") for report in reports))


def _write(file: Path, handed: Mapping[str, Any]) -> str:
    """Write the configuration `handed` to a file as YAML, which keeps every float exactly, and
    return the file's path.
    """
    file.write_text(yaml.safe_dump(dict(handed), sort_keys=False))
    return str(file)


def _report(file: str) -> dict:
    """Return what a worker wrote to its error file as it failed (message, final, hang); {} if there
    is nothing readable.
    """
    try:
        return gate.read_json(file, kinds.WORKER_ERROR)["message"]
    except gate.Refused:
        return {}


def cause(failures: dict) -> str:
    """Return a text about the worker that failed first. `failures`: torch's ProcessFailure of each
    rank. A rank killed by a signal from outside (other than SIGTERM) comes first, else the earliest
    failure: its traceback with rank and exit code, or its message alone for refused input (exit
    code 2).
    """
    killed = [f for f in failures.values() if f.exitcode < 0 and f.exitcode != -signal.SIGTERM]
    if killed:
        first, name = killed[0], signal.Signals(-killed[0].exitcode).name
        hint = " (out of memory?)" if name == "SIGKILL" else ""
        return (
            f"dolmen: rank {first.local_rank} (pid {first.pid}) was killed by {name}{hint}; all "
            "ranks were stopped"
        )
    failed = [f for f in failures.values() if f.exitcode not in (-signal.SIGTERM, 130, 143)]
    first = min(failed or failures.values(), key=lambda f: f.timestamp)
    report = first.error_file_data.get("message")  # as `process.end` wrote it
    text = report["message"] if isinstance(report, dict) else "no traceback"
    if first.exitcode == 2:
        return text.rstrip()
    return (
        f"{text.rstrip()}\n"
        f"dolmen: rank {first.local_rank} failed (exit code {first.exitcode}); "
        "all ranks were stopped"
    )


@contextmanager
def _reports() -> Iterator[str]:
    """Yield a new temporary folder for the workers' error files and their configuration, deleted on
    leaving. A file in it is locked while this launcher lives; folders of killed launchers, whose
    file is not locked, are deleted first.
    """
    for left in Path(tempfile.gettempdir()).glob(f"{PREFIX}*"):
        _delete_if_left(left)
    with tempfile.TemporaryDirectory(prefix=PREFIX) as reports:
        part = Path(reports) / f"{OURS}.part"
        with open(part, "w") as stream:
            filesystem.lock(stream)
            part.rename(part.with_name(OURS))  # never seen without its lock
            yield reports


def _delete_if_left(folder: Path) -> None:
    """Delete a launcher's temporary folder if it is this user's and its launcher is gone (its
    lock file is not locked); otherwise leave it. Ignores OSError.
    """
    try:
        if folder.is_symlink() or folder.stat().st_uid != os.getuid():
            return
        with open(os.open(folder / OURS, os.O_RDWR | os.O_NOFOLLOW), "r+") as mark:
            if filesystem.lock(mark, wait=False):
                shutil.rmtree(folder)
    except OSError:
        return  # somebody else's, or in use
