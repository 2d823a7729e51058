"""Each typed collective against its definition, forward and backward, over axes of 2 and 4 ranks.
Values are small integers in fp32, so that sums are exact and every comparison is bitwise.
"""

from functools import cache

import pytest
import torch
from spawning import run_spawned

from dolmen.core import collectives as c
from dolmen.core import mesh as meshes
from dolmen.core.mesh import Axis


def total(parts):
    return torch.stack(list(parts)).sum(0)


def part(x, d, a):
    return x.chunk(a.size, d)[a.rank]


# name: (call, forward and backward by definition). xs, gs: the input and the output gradient of
# every rank of the axis. Where a tensor is I all ranks hold rank 0's.
TYPED = {
    "copy": (
        lambda x, d, a: c.copy(x, a),
        lambda xs, d, a: xs[0],
        lambda gs, d, a: total(gs),
        "I",
        "",
    ),
    "all_reduce_": (
        lambda x, d, a: c.all_reduce_(x, a),
        lambda xs, d, a: total(xs),
        lambda gs, d, a: gs[0],
        "",
        "I",
    ),
    "all_gather": (
        c.all_gather,
        lambda xs, d, a: torch.cat(xs, d),
        lambda gs, d, a: part(total(gs), d, a),
        "",
        "",
    ),
    "reduce_scatter": (
        c.reduce_scatter,
        lambda xs, d, a: part(total(xs), d, a),
        lambda gs, d, a: torch.cat(gs, d),
        "",
        "",
    ),
}


def values(shape, axis, invariant, seed):
    """One tensor a rank of the axis, the same list on every rank; transposed storage, so that
    contiguity is not assumed.
    """
    generator = torch.Generator().manual_seed(seed)
    made = [
        torch.randint(-9, 10, (*shape[1:], shape[0]), generator=generator).float().movedim(-1, 0)
        for _ in range(axis.size)
    ]
    return [made[0]] * axis.size if invariant else made


def given(name: str, x: torch.Tensor) -> torch.Tensor:
    """x, or, for what writes to its input, one that nothing else reads."""
    return x.clone(memory_format=torch.contiguous_format) if name.endswith("_") else x


def check(name: str, axis: Axis, d: int, function) -> None:
    """`function(x, dim, axis)` against the definition of the collective `name`."""
    _, forward, backward, x_type, y_type = TYPED[name]
    xs = values((8, 4, 3), axis, x_type == "I", 1)
    x = xs[axis.rank].detach().clone(memory_format=torch.preserve_format).requires_grad_()
    y = function(given(name, x), d, axis)
    want = forward(xs, d, axis)
    assert torch.equal(y, want), f"{name} forward over {axis.size}, dim {d}"
    gs = values(want.shape, axis, y_type == "I", 2)
    g = gs[axis.rank].clone(memory_format=torch.preserve_format)
    (got,) = torch.autograd.grad(y, x, g)
    assert torch.equal(got, backward(gs, d, axis)), f"{name} backward over {axis.size}, dim {d}"
    assert torch.equal(x, xs[axis.rank]) and torch.equal(g, gs[axis.rank]), (
        f"{name} wrote to its input"
    )
    with torch.no_grad():
        y = function(given(name, x.detach()), d, axis)
        y.add_(1)  # a caller may write to the result ...
    if name != "copy":
        # ... except copy's
        assert torch.equal(x, xs[axis.rank]), f"{name} returned a view of its input"


def in_world() -> dict[str, str]:
    """Every check on 4 processes: {check: what went wrong, or ""}. An axis of 4, and of 2 inner
    (tp) and outer (dp) ranks.
    """
    cpu, out = torch.device("cpu"), {}
    two, four = meshes.build_mesh(2, 2, cpu), meshes.build_mesh(1, 4, cpu)

    def attempt(name, fn):
        try:
            fn()
        except Exception as e:
            out[name] = f"{type(e).__name__}: {e}"
        else:
            out[name] = ""

    for name, (function, *_) in TYPED.items():
        for label, axis in (("tp of 2", two.tp), ("dp of 2", two.dp), ("tp of 4", four.tp)):
            for d in (0, 1):
                attempt(f"{name} {label} dim {d}", lambda: check(name, axis, d, function))
        torch.compiler.reset()  # one code object serves them all: dynamo gives up at the eighth
        compiled = torch.compile(
            lambda x, d, axis: function(x * 1, d, axis) * 1, fullgraph=True, backend="aot_eager"
        )
        attempt(f"{name} compiled", lambda: check(name, two.tp, 1, compiled))
    for name, call in REFUSED.items():
        attempt(f"refused {name}", lambda: call(two.tp))
    attempt("reduce_scalar", lambda: scalar(four))
    return out


def scalar(mesh):
    x = torch.tensor(float(mesh.rank), requires_grad=True)
    assert (
        float(c.reduce_scalar(x, mesh.tp)) == 6 and float(c.reduce_scalar(x, mesh.tp, "max")) == 3
    )
    assert not c.reduce_scalar(x, mesh.tp).requires_grad and float(x) == mesh.rank


REFUSED = {
    "reduce_scatter": lambda a: c.reduce_scatter(torch.ones(4, 3), 1, a),
    "part": lambda a: c.local_part(torch.ones(3), 0, a),
}


@cache
def results() -> dict[str, str]:
    return run_spawned(4, in_world)


@pytest.mark.parametrize("name", TYPED)
def test_definition(name):
    """Forward, backward, and nothing mutated; over dim 0 and 1, over axes of 2 (either
    kind) and 4.
    """
    rows = {k: v for k, v in results().items() if k.startswith(f"{name} ") and "compiled" not in k}
    assert len(rows) == 6 and not any(rows.values()), rows


@pytest.mark.parametrize("name", TYPED)
def test_traces_under_compile(name):
    assert results()[f"{name} compiled"] == ""


@pytest.mark.parametrize("name", REFUSED)
def test_indivisible_is_refused(name):
    message = results()[f"refused {name}"]
    assert message.startswith("ValueError") and "of size 3 is not divisible by tp (2)" in message


@pytest.mark.parametrize("d", (0, 1))
def test_parts_lie_in_the_order_of_ranks(d):
    x = torch.arange(32).view(4, 8)
    parts = [c.local_part(x, d, Axis("tp", 4, rank)) for rank in range(4)]
    assert all(map(torch.equal, parts, x.chunk(4, d)))


def test_reduce_scalar():
    assert results()["reduce_scalar"] == ""


@pytest.mark.parametrize("name", TYPED)
def test_identity_on_an_axis_of_one(name):
    x = torch.randn(3, 5, requires_grad=True)
    assert TYPED[name][0](x, 0, Axis("tp", 1, 0)) is x  # without any process group
    assert c.reduce_scalar(x, Axis("tp", 1, 0)) is x
