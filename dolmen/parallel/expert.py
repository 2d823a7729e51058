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

Leaves = Sequence[Sequence[Sequence[int]]]
"""[local expert][rank of ep][sequence] -> number of rows; they are in this order."""


class Trip(NamedTuple):
    """How rows were dispatched, which `combine` needs to send them back."""

    groups: moe.Groups
    """Rows of each local expert, from all ranks of ep together: counts, or end offsets."""
    leaves: Leaves
    """Rows of each local expert by rank and sequence, with exact numerics; else empty."""
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
    if axis.size == 1 and sequences is not None:
        leaves = [[n] for n in device.read_back(sequences.t())]
        return rows, Trip(_count_rows(leaves), leaves, [], [], None)
    if axis.size == 1:
        groups = _ends(counts) if kernel else device.read_back(counts, len(rows))
        return rows, Trip(groups, [], [], [], None)
    here = len(counts) // axis.size
    counted = counts if sequences is None else sequences.t().contiguous()
    # A rank must know how many rows will come before it can receive them, so counts go ahead:
    # [rank, expert], flat, to each rank those of its experts.
    came = collectives.all_to_all(counted, [here] * axis.size, [here] * axis.size, axis)
    shape = (2, axis.size, here, *counted.shape[1:])
    sent, got = device.read_back(torch.stack((counted, came)).view(shape), len(rows))
    leaves: Leaves = []
    if sequences is not None:
        leaves = list(zip(*got, strict=True))
        # over sequences
        sent, got = ([[sum(n) for n in ranks] for ranks in counts] for counts in (sent, got))
        came = came.sum(1)
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
    trip = Trip(groups, leaves, [sum(n) for n in sent], receive, (order, back))
    rows = collectives.all_to_all(rows, trip.send, trip.receive, axis)
    return moe.permute(rows, order, back), trip


def _count_rows(leaves: Leaves) -> list[int]:
    """Return the number of rows of each local expert, of all ranks and sequences."""
    return [sum(map(sum, ranks)) for ranks in leaves]


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


class _LeafLinears(TypedFunction):
    """Autograd of `leaf_linears`: weights [experts, out, in], then as many biases [experts, out] or
    None. With several ranks of ep, one that needs a gradient has a copy for the rows of each rank:
    [ranks, experts, ...].
    """

    @staticmethod
    def forward(
        ctx: Context[_LeafCall], x: Tensor, call: _LeafCall, *weights_and_biases: Tensor | None
    ) -> tuple[Tensor, ...]:
        """Return x W_i^T + b_i of each expert's rows, weight and bias, concatenated, whole on every
        rank of tp.
        """
        ctx.kept = call
        ctx.save_for_backward(x, *weights_and_biases)
        counts = _count_rows(call.leaves)
        group = torch.arange(len(counts)).repeat_interleave(torch.tensor(counts))
        weights, biases = _split_parameters(weights_and_biases)
        ys = []
        for weight, bias in zip(weights, biases, strict=True):
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
        grads = tuple(g.to(x.dtype) for g in grads)
        dx: Tensor | None = None
        if wants_dx:
            weights, _ = _split_parameters(saved)
            experts = zip(*(g.split(_count_rows(call.leaves)) for g in grads), strict=True)
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
        # as many biases as weights, whose gradients have no second factor
        factors: list[Tensor | None] = [x] * len(grads) + [None] * len(grads)
        gradients = [
            _add_leaves(g, factor, call.leaves, p.shape) if wanted else None
            for g, factor, p, wanted in zip(grads * 2, factors, saved, wants, strict=True)
        ]
        return dx, None, *gradients


def _split_parameters(
    parameters: Sequence[Tensor | None],
) -> tuple[list[Tensor], list[Tensor | None]]:
    """Return (weights, biases) of `parameters`, without a dimension of copies for ranks of ep."""
    number = len(parameters) // 2
    weights = [w if w.ndim == 3 else w[0] for w in parameters[:number] if w is not None]
    return weights, [b if b is None or b.ndim == 2 else b[0] for b in parameters[number:]]


def _add_leaves(g: Tensor, x: Tensor | None, leaves: Leaves, shape: torch.Size) -> Tensor:
    """Return, for each rank of ep and expert, the sum of g^T x over its sequences by a tree, or
    without x the sum of the rows of g, in fp32 or wider: [ranks, experts, ...], in this `shape`.
    """
    out = widen(g.new_zeros(shape))
    counts = [sum(rows) for ranks in leaves for rows in ranks]
    xs = [None] * len(counts) if x is None else x.split(counts)
    parts = iter(zip(g.split(counts), xs, strict=True))
    by_rank = out.view(-1, len(leaves), *shape[-1 if x is None else -2 :])
    for e, ranks in enumerate(leaves):
        for rank, rows in enumerate(ranks):
            total = invariant.sum_leaves(*next(parts), rows)
            if total is not None:
                # to 0: no sum is -0, as where a sequence's zeros are added
                by_rank[rank, e].add_(total)
    return out


def leaf_linears(
    x: Float[Tensor, "m in"], linears: Sequence[Linear], leaves: Leaves, tp: TensorParallel
) -> tuple[Float[Tensor, "m _"], ...]:
    """Return, for each of `linears` of stacked experts, which share the input x, each expert's rows
    of x times its weight transposed, plus its bias, whole on every rank of tp, with autograd and
    exact numerics: bits of a row depend on no other, and gradients of weights and biases are added
    over sequences by a tree. Where `leaves` have rows of several ranks of ep, a weight or bias that
    needs a gradient has a copy for the rows of each, [ranks, experts, ...], and so has its
    gradient. Collective over tp: forward where it splits inputs, else backward.
    """
    assert tp.exact is not None
    cut, several = linears[0].cut, tp.axis if tp.axis.size > 1 else None
    call = _LeafCall(
        leaves,
        LeafProduct.from_cut(tp.exact, cut, tp.axis.size),
        several if cut == "inputs" else None,
        several if cut == "outputs" else None,
    )
    return _LeafLinears.apply(
        x, call, *(linear.weight for linear in linears), *(linear.bias for linear in linears)
    )
