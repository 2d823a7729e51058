"""Experts saved on one layout of (edp, ep, tp), loaded on others, bitwise."""

from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from spawning import run_spawned
from tiny_models import Flat, build, initialize

from dolmen.checkpoint.reader import Checkpoint, locate
from dolmen.checkpoint.store import Checkpoints
from dolmen.core import state
from dolmen.core.mesh import SINGLE
from dolmen.model.layout import Layout
from dolmen.optim.optimizer import OptimizerConfig, adamw, prime, tensors

MODEL = Flat(
    vocab_size=32,
    hidden_size=16,
    intermediate_size=24,
    num_hidden_layers=1,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=4,
    num_experts=6,
    router_balance="bias",
)
SAVED = Layout(dp=2, tp=2, ep=2, zero=1)
OTHERS = (
    Layout(dp=4, zero=3),
    Layout(dp=4, ep=2, zero=2),
    Layout(dp=2, cp=2, ep=2, zero=0),
    Layout(tp=4, dp=1),
)


def held(mesh, layout: Layout, seed: int) -> dict[str, torch.Tensor]:
    """Weights and moments, all of them random and of `seed`."""
    model = build(MODEL, mesh, layout)
    initialize(model, seed)
    optimizer = adamw(model, OptimizerConfig())
    prime(optimizer)
    found = tensors(model, optimizer)
    with torch.no_grad():
        for name, t in found.items():
            state.fill_normal(t, name, seed, 1.0)
    return found


def differing(folder: Path) -> list[str]:
    wrong, want = [], held(SINGLE, Layout(dp=1), 0)
    checkpoints = Checkpoints(folder, SAVED.mesh(torch.device("cpu")), 0)
    checkpoints.save(1, held(SAVED.mesh(torch.device("cpu")), SAVED, 0), {"step": 1}, wait=True)
    for layout in OTHERS:
        mesh = layout.mesh(torch.device("cpu"))
        other = held(mesh, layout, 1)
        Checkpoints(folder, mesh, 0).load(1, other)
        wrong += [
            f"{layout}: {name}"
            for name, t in other.items()
            if not torch.equal(state.gather_full(t), want[name])
        ]
    everyone = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, wrong)
    return sum(everyone, [])


@pytest.mark.full  # golden/test_checkpoints.py has a model with experts
def test_experts_move_between_layouts(tmp_path):
    assert run_spawned(4, differing, tmp_path) == []
    want, read = held(SINGLE, Layout(dp=1), 0), dict(Checkpoint(locate(tmp_path)).stream())
    assert {f"model/{name}" for name in read} == {
        name for name in want if name.startswith("model/")
    }
    assert all(torch.equal(tensor, want[f"model/{name}"]) for name, tensor in read.items())
