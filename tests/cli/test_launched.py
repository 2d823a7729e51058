"""Who started this process, and as part of which job, by its environment."""

import os
import signal
import socket
import tempfile
import threading
from pathlib import Path

import pytest

from dolmen.core import filesystem
from dolmen.core.torch_private import strings
from dolmen.launch import launcher, process, watchdog
from dolmen.launch.fork_server import ForkServer

NAMES = (
    *("RANK", "SLURM_PROCID", "SLURM_JOB_ID", "SLURM_STEP_ID", strings.RUN, strings.ONE_STORE),
    *(process.LAUNCHER, process.HANDED, *process.RESTART_COUNTS.values()),
    *process.RECOVERED_JOBS.values(),
)
OURS, TORCHRUN = {process.LAUNCHER: "4711"}, {strings.RUN: "7", strings.ONE_STORE: "True"}


@pytest.fixture
def environment(monkeypatch):
    """Set these variables, and no others that say who started a process."""

    def put(**values: str) -> None:
        for name in NAMES:
            monkeypatch.delenv(name, raising=False)
        for name, value in values.items():
            monkeypatch.setenv(name, value)

    return put


def test_a_process_is_known_by_its_host_number_and_start():
    ticks = open(f"/proc/{os.getppid()}/stat").read().split()[21]
    assert process.parent() == f"{socket.gethostname()} {os.getppid()} {ticks}"


@pytest.mark.parametrize(
    "values, ours, store, agent",
    (
        ({}, False, False, False),
        (OURS, True, False, False),
        (TORCHRUN, False, True, True),
        (OURS | TORCHRUN, True, False, False),
        (TORCHRUN | {strings.ONE_STORE: "False"}, False, False, True),
        (TORCHRUN | {"SKYPILOT_TASK_ID": "s-1"}, False, True, False),
    ),
)
def test_our_launcher_and_torchrun_are_told_apart(environment, values, ours, store, agent):
    environment(**values)
    assert (process.launched_here(), process.one_store()) == (ours, store)
    assert process.agent() == (process.parent() if agent else "")


@pytest.mark.parametrize(
    "values, job",
    (
        ({}, ""),
        ({strings.RUN: "7"}, ""),
        ({"RANK": "0"}, None),
        ({"RANK": "0", strings.RUN: "none"}, None),
        ({"RANK": "0", strings.RUN: "7"}, "run 7"),
        ({"SLURM_PROCID": "0", "SLURM_JOB_ID": "12", "SLURM_STEP_ID": "3"}, "slurm 12.3"),
        ({"RANK": "0", "SLURM_JOB_ID": "12", strings.RUN: "7"}, "slurm 12."),
        ({"RANK": "0", "SLURM_JOB_ID": "12", "SKYPILOT_TASK_ID": "s-1"}, "SkyPilot s-1"),
        ({"RANK": "0", "DOLMEN_RAY_JOB": "r-1"}, "Ray Train r-1"),
        ({"SKYPILOT_TASK_ID": "s-1"}, ""),
    ),
)
def test_restarts_share_the_name_of_their_job(environment, values, job):
    environment(**values)
    assert process.job() == (process.parent() if job is None else job)


def test_restarts_are_the_most_that_any_engine_counts(environment):
    environment()
    assert process.restarts() == 0 and process.recovered_job() == ""
    for count, name in enumerate(process.RESTART_COUNTS.values(), 2):
        environment(**{name: str(count)})
        assert process.restarts() == count
    environment(SLURM_RESTART_COUNT="3", JOBSET_RESTART_ATTEMPT="")
    assert process.restarts() == 3


def test_variables_are_set_for_a_while_unless_they_are_there(monkeypatch):
    monkeypatch.setenv("A_OF_OURS", "kept")
    monkeypatch.delenv("B_OF_OURS", raising=False)
    with process.environment({"A_OF_OURS": "x", "B_OF_OURS": "y"}):
        assert (os.environ["A_OF_OURS"], os.environ["B_OF_OURS"]) == ("kept", "y")
    assert os.environ["A_OF_OURS"] == "kept" and "B_OF_OURS" not in os.environ


@pytest.mark.parametrize("ours", (True, False))
def test_a_stop_is_asked_for_by_the_signals_of_the_launcher(environment, ours):
    environment(**(OURS if ours else {}))
    asking = (*((signal.SIGUSR1, signal.SIGUSR2) if ours else (signal.SIGINT,)), signal.SIGTERM)
    before, heard = [signal.getsignal(one) for one in asking], []
    with process.stop_handler(heard.append):
        for one in asking:
            signal.raise_signal(one)
        assert heard == [signal.SIGINT, signal.SIGTERM]  # by two signals it is one request
        signal.raise_signal(signal.SIGTERM)
    assert heard == [signal.SIGINT, signal.SIGTERM, signal.SIGTERM]
    assert [signal.getsignal(one) for one in asking] == before


@pytest.mark.parametrize("ours", (True, False))
def test_an_interrupt_that_a_shell_ignores_is_obeyed(environment, ours):
    environment(**(OURS if ours else {}))
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        process.obey_interrupts()
        ignored = signal.getsignal(signal.SIGINT) is signal.SIG_IGN
        assert ignored == ours
    finally:
        signal.signal(signal.SIGINT, before)


def test_a_sibling_has_our_parent_and_our_host():
    row = {"host": socket.gethostname(), "parent": os.getppid(), "pid": os.getpid()}
    assert watchdog._is_sibling(row)
    assert not watchdog._is_sibling(row | {"host": "elsewhere"})
    assert not watchdog._is_sibling(row | {"parent": os.getppid() + 1})
    assert not watchdog._is_sibling(row | {"pid": os.getppid()})  # its parent is another
    assert not watchdog._is_sibling(row | {"pid": 2**22 + 1})  # there is none
    watchdog._send(2**22 + 1, signal.SIGTERM)  # nor is that an error


def test_torch_waits_longer_than_the_watch():
    assert watchdog.network_limit(None) is None
    for seconds, minutes in ((1, 30), (144, 30), (240, 50), (600, 125)):
        limit = watchdog.network_limit(seconds)
        assert limit and limit.total_seconds() == 60 * minutes


def beat(passed: int, waits: bool = False, step: int = 7) -> dict:
    place = {"host": "a", "pid": 10 + passed, "phase": "a step"}
    return place | {"step": step, "passed": passed, "waits": waits}


@pytest.mark.parametrize(
    "rows, silent, blamed, how",
    (
        # the fewest points, and not in a collective
        ({0: beat(9, True), 1: beat(8), 2: beat(9, True)}, [], [1], "makes no progress"),
        ({0: beat(8, True), 1: beat(8), 2: beat(8)}, [], [1, 2], "makes no progress"),
        ({0: beat(8, True), 1: beat(9), 2: beat(8, True)}, [], [0, 2], "waits in a collective"),
        ({0: beat(9), 1: beat(3), 2: beat(2)}, [1], [1], "does not respond"),
        ({0: beat(9), 1: {}, 2: beat(9)}, [1], [1], "does not respond"),
        ({rank: beat(5) for rank in range(9)}, [], list(range(9)), "makes no progress"),
    ),
)
def test_the_rank_that_hangs_is_the_one_that_has_passed_fewest_points(rows, silent, blamed, how):
    text = watchdog.verdict(rows, silent, {blamed[0]: "the stack"})
    lines = text.splitlines()
    named = [line for line in lines if line.startswith("dolmen: rank ")]
    assert [int(line.split()[2]) for line in named] == blamed[:4] and all(
        how in line for line in named
    )
    assert lines[1:3] == [f"stack of rank {blamed[0]}:", "the stack"]
    others = f"{len(rows) - 1} of {len(rows)} ranks are waiting for it"
    assert lines[-1] == (others if len(blamed) == 1 else f"{len(blamed)} of {len(rows)} ranks hang")
    if silent:
        step = rows[1].get("step", 0)
        assert f"last heard of after step {step}, while others are at 7" in named[0]
        assert ("unknown host" in named[0]) == (not rows[1])
    else:
        assert f"(a, pid {rows[blamed[0]]['pid']}) hangs after step 7, in a step" in named[0]


def test_points_are_counted_and_handed_on(tmp_path):
    watch = watchdog.Watch(tmp_path / "hang", 1, 2, None, pytest.fail)
    points = []
    watch.pass_point = lambda step, point: points.append((step, point))
    watch.beat(3, "a step")
    assert [*watch.through("ab", "batches", patient=True)] == ["a", "b"]
    assert points == [(3, "a step"), (3, "batches"), (3, "batches")]
    assert (watch.passed, watch.step, watch.phase, watch.patient) == (3, 3, "batches", False)
    with watch.watching() as entered:  # nothing is watched without seconds
        assert entered is watch and not (tmp_path / "hang").exists()


def left(tmp_path, name: str):
    folder = tmp_path / name
    folder.mkdir()
    (folder / launcher.OURS).touch()
    return folder


def test_folders_of_killed_launchers_alone_are_deleted(tmp_path):
    killed, used, other = (left(tmp_path, name) for name in ("killed", "used", "other"))
    (other / launcher.OURS).unlink()
    link = tmp_path / "link"
    link.symlink_to(killed)
    launcher._delete_if_left(link)
    assert killed.exists()
    with open(used / launcher.OURS, "r+") as mark:
        assert filesystem.lock(mark, wait=False)
        for folder in (killed, used, other, tmp_path / "none"):
            launcher._delete_if_left(folder)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["link", "other", "used"]


def failure(code: int, at: float, rank: int = 0, text: str | None = None) -> launcher.Failure:
    return launcher.Failure(rank, 100 + rank, code, at, {"text": text} if text else {})


def seconds_of(process_id: int) -> float:
    """How long a process runs, by the kernel's count of ticks since the machine has started."""
    ticks = int(Path(f"/proc/{process_id}/stat").read_text().rpartition(")")[2].split()[19])
    return float(Path("/proc/uptime").read_text().split()[0]) - ticks / os.sysconf("SC_CLK_TCK")


def test_a_command_was_started_with_its_process_or_its_launcher(environment, monkeypatch):
    """A script that calls dolmen is started when it calls; of two processes the older counts."""
    parent = os.getppid()
    assert process._age("self") == pytest.approx(seconds_of(os.getpid()), abs=0.5)
    assert process._age(str(parent)) == pytest.approx(seconds_of(parent), abs=0.5)
    assert process._age(str(2**22 + 1)) == 0.0, "no process has such a number"
    ages = {"self": 5.0, "7": 20.0, str(parent): 30.0}
    monkeypatch.setattr(process, "_age", ages.__getitem__)
    monkeypatch.setattr(process.time, "time", lambda: 100.0)
    environment()
    assert process.started_at(True) == 100.0
    monkeypatch.setattr("sys.argv", ["/bin/dolmen"])
    assert (process.started_at(False), process.started_at(True)) == (95.0, 95.0)
    environment(**{strings.RUN: "a run"})
    assert (process.started_at(False), process.started_at(True)) == (95.0, 70.0)
    environment(**{process.LAUNCHER: "7"})
    assert process.started_at(True) == 80.0
    ages["7"] = 1.0
    assert process.started_at(True) == 95.0


def test_the_folder_of_a_launcher_is_locked_while_it_lives(tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    with launcher._reports() as folder, launcher._reports() as other:
        assert folder.is_dir() and other.is_dir() and folder != other
        with open(folder / launcher.OURS, "r+") as mark:
            assert not filesystem.lock(mark, wait=False)
    assert not [*tmp_path.iterdir()]


@pytest.mark.parametrize(
    "failures, text",
    (
        (
            [failure(1, 5.0, 0, "late\n"), failure(1, 3.0, 1, "early\n")],
            "early\ndolmen: rank 1 failed (exit code 1); all ranks were stopped",
        ),
        ([failure(2, 3.0, 1, "refused\n")], "refused"),
        (
            [failure(1, 1.0), failure(-signal.SIGKILL, 9.0, 3)],
            "dolmen: rank 3 (pid 103) was killed by SIGKILL (out of memory?); all ranks were "
            "stopped",
        ),
        (
            [failure(-signal.SIGSEGV, 9.0, 3)],
            "dolmen: rank 3 (pid 103) was killed by SIGSEGV; all ranks were stopped",
        ),
        # those that were asked to end come last
        (
            [failure(143, 1.0), failure(-process.END, 1.0, 1), failure(1, 8.0, 2)],
            "no traceback\ndolmen: rank 2 failed (exit code 1); all ranks were stopped",
        ),
        (
            [failure(-signal.SIGTERM, 9.0, 3), failure(1, 8.0, 2)],
            "dolmen: rank 3 (pid 103) was killed by SIGTERM; all ranks were stopped",
        ),
        (
            [failure(130, 2.0, 0), failure(143, 1.0, 1)],
            "no traceback\ndolmen: rank 1 failed (exit code 143); all ranks were stopped",
        ),
    ),
)
def test_the_first_failure_is_told(failures, text):
    assert launcher.cause(failures) == text


def test_ranks_are_asked_for_while_the_fork_server_reads_slowly():
    """After a restart the socket has the timeout of the last message: here none is waited for. It
    holds a few hundred messages.
    """
    server = ForkServer.__new__(ForkServer)
    server.connection, end = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with server.connection, end:
        assert server.receive(0.0) is None
        asking = threading.Thread(
            target=lambda: [server.fork({"RANK": str(rank)}) for rank in range(1000)]
        )
        asking.start()
        asking.join(0.2)
        end.settimeout(10)
        assert [end.recv(100) for _ in range(1000)] == [b"RANK=%d" % i for i in range(1000)]
        asking.join()
