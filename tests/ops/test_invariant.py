"""Operators of exact numerics: a row, a column or an element has the same bits whatever else is
computed with it, in any storage order, at any alignment and number of threads; and torch's own in
their place do not.
"""

from contextlib import contextmanager
from functools import partial, reduce
from itertools import permutations
from operator import add

import pytest
import torch
import torch.nn.functional as F

from dolmen.core.reduction import Tree, tree_sum
from dolmen.ops import invariant
from dolmen.ops.attention import Attend, blockwise
from dolmen.ops.norm import layer_norm, rms_norm

LENGTHS = (*range(1, 70), 127, 1000, 4097)
KS = (8, 25, 64, 200, 512)
MKL = pytest.mark.skipif(not torch.backends.mkl.is_available(), reason="breaks known of MKL")


def normal(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


@contextmanager
def threads(number: int):
    before = torch.get_num_threads()
    torch.set_num_threads(number)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def stored(x: torch.Tensor, order: int) -> torch.Tensor:
    """The same matrix: contiguous, transposed, in a wider one, or off a vector's alignment."""
    match order:
        case 0:
            return x.contiguous()
        case 1:
            return x.t().contiguous().t()
        case 2:
            return F.pad(x, (3, 2))[:, 3:-2]
    return F.pad(x.flatten(), (1, 0))[1:].view(x.shape)


def parts_that_differ(multiply, cases, seed: int, dtype=torch.float32, ks=KS) -> int:
    """Of `cases` (rows, columns), those whose product differs from that part of a larger one."""
    generator, found = torch.Generator().manual_seed(seed), 0
    wholes = {k: (normal(280, k).to(dtype), normal(k, 280, seed=1).to(dtype)) for k in ks}
    products = {k: multiply(a, b) for k, (a, b) in wholes.items()}

    def any_of(n: int) -> int:
        return int(torch.randint(n, (), generator=generator))

    for m, n in cases:
        k = ks[any_of(len(ks))]
        i, j = any_of(281 - m), any_of(281 - n)
        a, b = wholes[k][0][i : i + m], wholes[k][1][:, j : j + n]
        part = multiply(stored(a, any_of(4)), stored(b, any_of(4)))
        found += not torch.equal(part, products[k][i : i + m, j : j + n])
    return found


EVERY = [(m, n) for m in range(1, 73) for n in range(1, 73)]
SAMPLE = EVERY[:: len(EVERY) // 300] + [(m, n) for m in (1, 3, 100, 256) for n in (2, 9, 255)]


@pytest.mark.parametrize("number", [1, 2])
@pytest.mark.parametrize(
    "cases", [SAMPLE, pytest.param(EVERY, marks=pytest.mark.full)], ids=["sample", "every"]
)
def test_product(number, cases):
    with threads(number):
        assert parts_that_differ(invariant.product, cases, number) == 0


LONG = (25, 200, 1536, 4096)


@pytest.mark.parametrize("number", [1, 2])
@pytest.mark.parametrize(
    "cases", [SAMPLE[::4], pytest.param(EVERY, marks=pytest.mark.full)], ids=["sample", "every"]
)
def test_product_in_bf16(number, cases):
    with threads(number):
        assert parts_that_differ(invariant.product, cases, number, torch.bfloat16, LONG) == 0


def test_long_products_of_torch_in_bf16_differ():
    """Those of a transposed factor, from those of one that is not."""
    assert parts_that_differ(torch.mm, SAMPLE[::4], 1, torch.bfloat16, LONG) > 0


@pytest.mark.full
@pytest.mark.parametrize("number", range(3, 9))
def test_product_on_threads(number):
    """From 256 rows and columns on, of multiples of 16 per thread."""
    a, b = normal(1024, 200), normal(200, 1024)
    with threads(number):
        whole = invariant.product(a, b)
        for m in (256, 512, 640):
            assert torch.equal(invariant.product(a[:m], b[:, -m:]), whole[:m, -m:])


@MKL
def test_small_products_of_torch_differ():
    """Else the test above would prove little: what is padded is what breaks."""
    assert parts_that_differ(torch.mm, SAMPLE, 1) > 0


def test_product_is_right():
    for m, k, n in ((1, 7, 1), (5, 300, 40), (33, 64, 3)):
        a, b = normal(m, k), normal(k, n, seed=1)
        wide = (a.double() @ b.double()).float()
        torch.testing.assert_close(invariant.product(a, b), wide, rtol=1e-5, atol=1e-5)


FUNCTIONS = {**invariant.ACTIVATIONS, "sigmoid": invariant.sigmoid}
NAMES = sorted(FUNCTIONS)
TORCH = {
    "sigmoid": torch.sigmoid,
    "silu": F.silu,
    "gelu": F.gelu,
    "gelu_tanh": partial(F.gelu, approximate="tanh"),
    "relu": F.relu,
}


def value_and_gradient(function, x: torch.Tensor, g: torch.Tensor) -> torch.Tensor:
    x = x.detach().requires_grad_()
    y = function(x)
    return torch.stack((y.detach(), *torch.autograd.grad(y, x, g)))


def elements_that_differ(function, dtype=torch.float32) -> int:
    x, g = (normal(3 * 4200) * 3).to(dtype), normal(3 * 4200, seed=1).to(dtype)
    with threads(1):
        whole = value_and_gradient(function, x, g)
    found = 0
    for length in LENGTHS:
        for offset in (0, 1, 3, 17):
            for step, number in ((1, 1), (3, 1), (1, 3)):
                part = slice(offset, offset + length * step, step)
                with threads(number):
                    found += not torch.equal(
                        value_and_gradient(function, x[part], g[part]), whole[:, part]
                    )
    return found


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", NAMES)
def test_activation(name, dtype):
    assert elements_that_differ(FUNCTIONS[name], dtype) == 0


@pytest.mark.parametrize("name", ["silu", "gelu", "gelu_tanh", "sigmoid"])
def test_activations_of_torch_differ(name):
    assert elements_that_differ(TORCH[name]) > 0


@pytest.mark.parametrize("name", ["gelu", "gelu_tanh"])
def test_activations_of_torch_in_bf16_differ(name):
    assert elements_that_differ(TORCH[name], torch.bfloat16) > 0


@pytest.mark.parametrize("name", NAMES)
def test_activation_in_bf16_is_rounded_once(name):
    """Within half a unit in the last place of bf16, and fp32's rounding."""
    x = (normal(1000) * 4).bfloat16()
    got, want = FUNCTIONS[name](x), TORCH[name](x.double())
    assert ((got - want).abs() <= 2.0**-8 * want.abs() * 1.01 + 1e-6).all()


@pytest.mark.parametrize("name", NAMES)
def test_activation_is_right(name):
    """Against torch's in fp64; at the ends of the range, too."""
    x = torch.cat((normal(1000) * 4, torch.tensor([-200.0, -30.0, 0.0, 30.0, 200.0])))
    g = normal(1005, seed=1)
    want = value_and_gradient(TORCH[name], x.double(), g.double()).float()
    got = value_and_gradient(FUNCTIONS[name], x, g)
    torch.testing.assert_close(got, want, rtol=2e-6, atol=2e-6)


def columns_that_differ(function, x: torch.Tensor) -> int:
    whole = function(x)
    cuts = [(i, n) for n in (1, 3, 8, 16, 20, 33, 64) for i in (0, 1, 5, 32)]
    return sum(not torch.equal(function(x[:, i : i + n]), whole[i : i + n]) for i, n in cuts)


@pytest.mark.parametrize("leaf", [64, 25, 200])
def test_sum_over_tokens(leaf):
    """Of any columns; of any aligned run of leaves added beforehand."""
    x, sum_tokens = normal(8 * leaf, 96), partial(invariant.sum_tokens, leaf=leaf)
    assert columns_that_differ(sum_tokens, x) == 0
    for runs in (2, 4, 8):
        assert torch.equal(tree_sum(torch.stack([*map(sum_tokens, x.chunk(runs))])), sum_tokens(x))
    torch.testing.assert_close(sum_tokens(x), x.double().sum(0).float(), rtol=1e-5, atol=1e-5)


def test_sum_over_rows_of_torch_differs():
    assert columns_that_differ(lambda x: x.sum(0), normal(200, 96)) > 0


def test_sum_of_blocks():
    """Of any rows; of any aligned run of blocks."""
    x, whole = normal(70, 711).exp(), invariant.sum_blocks(normal(70, 711).exp(), 89)
    for rows in (slice(0, 1), slice(3, 20), slice(1, 70, 2)):
        assert torch.equal(invariant.sum_blocks(x[rows], 89), whole[rows])
    for ranks in (2, 4):
        runs = [invariant.sum_blocks(part, 89) for part in x.split(8 // ranks * 89, 1)]
        assert torch.equal(tree_sum(torch.stack(runs)), whole)
    torch.testing.assert_close(whole, x.double().sum(-1).float())


def test_weight_gradient():
    """Of any rows and columns of the weight; sequences added beforehand in aligned runs."""
    g, x, leaf = normal(8 * 100, 40), normal(8 * 100, 200, seed=1), 100
    whole = invariant.weight_gradient(g, x, leaf)
    for rows, columns in ((slice(0, 5), slice(0, 25)), (slice(20, 40), slice(50, 150))):
        part = invariant.weight_gradient(g[:, rows], x[:, columns], leaf)
        assert torch.equal(part, whole[rows, columns])
    for ranks in (2, 4, 8):
        runs = [
            invariant.weight_gradient(a, b, leaf)
            for a, b in zip(g.chunk(ranks), x.chunk(ranks), strict=True)
        ]
        assert torch.equal(tree_sum(torch.stack(runs)), whole)
    assert not torch.equal(g.t() @ x, whole)
    wide = (g.double().t() @ x.double()).float()
    torch.testing.assert_close(whole, wide, rtol=1e-4, atol=1e-4)


def test_sum_of_leaves():
    """Of any rows and columns of the weight; leaves added beforehand in aligned runs, zeros where
    there are no rows.
    """
    leaves = [7, 0, 30, 1, 0, 0, 16, 5]
    g, x = normal(sum(leaves), 40), normal(sum(leaves), 200, seed=1)
    whole, bias = (invariant.sum_leaves(g, factor, leaves) for factor in (x, None))
    part = invariant.sum_leaves(g[:, 20:40], x[:, 50:150], leaves)
    assert torch.equal(part, whole[20:40, 50:150])
    for ranks in (2, 4):
        runs = [leaves[i : i + 8 // ranks] for i in range(0, 8, 8 // ranks)]
        cuts = [sum(run) for run in runs]
        for factor, want in ((x, whole), (None, bias)):
            xs = [None] * ranks if factor is None else factor.split(cuts)
            sums = [
                invariant.sum_leaves(a, b, run)
                for a, b, run in zip(g.split(cuts), xs, runs, strict=True)
            ]
            zeros = torch.zeros_like(want)
            sums = torch.stack([zeros if one is None else one for one in sums])
            assert torch.equal(tree_sum(sums), want)
    torch.testing.assert_close(whole, (g.double().t() @ x.double()).float(), rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(bias, g.double().sum(0).float(), rtol=1e-5, atol=1e-5)
    assert invariant.sum_leaves(g[:0], x[:0], [0, 0, 0]) is None
    even, leaf = g[:56], 7
    dense = invariant.weight_gradient(even, x[:56], leaf)
    assert torch.equal(invariant.sum_leaves(even, x[:56], [leaf] * 8), dense)


def test_embedding():
    """Its gradient in aligned runs of sequences, and of some rows, other tokens masked."""
    tokens = torch.randint(50, (8 * 30,), generator=torch.Generator().manual_seed(0))
    weight, g = normal(50, 24).requires_grad_(), normal(240, 24, seed=1)

    def gradient(tokens, weight, g):
        weight = weight.detach().requires_grad_()
        y = invariant.embedding(tokens, weight, 30)
        assert torch.equal(y, weight[tokens])
        return torch.autograd.grad(y, weight, g)[0]

    whole = gradient(tokens, weight, g)
    runs = [gradient(*each) for each in zip(tokens.chunk(4), [weight] * 4, g.chunk(4), strict=True)]
    assert torch.equal(tree_sum(torch.stack(runs)), whole)
    mine = tokens < 20
    part = gradient(torch.where(mine, tokens, 0), weight[:20], g * mine[:, None])
    assert torch.equal(part, whole[:20])
    want = torch.zeros(50, 24).double().index_add_(0, tokens, g.double()).float()
    torch.testing.assert_close(whole, want, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("leaves", range(1, 8))
def test_tree_in_any_order(leaves):
    parts = normal(leaves, 5, 3)
    orders = list(permutations(range(leaves)))
    for order in orders[:: max(1, len(orders) // 50)]:
        tree = Tree(leaves)
        *before, total = [tree.add(i, parts[i].clone()) for i in order]
        assert all(one is None for one in before) and not tree.waiting
        assert total is not None and torch.equal(total, tree_sum(parts))
    if leaves > 3:
        assert not torch.equal(reduce(add, parts), tree_sum(parts))
    half, tree = parts.bfloat16(), Tree(leaves)
    *_, total = [tree.add(i, part) for i, part in enumerate(half.clone())]
    assert torch.equal(total.float(), tree_sum(half.float()))  # in fp32, not rounded


SUM_ROWS = partial(invariant.sum_tokens, leaf=25)


@pytest.mark.parametrize("number", [1, 3])
@pytest.mark.parametrize("parameters", [0, 1, 2])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_layer_norm(dtype, parameters, number):
    """Rows of any number, with a weight, a bias, or none; gradients of both in aligned runs of
    rows.
    """
    x, g, wb = (
        normal(*shape, seed=i).to(dtype) for i, shape in enumerate([(200, 96)] * 2 + [(2, 96)])
    )
    given = [p.requires_grad_() for p in wb[:parameters].unbind()]

    def run(x, g, function=layer_norm):
        x = x.detach().requires_grad_()
        for p in given:
            p.grad_dtype = torch.float32
        y = function(x, *given, *[None] * (2 - parameters), 1e-5, SUM_ROWS)
        y.backward(g)
        found = [y.detach(), x.grad, *(p.grad for p in given)]
        for p in given:
            p.grad = None
        return found

    with threads(number):
        y, dx, *dps = run(x, g)
        for ranks in (2, 8):
            ys, dxs, *parts = zip(*map(run, x.chunk(ranks), g.chunk(ranks)), strict=True)
            assert torch.equal(torch.cat(ys), y) and torch.equal(torch.cat(dxs), dx)
            for part, whole in zip(parts, dps, strict=True):
                assert torch.equal(tree_sum(torch.stack(part)), whole)
    wide = x.detach().double().requires_grad_()
    double = [p.detach().double().requires_grad_() for p in given]
    want = F.layer_norm(wide, (96,), *double, eps=1e-5)
    grads = torch.autograd.grad(want, (wide, *double), g.double())
    near = {"rtol": 1e-2, "atol": 1e-2} if dtype == torch.bfloat16 else {"rtol": 1e-4, "atol": 1e-5}
    for got, right in zip([y, dx, *dps], [want, *grads], strict=True):
        torch.testing.assert_close(got.double(), right.double(), **near)


def test_bias():
    """Its gradient in aligned runs of tokens."""
    y, g, bias = normal(200, 40), normal(200, 40, seed=1), normal(40, seed=2).requires_grad_()

    def gradient(y, g):
        out = invariant.add_bias(y, bias, 25)
        assert torch.equal(out, y + bias)
        return torch.autograd.grad(out, bias, g)[0]

    whole = gradient(y, g)
    for ranks in (2, 4, 8):
        runs = [gradient(*each) for each in zip(y.chunk(ranks), g.chunk(ranks), strict=True)]
        assert torch.equal(tree_sum(torch.stack(runs)), whole)
    torch.testing.assert_close(whole, g.double().sum(0).float(), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("number", [1, 3])
def test_norm(number):
    """Rows of any number, and the weight's gradient in aligned runs of them."""
    x, g, w = normal(8 * 25, 96), normal(200, 96, seed=1), normal(96, seed=2).requires_grad_()

    def run(x, g):
        x = x.detach().requires_grad_()
        y = rms_norm(x, w, 1e-5, sum_rows=SUM_ROWS)
        return y, *torch.autograd.grad(y, (x, w), g)

    with threads(number):
        y, dx, dw = run(x, g)
        for ranks in (2, 8):
            ys, dxs, dws = zip(*map(run, x.chunk(ranks), g.chunk(ranks)), strict=True)
            assert torch.equal(torch.cat(ys), y) and torch.equal(torch.cat(dxs), dx)
            assert torch.equal(tree_sum(torch.stack(dws)), dw)
    torch.testing.assert_close(dw, torch.autograd.grad(rms_norm(x, w, 1e-5), w, g)[0])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("number", [1, 2])
@pytest.mark.parametrize("length", [40, 200])
def test_attention(number, length, dtype):
    """A sequence and a key-value head by themselves have the bits of all together."""
    q, k, v, g = (
        normal(2, length, heads, 32, seed=i).to(dtype) for i, heads in enumerate((8, 4, 4, 8))
    )

    def run(q, k, v, g):
        q, k, v = (t.detach().requires_grad_() for t in (q, k, v))
        y = blockwise.attention(q, k, v, Attend())
        return y, *torch.autograd.grad(y, (q, k, v), g)

    with threads(number):
        whole = run(q, k, v, g)
        for batch, head in ((0, 0), (1, 2), (1, 3)):
            cut = [
                t[batch : batch + 1, :, head * n : (head + 1) * n]
                for t, n in zip((q, k, v, g), (2, 1, 1, 2), strict=True)
            ]
            for own, of_all, n in zip(run(*cut), whole, (2, 2, 1, 1), strict=True):
                part = of_all[batch : batch + 1, :, head * n : (head + 1) * n]
                assert torch.equal(own, part)


def test_update_of_a_shard():
    """AdamW in torch's foreach form, of any shard; its fused form differs."""

    def update(p, g, foreach):
        p = torch.nn.Parameter(p.clone())
        optimizer = torch.optim.AdamW([p], lr=1e-2, foreach=foreach, fused=not foreach)
        for scale in (1.0, 0.3):
            p.grad = g * scale
            optimizer.step()
        return torch.stack(
            (p.detach(), *(optimizer.state[p][k] for k in ("exp_avg", "exp_avg_sq")))
        )

    p, g = normal(600), normal(600, seed=1)
    for foreach in (True, False):
        whole = update(p, g, foreach)
        parts = [slice(i, i + n) for n in (1, 5, 13, 37, 101) for i in (0, 3, 64)]
        same = [torch.equal(update(p[s], g[s], foreach), whole[:, s]) for s in parts]
        assert all(same) if foreach else not all(same)
