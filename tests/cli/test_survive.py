"""Runs that survive: a restart after kill -9 goes on by itself and equals a run never disturbed,
bit by bit; what must not be restarted is not; a rank that hangs is named. benchmarks/chaos.py does
the same twenty times in one run.
"""

import os
import shutil
import signal
import subprocess
import sys
import time

import pytest
import tinyrun
from spawning import launch_forked
from test_processes import (
    ENDLESS,
    PATIENCE,
    TWO,
    WORKER,
    at_step,
    in_workers,
    meanwhile,
    parent,
    ranks,
    trainer,
    wait,
)
from tinyrun import dolmen, losses, rows, same, steps, tensors

import dolmen as package
from dolmen.checkpoint import folders
from dolmen.launch import launcher
from dolmen.training.folder import OWNER

material, one_thread = tinyrun.material, tinyrun.one_thread
FIXED = ("--optimizer.schedule", "constant", "--log.validate-every", 0, "--checkpoint.every", 4)


@pytest.fixture(scope="module")
def whole(material, tmp_path_factory):
    """Twelve steps that nobody disturbs, in one process."""
    out = tmp_path_factory.mktemp("survive") / "whole"
    assert (
        dolmen(
            "train",
            material.file,
            "--out",
            out,
            *FIXED,
            "--train.steps",
            12,
            "--checkpoint.keep",
            0,
        ).code
        == 0
    )
    return out


@pytest.fixture
def run(whole, tmp_path):
    shutil.copytree(whole, tmp_path / "run")
    return tmp_path / "run"


# ---- our launcher


@pytest.mark.spawn
def test_killed_and_restarted_is_bitwise_never_killed(material, tmp_path, capfd):
    """Two ranks; --overwrite, which the restart must not obey again; rank 1 is killed between two
    checkpoints.
    """
    words = (*FIXED, *TWO, "--train.steps", 24)
    calm, wild = tmp_path / "calm", tmp_path / "wild"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(launcher, "launch", launch_forked)
        assert dolmen("train", material.file, "--out", calm, *words).code == 0
    shutil.copytree(calm, wild)
    meanwhile(
        # a checkpoint is written beside the steps: on a busy machine it is whole some steps later
        lambda: (
            (wild / OWNER).exists()
            and at_step(wild, 6)
            and bool(folders.list_checkpoints(wild / "checkpoints"))
        ),
        lambda: os.kill(ranks(os.getpid())[1], signal.SIGKILL),
    )
    capfd.readouterr()
    result = dolmen(
        "train", material.file, "--out", wild, "--overwrite", *words, "--max-restarts", 1
    )
    said = capfd.readouterr().out
    assert result.code == 0 and "was killed by SIGKILL" in result.err, result
    assert "dolmen: restart 1 of 1, from the newest complete checkpoint" in result.err
    assert said.count("resuming from step ") == 1 and "resuming from step 24" not in said
    assert (
        losses(wild) == losses(calm)
        and same(tensors(wild, 24), tensors(calm, 24))
        and not ranks(os.getpid())
    )


def light(tmp_path, monkeypatch, capfd, code: str, max_restarts: int = 2) -> tuple[int, str, int]:
    """launch() of two workers that only run `code`: (exit code, stderr, starts of the group)."""
    started = (
        f"if RANK: open({str(tmp_path)!r} + f'/begun-{{RANK}}-"
        "{os.environ[\"TORCHELASTIC_RESTART_COUNT\"]}', 'w').close()"
    )
    (tmp_path / "sitecustomize.py").write_text(in_workers(f"{WORKER}\n{started}\n{code}"))
    monkeypatch.setenv("PYTHONPATH", tinyrun.path_of(tmp_path))
    return (
        launcher.launch(2, ["--version"], max_restarts),
        capfd.readouterr().err,
        # one that dies at once may take the other with it before that has begun
        len({path.name.split("-")[2] for path in tmp_path.glob("begun-*")}),
    )


def test_restarts_come_to_an_end(tmp_path, monkeypatch, capfd):
    code, complained, started = light(
        tmp_path,
        monkeypatch,
        capfd,
        "if RANK == '1': os.kill(os.getpid(), signal.SIGKILL)\nif RANK: time.sleep(60)",
    )
    assert (
        (code, started) == (1, 3)
        and complained.count("was killed by SIGKILL") == 3
        and complained.count("dolmen: restart ") == 2
    )


def test_a_restart_that_ends_well_is_well(tmp_path, monkeypatch, capfd):
    code, complained, started = light(
        tmp_path,
        monkeypatch,
        capfd,
        "if RANK == '1' and os.environ['TORCHELASTIC_RESTART_COUNT'] == '0': os._exit(1)",
    )
    assert (code, started) == (0, 2) and "restart 1 of 2" in complained


FINAL = """
if RANK:
    sys.path.insert(0, {root!r})
    from dolmen.launch import process
    from dolmen.core.messages import BadInput, Failed
    def work(): raise {error}
    if RANK == "1": time.sleep(60)
    process.run_worker(work)
"""


@pytest.mark.parametrize(
    "error, code", [("BadInput('use --less')", 2), ("Failed('never finite', final=True)", 1)]
)
def test_what_would_fail_again_is_not_restarted(tmp_path, monkeypatch, capfd, error, code):
    root = os.path.dirname(os.path.dirname(package.__file__))
    got, complained, started = light(
        tmp_path, monkeypatch, capfd, FINAL.format(root=root, error=error)
    )
    assert (
        (got, started) == (code, 1)
        and "restart" not in complained
        and "Traceback" not in complained
    )


def test_sigterm_is_not_restarted(tmp_path, monkeypatch, capfd):
    meanwhile(
        lambda: len(list(tmp_path.glob("ready*"))) == 2,
        lambda: os.kill(os.getpid(), signal.SIGTERM),
    )
    code = (
        "if RANK: signal.signal(signal.SIGUSR2, lambda *_: os._exit(143))\n"
        f"if RANK: open({str(tmp_path)!r} + '/ready' + RANK, 'w').close(); time.sleep(60)"
    )
    assert light(tmp_path, monkeypatch, capfd, code) == (143, "", 1)


@pytest.mark.full  # training/test_watch.py has the rule, in one process
def test_a_stopped_rank_is_named(material, tmp_path):
    """SIGSTOP to rank 1: it cannot report, so rank 0 does, and nothing is left behind."""
    out = tmp_path / "run"
    argv = trainer(material.file, "--out", out, *ENDLESS, *TWO, "--train.hang-seconds", 10)
    launcher = subprocess.Popen(argv, stderr=subprocess.PIPE, text=True)
    try:
        assert wait(lambda: at_step(out, 3)), launcher.communicate()
        workers = ranks(launcher.pid)
        time.sleep(4)  # each rank writes a heartbeat every 2.5 s
        os.kill(workers[1], signal.SIGSTOP)
        _, complained = launcher.communicate(timeout=PATIENCE)
    finally:
        launcher.kill()
    assert (
        launcher.returncode == 1
        and f"dolmen: rank 1 ({os.uname().nodename}, pid {workers[1]}) last heard of after step "
        in complained
    ), complained
    assert (
        "does not respond" in complained
        and "1 of 2 ranks are waiting for it" in complained
        and (out / "hang" / "rank-0.txt").stat().st_size
    )
    assert wait(lambda: all(parent(pid) is None for pid in workers.values()))


# ---- torchrun


@pytest.mark.full
def test_torchrun_restarts_what_was_killed_and_not_what_was_asked_to_end(material, tmp_path):
    """No --resume is given: the restart knows. After it, SIGTERM to torchrun saves and ends."""
    out = tmp_path / "run"
    words = ("train", material.file, "--out", out, *ENDLESS, *TWO, "--checkpoint.every", 4)
    argv = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc-per-node",
        2,
        "--max-restarts",
        3,
        "-m",
        "dolmen",
        *words,
    ]
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    torchrun = subprocess.Popen(
        [str(a) for a in argv], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=env
    )
    try:
        assert wait(lambda: at_step(out, 6)), torchrun.communicate()
        first = ranks(torchrun.pid)
        os.kill(first[1], signal.SIGKILL)
        assert wait(
            lambda: (
                len(now := ranks(torchrun.pid)) == 2 and not set(now.values()) & set(first.values())
            )
        )
        started = (out / "metrics.jsonl").stat().st_ino  # a resumed run writes the file anew
        assert wait(
            lambda: (out / "metrics.jsonl").stat().st_ino != started and len(rows(out)) > 20
        ), torchrun.communicate()
        torchrun.send_signal(signal.SIGTERM)
        said, complained = torchrun.communicate(timeout=PATIENCE)
    finally:
        torchrun.kill()
    assert torchrun.returncode != 0 and said.count("resuming from step ") == 1, complained
    assert (
        f"stopped by signal 15 after step {steps(out)[-1]}, checkpoint saved" in said
        and len(rows(out)) == steps(out)[-1]
    )


# ---- one worker as torchrun starts it, in this process


@pytest.fixture
def worker(monkeypatch):
    """dolmen() as a torchrun worker of one, after `count` restarts by the launcher `job`."""

    def worker(*words, count: int = 1, job: str = "job-1"):
        for name, value in {
            "RANK": 0,
            "WORLD_SIZE": 1,
            "LOCAL_RANK": 0,
            "LOCAL_WORLD_SIZE": 1,
            "TORCHELASTIC_RESTART_COUNT": count,
            "TORCHELASTIC_RUN_ID": job,
        }.items():
            monkeypatch.setenv(name, str(value))
        return dolmen(*words)

    return worker


def test_a_first_start_is_refused_what_a_restart_is_not(worker, material, run):
    words = ("train", material.file, "--out", run, *FIXED, "--train.steps", 14)
    first = worker(*words, count=0)
    assert first.code == 2 and "already contains a run" in first.words
    again = worker(*words)
    assert again.code == 0 and "resuming from step 12" in again.out and max(steps(run)) == 14


def test_only_the_first_start_overwrites(worker, material, run, whole):
    """A restart goes on if its own job has emptied the folder, and empties it if the kill came
    before.
    """
    words = (
        "train",
        material.file,
        "--out",
        run,
        "--overwrite",
        *FIXED,
        "--train.steps",
        12,
        "--checkpoint.keep",
        0,
    )
    other = worker(*words)
    assert (
        other.code == 0
        and "nothing left" not in other.out
        and losses(run) == losses(whole)
        and (run / OWNER).read_text().splitlines()[1:] == ["run job-1"]
    )
    shutil.rmtree(run / "checkpoints" / "step-00000012")
    again = worker(*words)
    assert again.code == 0 and "resuming from step 8" in again.out and losses(run) == losses(whole)
    assert same(tensors(run, 12), tensors(whole, 12))


def test_a_recovered_job_of_skypilot_goes_on(monkeypatch, worker, material, tmp_path):
    """SkyPilot keeps the id of a job over recoveries and counts none: the folder knows the id."""
    words = ("train", material.file, "--out", tmp_path / "sky", *FIXED, "--train.steps")
    monkeypatch.setenv("SKYPILOT_TASK_ID", "sky-managed-1")
    assert worker(*words, 4, count=0).code == 0
    again = worker(*words, 8, count=0)
    assert again.code == 0 and "resuming from step 4" in again.out
    monkeypatch.setenv("SKYPILOT_TASK_ID", "sky-managed-2")
    other = worker(*words, 12, count=0)
    assert other.code == 2 and "already contains a run" in other.words


def test_a_start_by_an_agent_that_has_taken_part_is_a_restart(worker, material, tmp_path):
    """torchrun does not count the restart by which an agent joins; --overwrite is not obeyed
    again.
    """
    words = ("train", material.file, "--out", tmp_path / "run", *FIXED, "--overwrite")
    (tmp_path / "run").mkdir()
    assert worker(*words, "--train.steps", 4, count=0).code == 0
    joined = worker(*words, "--train.steps", 6, count=0, job="another")
    assert joined.code == 0 and "resuming from step 4" in joined.out


def test_nothing_saved_yet_starts_again(worker, material, run, whole):
    shutil.rmtree(run / "checkpoints")
    again = worker("train", material.file, "--out", run, *FIXED, "--train.steps", 12)
    assert (
        again.code == 0
        and "restart: no checkpoint yet, starting from step 0" in again.out
        and losses(run) == losses(whole)
    )


def mostly_full(short: tuple[str, ...], full: tuple[str, ...]) -> list:
    """Damages of which the latter are of the full tier: tests/checkpoint/test_damage.py has them
    without a command.
    """
    return [*short, *(pytest.param(damage, marks=pytest.mark.full) for damage in full)]


@pytest.mark.parametrize(
    "damage", mostly_full(("a bit", "a number", "seal"), ("short", "state", "metadata", "a flip"))
)
def test_a_restart_falls_back_to_an_older_checkpoint(worker, material, run, whole, damage):
    newest = run / "checkpoints" / "step-00000012"
    shard = next(newest.glob("*.distcp"))
    if damage == "a bit":
        content = bytearray(shard.read_bytes())
        content[len(content) // 2] ^= 1
        shard.write_bytes(content)
    elif damage == "short":
        os.truncate(shard, 100)
    elif damage == "state":
        (newest / "state.json").write_text("{")
    elif damage == "a number":
        text = (newest / "state.json").read_text()
        assert '"updates": 12,' in text
        (newest / "state.json").write_text(text.replace('"updates": 12,', '"updates": 11,'))
    elif damage == "a flip":
        content = bytearray((newest / ".metadata").read_bytes())
        content[content.index(b"relative_path") + 3] ^= 1
        (newest / ".metadata").write_bytes(content)
    elif damage == "seal":
        (newest / "seal").unlink()
    else:
        (newest / ".metadata").write_bytes(b"")
    again = worker(
        "train", material.file, "--out", run, *FIXED, "--train.steps", 12, "--checkpoint.keep", 0
    )
    words = " ".join(again.out.split())
    assert (
        again.code == 0
        and "WARNING: the newest checkpoint, of step 12, is damaged" in words
        and "resuming from step 8" in words
    )
    assert losses(run) == losses(whole) and same(tensors(run, 12), tensors(whole, 12))
    assert (run / "checkpoints" / "step-00000012.damaged").is_dir()


def test_two_ranks_fall_back_together(whole, run, capfd):
    """One of them puts the damaged checkpoint aside."""
    (run / "checkpoints" / "step-00000012" / "state.json").write_text("{")
    words = ("train", run / "config.yaml", "--out", run, *FIXED, *TWO, "--train.steps", 12)
    assert launch_forked(2, list(map(str, words)), attempt=1) == 0
    said = " ".join(capfd.readouterr().out.split())
    assert said.count("of step 12, is damaged") == 1, said
    assert "resuming from step 8" in said and max(steps_whole(run)) == 12
    assert (run / "checkpoints" / "step-00000012.damaged").is_dir()
    assert not (run / "checkpoints" / "step-00000012.damaged-2").exists()


def steps_whole(out) -> list[int]:
    return list(folders.list_checkpoints(out / "checkpoints"))


def newer(checkpoint) -> None:
    """Let it say that it is of the next format, which is sealed in another way."""
    number = int((checkpoint / "seal").read_text().split()[2].rstrip(","))
    for name, old, new in (
        ("seal", f"checkpoint {number}, ", f"checkpoint {number + 1}, "),
        ("state.json", f'"format": {number}', f'"format": {number + 1}'),
    ):
        text = (checkpoint / name).read_text()
        assert old in text
        (checkpoint / name).write_text(text.replace(old, new))


def test_what_is_whole_and_does_not_fit_is_not_put_aside(worker, material, run):
    """Another model, as after a requeue with an edited YAML; another format, as by older code."""
    before = sorted(p.name for p in (run / "checkpoints").iterdir())
    words = ("train", material.file, "--out", run, *FIXED, "--train.steps", 14)
    other = worker(*words, "--model.intermediate-size", 64)
    assert other.code == 2 and "step 12 belongs to another model" in other.words, other
    assert "intermediate_size: 48 -> 64" in other.words and other.err.count("\n") == 1
    assert sorted(p.name for p in (run / "checkpoints").iterdir()) == before
    newer(run / "checkpoints" / "step-00000012")
    again = worker(*words)
    assert again.code == 2 and "by a newer dolmen" in again.words, again
    assert again.err.count("\n") == 1
    assert sorted(p.name for p in (run / "checkpoints").iterdir()) == before


# ---- what the world does


@pytest.fixture
def small(tmp_path):
    """A file system of 1.5 MiB: three checkpoints of the tiny model do not fit."""
    folder = tmp_path / "small"
    folder.mkdir()
    mounted = (
        os.geteuid() == 0
        and subprocess.run(
            ["mount", "-t", "tmpfs", "-o", "size=1536k", "tmpfs", folder], capture_output=True
        ).returncode
        == 0
    )
    if not mounted:
        pytest.skip("a small file system cannot be mounted here (not root?)")
    yield folder
    subprocess.run(["umount", "-l", folder], check=True)


def test_a_full_disk_is_told_and_breaks_nothing(material, small):
    options = {
        "train": {"steps": 40},
        "checkpoint": {"every": 1, "keep": 0},
        "log": {"validate_every": 0},
    }
    with pytest.raises(RuntimeError, match="No space left on device") as raised:
        package.train(str(material.file), out=small / "run", **options)
    newest = max(
        int(p.name[5:]) for p in (small / "run" / "checkpoints").iterdir() if p.name[5:].isdigit()
    )
    assert f"is that of step {newest}: make room" in str(raised.value) and "Traceback" not in str(
        raised.value
    )
    assert len(tensors(small / "run", newest)) > 10 and newest < 10


def test_steps_that_are_not_finite_name_their_documents(material, tmp_path):
    """A learning rate of 1e30: the weights are gone after a step, and the run after three more."""
    options = {
        "train": {"steps": 30, "max_skipped_steps": 3},
        "optimizer": {"lr": 1e30, "warmup_steps": 0, "clip": 0},
        "log": {"validate_every": 0},
    }
    with pytest.raises(RuntimeError, match="last 3 steps, up to step .* non-finite") as raised:
        package.train(str(material.file), out=tmp_path / "run", **options)
    assert str(raised.value).count(": documents ") == 4, raised.value  # rows of the batch
