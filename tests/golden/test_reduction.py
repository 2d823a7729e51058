"""Sums in a fixed order: what the order is, that no backend adds anything, and which runs so have
the same bits.
"""

from functools import partial, reduce
from operator import add

import pytest
import torch
from spawning import Row
from table import FAMILIES, Layout, batches, run, start
from tiny_models import tiny
from torch.utils._python_dispatch import TorchDispatchMode

from dolmen.core import collectives, state, transfers
from dolmen.core.mesh import SINGLE
from dolmen.core.reduction import tree_sum
from dolmen.training.step import optimizer_step

CPU = torch.device("cpu")


@pytest.mark.parametrize("n", range(1, 9))
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
def test_neighbours_are_added_first(n, dtype):
    """Of half precision in fp32, and rounded once."""
    parts = torch.randn(n, 5, 3, generator=torch.Generator().manual_seed(n), dtype=dtype)
    wide = list(parts.float() if dtype == torch.bfloat16 else parts)
    while len(wide) > 1:
        pairs = [wide[i : i + 2] for i in range(0, len(wide), 2)]
        wide = [pair[0] + pair[1] if len(pair) == 2 else pair[0] for pair in pairs]
    assert torch.equal(tree_sum(parts), wide[0].to(dtype))


def test_the_order_can_be_told():
    """Else the tests below would prove little."""
    parts = torch.tensor([1e8, 1.0, -1e8, 1.0])
    assert (tree_sum(parts[:, None]).item(), reduce(add, parts).item()) == (0.0, 1.0)
    assert tree_sum(parts[[0, 2, 1, 3], None]).item() == 2.0


class Added(Exception):
    """A backend was to add."""


class MovingAlone(TorchDispatchMode):
    """Within, the backend moves numbers and adds none, whoever asks: FSDP, DTensor or the house.
    `sent`: bytes that this rank gave away in exchanges and gathers over `ranks`.
    """

    def __init__(self, ranks: int = 1):
        super().__init__()
        self.ranks, self.sent = ranks, 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if function.namespace in ("c10d", "_c10d_functional"):
            name = function.overloadpacket.__name__
            if "reduce" in name and args[1] not in ("max", "min"):
                raise Added(f"{name} of {args[1:]}")
            if "all_to_all" in name:
                self.sent += args[0].nbytes * (self.ranks - 1) // self.ranks
            elif "all_gather" in name:
                self.sent += args[0].nbytes * (self.ranks - 1)
        return function(*args, **(kwargs or {}))


def sums() -> None:
    """Each way to add over four ranks against the tree of what they have, which each knows."""
    axis = Layout.of("tp4 zero1 fixed").mesh(CPU).tp
    with MovingAlone(4) as moved:
        for dtype in (torch.float64, torch.float32, torch.bfloat16):
            for shape in ((8, 3), (5,), ()):
                made = torch.Generator().manual_seed(len(shape))
                all_of = torch.randn(4, *shape, generator=made).to(dtype)
                x, want = all_of[axis.rank], tree_sum(all_of)
                assert torch.equal(collectives.reduce_scalar(x, axis), want)
                own = x.clone()
                assert collectives.sum_(own, axis) is own and torch.equal(own, want)
                assert torch.equal(collectives.all_reduce_(x.clone(), axis), want)
                if shape == (8, 3):
                    got = collectives.reduce_scatter(x, 0, axis)
                    assert torch.equal(got, collectives.local_part(want, 0, axis))
        assert float(collectives.reduce_scalar(torch.tensor(float(axis.rank)), axis, "max")) == 3
        x, moved.sent = torch.ones(8, 3), 0  # 96 bytes
        collectives.reduce_scatter(x, 0, axis)
        assert moved.sent == 96 * 3 / 4
        collectives.sum_(x, axis)
        assert moved.sent == 96 * 3 / 4 + 2 * 96 * 3 / 4


def compiled() -> None:
    """An exchange, a tree and a gathering trace."""
    axis = Layout.of("tp4 zero1 fixed").mesh(CPU).tp
    parts = torch.randn(4, 5, generator=torch.Generator().manual_seed(0))
    traced = torch.compile(
        lambda x: transfers.wait(transfers.start_all_reduce_(x * 1, axis), axis) * 1,
        fullgraph=True,
        backend="aot_eager",
    )
    assert torch.equal(traced(parts[axis.rank]), tree_sum(parts))


def bits(family: str, layout: Layout) -> None:
    """The same run twice, once where no backend adds, leaves the same bits: gradients of every
    step, norms and losses.
    """
    mesh = layout.mesh(CPU)
    with MovingAlone():
        first = run(FAMILIES[family], mesh, layout, steps=2)
    second = run(FAMILIES[family], mesh, layout, steps=2)
    assert (first.norms, first.losses) == (second.norms, second.losses)
    for mine, other in zip(first.gradients, second.gradients, strict=True):
        for name, g in mine.items():
            assert torch.equal(state.local_view(g), state.local_view(other[name])), name


def leaves(parts: int) -> dict[str, torch.Tensor]:
    """Gradients of the first step's microbatches, in one process, added as the tree does."""
    train = start(FAMILIES["llama"], SINGLE, Layout.of(f"acc{parts}"))
    named, found = dict(train.model.named_parameters()), []

    def take(action) -> None:
        if action.kind == "B":
            found.append({n: p.grad.clone() for n, p in named.items()})
            for p in named.values():  # the step goes on with the last ones
                p.grad = p.grad if len(found) == parts else None

    optimizer_step(train, batches(SINGLE)[0], SINGLE, observe=take)
    return {n: tree_sum(torch.stack([one[n] for one in found])) for n in named}


def gradients(layout: Layout) -> None:
    """Those of a run over dp are the tree of its four microbatches', whichever rank had which."""
    want = leaves(4)
    got = run(FAMILIES["llama"], layout.mesh(CPU), layout, steps=1).gradients[0]
    for name, g in got.items():
        part = state.local_view(g)
        assert torch.equal(part, want[name][state.region(g)]), name


def backends_add() -> None:
    """As they do by default."""
    axis = Layout.of("tp4").mesh(CPU).tp
    for way in (collectives.reduce_scalar, collectives.sum_, collectives.all_reduce_):
        with MovingAlone(), pytest.raises(Added):
            way(torch.ones(1), axis)


ROWS = [
    Row("every way to add", 4, sums),
    Row("compiled", 4, compiled, full=True),
    Row("a backend that adds is seen", 4, backends_add),
    Row("twice, on two axes", 4, partial(bits, "llama", Layout.of("dp2 tp2 sp zero3 fixed"))),
    Row("twice, with experts", 4, partial(bits, "qwen3-moe", Layout.of("dp4 ep2 zero1 fixed"))),
    Row("gradients of dp 4", 4, partial(gradients, Layout.of("dp4 zero1 fixed"))),
    Row("gradients of dp 2", 2, partial(gradients, Layout.of("dp2 acc2 zero1 fixed"))),
]


@pytest.mark.parametrize("row", [row.parameter for row in ROWS])
def test_on_ranks(row, result):
    result(row)


def test_zero_0_is_refused():
    """torch's `replicate` has the backend add."""
    with pytest.raises(ValueError, match="set --layout.zero 1"):
        Layout.of("dp2 fixed").check(tiny("llama").spec, 8, 16, 8)
