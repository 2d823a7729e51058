"""`dolmen train pretrain --init MODEL --adapter.rank ...` from end to end in this process: what is
trained, what it leaves, and what reads that.
"""

import pytest
import tinyrun
import torch
from safetensors.torch import load_file
from tinyrun import dolmen

from dolmen.conversion.source import open_source

material, one_thread = tinyrun.material, tinyrun.one_thread
TARGETS = ("q_proj", "down_proj")


def words(material, *more) -> list:
    return [
        *("train", "pretrain", "--init", material.model),
        *("--data.path", material.docs, "--data.cache", material.folder / "cache"),
        *("--train.steps", 4, "--train.sequence-length", 16, "--train.global-batch-size", 4),
        *("--optimizer.lr", 1e-2, "--adapter.rank", 2, "--adapter.alpha", 8),
        *("--adapter.targets", *TARGETS, *more),
    ]


@pytest.fixture(scope="module")
def run(material, tmp_path_factory):
    out = tmp_path_factory.mktemp("adapters") / "run"
    asked = words(material, "--out", out, "--finish.export", "--finish.verify")
    result = dolmen(*asked, "--checkpoint.every", 2)
    assert result.code == 0, result.err
    return out, result.out


def test_a_run_tells_what_it_trains(run):
    """Two layers: of q 2 x (32 + 32), of down 2 x (48 + 32)."""
    told = " ".join(run[1].split())
    assert "adapters rank 2, alpha 8, on q_proj, down_proj: 576 of" in told
    assert "the exported directory gives the same logits, loss, gradients and text" in told


def test_an_export_has_adapters_merged(run, material):
    out, _ = run
    before, after = (
        load_file(folder / "model.safetensors") for folder in (material.model, out / "hf")
    )
    assert before.keys() == after.keys()
    for name, tensor in before.items():
        assert after[name].dtype == tensor.dtype
        assert torch.equal(after[name], tensor) == (name.split(".")[-2] not in TARGETS), name
    kept = tinyrun.tensors(out, 4)
    for layer in range(2):
        part = f"model/layers.{layer}.attn.q"
        delta = 8 / 2 * kept[f"{part}.lora_B"] @ kept[f"{part}.lora_A"]
        whole = (kept[f"{part}.weight"] + delta).to(torch.bfloat16)
        assert torch.equal(after[f"model.layers.{layer}.self_attn.q_proj.weight"], whole)
    assert {n.rpartition(".")[2] for n in kept if not n.startswith("model/")} == {
        "lora_A",
        "lora_B",
    }


def test_a_run_is_read_as_the_merged_model(run, material, tmp_path):
    """By whatever reads a source, --init too."""
    out, _ = run
    source, exported = open_source(out), open_source(out / "hf")
    assert source.specs.keys() == exported.specs.keys()
    for name, tensor in source.stream():
        assert torch.equal(tensor.to(torch.bfloat16), exported.read(name)), name
    first = dolmen("generate", out, "--prompt", "abc", "--max-new-tokens", 4)
    second = dolmen("generate", out / "hf", "--prompt", "abc", "--max-new-tokens", 4)
    assert first.code == 0, first.err
    assert first.out == second.out
    again = [out if word == material.model else word for word in words(material)]
    result = dolmen(*again, "--out", tmp_path / "on", "--train.steps", 1)
    assert result.code == 0, result.err


def test_a_run_goes_on_with_its_own_adapters_alone(run, material):
    out, _ = run
    for option, said in (
        (("--adapter.rank", 4), "adapter.rank: 2 -> 4"),
        (("--adapter.alpha", 4), "adapter.alpha: 8.0 -> 4.0"),
        (("--adapter.targets", "q_proj"), "adapter.targets: ['down', 'q'] -> ['q']"),
    ):
        result = dolmen(*words(material), "--out", out, "--resume", *option)
        assert result.code == 2 and said in result.words, result.words
    result = dolmen(*words(material), "--out", out, "--resume", "--train.steps", 5)
    assert result.code == 0 and tinyrun.steps(out)[-1] == 5, result.err


def test_a_run_on_weights_of_eight_bits(material, tmp_path):
    """It holds them so, in its checkpoints too; what reads it reads the weights that it has trained
    with, restored, and adapters merged into those.
    """
    asked = words(material, "--adapter.frozen", "int8", "--out", tmp_path / "run")
    result = dolmen(*asked, "--finish.export", "--finish.verify")
    assert result.code == 0, result.err
    told = " ".join(result.out.split())
    # two layers of q, k, v, o: 32 x (32 + 16 + 16 + 32), gate, up, down: 3 x 32 x 48; 7 scales
    assert "of the others 61.4 kB are held in int8, in 17.2 kB" in told
    assert "the exported directory gives the same logits, loss, gradients and text" in told
    kept = tinyrun.tensors(tmp_path / "run", 4)
    after = load_file(tmp_path / "run/hf/model.safetensors")
    for ours, theirs in {"attn.q": "self_attn.q_proj", "attn.k": "self_attn.k_proj"}.items():
        part = f"model/layers.1.{ours}"
        assert kept[f"{part}.weight"].dtype == torch.int8
        whole = kept[f"{part}.weight"] * kept[f"{part}.weight_scale"][:, None]
        if ours == "attn.q":
            whole = whole + 8 / 2 * kept[f"{part}.lora_B"] @ kept[f"{part}.lora_A"]
        assert torch.equal(after[f"model.layers.1.{theirs}.weight"], whole.to(torch.bfloat16))
    result = dolmen(*asked, "--resume", "--train.steps", 5)
    assert result.code == 0 and tinyrun.steps(tmp_path / "run")[-1] == 5, result.err
    result = dolmen(*words(material), "--out", tmp_path / "run", "--resume")
    assert result.code == 2 and "adapter.frozen: int8 -> whole" in result.words, result.words


def test_adapters_that_cannot_be_are_refused(material, tmp_path):
    for more, said in {
        ("--adapter.rank", 0): "adapter.rank is 0: it must be at least 1",
        ("--adapter.rank", 10**12): "adapter.rank is 1000000000000: no matrix of adapter.targets",
        ("--adapter.targets", "q_proj", "wq"): "choose of q_proj, k_proj, v_proj, o_proj, gate",
        ("--adapter.targets", "lm_head"): "the head is computed together with its loss",
        ("--optimizer.name", "muon"): "use --optimizer.name adamw",
        (
            "--adapter.frozen",
            "int8",
            "--train.precision",
            "fp8-rowwise",
        ): "leave out one of the two",
        ("--train.router.balance", "bias"): "use --train.router.balance loss, or none",
    }.items():
        result = dolmen(*words(material), "--out", tmp_path / "out", *more)
        assert result.code == 2 and said in result.words, result.words
        assert not (tmp_path / "out").exists()
    result = dolmen("train", material.file, "--out", tmp_path / "out", "--adapter.rank", 2)
    assert result.code == 2 and "they are random: give --init" in result.words
