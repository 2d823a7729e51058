"""Runs whose products are of eight bits, by the command line."""

import shutil

import pytest
import tinyrun
import torch
from tinyrun import dolmen, losses, same, tensors

from dolmen.conversion.source import open_source

material, one_thread = tinyrun.material, tinyrun.one_thread
DELAYED = ("--train.precision", "fp8-delayed", "--train.fp8.amax-history", "3")


@pytest.fixture(scope="module")
def whole(material, tmp_path_factory):
    """Six steps, a checkpoint after the third."""
    out = tmp_path_factory.mktemp("eight") / "run"
    kept = ("--checkpoint.every", "3", "--checkpoint.keep", "0")
    result = dolmen("train", material.file, *DELAYED, *kept, "-v", "--out", out)
    assert result.code == 0, result.err
    return out, " ".join(result.out.split())


@pytest.mark.slow
def test_the_header_says_the_recipe(whole):
    _, said = whole
    assert "fp8 fp8-delayed, E4M3, gradients E5M2; max of 3 steps;" in said
    assert "the rest in float32" in said


@pytest.mark.slow
def test_resumed_is_bitwise_never_stopped(whole, tmp_path):
    """Weights, moments, histories and scales."""
    out, _ = whole
    copy = tmp_path / "copy"
    shutil.copytree(out, copy)
    shutil.rmtree(copy / "checkpoints" / "step-00000006")
    result = dolmen("train", copy / "config.yaml", "--out", copy, "--resume")
    assert result.code == 0 and "resuming from step 3\n" in result.out
    assert "changed" not in result.out
    assert losses(copy) == losses(out)
    kept = tensors(out, 6)
    assert same(tensors(copy, 6), kept)
    assert {name.split("/")[0] for name in kept} >= {"amax_history", "fp8_scale"}


@pytest.mark.slow
def test_another_recipe_begins_its_scales_anew(whole, tmp_path):
    out, _ = whole
    copy = tmp_path / "copy"
    shutil.copytree(out, copy)
    shutil.rmtree(copy / "checkpoints" / "step-00000006")
    words = ("train", copy / "config.yaml", "--out", copy, "--resume", "--train.fp8.margin", "1")
    result = dolmen(*words)
    assert result.code == 0 and "changed: train.fp8.margin" in result.out
    assert losses(copy)[:3] == losses(out)[:3] and losses(copy)[3:] != losses(out)[3:]


@pytest.mark.slow
def test_its_scales_go_to_transformer_engine_and_begin_another_run(whole, material, tmp_path):
    """One product there is several here, which have the largest of each then."""
    out, _ = whole
    result = dolmen("convert", out, tmp_path / "te", "--to", "torch-dist")
    assert result.code == 0 and "; fp8 scales of 14 weights compared too" in result.out, result.err
    kept, found = tensors(out, 6), open_source(tmp_path / "te").scaling
    assert len(found) == 14
    for module in ("attn.q", "attn.k", "attn.v"), ("mlp.gate", "mlp.up"), ("mlp.down",):
        names = [f"layers.1.{name}.weight" for name in module]
        history = torch.stack([kept[f"amax_history/{name}"] for name in names]).amax(0)
        scale = torch.stack([kept[f"fp8_scale/{name}"] for name in names]).amin(0)
        for name in names:
            assert torch.equal(found[name].history, history)
            assert torch.equal(found[name].scale, scale)
    words = (
        "--init",
        tmp_path / "te",
        "--train.steps",
        "1",
        "-v",
        *DELAYED,
        "--out",
        tmp_path / "run",
    )
    started = dolmen("train", material.file, *words)
    assert started.code == 0 and "fp8 scales of --init" in " ".join(started.out.split()), (
        started.err
    )


@pytest.mark.parametrize(
    "words, said",
    [
        ("--train.fp8.format e4m3", "set --train.precision"),
        ("--train.precision mxfp8 --train.fp8.margin 1", "train.fp8.margin is for fp8-delayed"),
        (
            "--train.precision mxfp8 --train.fp8.margin -1",
            "train.fp8.margin is -1: it must be at",
        ),
        ("--train.precision fp8-rowwise --train.fp8.first-layers 2", "leave none of the 2 layers"),
        ("--train.precision mxfp8 --layout.tp 2", "per 32 elements, but tp (2) splits the 32 of"),
        ("--train.precision fp8-rowwise --layout.tp 4", "num_key_value_heads (2)"),
        ("--train.precision mxfp8 --layout.cp 2", "layout.cp (2) leaves parts of"),
    ],
)
def test_refused(material, tmp_path, words, said):
    result = dolmen("train", material.file, *words.split(), "--out", tmp_path / "out")
    assert result.code == 2 and said in result.err, result.err
    assert len(result.err.strip().splitlines()) == 1 and not (tmp_path / "out").exists()
