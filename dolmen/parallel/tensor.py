"""Tensor parallelism (1909.08053) with or without sequence parallelism (2205.05198): a
column-parallel linear carries a row-parallel one, and activations cross the tp axis only on
entering and leaving the pair.

    x [tokens, hidden]   I@tp                      | S(0)@tp under sequence parallelism
      | enter            copy                      | all-gather
      |                  (backward: all-reduce)    | (backward: reduce-scatter)
      | columns          y_i = x W_i^T, W_i S(0)@tp: this rank's heads, or its part of the
      |                  feed-forward width
      | rows             y = x W^T, W S(1)@tp: a partial sum, P@tp
      v leave            all-reduce                | reduce-scatter
                         (backward: nothing)       | (backward: all-gather)

The input-gradient collective runs while the weight-gradient products do. Under sequence parallelism
only the sharded input is kept, and gathered once more in backward, while the input gradient is
computed. Where a pipeline schedule splits the backward, the weight gradients are not computed there
at all, but left in `later` for the executor of the schedule (2401.10241).
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
import torch.nn.functional as F
from torch import Tensor

from dolmen.core import collectives as c
from dolmen.core.mesh import Axis
from dolmen.core.state import Partial, Placement


class Deferred:
    """Weight gradients that backward was not to compute: functions, one for each product, that
    compute them and add them to their parameters'. The one way from the products of a model to the
    executor of its schedule: backward adds, the executor takes after each.
    """

    def __init__(self) -> None:
        self.products: list[Callable[[], None]] = []

    def add(self, product: Callable[[], None]) -> None:
        self.products.append(product)

    def take(self) -> list[Callable[[], None]]:
        """Those added since the last call, in order."""
        taken, self.products = self.products, []
        return taken


@dataclass(frozen=True)
class TensorParallel:
    """The tp axis and how the residual stream lies on it between blocks: invariant, or sharded by
    tokens (`sequence`).
    """

    axis: Axis
    sequence: bool = False
    later: Deferred | None = field(default=None, compare=False)
    """Where backward leaves the weight gradients. None: it computes them."""

    @property
    def gathers(self) -> bool:
        """Whether entering a block is an all-gather."""
        return self.sequence and self.axis.size > 1

    @property
    def residual_grad(self) -> Placement | None:
        """Type of the gradient of a replicated weight used on the residual stream (norms, output
        biases).
        """
        return Partial() if self.gathers else None

    @property
    def branch_grad(self) -> Placement | None:
        """Type of the gradient of a replicated weight used inside a block, on this rank's heads (q
        and k norms, shared k, v).
        """
        return Partial() if self.axis.size > 1 else None

    def enter(self, x: Tensor) -> Tensor:
        """I -> R, or S(0) -> R under sequence parallelism, where `columns` is not what is entered.
        x [tokens, hidden].
        """
        return c.all_gather(x, 0, self.axis) if self.gathers else c.copy(x, self.axis)

    def leave(self, y: Tensor) -> Tensor:
        """P -> I, in y's memory, or P -> S(0) under sequence parallelism. y [tokens, hidden] is the
        sum or product just made, which nothing else reads.
        """
        return c.reduce_scatter(y, 0, self.axis) if self.sequence else c.all_reduce_(y, self.axis)


class _Linear(torch.autograd.Function):
    """y_i = enter(x) W_i^T + b_i. One collective on the way in serves all W_i; one on the way back
    overlaps all dW_i.

    `enters`: x comes from the residual stream, else it is already this rank's part. `kept`: the
    weights as autograd knows them, where their gradients are for later and what is multiplied is
    detached.
    """

    @staticmethod
    def forward(ctx, x, tp, enters, kept, count, *weights_and_biases):
        weights, biases = weights_and_biases[:count], weights_and_biases[count:]
        gathers = enters and tp.gathers
        entered = c.wait(c.start_all_gather(x, tp.axis), tp.axis) if gathers else x
        ctx.tp, ctx.kept, ctx.with_bias = tp, kept, [b is not None for b in biases]
        ctx.gathers, ctx.reduces = gathers, enters and not gathers and tp.axis.size > 1
        ctx.save_for_backward(x, *weights)
        return tuple(F.linear(entered, w, b) for w, b in zip(weights, biases, strict=True))

    @staticmethod
    def backward(ctx, *grads):
        (x, *weights), axis, now = ctx.saved_tensors, ctx.tp.axis, ctx.kept is None
        if ctx.gathers and now:
            gathering = c.start_all_gather(x, axis)
        dx = grads[0] @ weights[0]
        for g, w in zip(grads[1:], weights[1:], strict=True):
            dx.addmm_(g, w)
        if ctx.gathers:
            if now:
                x = c.wait(gathering, axis)
            dx = c.start_reduce_scatter(dx, axis)
        elif ctx.reduces:
            dx = c.start_all_reduce_(dx, axis)
        dw = [g.t() @ x for g in grads] if now else [None] * len(grads)
        if not now:
            ctx.tp.later.add(_weight_gradients(ctx.kept, grads, x, axis if ctx.gathers else None))
        db = [g.sum(0) if has else None for g, has in zip(grads, ctx.with_bias, strict=True)]
        if ctx.gathers:
            dx = c.finish_reduce_scatter(dx, axis)
        elif ctx.reduces:
            dx = c.wait(dx, axis)
        return dx, None, None, None, None, *dw, *db


def _weight_gradients(
    weights: Sequence[Tensor], grads: Sequence[Tensor], x: Tensor, gather: Axis | None
) -> Callable[[], None]:
    def run() -> None:
        whole = x if gather is None else c.wait(c.start_all_gather(x, gather), gather)
        torch.autograd.backward(list(weights), [g.t() @ whole for g in grads])

    return run


def _linear(
    x: Tensor,
    weights: Sequence[Tensor],
    biases: Sequence[Tensor | None],
    tp: TensorParallel,
    enters: bool,
) -> tuple[Tensor, ...]:
    later = (
        tp.later is not None
        and torch.is_grad_enabled()
        and x.requires_grad
        and weights[0].requires_grad
    )
    if not later and not (enters and tp.axis.size > 1):
        return tuple(F.linear(x, w, b) for w, b in zip(weights, biases, strict=True))
    used = [w.detach() for w in weights] if later else weights
    return _Linear.apply(
        x, tp, enters, tuple(weights) if later else None, len(weights), *used, *biases
    )


def columns(
    x: Tensor, weights: Sequence[Tensor], biases: Sequence[Tensor | None], tp: TensorParallel
) -> tuple[Tensor, ...]:
    """Column-parallel products that share one input: [tokens, out_i / tp] for each local weight
    [out_i / tp, in].

    x [tokens, in] is I@tp, or S(0)@tp under sequence parallelism; the outputs are S(1)@tp.
    """
    return _linear(x, weights, biases, tp, enters=True)


def rows(x: Tensor, weight: Tensor, tp: TensorParallel) -> Tensor:
    """Row-parallel product: x [tokens, in / tp] S(1)@tp, weight [out, in / tp] S(1)@tp -> [tokens,
    out] as `leave` says.
    """
    return tp.leave(_linear(x, [weight], [None], tp, enters=False)[0])


def vocabulary_range(vocab_size: int, axis: Axis) -> tuple[int, int]:
    """(first row, number of rows) of this rank's part of the vocabulary; the last ranks may hold
    fewer, or none.
    """
    chunk = -(-vocab_size // axis.size)
    first = min(axis.rank * chunk, vocab_size)
    return first, min(chunk, vocab_size - first)


def embed(tokens: Tensor, weight: Tensor, vocab_size: int, tp: TensorParallel) -> Tensor:
    """Rows of the vocabulary-parallel embedding: tokens [n] -> [n, hidden], or this rank's n / tp
    rows of it (S(0)).

    weight [rows of this rank, hidden] is S(0)@tp: each rank looks up its own rows, zero elsewhere,
    and `leave` sums.
    """
    if tp.axis.size == 1:
        return F.embedding(tokens, weight)
    first, size = vocabulary_range(vocab_size, tp.axis)
    row = tokens - first
    mine = (row >= 0) & (row < size)
    return tp.leave(F.embedding(torch.where(mine, row, 0), weight) * mine[:, None].to(weight.dtype))


def gather_vocabulary(logits: Tensor, vocab_size: int, axis: Axis) -> Tensor:
    """Logits [..., rows of this rank] S(-1)@tp -> [..., vocab_size] on every rank. No autograd: for
    reading and sampling.
    """
    if axis.size == 1:
        return logits
    chunk = -(-vocab_size // axis.size)
    padded = F.pad(logits.detach(), (0, chunk - logits.shape[-1])).movedim(-1, 0)
    return c.wait(c.start_all_gather(padded, axis), axis).movedim(0, -1)[..., :vocab_size]


def own_tokens(per_token: Tensor, tp: TensorParallel) -> Tensor:
    """Of something known for all tokens [tokens, ...], this rank's part of the residual stream:
    all, or S(0)@tp.
    """
    return c.part(per_token, 0, tp.axis) if tp.gathers else per_token
