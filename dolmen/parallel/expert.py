"""Expert parallelism (2006.16668): each rank of `ep` holds some of the experts, and rows travel to
theirs and back. No expert has a capacity: rows are as many as the router sends, none is dropped,
none is padded.

    ep 2: rank 0 holds experts a, b; rank 1 c, d
    rows sorted by expert [m, H]        rank 0: a a b c d d d     rank 1: b c c d
      | counts exchanged, then rows     rank 0: a a b | b         rank 1: c d d d | c c d
      | sorted by expert                rank 0: a a b b           rank 1: c c c d d d d
      v one product per expert, and all the way back

The ranks of ep are neighbours of dp x cp with one rank of tp: each sends the rows of its own
tokens, entered whole on tp.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from jaxtyping import Float, Int64, Shaped
from torch import Tensor

from dolmen.core import collectives, device
from dolmen.core.autograd import Context, TypedFunction
from dolmen.core.mesh import Axis
from dolmen.core.reduction import widen
from dolmen.ops import invariant, moe
from dolmen.parallel.exact import LeafProduct
from dolmen.parallel.quantized_product import Product
from dolmen.parallel.tensor import Linear, TensorParallel

Leaves = Sequence[Sequence[int]]
"""Rows of each sequence that each local expert has, one after the other."""


class Trip(NamedTuple):
    """How rows were dispatched, which `combine` needs to send them back."""

    groups: moe.Groups
    """Rows of each local expert, from all ranks of ep together: counts, or end offsets."""
    leaves: Leaves
    """Rows of each sequence that each local expert has, with exact numerics; else empty."""
    send: list[int]
    """Rows that this rank sent to each."""
    receive: list[int]
    """Rows that this rank got from each."""
    sorting: tuple[Int64[Tensor, " m"], Int64[Tensor, " m"]] | None
    """Permutation from the order received (by rank, then expert) to order by expert, and its
    inverse. None: nothing was sent, and rows are sorted.
    """


def dispatch(
    rows: Float[Tensor, "n H"],
    counts: Int64[Tensor, " E"],
    axis: Axis,
    kernel: bool,
    sequences: Int64[Tensor, "batch E"] | None = None,
) -> tuple[Float[Tensor, "m H"], Trip]:
    """Send rows [n, H], sorted by expert with `counts` rows for each of all E experts, to the ranks
    of `axis` that hold their experts, with autograd. Returns the rows of this rank's E / ep
    experts, sorted by expert, and what `combine` needs to send them back, whose `groups` are device
    offsets if the experts' products are one `kernel`, or host counts for a loop. `sequences`: with
    exact numerics, the rows that each sequence has for each expert. Collective over the axis.

    With ep > 1 there are two exchanges, and between them the host reads how much the second will
    bring, once. With ep 1 nothing is sent, and only a loop must know the counts.

    Recomputation reads again. Sizes kept from forward would save that, but were a token routed
    otherwise the second time, rows would reach wrong experts, and nobody would see it.
    """
    if sequences is not None:
        assert axis.size == 1, "checks/exact.py refuses it"
        leaves = device.read_back(sequences.t())
        return rows, Trip([sum(n) for n in leaves], leaves, [], [], None)
    if axis.size == 1:
        groups = _ends(counts) if kernel else device.read_back(counts, len(rows))
        return rows, Trip(groups, [], [], [], None)
    here = len(counts) // axis.size
    # A rank must know how many rows will come before it can receive them, so counts go ahead:
    # [rank, expert], flat, to each rank those of its experts.
    came = collectives.all_to_all(counts, [here] * axis.size, [here] * axis.size, axis)
    sent, got = device.read_back(torch.stack((counts, came)).view(2, axis.size, here), len(rows))
    receive = [sum(n) for n in got]
    # Rows come by rank, and of each rank by expert. A stable sort by expert puts those of an expert
    # together, ranks in their order: the same every time, and with one rank as with many.
    order = (
        torch.arange(here, device=rows.device)
        .repeat(axis.size)
        .repeat_interleave(came, output_size=sum(receive))  # else it reads the sum
        .argsort(stable=True)
    )
    groups = (
        _ends(came.view(axis.size, here).sum(0))
        if kernel
        else [sum(n) for n in zip(*got, strict=True)]
    )
    back = moe.inverse(order)
    trip = Trip(groups, [], [sum(n) for n in sent], receive, (order, back))
    rows = collectives.all_to_all(rows, trip.send, trip.receive, axis)
    return moe.permute(rows, order, back), trip


def _ends(counts: Tensor) -> Tensor:
    """Return the end offset of each group from the groups' counts, int32 on the device, as
    F.grouped_mm takes it.
    """
    return counts.cumsum(0, dtype=torch.int32)


def combine(rows: Float[Tensor, "m H"], trip: Trip, axis: Axis) -> Float[Tensor, "n H"]:
    """Send each row back to the rank and position it came from, with autograd: the inverse of
    `dispatch`, which returned `trip`. Rows are sorted by expert before, and have their earlier
    order after. Collective over the axis.
    """
    if trip.sorting is None:
        return rows
    order, back = trip.sorting
    return collectives.all_to_all(moe.permute(rows, back, order), trip.receive, trip.send, axis)


class _Rounded(TypedFunction):
    """Autograd of `rounded_linear`. Experts without rows take part too, as scales are shared with
    other ranks, which may have rows for them.
    """

    @staticmethod
    def forward(
        ctx: Context[tuple[Sequence[int], Product]],
        x: Tensor,
        weight: Tensor,
        counts: Sequence[int],
        product: Product,
    ) -> Tensor:
        """Return x W^T of each expert's rows and weight, concatenated."""
        ctx.kept = counts, product
        wants_dx, wants_dw, *_ = ctx.needs_input_grad
        ctx.save_for_backward(x if wants_dw else None, weight if wants_dx else None)
        return torch.cat(product.output(x.split(list(counts)), weight.unbind()))

    @staticmethod
    def backward(
        ctx: Context[tuple[Sequence[int], Product]], g: Tensor
    ) -> tuple[Tensor | None, Tensor | None, None, None]:
        """Return the gradients of x and of the stacked weights, None where not needed."""
        (x, weight), (counts, product) = ctx.saved_tensors, ctx.kept
        wants_dx, wants_dw, *_ = ctx.needs_input_grad
        grads, dx, dw = g.split(list(counts)), None, None
        if wants_dx:
            dx = torch.cat(product.input_gradient(grads, weight.unbind()))
        if wants_dw:
            dw = torch.stack(product.weight_gradient(grads, x.split(list(counts))))
        return dx, dw, None, None


def rounded_linear(
    x: Float[Tensor, "m in"],
    weight: Shaped[Tensor, "groups out in"],
    counts: Sequence[int],
    product: Product,
) -> Float[Tensor, "m out"]:
    """Return each expert's rows of x times its weight transposed, by an 8-bit `product`, with
    autograd: moe.grouped_linear where factors are rounded, or weights stored in 8 bits. `counts`:
    rows of each expert, in order.
    """
    return _Rounded.apply(x, weight, counts, product)


class _LeafCall(NamedTuple):
    """Arguments of `leaf_linears` other than tensors."""

    leaves: Leaves
    product: LeafProduct
    sums_outputs: Axis | None
    """Axis that splits the inputs of the weights, over which outputs are partial sums."""
    sums_input_gradients: Axis | None
    """Axis that splits the outputs of the weights, over which input gradients are partial sums."""


class _Leaves(TypedFunction):
    """Autograd of `leaf_linears`; weights [experts, out, in] first, then as many biases."""

    @staticmethod
    def forward(
        ctx: Context[_LeafCall], x: Tensor, call: _LeafCall, *weights_and_biases: Tensor | None
    ) -> tuple[Tensor, ...]:
        """Return x W_i^T + b_i of each expert's rows, weight and bias, concatenated, whole on every
        rank of tp.
        """
        ctx.kept = call
        ctx.save_for_backward(x, *weights_and_biases)
        number = len(weights_and_biases) // 2
        counts = [sum(rows) for rows in call.leaves]
        group = torch.arange(len(counts)).repeat_interleave(torch.tensor(counts))
        ys = []
        for weight, bias in zip(
            weights_and_biases[:number], weights_and_biases[number:], strict=True
        ):
            assert weight is not None
            y = torch.cat(call.product.output(x.split(counts), weight.unbind()))
            if call.sums_outputs is not None:
                y = collectives.sum_(y, call.sums_outputs)
            y = y.to(x.dtype)  # of exact numerics partial sums are fp32, and rounded once
            ys.append(y if bias is None else y.add_(bias[group]))
        return tuple(ys)

    @staticmethod
    def backward(ctx: Context[_LeafCall], *grads: Tensor) -> tuple[Tensor | None, ...]:
        """Return the gradients of x, of each weight and of each bias, None where not needed."""
        (x, *saved), call = ctx.saved_tensors, ctx.kept
        wants_dx, _, *wants = ctx.needs_input_grad
        weights, counts = saved[: len(grads)], [sum(rows) for rows in call.leaves]
        dx: Tensor | None = None
        if wants_dx:
            experts = zip(*(g.split(counts) for g in grads), strict=True)
            of_experts = zip(*(weight.unbind() for weight in weights), strict=True)
            dx = torch.cat(
                [
                    call.product.sum_of_input_gradients(gs, ws)
                    for gs, ws in zip(experts, of_experts, strict=True)
                ]
            )
            if call.sums_input_gradients is not None:
                dx = collectives.sum_(dx, call.sums_input_gradients)
            dx = dx.to(x.dtype)
        gradients: list[Tensor | None] = [None] * len(saved)
        for i, (p, wanted) in enumerate(zip(saved, wants, strict=True)):
            if wanted:
                factor = x if i < len(weights) else None
                g = grads[i % len(grads)].to(x.dtype)
                gradients[i] = _add_leaves(g, factor, call.leaves, p.shape)
        return dx, None, *gradients


def _add_leaves(g: Tensor, x: Tensor | None, leaves: Leaves, shape: torch.Size) -> Tensor:
    """Return, for each expert, the sum of g^T x over its `leaves` by a tree, or without x the sum
    of the rows of g, in fp32 or wider: [experts, ...], of this `shape`.
    """
    out = widen(g.new_zeros(shape))
    counts = [sum(rows) for rows in leaves]
    xs = [None] * len(counts) if x is None else x.split(counts)
    for e, (g_rows, x_rows) in enumerate(zip(g.split(counts), xs, strict=True)):
        total = invariant.sum_leaves(g_rows, x_rows, leaves[e])
        if total is not None:
            out[e].add_(total)  # to 0: no sum is -0, as where a sequence's zeros are added
    return out


def leaf_linears(
    x: Float[Tensor, "m in"], linears: Sequence[Linear], leaves: Leaves, tp: TensorParallel
) -> tuple[Float[Tensor, "m _"], ...]:
    """Return, for each of `linears` of stacked experts, which share the input x, each expert's rows
    of x times its weight transposed, plus its bias, whole on every rank of tp, with autograd and
    exact numerics: bits of a row depend on no other, and gradients of weights and biases are added
    over `leaves` by a tree. Collective over tp: forward where it splits inputs, else backward.
    """
    assert tp.exact is not None
    cut, several = linears[0].cut, tp.axis if tp.axis.size > 1 else None
    call = _LeafCall(
        leaves,
        LeafProduct.from_cut(tp.exact, cut, tp.axis.size),
        several if cut == "inputs" else None,
        several if cut == "outputs" else None,
    )
    return _Leaves.apply(
        x, call, *(linear.weight for linear in linears), *(linear.bias for linear in linears)
    )
