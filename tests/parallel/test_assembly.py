"""Matrices assembled on their owners (parallel/assembly.py): each has one, work is divided, what
arrives is the logical matrix and what goes back its parts, bitwise; and the bytes sent are those of
a closed form, counted on every rank of fake groups.
"""

from collections import Counter
from contextlib import contextmanager
from dataclasses import replace
from functools import partial

import pytest
import torch
import torch.distributed as dist
from fakes import join_fake
from spawning import Row
from tiny_models import Flat, build, initialize
from torch.utils._python_dispatch import TorchDispatchMode

from dolmen.core import state
from dolmen.core.mesh import SINGLE, Mesh
from dolmen.model.decoder import Decoder
from dolmen.model.layout import Layout
from dolmen.model.spec import ParamSpec
from dolmen.optim.muon import flops, matrices
from dolmen.parallel.assembly import Assembly

SIZES = dict(
    vocab_size=71,
    hidden_size=32,
    intermediate_size=48,
    num_hidden_layers=2,
    num_attention_heads=8,
    head_dim=8,
    num_key_value_heads=1,  # k and v are whole on every rank of tp
    qk_norm=True,
)
DENSE = Flat(**SIZES)
SPARSE = Flat(**SIZES, num_experts=8, num_experts_per_tok=2, moe_intermediate_size=24)
# 6 rows over 4 ranks are 2, 2, 2 and none; 3 experts of a rank of ep are cut within by 2 of edp
UNEVEN = Flat(
    **SIZES | dict(hidden_size=18, head_dim=6, num_attention_heads=2),
    num_experts=6,
    num_experts_per_tok=2,
    moe_intermediate_size=10,
)
# no dim of an expert can be cut equally: 6 experts over 4 ranks are 2, 2, 2 and none as well
ODD = replace(UNEVEN, hidden_size=19, moe_intermediate_size=5)
CASES = {
    "dp2 zero0": (DENSE, Layout(dp=2, zero=0)),
    "dp4 zero1": (DENSE, Layout(dp=4, zero=1)),
    "tp2": (DENSE, Layout(dp=1, tp=2)),
    "dp2 tp2 zero0": (DENSE, Layout(dp=2, tp=2, zero=0)),
    "dp2 tp4 zero3": (DENSE, Layout(dp=2, tp=4, zero=3)),
    "pp2 cp2 tp2 zero2": (DENSE, Layout(dp=1, pp=2, cp=2, tp=2, zero=2)),
    "dp2 zero1 experts": (SPARSE, Layout(dp=2, zero=1)),
    "dp4 ep2 tp2 zero0": (SPARSE, Layout(dp=4, ep=2, tp=2, zero=0)),
    "dp4 ep4 zero3": (SPARSE, Layout(dp=4, ep=4, zero=3)),
    "dp2 cp2 ep2 tp2 zero1": (SPARSE, Layout(dp=2, cp=2, ep=2, tp=2, zero=1)),
}


class Sent(TorchDispatchMode):
    """Elements that this rank gives to others; nothing may be sent but by an exchange."""

    def __init__(self):
        super().__init__()
        self.elements = 0

    def __torch_dispatch__(self, op, types, args=(), kwargs=None):
        name = op.__name__.split(".")[0]
        if op.namespace == "_c10d_functional" and "wait" not in name and "wrap" not in name:
            assert name == "all_to_all_single", name
            assert args[0].numel() == sum(args[2])
            self.elements += args[0].numel()
            # the fake group's own refuses to receive where nothing is sent
            return args[0].new_zeros(sum(args[1]))
        assert op.namespace != "c10d", name
        return op(*args, **(kwargs or {}))


@contextmanager
def as_rank(layout: Layout, rank: int):
    join_fake(layout.pp * layout.dp * layout.cp * layout.tp, rank)
    try:
        yield layout.mesh(torch.device("cpu"))
    finally:
        dist.destroy_process_group()


def hidden(model: Decoder) -> dict[str, torch.nn.Parameter]:
    roles = {n: param.role for n, param in model.local_specs().items()}
    return {n: p for n, p in model.named_parameters() if roles[n] in ("matrix", "expert")}


def assembled(config: Flat, layout: Layout, mesh: Mesh) -> tuple[dict, Assembly]:
    schedule = layout.make_schedule(16, 1) if layout.pp > 1 else None
    parameters = hidden(build(config, mesh, layout, schedule))
    return parameters, Assembly(list(parameters.values()), mesh, flops)


def closed_form(param: ParamSpec, layout: Layout) -> int:
    """Elements of a parameter that all ranks of its stage send (docs/concepts/optimizers.md)."""
    n, T = param.elements, layout.tp
    fsdp = layout.dp * layout.cp
    experts = param.role == "expert"
    F = fsdp // layout.ep if experts else fsdp
    if experts and layout.zero:  # each rank of edp has experts of its own
        assert param.shape[0] // layout.ep % F == 0
        F = 1
    by_tp = any(cut.axis == "tp" and cut.splits(T) for cut in param.shards)
    lines = 1 if by_tp else T
    there = (lines * n * (F - 1) // F if layout.zero else 0) + (n * (T - 1) // T if by_tp else 0)
    over_tp = n * (T - 1) // T if by_tp else n * (T - 1)
    over_fsdp = lines * n * (F - 1) // F if layout.zero else lines * n * (F - 1)
    return there + over_tp + over_fsdp


def of_all_ranks(config: Flat, layout: Layout) -> tuple[int, Counter, list[list[int]]]:
    """On every rank of the world in turn: elements that are sent, how many matrices of each shape
    are owned, and the work of the owners of each stage. In a fake group nothing arrives.
    """
    world = layout.pp * layout.dp * layout.cp * layout.tp
    sent, owned, work = 0, Counter(), Counter()
    for rank in range(world):
        with as_rank(layout, rank) as mesh:
            parameters, assembly = assembled(config, layout, mesh)
            with Sent() as counted, torch.no_grad():
                parts = matrices(map(state.local_view, parameters.values()))
                assembly.apply(lambda whole: whole, parts)
            sent += counted.elements
            owned += Counter(assembly.shapes[i] for i in assembly.owned)
            work[rank] = sum(flops(*assembly.shapes[i]) for i in assembly.owned)
    stages = [
        [work[r] for r in range(world) if r * layout.pp // world == s] for s in range(layout.pp)
    ]
    return sent, owned, stages


def hidden_leaves(config: Flat) -> list[ParamSpec]:
    return [param for param in config.spec.params.values() if param.role in ("matrix", "expert")]


@pytest.mark.parametrize("name", CASES)
def test_owners_and_bytes(name):
    config, layout = CASES[name]
    sent, owned, stages = of_all_ranks(config, layout)
    params, shapes = hidden_leaves(config), Counter()
    for param in params:
        shapes[param.shape[-2:]] += param.shape[0] if len(param.shape) == 3 else 1
    assert owned == shapes, "each matrix has one owner"
    assert sent == sum(closed_form(param, layout) for param in params)
    most = max(flops(*shape) for shape in shapes)
    assert all(max(work) - min(work) <= most for work in stages), "work is divided"


def test_others_work_where_experts_are_not_equally_many():
    """6 experts over ep 2 x edp 2 are 2, 2, 1 and 1: who has less of them owns more of the rest."""
    config = replace(ODD, num_hidden_layers=8)
    _, _, (work,) = of_all_ranks(config, Layout(dp=4, ep=2, zero=2))
    most = max(flops(*param.shape[-2:]) for param in hidden_leaves(config))
    assert 3 * 8 * flops(5, 19) > 2 * most and max(work) - min(work) <= most


def test_one_process_sends_nothing():
    parameters, assembly = assembled(SPARSE, Layout(dp=1), SINGLE)
    with Sent() as counted, torch.no_grad():
        parts = matrices(parameters.values())
        assert assembly.apply(lambda whole: whole, parts) == parts
    assert counted.elements == 0 and assembly.owned == list(range(len(parts)))


def there_and_back(config: Flat, layout: Layout) -> None:
    """Owners are given the logical matrices; double of each goes back to where it came from."""
    mesh = layout.mesh(torch.device("cpu"))
    schedule = layout.make_schedule(16, 1) if layout.pp > 1 else None
    model = build(config, mesh, layout, schedule)
    initialize(model, 0)
    parameters, given = hidden(model), []
    assembly = Assembly(list(parameters.values()), mesh, flops)

    def double(whole):
        given.append(whole)
        return 2 * whole

    with torch.no_grad():
        parts = matrices(map(state.local_view, parameters.values()))
        back = assembly.apply(double, parts)
        wholes = {n: state.gather_full(p) for n, p in parameters.items()}
    assert all(torch.equal(b, 2 * part) for b, part in zip(back, parts, strict=True))
    numbers = []  # of this rank's matrices: parameter, and index in the logical stack
    for n, p in parameters.items():
        first = state.region(p)[0]
        numbers += [(n, i) for i in range(first.start, first.stop)] if p.ndim == 3 else [(n, None)]
    for i, whole in zip(assembly.owned, given, strict=True):
        n, index = numbers[i]
        assert torch.equal(whole, wholes[n] if index is None else wholes[n][index]), numbers[i]
    owned = [numbers[i] for i in assembly.owned]
    everyone = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, owned)
    of_all = Counter(number for rank in everyone for number in rank)
    assert set(of_all.values()) == {1}
    assert {n for n, _ in of_all} == {
        n for n, param in config.spec.params.items() if param in hidden_leaves(config)
    }


WORLDS = {
    "dense dp4 zero3": (DENSE, Layout(dp=4, zero=3)),
    "dense tp4": (DENSE, Layout(dp=1, tp=4)),
    "dense dp2 tp2 zero0": (DENSE, Layout(dp=2, tp=2, zero=0)),
    "dense dp2 tp2 zero1": (DENSE, Layout(dp=2, tp=2, zero=1)),
    "dense pp2 cp2 zero2": (DENSE, Layout(dp=1, pp=2, cp=2, zero=2)),
    "experts dp2 ep2 tp2 zero1": (SPARSE, Layout(dp=2, ep=2, tp=2, zero=1)),
    "experts dp4 ep2 zero0": (SPARSE, Layout(dp=4, ep=2, zero=0)),
    "uneven dp4 zero1": (UNEVEN, Layout(dp=4, zero=1)),
    "uneven dp4 ep2 zero2": (UNEVEN, Layout(dp=4, ep=2, zero=2)),
    "odd dp4 zero1": (ODD, Layout(dp=4, zero=1)),
    "odd dp4 ep2 zero3": (ODD, Layout(dp=4, ep=2, zero=3)),
    "uneven dp2 tp2 zero1": (UNEVEN, Layout(dp=2, tp=2, zero=1)),
}


@pytest.mark.parametrize(
    "row", [Row(n, 4, partial(there_and_back, *case)).parameter for n, case in WORLDS.items()]
)
def test_there_and_back_bitwise(row, result):
    result(row)
