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
from dolmen.ops import moe
from dolmen.parallel.quantized_product import Product


class Trip(NamedTuple):
    """How rows were dispatched, which `combine` needs to send them back."""

    groups: moe.Groups
    """Rows of each local expert, from all ranks of ep together: counts, or end offsets."""
    send: list[int]
    """Rows that this rank sent to each."""
    receive: list[int]
    """Rows that this rank got from each."""
    sorting: tuple[Int64[Tensor, " m"], Int64[Tensor, " m"]] | None
    """Permutation from the order received (by rank, then expert) to order by expert, and its
    inverse. None: nothing was sent, and rows are sorted.
    """


def dispatch(
    rows: Float[Tensor, "n H"], counts: Int64[Tensor, " E"], axis: Axis, kernel: bool
) -> tuple[Float[Tensor, "m H"], Trip]:
    """Send rows [n, H], sorted by expert with `counts` rows for each of all E experts, to the ranks
    of `axis` that hold their experts, with autograd. Returns the rows of this rank's E / ep
    experts, sorted by expert, and what `combine` needs to send them back, whose `groups` are device
    offsets if the experts' products are one `kernel`, or host counts for a loop. Collective over
    the axis.

    With ep > 1 there are two exchanges, and between them the host reads how much the second will
    bring, once. With ep 1 nothing is sent, and only a loop must know the counts.

    Recomputation reads again. Sizes kept from forward would save that, but were a token routed
    otherwise the second time, rows would reach wrong experts, and nobody would see it.
    """
    if axis.size == 1:
        groups = _ends(counts) if kernel else device.read_back(counts, len(rows))
        return rows, Trip(groups, [], [], None)
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
    trip = Trip(groups, [sum(n) for n in sent], receive, (order, back))
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
