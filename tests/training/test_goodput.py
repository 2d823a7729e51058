"""Shares of wall time (training/goodput.py): a run on a clock that only injected delays move, with
a kill, whose shares are therefore known; and two real processes, one of them slow, one killed.
"""

import json
import os
import signal
import subprocess
import sys
import threading
import time
from contextlib import suppress
from types import SimpleNamespace

import pytest
import tinyrun
from rich.console import Console

from benchmarks.killing import workers
from dolmen.checkpoint.store import Checkpoints
from dolmen.core.mesh import SINGLE
from dolmen.launch import watchdog
from dolmen.training import goodput, loop, run
from dolmen.training.evaluate import Validator
from dolmen.training.goodput import JoinTimes, Waits, describe, slowest
from dolmen.training.start import StartMode

material, one_thread = tinyrun.material, tinyrun.one_thread


class Killed(BaseException):
    """Ends a run as a kill does: nothing of the run handles it."""


class Clock:
    """A clock that stands still but for the delays that it adds to functions."""

    def __init__(self, monkeypatch):
        self.now, self.patch = 1.7e9, monkeypatch
        monkeypatch.setattr(goodput, "time", SimpleNamespace(time=lambda: self.now))

    def delay(self, owner, name: str, seconds: float):
        """Calls of `owner.name` take `seconds`."""
        original = getattr(owner, name)

        def delayed(*args, **kwargs):
            self.now += seconds
            return original(*args, **kwargs)

        self.patch.setattr(owner, name, delayed)


@pytest.fixture
def clock(monkeypatch):
    """Delays of the phases of a run, in seconds, all different."""
    clock = Clock(monkeypatch)
    clock.delay(run, "make_initial", 7.0)
    clock.delay(run, "resume", 3.0)
    clock.delay(loop, "_step", 1.25)
    clock.delay(Checkpoints, "save", 0.25)
    clock.delay(Validator, "measure", 0.5)
    clock.delay(loop, "collect_garbage", 0.0625)
    return clock


def train(material, out, clock, start: StartMode, steps: int = 12):
    """Train 12 steps or more, saving every 3 and validating every 4, in a process that takes 2 s to
    import and 0.125 s to meet the others.
    """
    config = material.config(
        train={"steps": steps}, checkpoint={"every": 3}, log={"validate_every": 4, "to": []}
    )
    joining = clock.now + 2
    joined = JoinTimes(clock.now, joining, joining + 0.125, imports=1.5)
    clock.now = joined.joined
    return run.run_training(config, out, SINGLE, Console(quiet=True), start=start, joined=joined)


def test_shares_of_a_run_that_was_killed(material, tmp_path, clock, monkeypatch):
    """The kill comes within step 8, half a second after it began. Step 7 was made and lost, as the
    newest checkpoint is of step 6.
    """
    began, step, made = clock.now, loop._step, []

    def killed(state, *rest):
        if len(made) == 7:
            clock.now += 0.5
            raise Killed
        made.append(state.step)
        return step(state, *rest)

    with monkeypatch.context() as patch, suppress(Killed):
        patch.setattr(loop, "_step", killed)
        train(material, tmp_path / "run", clock, StartMode())
    assert len(made) == 7
    # as of a file that was a second old; metrics.jsonl has step 7
    file = tmp_path / "run" / goodput.FILE
    file.write_text(json.dumps(json.loads(file.read_text()) | {"reached": 6}))
    clock.now += 10  # until the launcher starts it again
    outcome = train(material, tmp_path / "run", clock, StartMode(True, restarted=True))
    seconds = {
        "steps": (7 + 5) * 1.25,
        "recomputed": 1.25,
        "saves": 2 * 0.25 + 2 * 0.25,
        "validation": 0.5 + 2 * 0.5,
        "other": (6 + 6) * 0.0625,  # that of step 7 was not a second old, and is lost
        "imports": 2 * 1.5,
        "start": 2 * (0.5 + 7),
        "rendezvous": 2 * 0.125,
        "restore": 3.0,
        "down": 0.0625 + 0.5 + 10,
    }
    total = clock.now - began
    assert sum(seconds.values()) == total
    reported = {name: share * total for name, share in outcome.goodput.items() if share}
    assert reported == pytest.approx(seconds, abs=1e-5)  # doubles of 1.7e9 s
    assert sum(outcome.goodput.values()) == pytest.approx(1, abs=1e-12)
    stored = json.loads((tmp_path / "run" / goodput.FILE).read_text())
    assert stored["reached"] == 12 and stored["until"] == clock.now


def test_time_between_runs_counts_for_restarts_alone(material, tmp_path, clock):
    """A person resumes a finished run a day later; then nothing is left to train."""
    train(material, tmp_path / "run", clock, StartMode())
    clock.now += 86400
    longer = train(material, tmp_path / "run", clock, StartMode(True), steps=14)
    assert longer.goodput["restore"] and not longer.goodput["down"]
    clock.now += 86400
    clock.delay(Checkpoints, "finish", 1.0)
    again = train(material, tmp_path / "run", clock, StartMode(True), steps=14)
    assert again.goodput == longer.goodput


def test_a_damaged_file_ends_no_run(material, tmp_path, clock):
    train(material, tmp_path / "run", clock, StartMode())
    for content in ("", "{}", '{"until": -1}', "[" * 99):
        (tmp_path / "run" / goodput.FILE).write_text(content)
        outcome = train(material, tmp_path / "run", clock, StartMode(True, restarted=True))
        assert outcome.steps == 12, content


def test_the_slowest_rank_is_named_with_what_it_delays():
    """Rank 1 waits least. All wait as long in `send`; in `gather` it is waited for."""
    waits = [
        Waits(100, {"gather": 40, "send": 45}),
        Waits(50, {"gather": 5, "send": 22}),
        Waits(200, {"gather": 50, "send": 90}),
    ]
    lost, name = slowest(waits)
    assert lost == pytest.approx(0.85 - 0.54) and name == "rank 1 delays gather"
    assert slowest([Waits(0, {}), Waits(0, {})]) == (0.0, "")


def test_a_thread_that_waits_is_seen():
    """In a collective of ours, called by a function of ours; elsewhere it waits for nobody."""
    requested, done = threading.Event(), threading.Event()
    source = "def reduce(asked, done):\n    asked.set()\n    done.wait()\n"
    caller = "def step(*events):\n    reduce(*events)\n"
    names: dict = {}
    exec(compile(source, "/x/dolmen/core/collectives.py", "exec"), names)
    exec(compile(caller, "/x/dolmen/training/step.py", "exec"), names)
    thread = threading.Thread(target=names["step"], args=(requested, done))
    thread.start()
    requested.wait()
    assert thread.ident is not None
    found = watchdog.collective_of(sys._current_frames()[thread.ident])
    done.set()
    thread.join()
    assert found == "reduce in step (training/step.py)"
    assert watchdog.collective_of(sys._getframe()) is None


def test_shares_as_text():
    shares = {"steps": 0.7, "saves": 0.05, "start": 0.246, "other": 0.004}
    text = "70% of the wall time in productive steps; start 25%; saves 5%"
    assert describe(shares) == text


@pytest.mark.full
def test_two_processes_one_slow_and_one_killed(material, tmp_path):
    """Rank 1 is stopped half of the time for a while, then rank 0 is killed with -9. The sums are
    those of a stopwatch around the command, and rank 1 is named.
    """
    out, began = tmp_path / "run", time.time()
    words = ["--layout.dp", "2", "--max-restarts", "1", "--train.steps", "400"]
    words += ["--checkpoint.every", "100", "--log.validate-every", "0", "--train.device", "cpu"]
    command = [sys.executable, "-m", "dolmen", "train", str(material.file), "--out", str(out)]
    process = subprocess.Popen([*command, *words], stdout=subprocess.PIPE, text=True)

    def step() -> int:
        with suppress(OSError, ValueError):
            return json.loads((out / goodput.FILE).read_text())["reached"]
        return 0

    while step() < 20:
        assert process.poll() is None and time.time() < began + 120
        time.sleep(0.1)
    slow, stopped = workers(process.pid)[1], 0.0
    while step() < 150:
        assert process.poll() is None and time.time() < began + 180
        for sign in (signal.SIGSTOP, signal.SIGCONT):
            os.kill(slow, sign)
            time.sleep(0.1)
        stopped += 0.1
    os.kill(workers(process.pid)[0], signal.SIGKILL)
    said, _ = process.communicate(timeout=120)
    assert process.returncode == 0
    summary = json.loads((out / "summary.json").read_text())
    stored = json.loads((out / goodput.FILE).read_text())
    assert sum(summary["goodput"].values()) == pytest.approx(1, abs=1e-9)
    # the process that waits prints the summary after the last sum is written
    assert sum(stored["seconds"].values()) == pytest.approx(stored["until"] - began, abs=1)
    assert stored["seconds"]["recomputed"] > 0 < stored["seconds"]["down"], stored
    assert stored["seconds"]["stragglers"] > 0.2 * stopped, (stored, stopped)
    assert next(iter(summary["slow_ranks"])).startswith("rank 1 delays"), stored
    assert "of the wall time in productive steps" in said and "rank 1 delays" in said


def test_names_of_an_earlier_start_are_escaped(tmp_path):
    """They are printed at the end of the run."""
    row = {"until": 0, "reached": 1, "seconds": {}, "slow": {"\x1b[2J": 5.0}}
    (tmp_path / goodput.FILE).write_text(json.dumps(row))
    timer = goodput.GoodputTimer()
    timer.open(tmp_path / goodput.FILE, resumed=True, restarted=True, idle=False, step=1)
    timer.switch("steps")
    assert [name.isprintable() for name in timer.slow] == [True]
