"""Elements allocated by a column-parallel and a row-parallel product and their collectives, forward
and backward, on rank 0 of a fake process group of 4, against what the products and the messages
are. Nothing is copied for a collective.
"""

import pytest
import torch
import torch.distributed as dist
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from dolmen.core import mesh as meshes
from dolmen.ops.kernels import Kernels
from dolmen.parallel import tensor
from dolmen.parallel.loss import linear_cross_entropy
from dolmen.parallel.tensor import TensorParallel

TP, TOKENS, HIDDEN, FFN = 4, 8, 16, 32


@pytest.fixture(scope="module", autouse=True)
def world():
    meshes.fake(TP, 0)
    yield
    dist.destroy_process_group()


class Allocated(TorchDispatchMode):
    """Elements of the storages that operators have made."""

    def __init__(self):
        super().__init__()
        self.known, self.elements = [], 0

    def __torch_dispatch__(self, op, types, args=(), kwargs=None):
        given = [t for t in tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor)]
        self.known += [t.untyped_storage() for t in given]
        before = {s._cdata for s in self.known}
        out = op(*args, **(kwargs or {}))
        for t in tree_leaves(out):
            if not isinstance(t, torch.Tensor) or isinstance(t, AsyncCollectiveTensor):
                continue  # the latter holds one that was seen
            if t.untyped_storage()._cdata not in before:
                self.elements += t.untyped_storage().nbytes() // t.itemsize
                self.known.append(t.untyped_storage())  # no other storage takes its place
        return out

    def take(self) -> int:
        elements, self.elements = self.elements, 0
        return elements


@pytest.mark.parametrize("sequence", (False, True))
@pytest.mark.parametrize("bias", (False, True))
def test_a_pair_of_products_allocates_what_they_are(sequence, bias):
    """Forward: the two products, and under sequence parallelism what is gathered and scattered.
    Backward: two gradients of inputs and two of weights, and the same messages, x gathered again.
    """
    tp = TensorParallel(meshes.grid(1, TP, torch.device("cpu")).tp, sequence)
    rows, part = TOKENS // TP if sequence else TOKENS, FFN // TP
    x = torch.randn(rows, HIDDEN, requires_grad=True)
    up, down = (torch.randn(s, requires_grad=True) for s in ((part, HIDDEN), (HIDDEN, part)))
    b = torch.randn(part, requires_grad=True) if bias else None
    g = torch.randn(rows, HIDDEN)
    whole, local, weight = TOKENS * HIDDEN, TOKENS * part, HIDDEN * part
    with Allocated() as mode:
        y = tensor.rows(tensor.columns(x, [up], [b], tp)[0], down, tp)
        scattered = whole // TP
        assert mode.take() == local + whole + sequence * (whole + scattered)
        torch.autograd.backward(y, g)
    assert mode.take() == (
        whole + local + 2 * weight + bias * part + sequence * (2 * whole + scattered)
    )


def test_the_heads_gradient_is_summed_where_it_was_made():
    """Backward of the loss scales two gradients, of the input and of the weight; their sum over tp
    is no third.
    """
    tp = TensorParallel(meshes.grid(1, TP, torch.device("cpu")).tp)
    x, w = torch.randn(TOKENS, HIDDEN, requires_grad=True), torch.randn(5, HIDDEN).requires_grad_()
    loss = linear_cross_entropy(
        x, w, torch.zeros(TOKENS, dtype=torch.long), 20, tp, False, Kernels().logits_at_once
    )
    with Allocated() as mode:
        torch.autograd.backward(loss, torch.tensor(1.0))
    assert mode.take() == x.numel() + w.numel()


def test_a_sum_in_place_is_the_sum_for_autograd_too():
    """What a product gave is overwritten before anything reads it: its gradient is as without."""
    tp = TensorParallel(meshes.grid(1, TP, torch.device("cpu")).tp)
    x = torch.randn(TOKENS, HIDDEN, requires_grad=True)
    y = x * 3
    out = tp.leave(y)
    assert out is y and type(out.grad_fn).__name__.startswith("_AllReduceInPlace")
    (out * torch.arange(HIDDEN)).sum().backward()
    assert torch.equal(x.grad, (3.0 * torch.arange(HIDDEN)).expand(TOKENS, HIDDEN))
    kept = x.exp()  # its gradient is itself: torch refuses, and does not compute something else
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        tp.leave(kept).sum().backward()
