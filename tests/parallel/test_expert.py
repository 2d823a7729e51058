"""Rows reach the experts they are for and come back, whatever their numbers; stacked parameters are
the same on every layout. Bitwise, on 4 gloo processes: values are small integers, or drawn from the
same seeds.
"""

from functools import cache
from itertools import accumulate

import pytest
import tiny_models
import torch
import torch.distributed as dist
from spawning import run_spawned
from tiny_models import Flat, build, initialize
from torch import nn

from dolmen.core import collectives, state
from dolmen.core import mesh as meshes
from dolmen.core.mesh import SINGLE
from dolmen.core.state import Shard
from dolmen.model.decoder import Decoder
from dolmen.model.head import cross_entropy_function
from dolmen.model.layout import Layout
from dolmen.parallel import data, expert
from dolmen.training import balance

EXPERTS, HIDDEN = 4, 3
SCALE = torch.ones((), dtype=torch.float64)  # of the auxiliary losses' gradients
COUNTS = {  # rows of each rank for each expert
    "uneven": ((1, 5, 0, 2), (0, 0, 3, 1), (2, 2, 2, 2), (7, 0, 0, 0)),
    "an expert without rows": ((0, 1, 2, 3), (0, 3, 2, 1), (0, 1, 1, 1), (0, 0, 0, 5)),
    "a rank that sends nothing": ((0, 0, 0, 0), (1, 1, 1, 1), (0, 2, 0, 2), (0, 0, 0, 1)),
    "ranks that get nothing": ((3, 0, 0, 0), (2, 0, 0, 0), (0, 0, 0, 0), (1, 0, 0, 0)),
    "nothing at all": ((0, 0, 0, 0),) * 4,
}


def rows_of(rank: int, counts) -> torch.Tensor:
    """[rows, HIDDEN]: rank, expert, and how many-eth."""
    return torch.tensor(
        [(rank, e, i) for e, n in enumerate(counts) for i in range(n)], dtype=torch.float32
    ).view(-1, HIDDEN)


def round_trips() -> dict[str, str]:
    """{case: what is wrong on some rank}."""
    wrong = {}
    for size in (1, 2, 4):
        axis = meshes.build_mesh(4, 1, torch.device("cpu"), ep=size).ep
        peers = range(dist.get_rank() - axis.rank, dist.get_rank() - axis.rank + size)
        here = EXPERTS // size
        for name, counts in COUNTS.items():
            x = rows_of(dist.get_rank(), counts[dist.get_rank()]).requires_grad_()
            mine = torch.tensor(counts[dist.get_rank()])
            rows, trip = expert.dispatch(x * 1.0, mine, axis, kernel=False)
            _, other = expert.dispatch(x * 1.0, mine, axis, kernel=True)
            mine = range(axis.rank * here, (axis.rank + 1) * here)
            want = [
                row
                for e in mine
                for r in peers
                for row in rows_of(r, counts[r]).tolist()
                if row[1] == e
            ]
            back = expert.combine(rows * 2.0, trip, axis)
            sent = torch.arange(x.numel(), dtype=torch.float32).view_as(x)
            (g,) = torch.autograd.grad(back, x, sent)
            checks = {
                "rows": rows.tolist() == want,
                "counts": trip.groups == [sum(counts[r][e] for r in peers) for e in mine],
                "ends": other.groups.tolist() == list(accumulate(trip.groups)),
                "back": torch.equal(back, 2 * x),
                "gradient": torch.equal(g, 2 * sent),
            }
            wrong[f"{name}, ep {size}"] = [k for k, right in checks.items() if not right]
    everyone = [None] * 4
    dist.all_gather_object(everyone, wrong)
    return {
        name: str([w[name] for w in everyone]) for name in wrong if any(w[name] for w in everyone)
    }


def test_there_and_back():
    assert run_spawned(4, round_trips) == {}


def test_on_one_process_nothing_moves():
    x = torch.randn(8, HIDDEN)
    counts = torch.tensor([1, 5, 0, 2])
    rows, trip = expert.dispatch(x, counts, SINGLE.ep, kernel=False)
    assert rows is x and trip.groups == [1, 5, 0, 2] and expert.combine(rows, trip, SINGLE.ep) is x
    ends = expert.dispatch(x, counts, SINGLE.ep, kernel=True)[1].groups
    assert ends.tolist() == [1, 6, 6, 8] and ends.dtype == torch.int32
    assert collectives.all_to_all(x, [8], [8], SINGLE.ep) is x


# Experts as many as ranks, fewer, and a number that edp does not divide; F 8 over tp 1 to 4, H 6
LAYOUTS = [
    (dp, cp, tp, ep, zero)
    for dp, cp, tp, ep in (
        (4, 1, 1, 1),
        (4, 1, 1, 2),
        (2, 2, 1, 4),
        (1, 2, 2, 2),
        (2, 1, 2, 1),
        (1, 1, 4, 1),
    )
    for zero in (None, 0, 1, 3)
]
NUMBERS = (4, 12, 2)
SHAPES = {"gate": ((8, 6), Shard(1)), "down": ((6, 8), Shard(2))}


class Parameters(nn.Module):
    def __init__(self, number):
        super().__init__()
        for name, (shape, _) in SHAPES.items():
            self.register_parameter(name, nn.Parameter(torch.empty(number, *shape)))


def placed(mesh, zero, number) -> nn.Module:
    with torch.device("meta"):
        module = nn.Sequential(Parameters(number))
    state.distribute(
        module, {f"0.{name}": (Shard(0), place) for name, (_, place) in SHAPES.items()}, mesh
    )
    if zero is not None:
        data.shard_model(module, [data.Unit(module[0], experts=True)], mesh, zero, torch.float32)
    return module.to_empty(device="cpu")


def parameters_in_world() -> dict[str, str]:
    """{layout: what is wrong on some rank}."""
    wrong = {}
    for dp, cp, tp, ep, zero in LAYOUTS:
        mesh = meshes.build_mesh(dp, tp, torch.device("cpu"), cp=cp, ep=ep)
        for number in NUMBERS:
            if number % ep:
                continue
            bad = wrong[f"{(dp, cp, tp, ep, zero)} {number}"] = []
            for name, p in placed(mesh, zero, number).named_parameters():
                want, part = torch.empty(p.shape), state.region(p)
                with torch.no_grad():
                    for q in (p, want):
                        state.fill_normal(q, name, 0, 0.02)
                if not torch.equal(state.local_view(p), want[part]):
                    bad.append(f"{name}: initial values")
                if not torch.equal(state.gather_full(p), want):
                    bad.append(f"{name}: full")
                with torch.no_grad():
                    state.write_region(p, want + 1)
                if not torch.equal(state.gather_full(p), want + 1):
                    bad.append(f"{name}: write")
                held = torch.tensor(
                    state.local_elements(p) * state.replication_weight(p), dtype=torch.float64
                )
                dist.all_reduce(held)
                if round(float(held) / (mesh.edp.size if zero is None else 1), 6) != p.numel():
                    bad.append(f"{name}: owned")
                if zero == 3 and state.local_elements(p) * 4 != p.numel():
                    bad.append(f"{name}: not a quarter")
    everyone = [None] * 4
    dist.all_gather_object(everyone, wrong)
    return {
        name: str([w[name] for w in everyone]) for name in wrong if any(w[name] for w in everyone)
    }


def test_stacked_parameters_are_layout_independent():
    assert run_spawned(4, parameters_in_world) == {}


MODEL = Flat(
    vocab_size=32,
    hidden_size=16,
    intermediate_size=24,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=4,
    num_experts=4,
    num_experts_per_tok=2,
    dense_layers=(0,),
    initializer_range=0.3,
)


def counted_again(kind: str) -> tuple[list, list]:
    """The tally and the router's gradient after one backward, under recomputation `kind`."""
    model = build(MODEL, SINGLE, Layout(recompute=kind))
    initialize(model, 0)
    tokens = torch.arange(16).view(2, 8)
    given = balance.open_tallies(model, SCALE)
    model(tokens, cross_entropy_function(tokens), balance=given).backward()
    return given[1].tally.grad.tolist(), model.layers["1"].mlp.router.weight.grad.tolist()


def test_recomputation_counts_once():
    once = counted_again("none")
    assert sum(once[0][:4]) == 16 * 2 and counted_again("full") == once


@cache
def decoder() -> Decoder:
    model = tiny_models.decoder(MODEL)
    initialize(model, 0)
    return model


def test_without_a_gradient_nothing_is_counted():
    tokens = torch.arange(16).view(2, 8)
    with torch.no_grad():
        decoder()(
            tokens,
            cross_entropy_function(tokens),
            balance=(given := balance.open_tallies(decoder(), SCALE)),
        )
    decoder()(tokens, cross_entropy_function(tokens)).backward()
    assert given[1].tally.grad is None


def test_auxiliary_losses_add_to_the_gradient_what_their_formulas_say():
    """Of the router's weight, by finite differences of the plain formulas in fp64."""
    config = Flat(**{**vars(MODEL), "router_aux_loss_coef": 0.7, "router_z_loss_coef": 0.3})
    model = tiny_models.decoder(config).double()
    initialize(model, 0)
    tokens, moe = torch.arange(16).view(2, 8), model.layers["1"].mlp
    weight = moe.router.weight

    def gradient(scale):
        model.zero_grad()
        model(
            tokens, cross_entropy_function(tokens), balance=balance.open_tallies(model, scale)
        ).backward()
        return weight.grad.clone()

    added = gradient(2 * SCALE) - gradient(0 * SCALE)

    def losses():
        with torch.enable_grad():
            given = balance.open_tallies(model, 0 * SCALE)
            model(tokens, cross_entropy_function(tokens), balance=given).backward()
        uneven, z = given[1].tally.grad[4:].tolist()
        return 0.7 * uneven + 0.3 * z

    for at in ((0, 0), (2, 7), (3, 15)):
        with torch.no_grad():
            weight[at] += 1e-6
            up = losses()
            weight[at] -= 2e-6
            down = losses()
            weight[at] += 1e-6
        assert float(added[at]) == pytest.approx(2.0 * (up - down) / 2e-6, rel=1e-5, abs=1e-8)
