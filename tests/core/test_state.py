"""Initial values, regions and whole tensors are the same on every layout: bitwise, on 4 processes
and on one.
"""

import math
from functools import cache

import pytest
import torch
from spawning import run_spawned
from torch import nn

from dolmen.core import mesh as meshes
from dolmen.core import state
from dolmen.core.mesh import SINGLE
from dolmen.core.state import BLOCK, Replicate, Shard
from dolmen.parallel import data

# shape and placement on tp. 71 rows: neither 2 nor 4 divides them. `tall` has 3 blocks and a rest,
# `wide` rows longer than a block.
SHAPES = {
    "columns": ((71, 32), Shard(0)),
    "rows": ((32, 48), Shard(1)),
    "vector": ((71,), Shard(0)),
    "norm": ((33,), Replicate()),
    "tall": ((6500, 32), Shard(0)),
    "tall_rows": ((6500, 32), Shard(1)),
    "wide": ((5, BLOCK + 8), Shard(1)),
    "tiny": ((4, 2), Shard(0)),
}
LAYOUTS = [(dp, tp, zero) for dp, tp in ((4, 1), (2, 2), (1, 4)) for zero in (None, 0, 1, 3)]


class Parameters(nn.Module):
    def __init__(self):
        super().__init__()
        for name, (shape, _) in SHAPES.items():
            self.register_parameter(name, nn.Parameter(torch.empty(shape)))


def placed(mesh, zero) -> Parameters:
    with torch.device("meta"):
        module = Parameters()
    state.distribute(module, {name: place for name, (_, place) in SHAPES.items()}, mesh)
    if zero is not None:
        data.shard_model(module, (), mesh, zero, torch.float32)
    return module.to_empty(device="cpu")


def filled(p, name, seed=0, std=0.02) -> torch.Tensor:
    state.fill_normal(p, name, seed, std)
    return p


def single(name, seed=0, std=0.02) -> torch.Tensor:
    return filled(torch.empty(SHAPES[name][0]), name, seed, std)


def in_world() -> dict[str, dict[str, str]]:
    """{layout: {parameter: what differs}}, from rank 0 if anything differs there, else from the
    first rank where it does.
    """
    out = {}
    for dp, tp, zero in LAYOUTS:
        mesh = meshes.build_mesh(dp, tp, torch.device("cpu"))
        module = placed(mesh, zero)
        wrong = {}
        for name, p in module.named_parameters():
            want = single(name)
            with torch.no_grad():
                filled(p, name)
            held, part = state.local_view(p), state.region(p)
            checks = {
                "region": tuple(held.shape) == want[part].shape
                and held.numel() == state.local_elements(p),
                "initialize": torch.equal(held, want[part]),
                "full": torch.equal(state.gather_full(p), want),
                "owned": total(p, mesh) == want.numel(),
            }
            new = torch.arange(want.numel(), dtype=torch.float32).view(want.shape)
            with torch.no_grad():
                state.write_region(p, new)
            checks["write"] = torch.equal(state.gather_full(p), new)
            wrong[name] = " ".join(check for check, right in checks.items() if not right)
        everyone = [None] * mesh.size
        torch.distributed.all_gather_object(everyone, wrong)
        out[f"dp{dp} tp{tp} zero {zero}"] = {
            name: next((w[name] for w in everyone if w[name]), "") for name in wrong
        }
    return out


def total(p, mesh) -> int:
    """Elements of the logical tensor, each counted once: what the gradient's norm relies on.
    Without ZeRO a parameter does not know the dp axis, and every one of its ranks holds the whole.
    """
    copies = mesh.dp.size if p.device_mesh.ndim == 1 else 1
    held = torch.tensor(state.local_elements(p) * state.replication_weight(p), dtype=torch.float64)
    torch.distributed.all_reduce(held)
    return round(float(held) / copies, 6)


@cache
def results() -> dict[str, dict[str, str]]:
    return run_spawned(4, in_world)


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_layout_independent(layout):
    """Regions, initial values, whole tensors and writing, of every placement, with ZeRO and
    without.
    """
    wrong = results()["dp{} tp{} zero {}".format(*layout)]
    assert wrong.keys() == SHAPES.keys() and not any(wrong.values()), wrong


def test_values_depend_on_seed_name_and_position():
    assert torch.equal(single("tall"), single("tall"))
    assert not torch.equal(single("tall"), single("tall", seed=1))
    assert not torch.equal(single("tall"), filled(torch.empty(6500, 32), "other"))
    rows = single("tall")
    assert len({tuple(r) for r in rows.tolist()}) == len(rows), (
        "two rows are the same: blocks share a seed"
    )


@pytest.mark.parametrize("std", (0.02, 0.3))
def test_standard_deviation(std):
    """Mean and std of 208,000 values, within 5 standard errors: std / sqrt(n) and std /
    sqrt(2 n).
    """
    values = single("tall", std=std).double()
    n = values.numel()
    assert abs(values.mean()) < 5 * std / math.sqrt(n) and abs(
        values.std() - std
    ) < 5 * std / math.sqrt(2 * n)
    assert 0.6 < (values.abs() < std).double().mean() < 0.75  # normal: 0.683


@pytest.mark.parametrize("placement", (Shard(0), Shard(1)), ids=str)
def test_no_rank_builds_a_whole_tensor(placement, monkeypatch):
    """Rank 2 of 4 draws one block at a time. Split by rows it draws its quarter and at most two
    partial blocks; split by columns it must draw every row, for a block is seeded as a whole.
    """
    shape, sizes = (4 * BLOCK // 32, 32 * 2), []  # 8 blocks
    p = torch.empty(1)
    part = [slice(0, n) for n in shape]
    part[placement.dim] = slice(shape[placement.dim] // 4 * 2, shape[placement.dim] // 4 * 3)
    held = torch.empty([s.stop - s.start for s in part])
    monkeypatch.setattr(state, "local_view", lambda _: held)
    monkeypatch.setattr(state, "region", lambda _: tuple(part))
    normal = torch.Tensor.normal_
    monkeypatch.setattr(
        torch.Tensor, "normal_", lambda t, *a, **k: (sizes.append(t.numel()), normal(t, *a, **k))[1]
    )
    p = torch.empty(shape, device="meta")
    state.fill_normal(p, "w", 0, 1.0)
    assert max(sizes) <= BLOCK
    if placement.dim == 0:
        assert sum(sizes) <= held.numel() + 2 * BLOCK
    else:
        assert sum(sizes) == p.numel()


def test_write_refuses_another_shape():
    with pytest.raises(
        ValueError, match=r"a value of shape \(3, 2\) for a parameter of shape \(2, 3\)"
    ):
        state.write_region(torch.empty(2, 3), torch.empty(3, 2))


def test_one_process_needs_no_grid():
    module = placed(SINGLE, None)
    assert all(type(p) is nn.Parameter for p in module.parameters())
    assert (
        state.local(module.columns) is module.columns
        and state.replication_weight(module.columns) == 1
    )


@pytest.mark.parametrize("shape", ((40, 16), (3, 20, 16), (70,)))
def test_a_value_follows_from_seed_name_and_block_alone(monkeypatch, shape):
    """Rows of a block from a generator of their own, seeded by all three in this order, of each of
    stacked matrices by its own name.
    """
    monkeypatch.setattr(state, "BLOCK", 64)
    p = torch.empty(shape)
    state.fill_uniform(p, "a.weight", 7, 2.0)
    matrices = [("a.weight", p)] if len(shape) < 3 else [(f"a.weight.{i}", p[i]) for i in range(3)]
    for name, matrix in matrices:
        rows = 64 // (16 if matrix.ndim == 2 else 1)
        for block, found in enumerate(matrix.split(rows)):
            generator = torch.Generator().manual_seed(state.seed_of(7, name, block))
            want = torch.empty(found.shape).uniform_(-2, 2, generator=generator)
            assert torch.equal(found, want)
