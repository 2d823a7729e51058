"""What went wrong when strangers tried it: each of these once ended quietly, or elsewhere."""

import json
import os
import shutil
import time

import pytest
import tinyrun
import torch
from safetensors.torch import load_file, save_file
from tinyrun import dolmen as command
from tinyrun import rows, steps

import dolmen
from dolmen.training import folder

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


@pytest.mark.parametrize("options, code", [(4, 0), (3, 2)])
def test_resume_with_nothing_left_changes_nothing(run, options, code):
    before = (run / "config.yaml").read_text()
    assert command("train", run / "config.yaml", "--resume", "--train.steps", options).code == code
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
    with pytest.raises((RuntimeError, FloatingPointError), match="last 10 steps.*non-finite"):
        dolmen.train("pretrain", out=tmp_path / "out", **options)
    assert len(rows(tmp_path / "out")) < 30


def test_two_runs_in_one_folder(material, run):
    held = folder.lock_folder(run)
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
        "numbers are changed",
        "state.json is a list",
        # without a command: tests/checkpoint/test_damage.py
        pytest.param("a shard is short", marks=pytest.mark.full),
        pytest.param("no metadata", marks=pytest.mark.full),
        pytest.param("state.json is cut", marks=pytest.mark.full),
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
        and "to resume from step 2" in result.words
        and str(newest) in result.words.replace(" ", "")
    )
    shutil.rmtree(newest)
    assert (
        command("train", run / "config.yaml", "--resume", "--train.steps", 3).code == 0
        and max(steps(run)) == 3
    )


def test_the_newest_checkpoint_without_its_state_is_named(run, tmp_path):
    newest = run / "checkpoints" / "step-00000004"
    exported = command("export", run, "--to", tmp_path / "hf")
    assert exported.code == 0 and "from the checkpoint of step 4" in exported.out
    (newest / "state.json").unlink()
    for words in (
        ("train", run / "config.yaml", "--resume", "--train.steps", 6),
        ("export", run, "--to", tmp_path / "other"),
    ):
        result = command(*words)
        assert result.code == 2 and f"{newest}/state.json" in result.words, result
    assert steps(run) == [2, 4] and not (tmp_path / "other").exists()


def test_a_checkpoint_under_the_name_of_another_step(run, tmp_path):
    other = run / "checkpoints" / "step-00000009"
    (run / "checkpoints" / "step-00000004").rename(other)
    for words in (
        ("train", run / "config.yaml", "--resume", "--train.steps", 12),
        ("export", run, "--to", tmp_path / "hf"),
    ):
        result = command(*words)
        assert result.code == 2 and f"{other} has the name of another step" in result.words, result
    assert steps(run) == [2, 9] and not (tmp_path / "hf").exists()


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
    bad = tmp_path / "bad"
    shutil.copytree(material.model, bad)
    content = json.loads((bad / "config.json").read_text())
    (bad / "config.json").write_text(json.dumps(content | {field: value}))
    assert command("generate", bad, "--prompt", "abc").code == 2


HOSTILE = {
    "nested": (b"[" * 200_000, "has 200,000 brackets open at once"),
    "dtype": ({"dtype": 5}, "dtype is 5: it must be text"),
    "end": ({"eos_token_id": "abc"}, "eos_token_id is 'abc': it must be a whole number or a list"),
    "layers": (
        {"num_hidden_layers": 10**9},
        "num_hidden_layers is 1000000000: it must be at most 4,096",
    ),
    "experts": (
        {"model_type": "mixtral", "num_hidden_layers": 4096, "num_local_experts": 16384},
        "num_hidden_layers (4,096) x experts (16,384) are 67,108,864, more than 262,144",
    ),
    "tied": ({"tie_word_embeddings": "yes"}, "tie_word_embeddings is 'yes': it must be true or"),
    "rope": ({"rope_parameters": None, "rope_theta": 0}, "rope_theta is 0: it must be over 0"),
    "no size": ({"vocab_size": True}, "vocab_size is true: it must be a whole number"),
}


@pytest.mark.parametrize("verb", ("verify", "generate"))
@pytest.mark.parametrize("case", HOSTILE)
def test_a_hostile_config_json_is_one_line_at_once(material, tmp_path, verb, case):
    damage, want = HOSTILE[case]
    shutil.copytree(material.model, tmp_path / "bad")
    file = tmp_path / "bad" / "config.json"
    if isinstance(damage, bytes):
        file.write_bytes(damage)
    else:
        file.write_text(json.dumps(json.loads(file.read_text()) | damage))
    began = time.process_time()
    result = command(verb, tmp_path / "bad", *(("--prompt", "abc") if verb == "generate" else ()))
    assert time.process_time() - began < 5  # layers alone took 30 s
    assert result.code == 2 and f"{file}: {want}" in result.words
    assert result.words.count("dolmen ") <= 1 and "Traceback" not in result.words


@pytest.mark.parametrize(
    "name, content, want",
    [
        ("generation_config.json", b"[1]", "it is a list of 1: it must be a mapping"),
        ("generation_config.json", b'{"eos_token_id": "x"}', "eos_token_id is 'x': it must be"),
        ("tokenizer.json", b'{"a":' * 200_000, "has 200,000 brackets open at once"),
        ("tokenizer.json", b"{}", "it has no model"),
        ("tokenizer_config.json", b"[]", "it is a list of 0: it must be a mapping"),
    ],
)
def test_hostile_files_beside_the_weights(material, tmp_path, name, content, want):
    shutil.copytree(material.model, tmp_path / "bad")
    (tmp_path / "bad" / name).write_bytes(content)
    result = command("generate", tmp_path / "bad", "--prompt", "abc")
    assert result.code == 2 and f"{tmp_path / 'bad' / name}: {want}" in result.words


def test_an_expression_that_never_ends(material, tmp_path):
    """In a process of its own, which the limit of time ends."""
    shutil.copytree(material.model, tmp_path / "bad")
    file = tmp_path / "bad" / "tokenizer.json"
    content = json.loads(file.read_text())
    split = {"type": "Split", "pattern": {"Regex": "(a+)+$"}, "behavior": "Isolated"}
    file.write_text(json.dumps(content | {"pre_tokenizer": split | {"invert": False}}))
    result = command("generate", tmp_path / "bad", "--prompt", "abc")
    assert result.code == 2 and f"{file}: a regular expression fails, or takes" in result.words
    assert "panicked" not in result.words


@pytest.mark.parametrize(
    "text, want",
    [
        ("[" * 20_000, "nested deeper than 32"),
        ("a: &a [*a]", "the alias *a is inside its own anchor"),
        ("train: {steps: 1}\ntrain: {steps: 2}", "'train' is given twice"),
        ("- " * 20_000, "nested deeper than 32"),
    ],
)
def test_hostile_yaml(tmp_path, text, want):
    (tmp_path / "run.yaml").write_text(text)
    result = command("train", tmp_path / "run.yaml", "--out", tmp_path / "out")
    assert result.code == 2 and f"{tmp_path}/run.yaml: is not valid YAML" in result.words
    assert want in result.words and not (tmp_path / "out").exists()


def test_a_cut_config_yaml_is_told_as_one(run):
    """Text cut at a line is good YAML, of which options are missing."""
    file = run / "config.yaml"
    whole = file.read_text()
    lines = whole.splitlines(keepends=True)
    for text in ("", whole[:20], "".join(lines[:1]), "".join(lines[: len(lines) // 2])):
        file.write_text(text)
        result = command("train", file, "--resume")
        assert result.code == 2 and str(file) in result.words
        assert "is truncated" in result.words or "the file is damaged" in result.words
    file.write_text(whole)
    assert command("train", file, "--resume").code == 0


def test_metrics_that_are_damaged_do_not_end_a_run(run, line='{"step": 3, "loss": 1.0}'):
    """Rows before the damage stay, the file is kept beside, the picture is drawn."""
    file = run / "metrics.jsonl"
    old = "".join(file.read_text().splitlines(keepends=True)[:2]) + line + "\n" + '{"step": 4}\n'
    file.write_text(old)
    assert command("train", run / "config.yaml", "--resume", "--train.steps", 5).code == 0
    assert rows(run)[-1]["step"] == 5 and (run / "loss.png").exists()
    assert (run / "metrics.damaged.jsonl").read_text() == old


def test_a_folder_in_the_place_of_the_metrics(run):
    (run / "metrics.jsonl").unlink()
    (run / "metrics.jsonl").mkdir()
    result = command("train", run / "config.yaml", "--resume", "--train.steps", 5)
    assert result.code == 2 and "metrics.jsonl" in result.words and steps(run) == [2, 4]


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
