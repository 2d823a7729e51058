"""Norm, rope and the loss against their definitions in float64."""

import math
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from dolmen.core.mesh import SINGLE
from dolmen.core.torch_private import compute
from dolmen.model.spec.positions import yarn_temperature
from dolmen.ops import rope
from dolmen.ops.loss import IGNORED, exponentials
from dolmen.ops.loss import gradient as loss_gradient
from dolmen.ops.norm import rms_norm
from dolmen.parallel import vocabulary
from dolmen.parallel.log_probabilities import log_probabilities
from dolmen.parallel.tensor import Linear, TensorParallel, products


def normal(*shape, dtype=torch.float64):
    return (
        torch.randn(
            *shape, generator=torch.Generator().manual_seed(sum(shape)), dtype=torch.float64
        )
        .to(dtype)
        .requires_grad_()
    )


# float64: the order of sums. bf16: the result is rounded twice (before and after the weight), 2^-9
# each
@pytest.mark.parametrize(
    "dtype, tolerance",
    [(torch.float64, 1e-14), (torch.float32, 1e-6), (torch.bfloat16, 8e-3)],
    ids=["64", "32", "16"],
)
def test_rms_norm(dtype, tolerance):
    x, w = normal(5, 33, dtype=dtype), normal(33, dtype=dtype)
    want = x.double() / (x.double().square().mean(-1, keepdim=True) + 1e-5).sqrt() * w.double()
    torch.testing.assert_close(rms_norm(x, w, 1e-5).double(), want, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("zero_centred", [False, True])
def test_a_frozen_norm_computes_no_gradient_of_its_weight(zero_centred):
    """Nothing of the weight's shape is made in backward."""
    made = {}
    for trained in (True, False):
        x, w = normal(3, 5, 7), normal(7).requires_grad_(trained)
        y = rms_norm(x, w, 1e-5, zero_centred=zero_centred)
        with Shapes() as shapes:
            y.backward(torch.ones_like(y))
        made[trained] = shapes.made.count((7,))
        assert (w.grad is not None) == trained and x.grad is not None
    # one plus the weight, where it is stored less 1
    assert made[True] > made[False] == int(zero_centred)


class Shapes(TorchDispatchMode):
    """Of what operators have made."""

    def __init__(self):
        super().__init__()
        self.made: list[tuple[int, ...]] = []

    def __torch_dispatch__(self, op, types, args=(), kwargs=None):
        out = op(*args, **(kwargs or {}))
        self.made += [tuple(t.shape) for t in tree_leaves(out) if isinstance(t, torch.Tensor)]
        return out


def test_rms_norm_gradient():
    torch.autograd.gradcheck(lambda x, w: rms_norm(x, w, 1e-5), (normal(3, 7), normal(7)))


def test_a_zero_centred_norm():
    """Its weight is one more than what is stored, in fp32: bf16 has no number between 1 and
    1.0078.
    """
    x, w = normal(3, 7), normal(7)
    norm = partial(rms_norm, eps=1e-5, zero_centred=True)
    torch.testing.assert_close(norm(x, w), rms_norm(x, w + 1, 1e-5), rtol=0, atol=1e-15)
    torch.autograd.gradcheck(norm, (x, w))
    half = normal(64, 16, dtype=torch.bfloat16)
    small = torch.full((16,), 0.003, dtype=torch.bfloat16)
    assert torch.equal(
        norm(half, small), rms_norm(half.float(), small.float() + 1, 1e-5).bfloat16()
    )
    assert not torch.equal(norm(half, small), norm(half, torch.zeros_like(small)))


@pytest.mark.parametrize("zero_centred", [False, True])
def test_the_norm_that_the_compiler_traces_is_the_same(zero_centred, monkeypatch):
    inputs = normal(5, 7), normal(7)

    def found():
        y = rms_norm(*inputs, 1e-5, zero_centred=zero_centred)
        return [y, *torch.autograd.grad(y.square().sum(), inputs)]

    want = found()
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)
    torch.testing.assert_close(found(), want, rtol=1e-12, atol=1e-12)


def test_rms_norm_in_half_precision_is_rounded_twice():
    """Before and after the weight, and nowhere else: but for ties of rounding, one element in a
    thousand, the bits are known. Of the gradient its input is rounded, and the weight's terms.
    """
    x, w = normal(256, 64, dtype=torch.bfloat16), normal(64, dtype=torch.bfloat16)
    y, g = rms_norm(x, w, 1e-5), normal(256, 64, dtype=torch.bfloat16)
    wide, weight = (t.detach().double().requires_grad_() for t in (x, w))
    exact = wide / (wide.square().mean(-1, keepdim=True) + 1e-5).sqrt()
    assert float((y == exact.bfloat16() * w).double().mean()) > 0.998
    got = torch.autograd.grad(y, x, g)[0].double()
    (want,) = torch.autograd.grad(exact * weight, wide, g.double())
    assert (got - want).norm() < 3e-3 * want.norm()  # 2.3e-3: g w and the result are rounded


@pytest.fixture
def fused_backward(monkeypatch):
    """torch has the fused backward for GPUs alone; its definition runs anywhere. What was asked of
    it is noted.
    """
    op, requested = torch.ops.aten._fused_rms_norm_backward, []
    definition = torch._decomp.decomposition_table[op.default]

    def called(*args):
        requested.append([a.dtype for a in args if isinstance(a, torch.Tensor)])
        return definition(*args)

    monkeypatch.setattr(compute, "rms_norm_backward", called)
    return requested


@pytest.mark.parametrize(
    "dtype, tolerance",
    [(torch.float64, 1e-13), (torch.float32, 1e-5), (torch.bfloat16, 3e-3)],
    ids=["64", "32", "16"],
)
def test_the_fused_norm_is_the_same(dtype, tolerance, fused_backward):
    """Forward bit for bit: it is rounded before the weight and after it. Backward against fp64, of
    which bf16 rounds the results alone (2^-9).
    """
    x, w, g = normal(64, 33, dtype=dtype), normal(33, dtype=dtype), normal(64, 33, dtype=dtype)
    y = rms_norm(x, w, 1e-5, "fused")
    if dtype == torch.bfloat16:
        assert torch.equal(y, rms_norm(x, w, 1e-5, "passes"))
    wide = [t.detach().double().requires_grad_() for t in (x, w)]
    want = rms_norm(*wide, 1e-5, "passes")
    assert (y.double() - want).norm() < tolerance * want.norm()
    got, exact = torch.autograd.grad(y, (x, w), g), torch.autograd.grad(want, wide, g.double())
    for a, b in zip(got, exact, strict=True):
        assert a.dtype == dtype and (a.double() - b).norm() < tolerance * b.norm()
    scale = torch.promote_types(dtype, torch.float32)
    assert fused_backward == [[dtype, dtype, scale, dtype]]  # g, x, one number per row, the weight


def test_a_weight_of_another_dtype_takes_no_fused_norm(fused_backward):
    """torch's kernel would read it as x's."""
    x, w = normal(4, 8, dtype=torch.bfloat16), normal(8)
    rms_norm(x, w, 1e-5, "fused").sum().backward()
    assert fused_backward == [] and w.grad is not None


def test_slices_of_the_vocabulary_make_the_whole():
    """Slices of 5, 5 and 2 of 12, as three ranks would hold them: losses and their gradient."""
    logits, labels = normal(9, 12), torch.tensor([0, 4, 5, 9, 10, 11, IGNORED, 3, IGNORED])
    want = F.cross_entropy(logits, labels, ignore_index=IGNORED, reduction="none")
    (gradient,) = torch.autograd.grad(want.sum(), logits)
    pieces = list(zip((0, 5, 10), logits.detach().split(5, 1), strict=True))
    maximum = logits.detach().amax(-1)
    parts = [exponentials(z.clone(), maximum, labels, first) for first, z in pieces]
    total, target = (sum(part[i] for part in parts) for i in (1, 2))
    losses = torch.where(labels == IGNORED, 0.0, total.log() - target)
    torch.testing.assert_close(losses, want.detach(), rtol=1e-12, atol=1e-12)
    found = [
        loss_gradient(e, total, labels, first, torch.float64)
        for (first, _), (e, _, _) in zip(pieces, parts, strict=True)
    ]
    torch.testing.assert_close(torch.cat(found, 1), gradient, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("sizes", [(6, 3, 4), (1, 2)])
def test_weight_gradients_of_turned_factors(sizes):
    """Products wider together than their input, and narrower: turned or not, with the same
    gradients, in the order of the weights.
    """
    x, weights = normal(9, 4), [normal(size, 4) for size in sizes]
    found = {}
    for turned in (False, True):
        tp = TensorParallel(SINGLE.tp, turned=turned)
        total = sum(y.square().sum() for y in products(x, [Linear(w) for w in weights], tp))
        found[turned] = torch.autograd.grad(total, (x, *weights))
    for a, b in zip(found[True], found[False], strict=True):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)


def test_the_heads_gradient_lies_as_its_weight():
    """Also where it was added up turned: what takes it copies it row by row."""
    x, weight, labels = normal(5, 4), normal(9, 4), torch.arange(5)
    tp = TensorParallel(SINGLE.tp, turned=True)
    total = vocabulary.linear_cross_entropy(x, weight, labels, 9, tp)
    (gradient,) = torch.autograd.grad(total, weight)
    assert gradient.is_contiguous()


def test_rope_is_a_rotation_by_position():
    """As complex numbers, pair i of the token at position p is multiplied by exp(i p theta^(-2i /
    d)).
    """
    x = normal(2, 9, 3, 16, dtype=torch.float32)
    positions = torch.arange(40, 49)[None]
    cos, sin = rope.tables(positions, rope.inverse_frequencies(16, 10000.0))
    z = torch.complex(x.double()[..., :8], x.double()[..., 8:])
    angle = torch.arange(40, 49, dtype=torch.float64)[:, None, None] * 10000.0 ** (
        -torch.arange(8, dtype=torch.float64) / 8
    )
    want = z * torch.polar(torch.ones_like(angle), angle)
    got = rope.rotate(x, cos, sin).double()
    # an angle up to 48 in fp32 is known to 48 * 2^-24 = 3e-6
    torch.testing.assert_close(
        torch.complex(got[..., :8], got[..., 8:]), want, rtol=1e-5, atol=1e-5
    )


def test_interleaved_rope_of_a_part_of_the_head():
    """Neighbours are a pair, 2 i and 2 i + 1; dims after the rotated part stay as they are."""
    x = normal(2, 9, 3, 16)
    positions = torch.arange(9)
    inv = rope.inverse_frequencies(12, 10000.0, dtype=torch.float64)
    got = rope.rotate(x, *rope.tables(positions[None], inv), interleaved=True)
    z = torch.view_as_complex(x[..., :12].unflatten(-1, (6, 2)))
    angle = positions[:, None, None] * 10000.0 ** (-torch.arange(6, dtype=torch.float64) / 6)
    want = torch.view_as_real(z * torch.polar(torch.ones_like(angle), angle)).flatten(-2)
    torch.testing.assert_close(got[..., :12], want, rtol=1e-12, atol=1e-12)
    assert torch.equal(got[..., 12:], x[..., 12:])


@pytest.mark.parametrize("truncate", [True, False])
@pytest.mark.parametrize("factor", [4.0, 40.0])
def test_yarn_is_that_of_transformers(truncate, factor):
    from transformers import LlamaConfig
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    parameters = dict(
        rope_type="yarn",
        rope_theta=10000.0,
        factor=factor,
        original_max_position_embeddings=4096,
        beta_fast=32.0,
        beta_slow=1.0,
        truncate=truncate,
    )
    config = LlamaConfig(
        head_dim=64, max_position_embeddings=int(factor * 4096), rope_parameters=parameters
    )
    want, times = ROPE_INIT_FUNCTIONS["yarn"](config, "cpu")
    got = rope.yarn(rope.inverse_frequencies(64, 10000.0), 10000.0, factor, 4096, truncate=truncate)
    # theirs are 1 / (factor * theta^..), ours inv / factor: two roundings
    torch.testing.assert_close(got, want, rtol=3e-7, atol=0)
    assert yarn_temperature(factor) == pytest.approx(times, rel=1e-15)


def test_yarn_keeps_what_turns_fast_and_divides_what_turns_slowly():
    """By its definition: how often each pair turns in the original context."""
    inv = rope.inverse_frequencies(64, 10000.0, dtype=torch.float64)
    got = rope.yarn(inv, 10000.0, 8.0, 4096, truncate=False)
    turns = 4096 * inv / (2 * torch.pi)
    assert torch.equal(got[turns > 32], inv[turns > 32]) and (turns > 32).any()
    torch.testing.assert_close(got[turns < 1], inv[turns < 1] / 8, rtol=1e-15, atol=0)
    between = (turns < 32) & (turns > 1)
    assert (got[between] < inv[between]).all() and (got[between] > inv[between] / 8).all()


CASES = [
    (torch.float64, 1e-12, False),
    (torch.float32, 1e-5, False),
    (torch.bfloat16, 1e-2, False),
    pytest.param(torch.bfloat16, 1e-2, True, marks=pytest.mark.spawn),  # the C++ compiler
]


@pytest.mark.parametrize("soft_cap", (None, 2.0))
@pytest.mark.parametrize("dtype, tolerance, compile", CASES, ids=["64", "32", "16", "16-compiled"])
def test_linear_cross_entropy(dtype, tolerance, compile, soft_cap):
    """Chunks that do not divide the tokens, ignored labels; bf16 rounds logits and their gradient
    to 8 bits. Logits are 5 or so, which a soft cap of 2 feels.
    """
    x, w = normal(20, 24, dtype=dtype), normal(50, 24, dtype=dtype)
    labels = torch.arange(20) % 50
    labels[[0, 11]] = IGNORED
    tp = TensorParallel(SINGLE.tp)
    got = vocabulary.linear_cross_entropy(x, w, labels, 50, tp, compile, 7 * 50, soft_cap)
    wide = [t.detach().double().requires_grad_() for t in (x, w)]
    logits = F.linear(*wide)
    if soft_cap is not None:
        logits = soft_cap * torch.tanh(logits / soft_cap)
    want = F.cross_entropy(logits, labels, ignore_index=IGNORED, reduction="sum")
    assert math.isclose(got.item(), want.item(), rel_tol=tolerance)
    for a, b in zip(
        torch.autograd.grad(got * 0.3, (x, w)), torch.autograd.grad(want * 0.3, wide), strict=True
    ):
        assert (a.double() - b).norm() <= tolerance * b.norm()


def test_soft_capped_loss_by_differences():
    """Of logits far below the cap, about it and far above: the slope of the last is nearly 0."""
    labels = torch.tensor([0, 4, IGNORED])
    tp = TensorParallel(SINGLE.tp)
    for scale in (0.1, 1.0, 8.0):
        torch.autograd.gradcheck(
            lambda x, w, scale=scale: vocabulary.linear_cross_entropy(
                x * scale, w, labels, 5, tp, soft_cap=3.0
            ),
            (normal(3, 7), normal(5, 7)),
        )


@pytest.mark.parametrize(
    "dtype, tolerance",
    [(torch.float64, 1e-14), (torch.float32, 2e-6), (torch.bfloat16, 1e-2)],
    ids=["64", "32", "16"],
)
@pytest.mark.parametrize("soft_cap", [None, 2.0])
def test_log_probabilities(dtype, tolerance, soft_cap):
    """Of each token, and their gradient by a number of its own; chunks that do not divide them."""
    x, w, g = normal(20, 24, dtype=dtype), normal(50, 24, dtype=dtype), normal(20).detach()
    labels = torch.arange(20) % 50
    labels[[0, 11]] = IGNORED
    found = log_probabilities(x, w, labels, 50, TensorParallel(SINGLE.tp), 7 * 50, soft_cap)
    wide = [t.detach().double().requires_grad_() for t in (x, w)]
    logits = F.linear(*wide)
    if soft_cap is not None:
        logits = soft_cap * torch.tanh(logits / soft_cap)
    want = -F.cross_entropy(logits, labels, ignore_index=IGNORED, reduction="none")
    assert found.dtype == torch.promote_types(dtype, torch.float32)
    assert (found.double() - want).norm() <= tolerance * want.norm()
    got = torch.autograd.grad(found, (x, w), g.to(found.dtype))
    for a, b in zip(got, torch.autograd.grad(want, wide, g), strict=True):
        assert (a.double() - b).norm() <= tolerance * b.norm()


@pytest.mark.parametrize("soft_cap", [None, 2.0])
def test_biased_logits(soft_cap):
    """Both roads, against the sum over [tokens, vocabulary]; chunks that do not divide the
    tokens.
    """
    x, w, b = normal(20, 24), normal(50, 24), normal(50)
    labels, tp = torch.arange(20) % 50, TensorParallel(SINGLE.tp)
    labels[[0, 11]] = IGNORED
    logits = F.linear(x, w, b)
    if soft_cap is not None:
        logits = soft_cap * torch.tanh(logits / soft_cap)
    want = F.cross_entropy(logits, labels, ignore_index=IGNORED, reduction="sum")
    wanted = want, *torch.autograd.grad(want * 0.3, (x, w, b))
    total = vocabulary.linear_cross_entropy(x, w, labels, 50, tp, False, 350, soft_cap, bias=b)
    each = log_probabilities(x, w, labels, 50, tp, 350, soft_cap, b)
    for got in (total, -each.sum()):
        found = got, *torch.autograd.grad(got * 0.3, (x, w, b))
        for one, other in zip(found, wanted, strict=True):
            assert (one - other).norm() <= 1e-13 * other.norm()


@pytest.mark.parametrize("soft_cap", [None, 2.0])
def test_weighted_cross_entropy(soft_cap):
    """The sum of weights times losses; where a weight is 0, as where a label is IGNORED."""
    x, w, weights = normal(20, 24), normal(50, 24), normal(20).detach().abs()
    weights[[3, 7]] = 0
    labels, tp = torch.arange(20) % 50, TensorParallel(SINGLE.tp)

    def gradients(labels, weights):
        total = vocabulary.linear_cross_entropy(x, w, labels, 50, tp, False, 350, soft_cap, weights)
        return total, *torch.autograd.grad(total * 0.3, (x, w))

    each = -log_probabilities(x, w, labels, 50, tp, soft_cap=soft_cap)
    want = (each * weights).sum()
    wanted = want, *torch.autograd.grad(want * 0.3, (x, w))
    got = gradients(labels, weights)
    for a, b in zip(got, wanted, strict=True):
        assert (a - b).norm() <= 1e-14 * b.norm()
    labels[[3, 7]] = IGNORED
    weights[[3, 7]] = 5
    for a, b in zip(got, gradients(labels, weights), strict=True):
        assert torch.equal(a, b)
