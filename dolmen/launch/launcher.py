"""Starting processes on this machine, and what they do when one of them, or the launcher, ends.

    dolmen train --layout.tp 2    launcher: checks the input, holds the rendezvous store, hands the
      |                           ranks the checked run as a file, forwards Ctrl-C and SIGTERM to
      |                           them (as SIGUSR1 and SIGUSR2: save, then end), ends all when one
      |                           fails, and prints the first cause once
      `-- fork server             imports what a rank needs, once (fork_server.py)
            |-- rank 0            If the launcher or the server dies, the kernel kills the ranks.
            `-- rank 1

With --max-restarts the launcher starts the group again after a failure, and the run goes on from
its newest checkpoint. torch's LocalElasticAgent would not do here: it restarts after every failure,
the refused and the hopeless too, answers SIGTERM by killing, and each of its workers imports all
modules for itself.
"""

import os
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple

import yaml

from dolmen.core import filesystem
from dolmen.core.torch_private import strings
from dolmen.files import gate, kinds
from dolmen.launch import process
from dolmen.launch.fork_server import ForkServer
from dolmen.launch.process import END, HANDED, LAUNCHER, handling

PREFIX, OURS = "dolmen_", "dolmen-launcher"  # a folder of reports, and the file that says it is one
STOPPED = {130, 143, -signal.SIGUSR1, -signal.SIGUSR2, -signal.SIGTERM, -END}
"""Exit codes of workers that were asked to end."""
GRACE = 30.0  # seconds between END and SIGKILL, for the workers that are left after a failure


def launch(
    processes: int,
    words: list[str],
    max_restarts: int = 0,
    handed: Mapping[str, Any] | None = None,
    imports: str = "torch",
) -> int:
    """Run the command `dolmen *words` as `processes` worker processes of one process group on this
    machine, wait for them, and return one exit code: 0 if all ended well; 130 or 143 if they ended
    because this process received SIGINT or SIGTERM; 2 if the workers refused their input; else 1.
    The first failure is printed once, to stderr. After a failure that another start may mend, the
    whole group is started again, at most `max_restarts` times.

    handed: the configuration as plain values, checked by this process; workers read it from a file
        in place of the words after the verb (`process.run_file`)
    imports: module with what the workers use, imported once for all of them
    """
    group = _WorkerGroup(processes, max_restarts)
    shared = {"OMP_NUM_THREADS": process.threads(processes), LAUNCHER: str(os.getpid())}
    with handling(group.handlers), _reports() as reports:
        if handed is not None:
            shared[HANDED] = _write(reports / "handed.yaml", handed)
        with closing(ForkServer(words, imports, shared)) as server:
            return group.run_until_done(server, reports)


class Failure(NamedTuple):
    """A worker that ended with an exit code other than 0 (negative: the signal that killed it)."""

    rank: int
    pid: int
    exit_code: int
    when: float
    """Seconds since 1970."""
    report: dict[str, Any]
    """The content of its error file (`process.end`): text, when, final, hang; {} without one."""


class _End(NamedTuple):
    """How a group ended: its exit code, and whether restarting would be useless (`final`)."""

    code: int
    final: bool


class _WorkerGroup:
    """The workers of one `launch`, over all restarts. `first_signal`: the first signal that told
    this process to end, 0 if none did; `pids`: of the living workers, by rank.
    """

    def __init__(self, processes: int, max_restarts: int):
        """Prepare `processes` workers, without starting them, that are started again at most
        `max_restarts` times.
        """
        self.processes, self.max_restarts = processes, max_restarts
        self.handlers = {signal.SIGINT: self._forward, signal.SIGTERM: self._forward}
        self.first_signal = 0
        self.pids: dict[int, int] = {}

    def _forward(self, received: int, _: FrameType | None) -> None:
        """Handle a signal `received` by this process: remember it if it is the first, and send it
        on to all workers.
        """
        self.first_signal = self.first_signal or received
        for pid in [*self.pids.values()]:
            _ask_to_stop(pid, received)

    def run_until_done(self, server: ForkServer, reports: Path) -> int:
        """Run all workers, and again after failures that another start may mend; return the exit
        code of `launch`. `reports`: folder for the workers' error files.
        """
        for attempt in range(self.max_restarts + 1):
            if self.first_signal:
                return 128 + self.first_signal
            end = self._run(server, attempt, reports)
            if end.code == 0 or self.first_signal or end.final or attempt == self.max_restarts:
                return end.code
            print(
                f"dolmen: restart {attempt + 1} of {self.max_restarts}, from the newest complete "
                "checkpoint",
                file=sys.stderr,
                flush=True,
            )
        raise AssertionError("the last attempt returns")

    def _run(self, server: ForkServer, attempt: int, reports: Path) -> _End:
        """Start all workers with a new rendezvous store and wait until all have ended. Prints the
        cause of a failure, once. Return the exit code of the whole group and whether a restart
        would be useless. `attempt`: starts before this one.
        """
        # documented as torch.distributed's, where it is imported without being listed
        from torch.distributed import TCPStore  # pyright: ignore[reportPrivateImportUsage]

        store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        files = [reports / f"error-{attempt}-{rank}.json" for rank in range(self.processes)]
        for rank, file in enumerate(files):
            server.fork(self._environment(rank, attempt, store.port, file))
        failures: list[Failure] = []
        try:
            self._wait_for_all(server, files, failures)
        except EOFError:
            self.pids.clear()
            code = server.close()
            if self.first_signal:
                return _End(128 + self.first_signal, True)
            text = f"dolmen: the process that starts the ranks ended (exit code {code}); all "
            print(f"{text}ranks were stopped", file=sys.stderr, flush=True)
            if failures:
                print(cause(failures), file=sys.stderr, flush=True)
            return _End(1, True)
        return self._report_failures(failures) if failures else _End(0, True)

    def _wait_for_all(
        self, server: ForkServer, files: Sequence[Path], failures: list[Failure]
    ) -> None:
        """Wait until all workers have ended, and append those that failed to `failures`. After the
        first the others are ended (END), and killed if they have not ended in GRACE seconds.
        `files`: the error file of each. Raises EOFError if the server ends.
        """
        running, deadline = {*range(self.processes)}, None
        expected = {0}  # exit codes that are no failure
        while running:
            left = None if deadline is None else max(0.0, deadline - time.monotonic())
            message = server.receive(left)
            if message is None:
                self._kill(signal.SIGKILL)
                deadline = time.monotonic() + GRACE
                expected.add(-signal.SIGKILL)  # of ranks that END has not ended
                continue
            rank, pid, code = message
            if code is None:
                self.pids[rank] = pid
                if self.first_signal:  # it came before the pid was known
                    _ask_to_stop(pid, self.first_signal)
                elif failures:
                    _send(pid, END)
                continue
            running.remove(rank)
            del self.pids[rank]
            if code not in expected:
                failures.append(_failure(rank, pid, code, files[rank]))
                if deadline is None:
                    self._kill(END)
                    deadline = time.monotonic() + GRACE

    def _kill(self, sent: signal.Signals) -> None:
        """Send a signal to all living workers."""
        for pid in self.pids.values():
            _send(pid, sent)

    def _environment(self, rank: int, attempt: int, port: int, file: Path) -> dict[str, str]:
        """Return the environment variables of the worker `rank`, beside those that all share: ranks
        and world sizes, the address of the rendezvous store (`port`, on this machine), the number
        of restarts so far (`attempt`), and the `file` for its error.
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
            process.ERROR_FILE: str(file),
        }

    def _report_failures(self, failures: Sequence[Failure]) -> _End:
        """Print the cause of a failure of the group (a hang's report, else the first failure) and
        return its exit code and whether a restart would be useless: 2 and True if workers did
        nothing but refuse their input; else 1, and True if a worker said so. If the workers ended
        because this process or one of them received a signal: print nothing and return 128 + the
        signal, and True.
        """
        codes = {failure.exit_code for failure in failures}
        # a worker that is sent SIGTERM itself has all of them save and end
        stopped = self.first_signal or signal.SIGTERM * (143 in codes)
        if stopped and codes <= STOPPED:
            return _End(128 + stopped, True)
        hangs = [failure.report["text"] for failure in failures if failure.report.get("hang")]
        print(hangs[0] if hangs else cause(failures), file=sys.stderr, flush=True)
        # every rank that failed by itself refused its input: a restart would refuse again
        if 2 in codes and codes <= {2, -END} and not hangs:
            return _End(2, True)
        return _End(1, any(failure.report.get("final") for failure in failures))


def _ask_to_stop(pid: int, received: int) -> None:
    """Forward a signal that this process received: SIGINT as SIGUSR1, SIGTERM as SIGUSR2."""
    _send(pid, signal.SIGUSR1 if received == signal.SIGINT else signal.SIGUSR2)


def _send(pid: int, sent: signal.Signals) -> None:
    """Send a signal to a process; no-op if it has ended."""
    try:
        os.kill(pid, sent)
    except ProcessLookupError:
        pass


def _write(file: Path, handed: Mapping[str, Any]) -> str:
    """Write the configuration `handed` to a file as YAML, which keeps every float exactly, and
    return the file's path.
    """
    file.write_text(yaml.safe_dump(dict(handed), sort_keys=False))
    return str(file)


def _failure(rank: int, pid: int, code: int, file: Path) -> Failure:
    """Return the failure of a worker that has just ended with exit code `code`, with what it wrote
    to its error file, if there is anything readable.
    """
    try:
        report = gate.read_json(file, kinds.WORKER_ERROR)
    except gate.Refused:
        report = {}
    return Failure(rank, pid, code, report.get("when", time.time()), report)


def cause(failures: Sequence[Failure]) -> str:
    """Return a text about the worker that failed first. A rank killed by a signal from outside
    comes first, else the earliest failure: its traceback with rank and exit code, or its message
    alone for refused input (exit code 2). `failures`: in the order in which workers ended.
    """
    killed = [
        failure for failure in failures if failure.exit_code < 0 and failure.exit_code != -END
    ]
    if killed:
        first, name = killed[0], signal.Signals(-killed[0].exit_code).name
        hint = " (out of memory?)" if name == "SIGKILL" else ""
        return (
            f"dolmen: rank {first.rank} (pid {first.pid}) was killed by {name}{hint}; all "
            "ranks were stopped"
        )
    failed = [f for f in failures if f.exit_code not in (-END, 130, 143)]
    first = min(failed or failures, key=lambda f: f.when)
    text = first.report.get("text", "no traceback").rstrip()
    if first.exit_code == 2:
        return text
    return (
        f"{text}\ndolmen: rank {first.rank} failed (exit code {first.exit_code}); "
        "all ranks were stopped"
    )


@contextmanager
def _reports() -> Iterator[Path]:
    """Yield a new temporary folder for the workers' error files and their configuration, deleted on
    leaving. A file in it is locked while this launcher lives; folders of killed launchers, whose
    file is not locked, are deleted first.
    """
    for left in Path(tempfile.gettempdir()).glob(f"{PREFIX}*"):
        _delete_if_left(left)
    with tempfile.TemporaryDirectory(prefix=PREFIX) as reports:
        part = Path(reports, f"{OURS}.part")
        with open(part, "w") as stream:
            filesystem.lock(stream)
            part.rename(part.with_name(OURS))  # never seen without its lock
            yield Path(reports)


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
