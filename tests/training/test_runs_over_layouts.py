"""A run on two ranks is the run of one: resumed at any layout, validated or not, in bf16 with fp32
masters.
"""

import json
import shutil
from pathlib import Path

import pytest
import seals
import tinyrun
import torch
import torch.distributed as dist
from rich.console import Console
from tinyrun import Material, dolmen, losses, rows, same, steps, tensors

from dolmen.core.mesh import SINGLE
from dolmen.files import kinds
from dolmen.files.write import Tail
from dolmen.model.layout import Layout
from dolmen.training import run as train_run
from dolmen.training.loop import Stop
from dolmen.training.run import run_training

material, one_thread = tinyrun.material, tinyrun.one_thread

# eps: see tests/golden/table.py; Adam must not amplify rounding
SLOW = {"lr": 1e-2, "eps": 1e-3, "warmup_steps": 2}
LAYOUTS = (
    Layout(dp=2, zero=0),
    Layout(dp=2, zero=3),
    Layout(dp=2, zero=2),
    Layout(tp=2, dp=1, zero=1, sequence_parallel=True),
)


def train(
    material: Material,
    out: Path,
    layout: Layout | None = None,
    resumed: bool = False,
    stop: Stop | None = None,
    **sections,
):
    """run_training at `layout` of the joined world, or in this process without a group."""
    layout = layout or Layout(dp=1)
    mesh = layout.mesh(torch.device("cpu")) if dist.is_initialized() else SINGLE
    run = material.config(layout=vars(layout), **sections)
    return run_training(run, out, mesh, Console(quiet=True), resumed=resumed, stop=stop)


@pytest.fixture(scope="module")
def half(material, tmp_path_factory):
    """Six steps of one process, and a copy of it that was stopped after three."""
    folder = tmp_path_factory.mktemp("layouts")
    train(material, folder / "whole", optimizer=SLOW, checkpoint={"every": 3})
    shutil.copytree(folder / "whole", folder / "half")
    shutil.rmtree(folder / "half" / "checkpoints" / "step-00000006")
    return folder


JUDGED = {
    "cp2": Layout(cp=2, dp=1),
    "pp2 v2": Layout(pp=2, dp=1, virtual_stages=2, schedule="interleaved"),
}


def judged(material: Material, folder: Path, name: str, layout: Layout | None = None):
    """Two steps of four layers, after each of which the model writes."""
    if not dist.is_initialized() or dist.get_rank() == 0:
        (folder / "prompts.txt").write_text("abc\nd e\n")
    if dist.is_initialized():
        dist.barrier()
    evaluate = {"samples": str(folder / "prompts.txt"), "every": 1, "max_new_tokens": 8}
    short = {"steps": 2, "microbatch_size": 1}
    model = {"num_hidden_layers": 4}
    out = folder / f"judged-{name}"
    train(material, out, layout, train=short, model=model, optimizer=SLOW, evaluate=evaluate)


def two_ranks(folder: Path, material: Material):
    """Resume the half run at every layout of two ranks; train in bf16 with and without validations;
    ask one rank to stop.
    """
    for i, layout in enumerate(LAYOUTS):
        out = folder / f"resumed{i}"
        if dist.get_rank() == 0:
            shutil.copytree(folder / "half", out)
        dist.barrier()
        train(material, out, layout, resumed=True, optimizer=SLOW, checkpoint={"every": 3})
    for zero in (0, 1, 3):
        for every in (1, 0):
            out, short = folder / f"bf16-{zero}-{every}", {"dtype": "bfloat16", "steps": 2}
            train(
                material, out, Layout(dp=2, zero=zero), train=short, log={"validate_every": every}
            )
    for name, layout in JUDGED.items():
        judged(material, folder, name, layout)
    for layout, rank in ((Layout(dp=2), 1), (Layout(tp=2, dp=1), 1), (Layout(dp=2), 0)):
        outcome = train(
            material,
            folder / f"stopped-{layout.dp}-{rank}",
            layout,
            stop=Stop(15 if dist.get_rank() == rank else 0),
        )
        ended = [None, None]
        dist.all_gather_object(ended, (outcome.signal, outcome.steps))
        assert ended == [(15, 1)] * 2, ended


@pytest.fixture
def spawned(half, material, spawn):
    """Once for all tests."""
    if not (half / "resumed0").exists():
        spawn(2)(two_ranks, half, material)
    return half


@pytest.mark.parametrize("i, layout", list(enumerate(LAYOUTS)), ids=str)
def test_resumed_at_another_layout(spawned, i, layout):
    """Losses within 1e-6 and norms within 1e-5 of never having stopped, and of one process."""
    whole, out = spawned / "whole", spawned / f"resumed{i}"
    assert losses(out)[:3] == losses(whole)[:3] and [row[0] for row in losses(out)] == [
        1,
        2,
        3,
        4,
        5,
        6,
    ]
    for (_, loss, norm), (_, want, want_norm) in zip(losses(out), losses(whole), strict=True):
        assert abs(loss / want - 1) < 1e-6 and abs(norm / want_norm - 1) < 1e-5
    for got, want in zip(rows(out, "val_loss"), rows(whole, "val_loss"), strict=True):
        assert (
            abs(got["val_loss"] / want["val_loss"] - 1) < 1e-6
            and got["val_tokens"] == want["val_tokens"]
        )
    assert steps(out) == [3, 6]
    history = list(Tail(out / "history.jsonl", kinds.HISTORY_ROW).read())
    assert [row["processes"] for row in history if "begun" in row] == [1, 2]
    held = [row["memory_gib"] for row in history if "memory_gib" in row]
    assert [len(row) for row in held] == [1] * 6 + [2] * 3
    assert all(0.05 < gib < 64 for row in held for gib in row)


def last_losses(material: Material, saved: Path, out: Path) -> list[float]:
    """Of the two steps with which one process resumes a copy of a run of six steps."""
    shutil.copytree(saved, out)
    train(material, out, resumed=True, optimizer=SLOW, train={"steps": 8})
    return [loss for _, loss, _ in losses(out)[6:]]


@pytest.fixture(scope="module")
def whole_losses(half, material, tmp_path_factory):
    return last_losses(material, half / "whole", tmp_path_factory.mktemp("eight") / "out")


@pytest.mark.parametrize(
    "i", [pytest.param(i, marks=[pytest.mark.full] * (i in (0, 2))) for i in range(len(LAYOUTS))]
)
def test_saved_at_another_layout(spawned, material, whole_losses, i, tmp_path):
    """And one process goes on from what two saved, as from its own."""
    found = last_losses(material, spawned / f"resumed{i}", tmp_path / "out")
    assert len(found) == 2 and found == pytest.approx(whole_losses, rel=1e-6)


@pytest.mark.parametrize("name", ("2-1", "1-1", "2-0"))
def test_ranks_stop_together(spawned, name):
    """One of two was asked: both end after the same step, and it is saved whole."""
    assert (
        steps(spawned / f"stopped-{name}") == [1] and len(losses(spawned / f"stopped-{name}")) == 1
    )


@pytest.mark.parametrize("zero", (0, 1, 3))
def test_a_validation_leaves_the_masters(spawned, zero):
    """ZeRO keeps what it gathers in bf16 for the next backward, which a validation does not have: a
    checkpoint after it once held those copies. With and without validations the fp32 masters saved
    are bitwise equal.
    """
    with_, without = (tensors(spawned / f"bf16-{zero}-{every}", 2) for every in (1, 0))
    assert same(with_, without) and {t.dtype for t in with_.values()} == {torch.float32}
    weight = with_["model/layers.0.mlp.up.weight"]
    assert not torch.equal(weight, weight.bfloat16().float())
    assert len(rows(spawned / f"bf16-{zero}-1", "val_loss")) == 2


def test_bfloat16_is_bfloat16_over_fp32_masters(spawned, material):
    """Two steps in bf16 on two ranks: off fp32 by rounding of 2^-9, not by more, and not by nothing
    (a single number may agree by chance, not all four).
    """
    train(material, spawned / "fp32", train={"steps": 2})
    got, want = losses(spawned / "bf16-1-0"), losses(spawned / "fp32")
    assert len(got) == len(want) == 2
    for (_, loss, norm), (_, fp32_loss, fp32_norm) in zip(got, want, strict=True):
        assert abs(loss / fp32_loss - 1) < 2**-9 and abs(norm / fp32_norm - 1) < 2**-5
    assert got != want


@pytest.fixture(scope="module")
def judged_alone(material, tmp_path_factory):
    folder = tmp_path_factory.mktemp("judged")
    judged(material, folder, "one")
    return folder


@pytest.mark.parametrize("name", JUDGED)
def test_samples_are_those_of_one_process(spawned, name, judged_alone):
    """Of layouts that no text can be written in, at each step with the weights of that step."""
    got, want = (
        [(row["step"], row["prompt"], row["text"]) for row in Tail(file, kinds.SAMPLE_ROW).read()]
        for file in (
            spawned / f"judged-{name}" / "samples.jsonl",
            judged_alone / "judged-one" / "samples.jsonl",
        )
    )
    assert got == want and len(want) == 4
    assert want[0][2] != want[2][2], "or the weights of one step are those of the other"
    pairs = zip(
        losses(spawned / f"judged-{name}"), losses(judged_alone / "judged-one"), strict=True
    )
    for (_, loss, _), (_, wanted, _) in pairs:
        assert abs(loss / wanted - 1) < 1e-6


@pytest.fixture
def no_peak(monkeypatch):
    """A product of 1024 x 1024 in fp16 takes a CPU two seconds."""
    monkeypatch.setattr(train_run.mfu, "matmul_peak", lambda *_: 1e12)


@pytest.mark.parametrize("dtype", ("bfloat16", "float16"))
def test_half_precision_learns(material, tmp_path, no_peak, dtype):
    """Eight steps: the loss falls as in fp32. fp16 tells its scale."""
    for name in ("float32", dtype):
        words = ("--train.steps", 8, "--train.dtype", name, "--log.validate-every", 0)
        assert dolmen("train", material.file, "--out", tmp_path / name, *words).code == 0
    want, got = (rows(tmp_path / name)[-1]["loss"] for name in ("float32", dtype))
    assert got < rows(tmp_path / dtype)[0]["loss"] - 0.7 and abs(got / want - 1) < 0.02
    scales = [row.get("loss_scale") for row in rows(tmp_path / dtype)]
    assert (
        scales == [None] * 8
        if dtype == "bfloat16"
        else 2 <= scales[-1] <= 2**16 and rows(tmp_path / dtype)[-1]["skipped_steps"] >= 0
    )


def test_fp16_resumes_its_scale(material, tmp_path, no_peak):
    """Bitwise never having stopped; and the scale is the checkpoint's, whatever a new run would
    begin with.
    """
    words = [
        "train",
        material.file,
        "--train.dtype",
        "float16",
        "--log.validate-every",
        0,
        "--train.steps",
        3,
        "--checkpoint.every",
        2,
    ]
    assert dolmen(*words, "--out", tmp_path / "a").code == 0
    for name, scale in (("b", None), ("c", [1024.0, 7])):
        shutil.copytree(tmp_path / "a", tmp_path / name)
        shutil.rmtree(tmp_path / name / "checkpoints" / "step-00000003")
        file = tmp_path / name / "checkpoints" / "step-00000002" / "state.json"
        state = json.loads(file.read_text())
        file.write_text(json.dumps(state | {"loss_scale": scale or state["loss_scale"]}))
        seals.seal_again(file.parent)
        assert dolmen(*words, "--out", tmp_path / name, "--resume").code == 0
    assert losses(tmp_path / "a") == losses(tmp_path / "b") and same(
        tensors(tmp_path / "a", 3), tensors(tmp_path / "b", 3)
    )
    assert [rows(tmp_path / name)[-1]["loss_scale"] for name in "abc"] == [2**16, 2**16, 1024]
    saved = json.loads(
        (tmp_path / "c" / "checkpoints" / "step-00000003" / "state.json").read_text()
    )
    assert saved["loss_scale"] == [1024.0, 8]
