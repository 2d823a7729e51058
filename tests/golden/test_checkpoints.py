"""A checkpoint saved at any layout is loaded at any other, bitwise: weights and both moments, for a
tied GPT-2, for experts and for a scalar head, of which some ranks hold nothing; and Muon's
momentum.
"""

from dataclasses import replace
from pathlib import Path

import objectives
import pytest
import torch
import torch.distributed as dist
from mechanisms import ADAPTED_CONFIGS
from models import Flat, Tiny, build, initialize
from spawning import run_spawned
from table import FAMILIES, NEXT_TOKEN, OPTIMIZER, ROWS, SINGLE, STEPS, Layout, batches

from dolmen.checkpoint.reader import open_checkpoint
from dolmen.checkpoint.store import Checkpoints
from dolmen.core import state
from dolmen.model.spec import ScalarHeadSpec
from dolmen.model.training import Training
from dolmen.objectives.reward import PairwiseRewardLoss
from dolmen.ops.fp8_recipe import Fp8, Fp8Config
from dolmen.optim import optimizer as optim
from dolmen.optim.config import OptimizerConfig
from dolmen.training.state import TrainState
from dolmen.training.step import optimizer_step

DENSE = ("dp2 tp2 sp zero1", "pp4 acc4", "cp2 tp2 zero3", "pp2 dp2 acc4 zero-bubble-v v2 zero2")
SPARSE = ("dp4 ep4 zero1", "dp2 tp2 ep2 zero3", "pp2 dp2 ep2 acc4 zero2")
LAYOUTS = {
    "gpt2": (*DENSE, "one"),
    "qwen3-moe": (*SPARSE, "one"),
    "qwen3-moe muon": (*SPARSE, "one"),
    "qwen3 muon": ("dp2 tp2 sp zero1", "tp4", "one"),
    # beside frozen weights without moments; of pp 4 the first stage has no moments at all
    "deepseek-v3, adapters": ("dp2 tp2 sp ep2 zero2", "pp4 acc4", "one"),
    "llama scalar": ("dp4 zero3", "dp2 tp2 sp zero1", "one"),
    # histories and scales of all layers; of experts, on ranks that hold some of them
    "llama fp8": ("dp2 tp2 sp zero1", "pp4 acc4", "one"),
    "qwen3-moe fp8": ("dp2 tp2 ep2 zero3", "one"),
}
# the short tier: each layout is saved once and loaded once, by its neighbour in the list; of
# experts' Muon, whose momentum lies as the first moment of AdamW does, two
SHORT = {
    (family, a, b)
    for family, layouts in LAYOUTS.items()
    for a, b in zip(layouts, layouts[1:] + layouts[:1], strict=True)
    if family != "qwen3-moe muon" or b == "dp2 tp2 ep2 zero3"
}
CASES = [(family, a, b) for family, all_ in LAYOUTS.items() for a in all_ for b in all_]


def parameters(to_one: bool) -> list:
    """The cases that are loaded in one process, or those that are not."""
    return [
        pytest.param(case, id="-".join(case), marks=[] if case in SHORT else [pytest.mark.full])
        for case in CASES
        if (case[2] == "one") == to_one
    ]


def config_of(family: str) -> tuple[Flat | Tiny, OptimizerConfig]:
    """`qwen3-moe muon` is trained with Muon; `llama scalar` ends in a scalar head; `fp8` is with
    delayed scales.
    """
    if family in ADAPTED_CONFIGS:
        return ADAPTED_CONFIGS[family], OPTIMIZER
    name, _, word = family.partition(" ")
    config = objectives.scalar(FAMILIES[name]) if word == "scalar" else FAMILIES[name]
    if word == "fp8":
        eight = Fp8("fp8-delayed", Fp8Config(amax_history=3))
        config = Tiny(replace(config, num_key_value_heads=4).spec, Training(fp8=eight))
    return config, replace(OPTIMIZER, name="muon" if word == "muon" else "adamw")


def made(family: str, words: str, seed: int, steps: int = 0) -> TrainState:
    layout = Layout() if words == "one" else Layout.of(words)
    mesh = SINGLE if words == "one" else layout.mesh(torch.device("cpu"))
    schedule = layout.make_schedule(ROWS, ROWS // mesh.dp.size // layout.accumulation)
    config, settings = config_of(family)
    model = build(config, mesh, layout, schedule)
    initialize(model, seed)
    optimizer = optim.make_optimizer(model, settings, mesh)
    optim.prime(optimizer)
    rewards = model.spec.head == ScalarHeadSpec()
    objective, given = (
        (PairwiseRewardLoss(), objectives.batches) if rewards else (NEXT_TOKEN, batches)
    )
    train = TrainState(
        model, optimizer, settings, STEPS, layout.zero, schedule, objective=objective
    )
    for batch in given(mesh)[:steps]:
        optimizer_step(train, batch, mesh)
    return train, mesh


def everywhere(family: str) -> set[str]:
    return made(family, "one", 0)[0].names()


def save(folder: Path, family: str, words: str) -> None:
    """What two steps on a layout made."""
    train, mesh = made(family, words, 0, steps=2)
    tensors = train.tensors()
    Checkpoints(folder / family / words, mesh, 0).save(2, tensors, {}, wait=True)


def in_world(folder: Path, cases: list[tuple]) -> dict[tuple[str, str, str], list[str]]:
    """{case: names of tensors that differ on some rank}."""
    for family, saved in sorted({case[:2] for case in cases if case[1] != "one"}):
        save(folder, family, saved)
    return {case: different(folder, *case) for case in cases if case[2] != "one"}


def different(folder: Path, family: str, a: str, b: str) -> list[str]:
    """What was saved at `a`, loaded at `b`: names of tensors that differ on some rank, or that none
    has.
    """
    train, mesh = made(family, b, 9)
    tensors = train.tensors()
    saved = open_checkpoint(folder / family / a / "step-00000002")
    Checkpoints(folder / family / a, mesh, 0).load(2, tensors, everywhere(family))
    wrong = [
        n
        for n, t in tensors.items()
        if not torch.equal(state.local_view(t), saved.read(n)[state.region(t)])
    ]
    everyone = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, (wrong, set(tensors)))
    found = set.union(*(n for _, n in everyone))
    return sorted({n for w, _ in everyone for n in w} | (everywhere(family) - found))


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("any")


@pytest.fixture(scope="module")
def results(request, folder) -> dict:
    """The cases that this session runs, and no other; the layouts they need are saved in
    `folder`.
    """
    items = [item for item in request.session.items if item.module is request.module]
    cases = [item.callspec.params["case"] for item in items]
    for family in {case[0] for case in cases}:
        save(folder, family, "one")
    return run_spawned(4, in_world, folder, cases)


@pytest.mark.parametrize("case", parameters(to_one=False))
def test_loaded_bitwise(results, case):
    assert results[case] == []


@pytest.mark.parametrize("case", parameters(to_one=True))
def test_loaded_in_one_process(results, folder, case):
    family, saved, _ = case
    train, mesh = made(family, "one", 9)
    tensors = train.tensors()
    stream = open_checkpoint(folder / family / saved / "step-00000002")
    Checkpoints(folder / family / saved, mesh, 0).load(2, tensors)
    assert set(tensors) == set(stream.specs) and all(
        torch.equal(t, stream.read(n)) for n, t in tensors.items()
    )
    if family.endswith("fp8"):  # some number is rounded to its other neighbour
        return
    # and what two steps made is what one process made
    others = open_checkpoint(folder / family / "one" / "step-00000002")
    for n in tensors:
        assert float((stream.read(n) - others.read(n)).abs().max()) <= 1e-5 * max(
            1.0, float(others.read(n).abs().max())
        ), n
