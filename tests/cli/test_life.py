"""The life of a run, in this process: what it says of itself when it ends, ends early, or goes on,
and that no sample is skipped or repeated.
"""

import errno
import fcntl
import json
import math
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import tinyrun
import yaml
from seals import seal_again
from test_processes import LIGHT, TWO, in_workers, parent, ranks, wait
from tinyrun import dolmen, losses, rows, same, tensors

import dolmen as package
from dolmen.checkpoint import writer
from dolmen.checkpoint.writer import Writer
from dolmen.cli import runs
from dolmen.data.mixture import Mixture
from dolmen.launch import launcher
from dolmen.training import folder as lock
from dolmen.training import loop, mirror
from dolmen.training import run as train_run
from dolmen.training.checks.warn import warmup_over_run
from dolmen.training.folder import LOCK, Unusable

material, one_thread = tinyrun.material, tinyrun.one_thread
finished_run = tinyrun.finished_run


@pytest.fixture(scope="module")
def whole(finished_run, tmp_path_factory):
    """Six steps, saved and validated after each third."""
    return shutil.copytree(finished_run, tmp_path_factory.mktemp("life") / "whole")


@pytest.fixture
def run(whole, tmp_path):
    shutil.copytree(whole, tmp_path / "run")
    return tmp_path / "run"


def summary(out: Path) -> dict:
    return json.loads((out / "summary.json").read_text())


def state(out: Path, step: int) -> dict:
    return json.loads((out / "checkpoints" / f"step-{step:08d}" / "state.json").read_text())


def edit_state(out: Path, step: int, /, **changes) -> None:
    """Change a checkpoint's state.json and seal it again; None: leave a field out."""
    folder = out / "checkpoints" / f"step-{step:08d}"
    left_out = {name for name, value in changes.items() if value is None}
    kept = {n: v for n, v in (state(out, step) | changes).items() if n not in left_out}
    (folder / "state.json").write_text(json.dumps(kept))
    seal_again(folder)


def during(monkeypatch, act) -> None:
    """Call act(step) before every step of training."""
    step = loop.optimizer_step

    def acting(state, *args):
        act(state.step)
        return step(state, *args)

    monkeypatch.setattr(loop, "optimizer_step", acting)


# ---- summary.json


def test_resuming_a_finished_run_leaves_its_summary(whole, run):
    """Also where the kill came after the last save and before summary.json, or metrics.jsonl."""
    want = summary(whole)
    assert want["val_loss"] is not None and want["bits_per_byte"] is not None
    for gone in ((), ("summary.json",), ("summary.json", "metrics.jsonl")):
        for name in gone:
            (run / name).unlink()
        result = dolmen("train", run / "config.yaml", "--out", run, "--resume")
        assert result.code == 0 and "nothing left to train" in result.out
        seconds = summary(run)["seconds"]
        assert summary(run) == want | {"seconds": seconds}
        assert seconds == state(run, 6)["seconds"] <= want["seconds"]
        assert f"{want['bits_per_byte']:.3f}" in result.out and "nats per token on" in result.out


def test_a_stopped_run_says_of_which_step_its_validation_is(material, whole, tmp_path, monkeypatch):
    """SIGTERM in step 5 of 6: the last validation is of step 3, and bits per byte are its."""
    out = tmp_path / "run"
    with monkeypatch.context() as patch:
        during(patch, lambda step: step == 4 and os.kill(os.getpid(), signal.SIGTERM))
        result = dolmen("train", material.file, "--out", out)
    assert result.code == 143 and "stopped by signal 15 after step 5" in result.out
    found, (third, _) = summary(out), rows(whole, "val_loss")
    assert (found["steps"], found["signal"], found["val_step"]) == (5, signal.SIGTERM, 3)
    assert found["val_loss"] == third["val_loss"] and found["val_tokens"] == third["val_tokens"]
    held = sum(len(Path(file).read_bytes()) for file in found["validation_files"])
    nats = third["val_loss"] * third["val_tokens"]
    assert found["bits_per_byte"] == pytest.approx(nats / math.log(2) / held, rel=1e-12)
    assert dolmen("train", material.file, "--out", out, "--resume").code == 0
    assert losses(out) == losses(whole) and same(tensors(out, 6), tensors(whole, 6))
    again = summary(out)
    times = {"seconds": 0, "goodput": {}}
    assert again | times == summary(whole) | times and again["val_step"] == 6


def test_a_stopped_run_that_was_never_validated_says_nothing(material, tmp_path, monkeypatch):
    during(monkeypatch, lambda step: step == 1 and os.kill(os.getpid(), signal.SIGTERM))
    assert dolmen("train", material.file, "--out", tmp_path / "run").code == 143
    found = summary(tmp_path / "run")
    assert found["steps"] == 2 and found["val_loss"] is found["val_step"] is None
    assert found["bits_per_byte"] is None and found["val_tokens"] == 0


def test_seconds_are_of_all_starts(material, run, tmp_path, monkeypatch):
    """Half a second a step before, nothing after."""
    out = tmp_path / "slow"
    words = ("train", material.file, "--out", out, "--log.validate-every", 0)
    with monkeypatch.context() as patch:
        during(patch, lambda step: time.sleep(0.5))
        assert dolmen(*words, "--train.steps", 3).code == 0
    saved = state(out, 3)["seconds"]
    assert 1.5 < saved <= summary(out)["seconds"]
    result = dolmen(*words, "--train.steps", 4, "--resume")
    assert result.code == 0 and "4 steps in" in result.out
    assert saved < summary(out)["seconds"] < saved + 600


# ---- what is resumed


def test_adams_count_is_that_of_updates(run):
    """A run of which two steps were skipped: its bias correction is that of four updates."""
    edit_state(run, 6, updates=4)
    words = ("--resume", "--train.steps", 8)
    result = dolmen("train", run / "config.yaml", "--out", run, *words)
    assert result.code == 0 and state(run, 8)["updates"] == 6 and state(run, 8)["step"] == 8


def test_the_last_save_is_waited_for(material, tmp_path, monkeypatch):
    """It is slow, and fails."""
    finish = Writer.finish

    def failing(self, metadata, results):
        if self.step == 6:
            time.sleep(0.5)
            raise OSError(28, "No space left on device", "/mnt/x")
        finish(self, metadata, results)

    monkeypatch.setattr(Writer, "finish", failing)
    options = {"checkpoint": {"every": 3}, "log": {"validate_every": 0}}
    with pytest.raises(
        RuntimeError, match="step 6 was not saved in .*No space left.*is that of step 3"
    ):
        package.train(str(material.file), out=tmp_path / "run", **options)
    assert not (tmp_path / "run" / "summary.json").exists()


@pytest.fixture
def read(monkeypatch):
    """(first sample, samples) of every batch that is made, the one made ahead among them."""
    made, windows = [], Mixture.windows

    def noting(self, first, count):
        made.append((first, count))
        return windows(self, first, count)

    monkeypatch.setattr(Mixture, "windows", noting)
    return made


def test_another_batch_size_skips_and_repeats_no_sample(run, read):
    """24 samples in batches of 4, then batches of 8, then of 2: each begins where the last one
    ended.
    """
    words = ("train", run / "config.yaml", "--out", run, "--resume", "--log.validate-every", 0)
    for size, last, begin in ((8, 8, 24), (2, 11, 40), (4, 12, 46)):
        read.clear()
        result = dolmen(*words, "--train.global-batch-size", size, "--train.steps", last)
        assert result.code == 0, result
        made = last - {8: 6, 2: 8, 4: 11}[size]
        assert read[:made] == [(begin + i * size, size) for i in range(made)], (size, read)
        assert state(run, last)["samples"] == begin + made * size
    epochs = next(v for n, v in rows(run)[-1].items() if n.startswith("epoch/"))
    whole = next(v for n, v in rows(run)[5].items() if n.startswith("epoch/"))
    assert epochs == pytest.approx(whole * 50 / 24, rel=1e-12)  # and it is counted


def test_an_epoch_in_batches_of_two_sizes_is_an_epoch(material, tmp_path):
    """Without --train.steps: ten steps of 4 samples, the rest of the epoch in batches of 16."""
    options = material.options()
    del options["train"]["steps"]
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(options))
    words = ("train", tmp_path / "run.yaml", "--out", tmp_path / "run", "--log.validate-every", 0)
    assert dolmen(*words, "--train.steps", 10).code == 0
    result = dolmen(*words, "--resume", "--train.global-batch-size", 16)
    last = rows(tmp_path / "run")[-1]
    (epochs,) = (v for name, v in last.items() if name.startswith("epoch/"))
    assert result.code == 0 and last["step"] > 20, result
    assert epochs == pytest.approx(1, abs=0.03)  # half a batch is 8 of some 500 windows


def test_steps_skipped_before_a_resume_are_counted(run, monkeypatch):
    """fp16: two of six, as the count of AdamW's updates says."""
    monkeypatch.setattr(train_run.mfu, "matmul_peak", lambda *_: 1e12)
    edit_state(run, 6, updates=4)
    words = ("--resume", "--train.steps", 7, "--train.dtype", "float16")
    assert dolmen("train", run / "config.yaml", "--out", run, *words).code == 0
    assert rows(run)[-1]["skipped_steps"] == 2


STATES = {
    "run: 5": {"run": 5},
    "no data": {"data": None},
    "updates: null": {"updates": [None]},
    "updates over steps": {"updates": 7},
    "a text for steps": {"step": "6"},
    "no model": {"run": {"train": {"global_batch_size": 4}}},
    "a loss scale of text": {"loss_scale": ["a", "b"]},
    "norms of lists": {"norms": [[1]]},
    "validation: 3": {"validation": 3},
    "nested": {"run": json.loads("[" * 500 + "]" * 500)},
}


@pytest.mark.parametrize("case", STATES)
def test_a_state_of_nonsense_is_refused_in_one_line(run, case):
    edit_state(run, 6, **STATES[case])
    result = dolmen("train", run / "config.yaml", "--out", run, "--resume", "--train.steps", 7)
    assert result.code == 2 and result.err.count("\n") == 1, result
    assert "the newest checkpoint cannot be read" in result.err
    assert f"remove {run}/checkpoints/step-00000006 to resume from step 3" in result.err


# ---- two runs at once


def test_who_loses_the_race_for_a_folder_is_told_in_one_line(
    whole, material, tmp_path, monkeypatch, forked_ranks
):
    """The other run comes between the launcher's look and the start: with one process and with
    two.
    """
    for module in (runs, mirror):
        monkeypatch.setattr(module, "check_folder", lambda *_, **__: None)
    (tmp_path / "run").mkdir()
    held = lock.lock_folder(tmp_path / "run")
    said = f"{tmp_path}/run is in use by another run: wait for it, or give another --out\n"
    try:
        one = dolmen("train", material.file, "--out", tmp_path / "run")
        assert one.code == 2 and one.err == f"dolmen train: {said}"
        two = dolmen("train", material.file, "--out", tmp_path / "run", *TWO)
        assert two.code == 2 and os.listdir(tmp_path / "run") == [LOCK]
    finally:
        lock.unlock_folder(tmp_path / "run", held)
    assert not os.listdir(tmp_path / "run")


def test_a_lock_is_that_of_the_file_that_is_there(tmp_path, monkeypatch):
    """Freed between a second one's look and its lock: it takes the new file, and a third waits."""
    flock, first = fcntl.flock, lock.lock_folder(tmp_path)

    def freed(descriptor, how):
        monkeypatch.setattr(fcntl, "flock", flock)
        lock.unlock_folder(tmp_path, first)
        flock(descriptor, how)

    monkeypatch.setattr(fcntl, "flock", freed)
    second = lock.lock_folder(tmp_path, 10)
    with pytest.raises(Unusable, match="in use by another run"):
        lock.lock_folder(tmp_path)
    lock.unlock_folder(tmp_path, second)
    assert not os.listdir(tmp_path)


def test_a_file_system_without_locks_is_told_once(material, tmp_path, monkeypatch):
    def none(*_):
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "flock", none)
    words = ("--train.steps", 1, "--log.validate-every", 0)
    result = dolmen("train", material.file, "--out", tmp_path / "run", *words)
    assert result.code == 0 and result.out.count("does not support locks") == 1, result
    monkeypatch.undo()
    (tmp_path / "run" / LOCK).unlink()
    (tmp_path / "run" / LOCK).symlink_to(tmp_path / "elsewhere")
    again = dolmen("train", material.file, "--out", tmp_path / "run", "--resume", *words)
    assert again.code == 2 and again.err.count("\n") == 1 and ".dolmen-lock" in again.err


# ---- bounds and warnings


def test_the_last_validation_is_bounded_by_the_training_done(material, tmp_path):
    """Two steps of 64 tokens: 128 of the held-out tokens, and with 0 all."""
    words = ("train", material.file, "--train.steps", 2, "--data.validation-fraction", 0.3)
    words += ("--log.validate-every", 1)
    short = dolmen(*words, "--out", tmp_path / "a", "--log.validation-tokens", 32)
    everything = dolmen(*words, "--out", tmp_path / "b", "--log.validation-tokens", 0)
    first, last = rows(tmp_path / "a", "val_loss")
    assert short.code == everything.code == 0 and (first["val_tokens"], last["val_tokens"]) == (
        32,
        128,
    )
    held = rows(tmp_path / "b", "val_loss")[-1]["val_tokens"]
    assert held > 1000 and summary(tmp_path / "b")["bits_per_byte"] is not None
    said = " ".join(short.out.split())
    assert (
        f"on 128 of {held:,} tokens; limited in a short run, --log.validation-tokens 0 reads all"
        in said
    )
    assert f"128 of {held:,} held-out tokens" in said
    assert summary(tmp_path / "a")["bits_per_byte"] is None


def test_a_warm_up_longer_than_the_run_is_told(material, tmp_path):
    words = ("train", material.file, "--out", tmp_path / "run", "--train.steps", 2)
    result = dolmen(*words, "--optimizer.warmup-steps", 40)
    said = " ".join(result.out.split())
    assert result.code == 0 and (
        "WARNING: optimizer.warmup-steps (40) exceeds the run's 2 steps: the learning rate ends at "
        "0.0005 and never reaches 0.01; set --optimizer.warmup-steps 1 or less, or --train.steps "
        "over 40" in said
    )
    assert rows(tmp_path / "run")[-1]["lr"] == 0.0005
    exact = material.config(optimizer={"lr": 0.01, "warmup_steps": 40})
    assert warmup_over_run(exact, 41) is None and warmup_over_run(exact, 39)
    assert "reaches 0.01 in the last step; set" in (warmup_over_run(exact, 40) or "")


# ---- a full disk


def torchs(before: Exception | None):
    """What torch's archive writer raises when a write has failed: of that, nothing."""
    try:
        if before is not None:
            raise before
    finally:
        raise RuntimeError("[enforce fail at inline_container.cc:672] . unexpected pos 64 vs 0")


@pytest.mark.parametrize("before", [OSError(28, "No space left on device"), None])
def test_a_full_disk_is_said_to_be_full(tmp_path, monkeypatch, before):
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(
        writer.shutil, "disk_usage", lambda path: usage._replace(free=0 if before is None else 9e9)
    )
    with (
        pytest.raises(OSError, match="No space left on device"),
        writer.explain_write_errors(tmp_path),
    ):
        torchs(before)


def test_what_is_not_for_want_of_room_stays_what_it_is(tmp_path):
    with (
        pytest.raises(RuntimeError, match="inline_container"),
        writer.explain_write_errors(tmp_path),
    ):
        torchs(None)


def chained(cause: Exception | None, context: Exception) -> None:
    try:
        raise context
    except Exception:
        raise RuntimeError("a mistake of ours") from cause


def test_an_error_that_was_only_being_handled_is_no_cause(tmp_path):
    """But a disk error is; and a folder that is gone is not full."""
    missing = FileNotFoundError(2, "No such file or directory", "/x")
    gone = tmp_path / "gone"
    with pytest.raises(RuntimeError, match="a mistake of ours"), writer.explain_write_errors(gone):
        chained(None, missing)
    with pytest.raises(OSError, match="quota"), writer.explain_write_errors(gone):
        chained(None, OSError(122, "Disk quota exceeded"))
    with pytest.raises(PermissionError, match="/y"), writer.explain_write_errors(gone):
        chained(PermissionError(13, "Permission denied", "/y"), missing)
    with pytest.raises(RuntimeError, match="a mistake"), writer.explain_write_errors(gone):
        chained(ValueError("x"), missing)


# ---- launchers that are killed

WAITING = """
import os, sys, time
sys.path.insert(0, {root!r})
from dolmen.launch import process
process.die_with_agent()
open({folder!r} + "/ready" + os.environ["RANK"], "w").close()
time.sleep(600)  # longer than any wait
"""


def test_workers_end_with_torchruns_agent(tmp_path):
    """kill -9 of the agent: both workers are gone, and would have slept for ten minutes."""
    root = str(Path(package.__file__).parents[1])
    script = tmp_path / "worker.py"
    script.write_text(WAITING.format(root=root, folder=str(tmp_path)))
    argv = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    agent = subprocess.Popen([*argv, str(script)], stderr=subprocess.PIPE, text=True)
    try:
        assert wait(lambda: len(list(tmp_path.glob("ready*"))) == 2), agent.communicate()
        workers = ranks(agent.pid)
    finally:
        agent.kill()
    assert sorted(workers) == [0, 1]
    assert wait(lambda: all(parent(pid) is None for pid in workers.values()))
    agent.communicate()


def test_what_a_killed_launcher_leaves_is_deleted_by_the_next(tmp_path, monkeypatch, capfd):
    """And what a living one uses, or somebody else has put there, is not."""
    for name, mark in (("dolmen_mine", "data.txt"), ("dolmen_theirs", "dolmen-launcher.txt")):
        (tmp_path / name).mkdir()
        (tmp_path / name / mark).write_text("mine")
    env = {**os.environ, "TMPDIR": str(tmp_path), "PYTHONPATH": tinyrun.path_of(tmp_path)}
    (tmp_path / "sitecustomize.py").write_text(
        in_workers(
            f"import os, time; open({str(tmp_path)!r} + '/ready' + os.environ['RANK'] + "
            "str(os.getppid()), 'w').close(); time.sleep(120)"
        )
    )
    argv = [sys.executable, "-c", LIGHT, "--version"]
    killed, living = (subprocess.Popen(argv, env=env) for _ in range(2))
    try:
        assert wait(lambda: len(list(tmp_path.glob("ready*"))) == 4)
        made = [p for p in tmp_path.glob("dolmen_*") if (p / launcher.OURS).exists()]
        assert len(made) == 2
        killed.kill()
        killed.wait()
        monkeypatch.setattr(launcher.tempfile, "tempdir", str(tmp_path))
        with launcher._reports():
            pass
        left = [p for p in made if p.exists()]
        assert len(left) == 1 and (left[0] / launcher.OURS).exists()
    finally:
        killed.kill()
        living.kill()
        living.wait()
    with launcher._reports():
        pass
    assert sorted(p.name for p in tmp_path.glob("dolmen_*")) == ["dolmen_mine", "dolmen_theirs"]
