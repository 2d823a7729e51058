"""Runs whose --out is a URL: a machine that has nothing of the run resumes it, bit by bit; what is
at the URL is never overwritten. A machine is a home directory.
"""

import shutil
from pathlib import Path

import pytest
import tinyrun
from tinyrun import dolmen, losses, same, tensors

from dolmen.files import storage
from dolmen.training import mirror
from dolmen.training.config import RunConfig
from dolmen.training.request import LaunchOptions, TrainRequest

material, one_thread = tinyrun.material, tinyrun.one_thread
FIXED = ("--optimizer.schedule", "constant", "--log.validate-every", 0, "--checkpoint.every", 2)


@pytest.fixture
def machine(tmp_path, monkeypatch):
    """machine(name): from now on, commands run on that machine, which is new or known."""

    def move(name: str) -> Path:
        (tmp_path / name).mkdir(exist_ok=True)
        monkeypatch.setattr(storage, "COPIES", str(tmp_path / name / "storage"))
        monkeypatch.setattr(storage, "RUNS", str(tmp_path / name / "runs"))
        return tmp_path / name

    move("first")
    return move


def test_resumed_on_another_machine_is_bitwise_never_moved(material, tmp_path, machine):
    url, calm = f"file://{tmp_path}/bucket/run", tmp_path / "calm"
    words = ("train", material.file, *FIXED, "--train.steps")
    assert dolmen(*words, 6, "--out", calm).code == 0
    result = dolmen(*words, 4, "--out", url)
    assert result.code == 0, result.err
    refused = dolmen(*words, 4, "--out", url)
    assert refused.code == 2 and "--resume" in refused.words and "--over" not in refused.words
    refused = dolmen(*words, 4, "--out", url, "--overwrite")
    assert refused.code == 2 and "--overwrite deletes no objects: delete file://" in refused.words
    machine("second")
    refused = dolmen(*words, 4, "--out", url)
    assert refused.code == 2 and f"{url} already contains a run: use --resume" in refused.words
    # of its config.yaml, which has the URL
    result = dolmen("train", f"{url}/config.yaml", "--resume", "--train.steps", 6)
    assert result.code == 0 and "resuming from step 4" in result.out, result.err
    working = storage.working_folder(url)
    assert losses(working) == losses(calm)
    assert same(tensors(working, 6), tensors(calm, 6))
    # back on the first machine, whose copy is older
    machine("first")
    result = dolmen(*words, 6, "--out", url, "--resume")
    assert result.code == 0 and "resuming from step 6" in result.out, result.err
    assert losses(storage.working_folder(url)) == losses(calm)


def test_the_quickstart_runs_at_a_url(material, tmp_path, machine):
    """With its export, and a command for it that names the URL."""
    url = f"file://{tmp_path}/bucket/quickstart"
    words = ("--layout.dp", 1, "--train.steps", 2, "--train.sequence-length", 16, *FIXED)
    words = (*words, "--data.path", material.docs, "--data.cache", tmp_path / "cache")
    words = (*words, "--model.vocab-size", 300, "--data.tokenizer", "bpe:300")
    result = dolmen("train", "quickstart", "--out", url, *words, "--log.validation-tokens", 64)
    # a long URL goes over lines
    assert result.code == 0 and f"dolmengenerate{url}/hf" in "".join(result.out.split()), result.err
    names = storage.RemoteFolder(url).files()
    assert {"summary.json", "hf/model.safetensors", "checkpoints/step-00000002/seal"} < {*names}


def test_a_restart_on_a_host_that_has_nothing(material, tmp_path, machine, monkeypatch):
    """As torchrun starts it, without --resume."""
    url = f"file://{tmp_path}/bucket/run"
    words = ("train", material.file, *FIXED, "--out", url, "--train.steps")
    assert dolmen(*words, 2).code == 0
    machine("second")
    for name, value in (("RANK", 0), ("WORLD_SIZE", 1), ("TORCHELASTIC_RESTART_COUNT", 1)):
        monkeypatch.setenv(name, str(value))
    result = dolmen(*words, 4)
    assert result.code == 0 and "resuming from step 2" in result.out, result.err


def test_a_run_whose_url_another_takes_after_its_last_save(
    material, tmp_path, machine, monkeypatch
):
    url, push = f"file://{tmp_path}/bucket/run", mirror.push_result

    def push_late(*arguments):
        mirror.open_checkpoints(url, tmp_path).claim("another", restarted=False)
        push(*arguments)

    monkeypatch.setattr(mirror, "push_result", push_late)
    result = dolmen("train", material.file, *FIXED, "--out", url, "--train.steps", 1)
    assert result.code == 1 and "is complete in" in result.words, result.err
    assert "another run (another) has started to write to" in result.words
    assert "summary.json" not in storage.RemoteFolder(url).files()


def test_the_initial_model_is_on_the_first_machine_alone(material, tmp_path, machine):
    """The newest checkpoint stands in for it; its tensors are downloaded once, when they are
    read.
    """
    url, init = f"file://{tmp_path}/bucket/run", tmp_path / "init"
    shutil.copytree(material.model, init)
    words = ("--data.path", material.docs, "--train.sequence-length", 16, "--out", url, *FIXED)
    words = (*words, "--train.global-batch-size", 4, "--data.cache", tmp_path / "cache")
    result = dolmen("train", "pretrain", "--init", init, *words, "--train.steps", 2)
    assert result.code == 0, result.err
    shutil.rmtree(init)
    machine("second")
    result = dolmen("train", f"{url}/config.yaml", "--resume", "--train.steps", 3)
    assert result.code == 0 and "resuming from step 2" in result.out, result.err
    machine("third")
    mirror.pull_run(url, storage.working_folder(url))
    exported = dolmen("export", storage.working_folder(url), "--to", tmp_path / "exported")
    assert exported.code == 0, exported.err


def test_a_copy_of_what_was_deleted_is_named(tmp_path, machine, capsys):
    """A resume continues from it, as a failed upload of the first checkpoint leaves the same."""
    url = f"file://{tmp_path}/bucket/run"
    mirror.pull_run(url, storage.working_folder(url))
    (storage.working_folder(url) / "checkpoints" / "step-00000002").mkdir(parents=True)
    assert not capsys.readouterr().err
    mirror.pull_run(url, storage.working_folder(url))
    assert "has no checkpoint: resuming from step 2 of its copy" in capsys.readouterr().err


def test_a_local_run_is_uploaded_too(material, tmp_path, machine):
    """With --checkpoint.to; its export has checksums, and its model can be opened by its URL."""
    url, out = f"file://{tmp_path}/bucket/run", tmp_path / "out"
    words = ("--out", out, "--checkpoint.to", url, "--train.steps", 2, "--finish.export")
    result = dolmen("train", material.file, *FIXED, *words)
    # a long URL goes over lines
    assert result.code == 0 and url in "".join(result.out.split()), result.err
    there = tmp_path / "bucket/run"
    for name in ("config.yaml", "metrics.jsonl", "summary.json", "hf/config.json", ".dolmen"):
        assert (there / name).read_bytes() == (out / name).read_bytes()
    shutil.rmtree(out)
    machine("second")
    assert dolmen("export", url, "--to", tmp_path / "exported").code == 0
    weights = (tmp_path / "exported/model.safetensors").read_bytes()
    assert weights == (there / "hf/model.safetensors").read_bytes()
    assert dolmen("export", f"{url}/hf", "--to", tmp_path / "again").code == 0
    # to URLs, of the step that is named
    step, model = f"{url}/checkpoints/step-00000002", f"file://{tmp_path}/bucket/model"
    assert dolmen("export", step, "--to", model).code == 0
    assert (tmp_path / "bucket/model/model.safetensors").read_bytes() == weights
    refused = dolmen("export", step, "--to", model)
    assert refused.code == 2 and f"{model} holds 6 objects" in refused.words
    ranks = f"file://{tmp_path}/bucket/ranks"
    result = dolmen("convert", model, ranks, "--to", "megatron")
    assert result.code == 0 and f"wrote {ranks}: " in result.out, result.err
    assert dolmen("export", ranks, "--to", tmp_path / "fourth").code == 0
    # what the page shows, and no tensors
    machine("third")
    assert dolmen("show", url, "--out", tmp_path / "page.html").code == 0
    copied = storage.local_copy(url)
    assert "metrics.jsonl" in {p.name for p in copied.iterdir()}
    assert not list(copied.rglob("*.distcp"))
    damaged = bytearray(weights)
    damaged[-1] ^= 1
    (there / "hf/model.safetensors").write_bytes(damaged)
    refused = dolmen("export", f"{url}/hf", "--to", tmp_path / "third")
    assert refused.code == 2 and "model.safetensors: is not what was uploaded" in refused.words


def test_the_memory_of_a_process(material):
    refused = dolmen("train", material.file, "--out", "memory://bucket/run")
    assert refused.code == 2 and "memory://bucket/run is in the memory of one" in refused.words


def test_two_urls(material, tmp_path):
    refused = dolmen(
        "train", material.file, "--out", "memory://a/run", "--checkpoint.to", "memory://b/run"
    )
    assert refused.code == 2
    assert "--out memory://a/run is a URL, and --checkpoint.to memory://b/run another" in (
        refused.words
    )


def test_a_home_directory_in_out(monkeypatch, tmp_path):
    """A shell leaves the ~ of --out=~/run as it is."""
    monkeypatch.setenv("HOME", str(tmp_path))
    for out, folder in (
        ("~/run", tmp_path / "run"),
        ("~nobody-here/run", Path("~nobody-here/run")),
    ):
        assert TrainRequest.from_config(RunConfig(), LaunchOptions(out=out), None).out == folder
