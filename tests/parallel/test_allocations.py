"""Elements allocated by a column-parallel and a row-parallel product and their collectives, forward
and backward, on rank 0 of a fake process group of 4, against what the products and the messages
are. Nothing is copied for a collective.
"""

import pytest
import torch
import torch.distributed as dist
from fakes import join_fake
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from dolmen.core import mesh as meshes
from dolmen.ops.kernels import Kernels
from dolmen.parallel import tensor, vocabulary
from dolmen.parallel.log_probabilities import log_probabilities
from dolmen.parallel.tensor import Deferred, Linear, TensorParallel
from dolmen.parallel.vocabulary import linear_cross_entropy

TP, TOKENS, HIDDEN, FFN = 4, 8, 16, 32
PRODUCTS = (torch.ops.aten.mm, torch.ops.aten.addmm, torch.ops.aten.addmm_)


@pytest.fixture(scope="module", autouse=True)
def world():
    join_fake(TP, 0)
    yield
    dist.destroy_process_group()


class Allocated(TorchDispatchMode):
    """Elements of the storages that operators have made, and multiplications of their products."""

    def __init__(self):
        super().__init__()
        self.known, self.elements, self.multiplications = [], 0, 0

    def __torch_dispatch__(self, op, types, args=(), kwargs=None):
        given = [t for t in tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor)]
        self.known += [t.untyped_storage() for t in given]
        before = {s._cdata for s in self.known}
        out = op(*args, **(kwargs or {}))
        if op.overloadpacket in PRODUCTS:
            a, b = args[-2:]
            self.multiplications += a.shape[0] * a.shape[1] * b.shape[1]
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
    tp = TensorParallel(meshes.build_mesh(1, TP, torch.device("cpu")).tp, sequence)
    rows, part = TOKENS // TP if sequence else TOKENS, FFN // TP
    x = torch.randn(rows, HIDDEN, requires_grad=True)
    up, down = (torch.randn(s, requires_grad=True) for s in ((part, HIDDEN), (HIDDEN, part)))
    b = torch.randn(part, requires_grad=True) if bias else None
    g = torch.randn(rows, HIDDEN)
    whole, local, weight = TOKENS * HIDDEN, TOKENS * part, HIDDEN * part
    with Allocated() as mode:
        y = tensor.rows(tensor.columns(x, [Linear(up, b)], tp), [Linear(down)], tp)
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
    tp = TensorParallel(meshes.build_mesh(1, TP, torch.device("cpu")).tp)
    x, w = torch.randn(TOKENS, HIDDEN, requires_grad=True), torch.randn(5, HIDDEN).requires_grad_()
    total = linear_cross_entropy(
        x, w, torch.zeros(TOKENS, dtype=torch.long), 20, tp, False, Kernels().logits_at_once
    )
    with Allocated() as mode:
        torch.autograd.backward(total, torch.tensor(1.0))
    assert mode.take() == x.numel() + w.numel()


FROZEN = {
    "nothing": (True, (True, True)),
    "a weight": (True, (True, False)),
    "the first weight": (True, (False, True)),
    "the weights": (True, (False, False)),
    "the input": (False, (True, True)),
    "all but a weight": (False, (False, True)),
}


@pytest.mark.parametrize("sequence", (False, True))
@pytest.mark.parametrize("frozen", FROZEN)
def test_what_is_frozen_costs_nothing(frozen, sequence):
    """Backward of two products of one input, here with biases that train: a product and a gradient
    for x if it trains, and the sum of it over tp; a product and a gradient for each weight that
    does, and under sequence parallelism x gathered for any.
    """
    tp = TensorParallel(meshes.build_mesh(1, TP, torch.device("cpu")).tp, sequence)
    x_trains, trains = FROZEN[frozen]
    rows, part = TOKENS // TP if sequence else TOKENS, FFN // TP
    x = torch.randn(rows, HIDDEN, requires_grad=x_trains)
    weights = [torch.randn(part, HIDDEN, requires_grad=t) for t in trains]
    biases = [torch.randn(part, requires_grad=True) for _ in trains]
    linears = [Linear(w, b) for w, b in zip(weights, biases, strict=True)]
    out, g = tensor.columns(x, linears, tp), torch.ones(TOKENS, part)
    with Allocated() as mode:
        torch.autograd.backward(out, [g, g])
    whole, weight = TOKENS * HIDDEN, HIDDEN * part
    made = x_trains * (whole + sequence * whole // TP) + any(trains) * sequence * whole
    assert mode.take() == made + sum(trains) * weight + 2 * part
    assert mode.multiplications == (2 * x_trains + sum(trains)) * whole * part
    assert [w.grad is not None for w in weights] == list(trains)
    assert (x.grad is not None) == x_trains


@pytest.mark.parametrize("trains", (True, False))
def test_what_is_frozen_is_not_kept_for(trains):
    """x is kept for the gradients of weights alone."""
    tp = TensorParallel(meshes.build_mesh(1, TP, torch.device("cpu")).tp)
    x = torch.randn(TOKENS, HIDDEN, requires_grad=True)
    w = torch.randn(FFN // TP, HIDDEN, requires_grad=trains)
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t.shape) or t, lambda t: t):
        tensor.columns(x, [Linear(w)], tp)
    assert kept == ([x.shape, w.shape] if trains else [w.shape])


def test_a_frozen_weight_is_not_left_for_later():
    """Of two products whose gradients a schedule leaves, that of the frozen one is not computed."""
    later = Deferred()
    tp = TensorParallel(meshes.build_mesh(1, TP, torch.device("cpu")).tp, later=later)
    x = torch.randn(TOKENS, HIDDEN, requires_grad=True)
    weights = [torch.randn(FFN // TP, HIDDEN, requires_grad=t) for t in (False, True)]
    out = tensor.columns(x, [Linear(w) for w in weights], tp)
    torch.autograd.backward(out, [torch.ones(TOKENS, FFN // TP)] * 2)
    assert weights[1].grad is None
    (product,) = later.take()
    with Allocated() as mode:
        product()
    assert weights[0].grad is None
    assert torch.equal(weights[1].grad, torch.ones(FFN // TP, TOKENS) @ x)
    assert mode.take() == 2 * weights[1].numel()  # autograd keeps a copy of what it is given


def test_a_frozen_head_costs_nothing():
    """Forward makes both gradients beside the logits; of a frozen head neither its gradient nor
    the product.
    """
    tp = TensorParallel(meshes.build_mesh(1, TP, torch.device("cpu")).tp)
    labels = torch.zeros(TOKENS, dtype=torch.long)
    x = torch.randn(TOKENS, HIDDEN, requires_grad=True)

    def forward(w) -> tuple[int, int]:
        with Allocated() as mode:
            linear_cross_entropy(x, w, labels, 20, tp, False, Kernels().logits_at_once)
        return mode.take(), mode.multiplications

    w = torch.randn(5, HIDDEN)
    (frozen, products), (training, more) = forward(w), forward(w.clone().requires_grad_())
    assert products == 2 * x.numel() * 5 and more == 3 * x.numel() * 5
    # where it is added up, and the product of these tokens
    assert training - frozen == 2 * w.numel()


@pytest.mark.parametrize("soft_cap", (None, 30.0))
def test_logits_are_never_whole(monkeypatch, soft_cap):
    """Of a chunk of the loss there are as many elements as were asked for, the slope of a soft cap
    among them.
    """
    tp = TensorParallel(meshes.build_mesh(1, TP, torch.device("cpu")).tp)
    x, w = torch.randn(TOKENS, HIDDEN, requires_grad=True), torch.randn(5, HIDDEN).requires_grad_()
    chunk, sizes = vocabulary._chunk, []

    def watched(x, *rest):
        sizes.append(len(x) * 5)
        return chunk(x, *rest)

    monkeypatch.setattr(vocabulary, "_chunk", watched)
    labels = torch.zeros(TOKENS, dtype=torch.long)
    linear_cross_entropy(x, w, labels, 20, tp, at_once=4 * 5, soft_cap=soft_cap)
    assert sizes == ([20, 20] if soft_cap is None else [10, 10, 10, 10])


def test_a_sum_in_place_is_the_sum_for_autograd_too():
    """What a product gave is overwritten before anything reads it: its gradient is as without."""
    tp = TensorParallel(meshes.build_mesh(1, TP, torch.device("cpu")).tp)
    x = torch.randn(TOKENS, HIDDEN, requires_grad=True)
    y = x * 3
    out = tp.leave(y)
    assert out is y and type(out.grad_fn).__name__.startswith("_AllReduceInPlace")
    (out * torch.arange(HIDDEN)).sum().backward()
    assert torch.equal(x.grad, (3.0 * torch.arange(HIDDEN)).expand(TOKENS, HIDDEN))
    kept = x.exp()  # its gradient is itself: torch refuses, and does not compute something else
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        tp.leave(kept).sum().backward()


class Largest(TorchDispatchMode):
    """Elements of the largest tensor that an operator has given back."""

    elements = 0

    def __torch_dispatch__(self, op, types, args=(), kwargs=None):
        out = op(*args, **(kwargs or {}))
        sizes = [t.numel() for t in tree_leaves(out) if isinstance(t, torch.Tensor)]
        self.elements = max(self.elements, *sizes, 0)
        return out


@pytest.mark.parametrize("soft_cap", (None, 30.0))
@pytest.mark.parametrize("of", (linear_cross_entropy, log_probabilities))
def test_nothing_of_a_loss_is_as_large_as_its_logits(of, soft_cap):
    """Of 64 tokens and 32 rows of a vocabulary, four tokens at a time: forward and backward the
    largest are the input and its gradient.
    """
    tp = TensorParallel(meshes.build_mesh(1, TP, torch.device("cpu")).tp)
    x, w = torch.randn(64, 4, requires_grad=True), torch.randn(32, 4, requires_grad=True)
    with Largest() as mode:
        out = of(x, w, torch.arange(64), 128, tp, at_once=4 * 32, soft_cap=soft_cap)
        torch.autograd.backward(out, torch.ones_like(out))
    assert mode.elements == x.numel()
    assert x.grad is not None and w.grad is not None


@pytest.mark.parametrize("frozen", ("nothing", "the head", "the input"))
def test_log_probabilities_of_what_is_frozen(frozen):
    """Backward forms the logits again, and multiplies for what trains alone."""
    tp = TensorParallel(meshes.build_mesh(1, TP, torch.device("cpu")).tp)
    x = torch.randn(TOKENS, HIDDEN, requires_grad=frozen != "the input")
    w = torch.randn(5, HIDDEN, requires_grad=frozen != "the head")
    out = log_probabilities(x, w, torch.zeros(TOKENS, dtype=torch.long), 20, tp)
    with Allocated() as mode:
        torch.autograd.backward(out, torch.ones_like(out))
    assert mode.multiplications == (3 if frozen == "nothing" else 2) * x.numel() * 5
