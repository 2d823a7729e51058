"""A checkpoint saved at any layout is loaded at any other, bitwise: weights and both moments, for a
tied GPT-2, for experts and for a scalar head, of which some ranks hold nothing; and Muon's
momentum.
"""

import zlib
from dataclasses import replace
from functools import cache
from pathlib import Path

import objectives
import pytest
import torch
import torch.distributed as dist
from mechanisms import ADAPTED_CONFIGS
from spawning import run_spawned
from table import FAMILIES, NEXT_TOKEN, OPTIMIZER, ROWS, SINGLE, STEPS, Layout
from tiny_models import Flat, Tiny, build, initialize

from dolmen.checkpoint.reader import Checkpoint
from dolmen.checkpoint.store import Checkpoints
from dolmen.core import state
from dolmen.core.mesh import Mesh
from dolmen.model.spec import ScalarHeadSpec
from dolmen.model.training import Training
from dolmen.objectives.reward import PairwiseRewardLoss
from dolmen.ops.numerics import Fp8, Fp8Config
from dolmen.optim import optimizer as optim
from dolmen.optim.config import OptimizerConfig
from dolmen.training.state import TrainState

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
Case = tuple[str, str, str]  # family, the layout that saves, the layout that loads
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


def start(family: str, words: str, seed: int) -> tuple[TrainState, Mesh]:
    """Return a run before its first step, with moments of zero, and its mesh."""
    layout = Layout() if words == "one" else Layout.of(words)
    mesh = SINGLE if words == "one" else layout.mesh(torch.device("cpu"))
    schedule = layout.make_schedule(ROWS, ROWS // mesh.dp.size // layout.accumulation)
    config, settings = config_of(family)
    model = build(config, mesh, layout, schedule)
    initialize(model, seed)
    optimizer = optim.make_optimizer(model, settings, mesh)
    optim.prime(optimizer)
    rewards = model.spec.head == ScalarHeadSpec()
    objective = PairwiseRewardLoss() if rewards else NEXT_TOKEN
    train = TrainState(
        model, optimizer, settings, STEPS, layout.zero, schedule, objective=objective
    )
    return train, mesh


@cache
def tensor_names(family: str) -> set[str]:
    """Return the names of all tensors of a checkpoint of the family."""
    return start(family, "one", 0)[0].names()


def save(folder: Path, family: str, words: str) -> tuple[TrainState, Mesh]:
    """Save a checkpoint of a run of a layout, whose numbers follow from names alone; return it."""
    train, mesh = start(family, words, 0)
    tensors = train.tensors()
    for name, tensor in tensors.items():
        seeded = torch.Generator().manual_seed(zlib.crc32(name.encode()))
        whole = torch.rand(tensor.shape, generator=seeded)
        state.local_view(tensor).copy_(whole[state.region(tensor)])
    Checkpoints(folder / family / words, mesh, 0).save(2, tensors, {}, wait=True)
    return train, mesh


def run_cases(folder: Path, cases: list[Case]) -> dict[Case, list[str]]:
    """Run the cases that load on the joined world, each layout built once for what it saves and
    what it loads. Returns {case: names of tensors that differ on some rank}.
    """
    runs = {run: save(folder, *run) for run in sorted({c[:2] for c in cases if c[1] != "one"})}
    results = {}
    for case in cases:
        family, _, target = case
        if target != "one":
            run = family, target
            runs[run] = runs.get(run) or start(*run, 9)
            results[case] = differing_tensors(folder, case, *runs[run])
    return results


def differing_tensors(folder: Path, case: Case, train: TrainState, mesh: Mesh) -> list[str]:
    """Load the checkpoint of `case` into the run of its second layout; return the names of tensors
    that differ on some rank, or that none has.
    """
    family, source, _ = case
    tensors = train.tensors()
    for tensor in tensors.values():  # what is not loaded is not what was saved
        state.local_view(tensor).fill_(-7)
    saved = Checkpoint(folder / family / source / "step-00000002")
    Checkpoints(folder / family / source, mesh, 0).load(2, tensors, tensor_names(family))
    wrong = [
        n
        for n, t in tensors.items()
        if not torch.equal(state.local_view(t), saved.read(n)[state.region(t)])
    ]
    of_ranks = [None] * dist.get_world_size()
    dist.all_gather_object(of_ranks, (wrong, set(tensors)))
    found = set.union(*(names for _, names in of_ranks))
    return sorted({n for names, _ in of_ranks for n in names} | (tensor_names(family) - found))


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
    return run_spawned(4, run_cases, folder, cases)


@pytest.mark.parametrize("case", parameters(to_one=False))
def test_loaded_bitwise(results, case):
    assert results[case] == []


@pytest.mark.parametrize("case", parameters(to_one=True))
def test_loaded_in_one_process(results, folder, case):
    family, saved, _ = case
    train, mesh = start(family, "one", 9)
    tensors = train.tensors()
    stream = Checkpoint(folder / family / saved / "step-00000002")
    Checkpoints(folder / family / saved, mesh, 0).load(2, tensors)
    assert set(tensors) == set(stream.specs) and all(
        torch.equal(t, stream.read(n)) for n, t in tensors.items()
    )
    # and what a layout saved is what one process saved
    others = Checkpoint(folder / family / "one" / "step-00000002")
    assert all(torch.equal(stream.read(n), others.read(n)) for n in tensors)
