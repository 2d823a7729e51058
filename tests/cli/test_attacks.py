"""What went wrong when strangers tried it: each of these once ended quietly, or elsewhere."""

import os
import shutil

import pytest
import tinyrun
import torch
from safetensors.torch import load_file, save_file
from tinyrun import dolmen as command
from tinyrun import rows, steps

import dolmen
from dolmen.train.check import take_lock

material, one_thread = tinyrun.material, tinyrun.one_thread


@pytest.fixture(scope="module")
def finished(material, tmp_path_factory):
    out = tmp_path_factory.mktemp("attacks") / "run"
    assert (
        command(
            "train", material.file, "--out", out, "--train.steps", 4, "--checkpoint.every", 2
        ).code
        == 0
    )
    return out


@pytest.fixture
def run(finished, tmp_path):
    shutil.copytree(finished, tmp_path / "run")
    return tmp_path / "run"


def test_a_config_yaml_goes_on_in_its_own_folder(run):
    assert command("train", run / "config.yaml", "--resume", "--train.steps", 5).code == 0
    assert [row["step"] for row in rows(run)] == [1, 2, 3, 4, 5] and max(steps(run)) == 5


def test_resume_with_nothing_left_changes_nothing(run):
    before = (run / "config.yaml").read_text()
    assert command("train", run / "config.yaml", "--resume", "--train.steps", 3).code == 0
    assert (run / "config.yaml").read_text() == before and steps(run) == [2, 4]


def test_a_run_that_never_has_a_finite_gradient_fails(material, tmp_path):
    bad = tmp_path / "bad"
    shutil.copytree(material.model, bad)
    tensors = load_file(bad / "model.safetensors")
    next(iter(tensors.values()))[0, 0] = float("nan")
    save_file(tensors, bad / "model.safetensors", {"format": "pt"})
    data = {"path": [material.docs], "cache": material.folder / "cache"}
    options = {
        "init": bad,
        "data": data,
        "train": {"sequence_length": 16, "global_batch_size": 2, "steps": 30},
        "log": {"validate_every": 0},
    }
    with pytest.raises((RuntimeError, FloatingPointError), match="last 10 steps.*not finite"):
        dolmen.train("pretrain", out=tmp_path / "out", **options)
    assert len(rows(tmp_path / "out")) < 30


def test_two_runs_in_one_folder(material, run):
    held = take_lock(run)
    try:
        second = command("train", run / "config.yaml", "--resume", "--train.steps", 9)
    finally:
        os.close(held)
    assert second.code == 2 and "in use by another run" in second.words
    assert steps(run) == [2, 4]


@pytest.mark.parametrize(
    "damage",
    (
        "a shard is gone",
        "a shard is short",
        "numbers are changed",
        "no metadata",
        "state.json is cut",
        "state.json is a list",
    ),
)
def test_a_damaged_newest_checkpoint_is_refused_before_the_start(run, damage):
    newest = run / "checkpoints" / "step-00000004"
    shard = next(newest.glob("*.distcp"))
    if damage == "a shard is gone":
        shard.unlink()
    elif damage == "a shard is short":
        os.truncate(shard, shard.stat().st_size // 2)
    elif damage == "numbers are changed":  # seen only when they are read
        middle = shard.stat().st_size // 2
        with open(shard, "r+b") as file:
            file.seek(middle)
            file.write(bytes(4096))
    elif damage == "no metadata":
        (newest / ".metadata").write_bytes(b"")
    else:
        (newest / "state.json").write_text("[]" if damage.endswith("list") else '{"step": 4, "ru')
    result = command("train", run / "config.yaml", "--resume", "--train.steps", 6)
    assert (
        result.code == 2
        and "to go on from step 2" in result.words
        and str(newest) in result.words.replace(" ", "")
    )
    shutil.rmtree(newest)
    assert (
        command("train", run / "config.yaml", "--resume", "--train.steps", 3).code == 0
        and max(steps(run)) == 3
    )


@pytest.mark.parametrize(
    "field, value",
    [
        ("model_type", ["llama"]),
        ("rope_parameters", [1]),
        ("rms_norm_eps", "1e-5"),
        ("rms_norm_eps", float("inf")),
    ],
)
def test_nonsense_in_config_json(material, tmp_path, field, value):
    import json

    bad = tmp_path / "bad"
    shutil.copytree(material.model, bad)
    content = json.loads((bad / "config.json").read_text())
    (bad / "config.json").write_text(json.dumps(content | {field: value}))
    assert command("generate", bad, "--prompt", "abc").code == 2


def test_the_last_init_counts(material, tmp_path):
    other = tmp_path / "other"
    shutil.copytree(material.model, other)
    result = command(
        "train",
        "pretrain",
        "--init",
        tmp_path / "absent" / "x",
        "--init",
        other,
        "--data.path",
        material.docs,
        "--layout.tp",
        8,
        "--out",
        tmp_path / "out",
    )
    assert result.code == 2 and "num_attention_heads" in result.words
    assert torch.is_grad_enabled()
