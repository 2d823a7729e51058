"""Exact sums: the same bits in any order, of any distribution, and the right sum."""

import math

import pytest
import torch
from torch import nn

from dolmen.core.mesh import SINGLE
from dolmen.core.reduction import tree_sum
from dolmen.ops.numerics import Exact
from dolmen.parallel import exact


def orders(x: torch.Tensor, number: int = 50):
    seeded = torch.Generator().manual_seed(0)
    for _ in range(number):
        yield x[torch.randperm(len(x), generator=seeded)]


# squares of numbers whose magnitudes are spread over so many powers of e
@pytest.mark.parametrize("spread", [0, 3, 12])
def test_a_sum_of_any_order(spread):
    seeded = torch.Generator().manual_seed(0)
    x = torch.randn(5000, generator=seeded) * torch.exp(
        spread * torch.randn(5000, generator=seeded)
    )
    x = x.square().double() * math.pi  # more bits than squares of fp32
    sums = {exact.exact_sum(part, SINGLE).item() for part in orders(x)}
    assert sums == {exact.exact_sum(x, SINGLE).item()}
    assert sums.pop() == pytest.approx(math.fsum(x.tolist()), rel=1e-12)
    assert len({part.sum().item() for part in orders(x)}) > 1  # else this would prove little


@pytest.mark.parametrize("value", [0.0, 1.0, 3e-38, 2.0**-140, 3e38, math.inf, math.nan])
def test_a_sum_of_one(value):
    found = exact.exact_sum(torch.tensor([0.0, value], dtype=torch.float64), SINGLE).item()
    if math.isfinite(value):
        assert found == pytest.approx(value, rel=2**-50)
    else:
        assert not math.isfinite(found)


def test_a_norm():
    """Of matrices and vectors, against fp64."""
    p, q = nn.Parameter(torch.zeros(30, 16)), nn.Parameter(torch.zeros(7))
    frozen = nn.Parameter(torch.zeros(3))
    for one in (p, q):
        one.grad = torch.randn(one.shape, generator=torch.Generator().manual_seed(0))
    grads = [one.grad.double() for one in (p, q) if one.grad is not None]
    want = math.sqrt(sum(float(g.square().sum()) for g in grads))
    found = exact.gradient_norm([p, q, frozen], SINGLE, Exact(4, 8)).item()
    assert found == pytest.approx(want, rel=1e-6)


def test_losses_are_added_in_any_order():
    losses = torch.rand(20000, generator=torch.Generator().manual_seed(0)) * 12
    rounded = exact.round_losses(losses)
    assert float((rounded - losses).abs().max()) <= 2**-27
    assert {part.sum().item() for part in orders(rounded)} == {rounded.sum().item()}
    assert rounded.sum().item() == math.fsum(rounded.tolist())
    # in fp32 sums have other bits
    assert len({part.sum().item() for part in orders(losses)}) > 1


def test_gradients_of_what_all_heads_share():
    """Over leaves of three heads each, as up to four ranks have them."""
    key = torch.zeros(2, 5, 1, 7, requires_grad=True)
    g = torch.randn(2, 5, 12, 7, generator=torch.Generator().manual_seed(0))
    exact.expand_heads(key, 12, Exact(4, 5), SINGLE.tp).backward(g)
    leaves = [tree_sum(leaf.movedim(2, 0)) for leaf in g.chunk(4, 2)]
    assert key.grad is not None and torch.equal(key.grad[:, :, 0], tree_sum(torch.stack(leaves)))
    assert not torch.equal(key.grad[:, :, 0], tree_sum(g.movedim(2, 0)))


def test_gradients_of_what_all_tokens_share():
    """Over the tokens of a sequence, then over sequences."""
    sinks = torch.zeros(3, requires_grad=True)
    g = torch.randn(4, 7, 3, generator=torch.Generator().manual_seed(0))
    exact.expand_tokens(sinks, 4, 7, Exact(1, 7)).backward(g)
    sequences = torch.stack([tree_sum(tokens) for tokens in g])
    assert sinks.grad is not None and torch.equal(sinks.grad, tree_sum(sequences))
    assert not torch.equal(sinks.grad, tree_sum(g.flatten(0, 1)))
