"""Seven collectives with types. Per mesh axis a tensor is R (replicated, gradient P), I (invariant,
gradient I), S(d) (sharded along d, gradient S(d)) or P (partial sum, gradient R); each backward
follows from the types.

                    forward                      | backward
    copy            I -> R      no-op            | P -> I      all-reduce       Megatron's f
    all_reduce_     P -> I      all-reduce       | I -> R      no-op            Megatron's g
    all_gather      S(d) -> R   all-gather       | P -> S(d)   reduce-scatter   g-bar of sequence
    reduce_scatter  P -> S(d)   reduce-scatter   | S(d) -> R   all-gather       parallelism
    gather          S(d) -> I   all-gather       | I -> S(d)   local part
    split           I -> S(d)   local part       | S(d) -> I   all-gather
    exchange        rows to the ranks they are   | the same rows, back
                    for, unequal numbers of them

f and g are of 1909.08053, g-bar of 2205.05198.

All return new tensors or the input itself, never mutate one but by the names that end in `_`, are
the identity on an axis of size 1, and trace under torch.compile. What is sent, and how, is defined
in core/transfers.py.
"""

import torch
from jaxtyping import Shaped
from torch import Tensor

from dolmen.core.autograd import Context, TypedFunction
from dolmen.core.mesh import Axis
from dolmen.core.transfers import (
    finish_reduce_scatter,
    start_all_gather,
    start_all_reduce,
    start_all_reduce_,
    start_all_to_all,
    start_reduce_scatter,
    wait,
)


def _all_gather_dim(x: Tensor, dim: int, axis: Axis) -> Tensor:
    """Return x of all ranks of the axis concatenated along `dim`, without autograd; waits for the
    result. The transport gathers along dim 0, so another dim is moved there and back.
    """
    if dim == 0:
        return wait(start_all_gather(x, axis), axis)
    return wait(start_all_gather(x.movedim(dim, 0), axis), axis).movedim(0, dim).contiguous()


def _reduce_scatter_dim(x: Tensor, dim: int, axis: Axis) -> Tensor:
    """Return this rank's equal part along `dim` of the sum of x over the ranks of the axis, without
    autograd; waits for the result. The transport scatters along dim 0, so another dim is moved
    there and back.
    """
    if dim == 0:
        return finish_reduce_scatter(start_reduce_scatter(x, axis), axis)
    return (
        finish_reduce_scatter(start_reduce_scatter(x.movedim(dim, 0), axis), axis)
        .movedim(0, dim)
        .contiguous()
    )


def local_part(x: Shaped[Tensor, "*whole"], dim: int, axis: Axis) -> Shaped[Tensor, "*here"]:
    """Return this rank's equal part of x along dim, as a view. Raises ValueError where the axis
    does not divide it.
    """
    if x.shape[dim] % axis.size:
        raise ValueError(
            f"dim {dim} of size {x.shape[dim]} is not divisible by {axis.name} ({axis.size})"
        )
    n = x.shape[dim] // axis.size
    return x.narrow(dim, axis.rank * n, n)


Dim = tuple[int, Axis]
"""A tensor dimension, and the mesh axis that shards it."""


class _Copy(TypedFunction):
    """I -> R; backward all-reduces."""

    @staticmethod
    def forward(ctx: Context[Axis], x: Tensor, axis: Axis) -> Tensor:
        """Return x as a new tensor object on the same memory, and keep the axis for backward."""
        ctx.kept = axis
        # autograd needs a new tensor object; no memory is copied
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Context[Axis], g: Tensor) -> tuple[Tensor, None]:
        """Return the gradient summed over the ranks of the axis (all-reduce)."""
        # each rank's gradient is a partial sum (R's gradient is P)
        return wait(start_all_reduce(g, ctx.kept), ctx.kept), None


class _AllReduce(TypedFunction):
    """P -> I; backward is the identity."""

    @staticmethod
    def forward(ctx: Context[None], x: Tensor, axis: Axis) -> Tensor:
        """Return the sum of x over the ranks of the axis, as a new tensor."""
        return wait(start_all_reduce(x, axis), axis)

    @staticmethod
    def backward(ctx: Context[None], g: Tensor) -> tuple[Tensor, None]:
        """Return the gradient unchanged."""
        # the sum is invariant: every rank already has its whole gradient
        return g, None


class _AllReduceInPlace(_AllReduce):
    """P -> I in the input's memory."""

    @staticmethod
    def forward(ctx: Context[None], x: Tensor, axis: Axis) -> Tensor:
        """Overwrite x with its sum over the ranks of the axis, and return it."""
        # informs autograd that x is returned with new values
        ctx.mark_dirty(x)
        wait(start_all_reduce_(x, axis), axis)
        return x


class _AllGather(TypedFunction):
    """S(dim) -> R; backward reduce-scatters."""

    @staticmethod
    def forward(ctx: Context[Dim], x: Tensor, dim: int, axis: Axis) -> Tensor:
        """Return x of all ranks of the axis, concatenated along dim."""
        ctx.kept = dim, axis
        return _all_gather_dim(x, dim, axis)

    @staticmethod
    def backward(ctx: Context[Dim], g: Tensor) -> tuple[Tensor, None, None]:
        """Return this rank's part, along dim, of the gradient summed over the axis
        (reduce-scatter).
        """
        return _reduce_scatter_dim(g, *ctx.kept), None, None


class _ReduceScatter(TypedFunction):
    """P -> S(dim); backward all-gathers."""

    @staticmethod
    def forward(ctx: Context[Dim], x: Tensor, dim: int, axis: Axis) -> Tensor:
        """Return this rank's part, along dim, of the sum of x over the ranks of the axis."""
        ctx.kept = dim, axis
        return _reduce_scatter_dim(x, dim, axis)

    @staticmethod
    def backward(ctx: Context[Dim], g: Tensor) -> tuple[Tensor, None, None]:
        """Return the gradients of all ranks of the axis, concatenated along dim (all-gather)."""
        return _all_gather_dim(g, *ctx.kept), None, None


class _Gather(TypedFunction):
    """S(dim) -> I; backward takes the local part."""

    @staticmethod
    def forward(ctx: Context[Dim], x: Tensor, dim: int, axis: Axis) -> Tensor:
        """Return x of all ranks of the axis, concatenated along dim."""
        ctx.kept = dim, axis
        return _all_gather_dim(x, dim, axis)

    @staticmethod
    def backward(ctx: Context[Dim], g: Tensor) -> tuple[Tensor, None, None]:
        """Return this rank's part, along dim, of the gradient, which is whole on every rank."""
        return local_part(g, *ctx.kept), None, None


class _Split(TypedFunction):
    """I -> S(dim); backward all-gathers."""

    @staticmethod
    def forward(ctx: Context[Dim], x: Tensor, dim: int, axis: Axis) -> Tensor:
        """Return this rank's part of x along dim."""
        ctx.kept = dim, axis
        return local_part(x, dim, axis).contiguous()

    @staticmethod
    def backward(ctx: Context[Dim], g: Tensor) -> tuple[Tensor, None, None]:
        """Return the gradients of all ranks of the axis, concatenated along dim (all-gather)."""
        return _all_gather_dim(g, *ctx.kept), None, None


class _AllToAll(TypedFunction):
    """Rows to the ranks they are for; backward sends gradients back."""

    @staticmethod
    def forward(
        ctx: Context[tuple[list[int], list[int], Axis]],
        x: Tensor,
        send: list[int],
        receive: list[int],
        axis: Axis,
    ) -> Tensor:
        """Send the first send[0] rows of x to rank 0 of the axis, the next send[1] to rank 1 and so
        on; return the receive[r] rows from each rank r, in the order of ranks.
        """
        ctx.kept = send, receive, axis
        return wait(start_all_to_all(x, receive, send, axis), axis)

    @staticmethod
    def backward(
        ctx: Context[tuple[list[int], list[int], Axis]], g: Tensor
    ) -> tuple[Tensor, None, None, None]:
        """Return each row's gradient to the rank that sent the row; differentiable again."""
        send, receive, axis = ctx.kept
        # send and receive change places; differentiable again
        return _AllToAll.apply(g, receive, send, axis), None, None, None


def copy(x: Shaped[Tensor, "*shape"], axis: Axis) -> Shaped[Tensor, "*shape"]:
    """Return x, which is equal on all ranks, for computation that differs per rank (I -> R):
    nothing is sent, and backward sums the gradient over the ranks of the axis.
    """
    return x if axis.size == 1 else _Copy.apply(x, axis)


def all_reduce_(x: Shaped[Tensor, "*shape"], axis: Axis) -> Shaped[Tensor, "*shape"]:
    """Return the sum of x over the ranks of the axis, in x's memory unless torch.compile traces
    this (P -> I); all ranks then treat it as one tensor, so backward passes its gradient on
    unchanged. x must be a temporary that nothing else reads or keeps. An axis of size 1 returns x.
    """
    if axis.size == 1:
        return x
    # of a graph, inductor finds by itself that x may be overwritten
    return (_AllReduce if torch.compiler.is_compiling() else _AllReduceInPlace).apply(x, axis)


def all_gather(x: Shaped[Tensor, "*here"], dim: int, axis: Axis) -> Shaped[Tensor, "*whole"]:
    """Return the parts x of all ranks of the axis concatenated along dim (S(dim) -> R); backward
    sums the gradient over the ranks and keeps this rank's part. An axis of size 1 returns x.
    """
    return x if axis.size == 1 else _AllGather.apply(x, dim, axis)


def reduce_scatter(x: Shaped[Tensor, "*whole"], dim: int, axis: Axis) -> Shaped[Tensor, "*here"]:
    """Return this rank's equal part, along dim, of the sum of x over the ranks of the axis (P ->
    S(dim)); backward all-gathers the gradient. An axis of size 1 returns x. Raises ValueError where
    the axis does not divide the dim.
    """
    if axis.size == 1:
        return x
    # only for its check that the axis divides the dim
    local_part(x, dim, axis)
    return _ReduceScatter.apply(x, dim, axis)


def gather(x: Shaped[Tensor, "*here"], dim: int, axis: Axis) -> Shaped[Tensor, "*whole"]:
    """Return the parts x of all ranks of the axis concatenated along dim, for computation that is
    the same on every rank (S(dim) -> I): the gradient is whole on each, and backward keeps this
    rank's part. An axis of size 1 returns x.
    """
    return x if axis.size == 1 else _Gather.apply(x, dim, axis)


def split(x: Shaped[Tensor, "*whole"], dim: int, axis: Axis) -> Shaped[Tensor, "*here"]:
    """Return this rank's equal part, along dim, of x, which is the same on every rank of the axis
    (I -> S(dim)); backward all-gathers the gradient. An axis of size 1 returns x. Raises ValueError
    where the axis does not divide the dim.
    """
    return x if axis.size == 1 else _Split.apply(x, dim, axis)


def all_to_all(
    x: Shaped[Tensor, " sent *rest"], send: list[int], receive: list[int], axis: Axis
) -> Shaped[Tensor, " received *rest"]:
    """Send the first send[0] rows of x to rank 0 of the axis, the next send[1] to rank 1 and so on;
    return receive[r] rows from each rank r, in the order of ranks (S(0) -> S(0)). Counts may be 0;
    those of `send` add up to the rows of x. Backward sends the gradients of the rows back. An axis
    of size 1 returns x.
    """
    return x if axis.size == 1 else _AllToAll.apply(x, send, receive, axis)


def sum_(x: Shaped[Tensor, "*shape"], axis: Axis) -> Shaped[Tensor, "*shape"]:
    """Sum contiguous x over the ranks of the axis, in place and outside autograd, and return it:
    for gradients after backward.
    """
    return x if axis.size == 1 else wait(start_all_reduce_(x, axis), axis)


def reduce_scalar(
    x: Shaped[Tensor, "*shape"], axis: Axis, op: str = "sum"
) -> Shaped[Tensor, "*shape"]:
    """Return x, of any shape, combined elementwise over the ranks of the axis by `op` (sum, max,
    min), outside autograd and without changing x: for counts, norms, flags. An axis of one rank
    returns x itself, graph included.
    """
    return x if axis.size == 1 else wait(start_all_reduce(x.detach(), axis, op), axis)
