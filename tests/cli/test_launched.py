"""Who started this process, and as part of which job, by its environment."""

import os
import signal
import socket

import pytest

from dolmen.core.torch_private import strings
from dolmen.launch import process

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
    asking = (signal.SIGUSR1, signal.SIGUSR2) if ours else (signal.SIGINT, signal.SIGTERM)
    before, heard = [signal.getsignal(one) for one in asking], []
    with process.stop_handler(heard.append):
        for one in asking:
            signal.raise_signal(one)
    assert heard == [signal.SIGINT, signal.SIGTERM]
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
