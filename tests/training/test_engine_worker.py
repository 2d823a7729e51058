"""`dolmen.worker`: the function that one process of any engine calls, in a process group that is
there, or by the variables of a launcher.
"""

import errno
import json
import os
import signal
import sys
import threading
from dataclasses import asdict
from pathlib import Path
from types import SimpleNamespace

import pytest
import tinyrun
import torch.distributed as dist
from spawning import run_spawned
from tinyrun import rows

import dolmen
from dolmen.checkpoint.folders import Damaged
from dolmen.checkpoint.remote import Superseded
from dolmen.checkpoint.store import NotSaved
from dolmen.core.determinism import NotDeterministic
from dolmen.core.environment import Launch
from dolmen.core.messages import BadInput, Failed, as_bad_input
from dolmen.files.gate import Refused
from dolmen.files.storage import StorageError
from dolmen.training import ray_train
from dolmen.training import worker as workers
from dolmen.training.checks.run import usable_processes
from dolmen.training.folder import Unusable
from dolmen.training.request import LaunchOptions, TrainRequest

material = tinyrun.material
QUIET = {"log.validate_every": 0, "optimizer.schedule": "constant"}


@pytest.fixture
def launched(monkeypatch):
    """The variables of a launcher that has started this one process."""
    for name in ("RANK", "LOCAL_RANK"):
        monkeypatch.setenv(name, "0")
    for name in ("WORLD_SIZE", "LOCAL_WORLD_SIZE"):
        monkeypatch.setenv(name, "1")


def _train(file: str, out: str, steps: int) -> tuple[list[float], int, int, list[str]]:
    """Train on every rank of the group; losses that rank 1's callback got, the outcome's steps, the
    size of the group after it, and every rank's error where the batch does not divide.
    """
    seen = []
    options = {**QUIET, "out": out, "train.steps": steps, "resume": True}
    outcome = dolmen.worker(file, on_metrics=lambda row: seen.append(row.get("loss")), **options)
    assert outcome.signal == 0
    errors: list = [None] * dist.get_world_size()
    with pytest.raises(ValueError) as raised:
        dolmen.worker(file, **options | {"train.global_batch_size": 3})
    dist.all_gather_object(errors, str(raised.value))
    losses: list = [None] * dist.get_world_size()
    dist.all_gather_object(losses, seen)
    return losses[1][:-1], outcome.steps, dist.get_world_size(), errors


def test_a_process_group_is_used_and_stays(material, tmp_path, launched):
    """Two ranks in a group that somebody made train as one process does, and go on with it."""
    one = tmp_path / "one"
    dolmen.worker(str(material.file), out=str(one), **QUIET, **{"train.steps": 4})
    with pytest.MonkeyPatch.context() as patch:
        for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE"):
            patch.delenv(name)
        losses, steps, size, errors = run_spawned(
            2, _train, str(material.file), str(tmp_path / "two"), 4
        )
    assert losses == pytest.approx([row["loss"] for row in rows(one)], abs=1e-5)
    assert steps == 4 and size == 2
    assert len({*errors}) == 1 and "set train.global_batch_size to 2 or 4" in errors[0]


def test_the_outcome_is_summary_json_and_handlers_stay(material, tmp_path, launched):
    out, seen, handlers = tmp_path / "run", [], set()

    def on_metrics(row):
        seen.append(dict(row))
        handlers.add((signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)))

    before = signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)
    options = {"out": str(out), "train.steps": 3, "log.validate_every": 3}
    outcome = dolmen.worker(str(material.file), on_metrics=on_metrics, **options)
    assert json.loads(json.dumps(asdict(outcome))) == json.loads((out / "summary.json").read_text())
    assert handlers == {before} and not dist.is_initialized()
    written = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    assert seen == written and len(written) == 4 and "val_loss" in written[-1]


def test_a_signal_is_handled_where_that_is_asked_for(material, tmp_path, launched):
    def on_metrics(row):
        if row["step"] == 2:
            signal.raise_signal(signal.SIGTERM)

    options = {**QUIET, "out": str(tmp_path / "run"), "train.steps": 9}
    outcome = dolmen.worker(
        str(material.file), on_metrics=on_metrics, handle_signals=True, **options
    )
    assert outcome.signal == signal.SIGTERM and 2 <= outcome.steps <= 3


def test_processes_that_dp_cannot_use_wait_as_spares(material, tmp_path, launched, monkeypatch):
    """The third of three processes, for a batch of 4 sequences, until there is a new summary; not
    for a rank 0 that is gone.
    """
    config, out = material.config(), tmp_path / "run"
    assert [usable_processes(config, size) for size in (1, 2, 3, 4, 7)] == [1, 2, 2, 4, 4]
    options = {**QUIET, "out": str(out), "train.steps": 1}
    done = dolmen.worker(str(material.file), **options)
    for name, value in (("RANK", "2"), ("LOCAL_RANK", "2"), ("WORLD_SIZE", "3")):
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "3")
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("MASTER_PORT", "1")
    timer = threading.Timer(0.2, lambda: os.utime(out / "summary.json"))
    timer.start()
    assert dolmen.worker(str(material.file), spares=True, **options) == done
    timer.join()
    monkeypatch.setattr(workers, "SPARE_PATIENCE", 0.0)
    # the run had ended before the spare started
    assert dolmen.worker(str(material.file), spares=True, **options) == done
    answers = iter((True, *(False,) * 9))
    with monkeypatch.context() as patch, pytest.raises(dolmen.Failed, match="waited as a spare"):
        patch.setattr(workers.process, "store_answers", lambda: next(answers))
        dolmen.worker(str(material.file), spares=True, **options)
    (out / "summary.json").unlink()
    with pytest.raises(dolmen.Failed, match="rank 2 waited as a spare"):
        dolmen.worker(str(material.file), spares=True, **options)


def test_storage_that_is_gone_is_restarted_but_no_first_start(monkeypatch):
    for count, kind in ((0, BadInput), (1, dolmen.Failed)):
        monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", str(count))
        with pytest.raises(kind, match="s3://bucket: gone") as raised:
            with as_bad_input(), workers.restartable_storage():
                raise StorageError("s3://bucket: gone")
        assert not getattr(raised.value, "final", False)


def test_errors_have_types(material, tmp_path, launched, monkeypatch):
    """A run that diverges is no reason to restart; what a callback raises is raised."""
    file, out = str(material.file), str(tmp_path / "run")
    with pytest.raises(dolmen.Failed, match="were skipped") as raised:
        lost = {"optimizer.lr": 1e38, "train.max_skipped_steps": 1, "train.steps": 9}
        dolmen.worker(file, out=out, **QUIET | lost)
    assert raised.value.final
    with pytest.raises(ValueError, match=r"^nproc and max_restarts are for `train`"):
        dolmen.worker(file, out=out, nproc=2)
    with pytest.raises(ZeroDivisionError):
        other = str(tmp_path / "other")
        dolmen.worker(file, on_metrics=lambda row: 1 / 0, out=other, **QUIET)
    monkeypatch.delenv("RANK")
    with pytest.raises(ValueError, match="start this program with torchrun or srun"):
        dolmen.worker(file, out=out)


@pytest.mark.parametrize(
    "error, raised, final",
    [
        (Damaged("a shard"), BadInput, None),
        (Unusable("a folder"), BadInput, None),
        (Refused("a receipt"), BadInput, None),
        (NotSaved("a step"), Failed, False),
        (StorageError("a bucket"), Failed, False),
        (FloatingPointError("a loss"), Failed, True),
        (NotDeterministic("an operator"), Failed, True),
        (Superseded("x"), Failed, True),
        *((OSError(number, "a disk"), Failed, False) for number in workers.OUTSIDE),
        (OSError(errno.EBADF, "a bug"), OSError, None),
        (KeyError("a bug"), KeyError, None),
    ],
    ids=str,
)
def test_what_is_no_bug_is_told_without_a_traceback(error, raised, final, tmp_path):
    with pytest.raises(raised) as caught, workers.explain_errors(tmp_path):
        raise error
    assert type(caught.value) is raised and getattr(caught.value, "final", None) is final
    assert error.args[-1] in str(caught.value)


def test_the_end_of_a_run_of_several_processes_is_guarded(material, monkeypatch):
    """Where it fails, as at a URL that another run has claimed, no traceback is shown."""
    guarded = []
    monkeypatch.setattr(workers.launcher, "launch", lambda *_: 0)
    request = TrainRequest(material.config(layout={"dp": 2}), LaunchOptions(out="x"))
    resolved = SimpleNamespace(config=request.config)
    monkeypatch.setattr(workers, "prepare", lambda *_: SimpleNamespace(resolved=resolved))
    assert workers._start_processes(request, lambda work: guarded.append(work) or 1) == 1
    assert guarded


@pytest.mark.parametrize("first", [True, False])
def test_a_worker_of_ray_reports_every_20th_step_and_validations(first, tmp_path, monkeypatch):
    """Rank 0 reports each checkpoint once. `ray.train` is a stand-in; Ray itself: tests/cli."""
    reported, saved = [], {}

    def report(row, checkpoint=None):
        pointer = checkpoint and json.loads((Path(checkpoint) / ray_train.POINTER).read_text())
        reported.append((row["step"], pointer and pointer["step"]))

    train = SimpleNamespace(report=report, Checkpoint=SimpleNamespace(from_directory=str))
    monkeypatch.setitem(sys.modules, "ray.train", train)
    monkeypatch.setattr(ray_train.folders, "list_checkpoints", lambda _: saved)
    reporter = ray_train._Reporter(tmp_path, first)
    for step in range(1, 61):
        if step % 15 == 0:
            saved[step] = "a folder"
        reporter.report({"step": step} | ({"val_loss": 1.0} if step == 41 else {}))
    newest = [15, 30, None, 60] if first else [None] * 4
    assert reported == list(zip([20, 40, 41, 60], newest, strict=True))


@pytest.mark.parametrize("started", [None, Launch(0, 1, 0, 1)])
def test_a_run_of_ray_that_was_stopped_has_failed(started, monkeypatch):
    monkeypatch.setattr(workers.process, "read_launch", lambda: started)
    monkeypatch.setattr(workers, "join", lambda *_, **__: SimpleNamespace(signal=15))
    with pytest.raises(Failed, match="did not finish") as caught:
        workers._join_and_finish(None, print)
    assert caught.value.final
