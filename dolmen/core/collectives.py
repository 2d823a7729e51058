"""Five collectives with types. Per mesh axis a tensor is R (replicated, gradient P), I (invariant,
gradient I), S(d) (sharded along d, gradient S(d)) or P (partial sum, gradient R); each backward
follows from the types.

                    forward                      | backward
    copy            I -> R      no-op            | P -> I      all-reduce       Megatron's f
    all_reduce_     P -> I      all-reduce       | I -> R      no-op            Megatron's g
    all_gather      S(d) -> R   all-gather       | P -> S(d)   reduce-scatter   g-bar of sequence
    reduce_scatter  P -> S(d)   reduce-scatter   | S(d) -> R   all-gather       parallelism
    exchange        rows to the ranks they are   | the same rows, back
                    for, unequal numbers of them

f and g are of 1909.08053, g-bar of 2205.05198.

All return new tensors or the input itself, never mutate one but by the names that end in `_`, are
the identity on an axis of size 1, and trace under torch.compile. The `start_*` functions are the
raw, asynchronous forms: what is sent, with no autograd; their result is waited for by `wait`, of a
reduce-scatter by `finish_reduce_scatter`. Every byte of compute that moves goes through them
(gradients move in parallel/data.py).
"""

from contextlib import nullcontext
from typing import NamedTuple

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
from jaxtyping import Shaped
from torch import Tensor

from dolmen.core import ranges
from dolmen.core.function import Context, Function
from dolmen.core.mesh import Axis

_RENAMED = "all_gather_single" in vars(funcol)  # torch 2.13 renames two of them
_SUFFIX = "single" if _RENAMED else "tensor"
_ALL_GATHER = vars(funcol)[f"all_gather_{_SUFFIX}"]
_REDUCE_SCATTER = vars(funcol)[f"reduce_scatter_{_SUFFIX}"]


def _group(axis: Axis) -> dist.ProcessGroup:
    """That of an axis over which something is sent."""
    assert axis.group is not None, axis.name
    return axis.group


def start_all_reduce(
    x: Shaped[Tensor, "*shape"], axis: Axis, op: str = "sum"
) -> Shaped[Tensor, "*shape"]:
    """Sum (or `op`: max, min) of x over the axis."""
    with ranges.mark(axis.name, "all-reduce"):
        return funcol.all_reduce(x.contiguous(), op, _group(axis))


def start_all_reduce_(
    x: Shaped[Tensor, "*shape"], axis: Axis, op: str = "sum"
) -> Shaped[Tensor, "*shape"]:
    """The same in the memory of x, which is contiguous, and which the caller has made and does not
    read again: `start_all_reduce` copies it first, as large as the activation.
    """
    if torch.compiler.is_compiling():
        return start_all_reduce(x, axis, op)
    with ranges.mark(axis.name, "all-reduce"):
        return torch.ops._c10d_functional.all_reduce_(x, op, _group(axis).group_name)


def start_all_gather(
    x: Shaped[Tensor, " n *rest"], axis: Axis
) -> Shaped[Tensor, " {axis.size}*n *rest"]:
    """x of every rank, one after the other."""
    with ranges.mark(axis.name, "all-gather"):
        return _ALL_GATHER(x.contiguous(), 0, _group(axis))


def start_reduce_scatter(
    x: Shaped[Tensor, " rows *rest"], axis: Axis
) -> Shaped[Tensor, " arriving *rest"]:
    """On its way to this rank's part of the rows of the sum over the axis, for
    `finish_reduce_scatter`.

    gloo would all-reduce and keep a part. There, ranks exchange parts and each adds up its own: 8
    MiB of bf16 between two processes takes 5 ms instead of 15, and sums are rounded once.
    """
    if axis.gloo:
        return start_all_to_all(x, None, None, axis)
    with ranges.mark(axis.name, "reduce-scatter"):
        return _REDUCE_SCATTER(x.contiguous(), "sum", 0, _group(axis))


def start_all_to_all(
    x: Shaped[Tensor, " rows *rest"],
    receive: list[int] | None,
    send: list[int] | None,
    axis: Axis,
) -> Shaped[Tensor, " arriving *rest"]:
    """The first send[0] rows of x are on their way to rank 0, and so on; sum(receive) arrive. None:
    equally many to all and from all.
    """
    with ranges.mark(axis.name, "all-to-all"):
        return funcol.all_to_all_single(x.contiguous(), receive, send, _group(axis))


def wait(x: Shaped[Tensor, "*shape"], axis: Axis | None = None) -> Shaped[Tensor, "*shape"]:
    """What a `start_*` has begun, arrived; over which axis is told to a profile."""
    with nullcontext() if axis is None else ranges.mark(axis.name, "wait"):
        return funcol.wait_tensor(x)


def finish_reduce_scatter(
    x: Shaped[Tensor, " arriving *rest"], axis: Axis
) -> Shaped[Tensor, " n *rest"]:
    """This rank's rows of the sum: what `start_reduce_scatter` has begun."""
    x = wait(x, axis)
    return x.view(axis.size, x.shape[0] // axis.size, *x.shape[1:]).sum(0) if axis.gloo else x


def start_send(x: Shaped[Tensor, "..."], axis: Axis, peer: int) -> dist.Work:
    """x on its way to rank `peer` of the axis, which calls `start_receive`. x must not be written
    to before the work is done. From one rank to another, what is sent first comes first.

    Over NCCL the first send or receive of two ranks on an axis makes their communicator, and the
    CPU waits there for the other rank: see `connect` in parallel/channels.py.
    """
    with ranges.mark("pp", "send"):
        return _begun(dist.isend(x, group=axis.group, group_dst=peer))


def start_receive(into: Shaped[Tensor, "..."], axis: Axis, peer: int) -> dist.Work:
    """`into` will hold what rank `peer` of the axis sends, once the work is waited for."""
    with ranges.mark("pp", "receive"):
        return _begun(dist.irecv(into, group=axis.group, group_src=peer))


def _begun(work: dist.Work | None) -> dist.Work:
    assert work is not None, "torch gives no work where this process is not of the group"
    return work


class Rotation(NamedTuple):
    """Tensors under way to the next rank; `wait` gives those that have come from the
    previous one.
    """

    coming: list[Tensor]
    going: list[Tensor]  # kept alive until they have left
    works: list[dist.Work]
    axis: Axis

    def wait(self) -> list[Tensor]:
        with ranges.mark(self.axis.name, "wait"):
            for work in self.works:
                work.wait()
        return self.coming


def start_rotate(tensors: list[Shaped[Tensor, "..."]], axis: Axis, shift: int = 1) -> Rotation:
    """Sends each tensor to the rank `shift` further on the ring of the axis, and receives that of
    the rank as far behind. Shapes are equal on all ranks, and all ranks call this in the same
    order. What is sent must not be written to before `wait`.

    One batch, so that NCCL takes the communicator of the whole axis, as a collective does, and not
    one for each pair. The CPU waits for the others only while that is made, in the first call; as
    all ranks of the axis make it, and before it the same calls, none waits for ever.
    """
    if axis.size == 1:
        return Rotation(tensors, tensors, [], axis)
    going = [t.contiguous() for t in tensors]
    coming = [torch.empty_like(t) for t in going]
    there, behind = (axis.rank + shift) % axis.size, (axis.rank - shift) % axis.size
    with ranges.mark(axis.name, "send and receive"):
        works = dist.batch_isend_irecv(
            [dist.P2POp(dist.isend, t, group=axis.group, group_peer=there) for t in going]
            + [dist.P2POp(dist.irecv, t, group=axis.group, group_peer=behind) for t in coming]
        )
    return Rotation(coming, going, works, axis)


def _gathered(x: Tensor, dim: int, axis: Axis) -> Tensor:
    if dim == 0:
        return wait(start_all_gather(x, axis), axis)
    return wait(start_all_gather(x.movedim(dim, 0), axis), axis).movedim(0, dim).contiguous()


def _scattered(x: Tensor, dim: int, axis: Axis) -> Tensor:
    if dim == 0:
        return finish_reduce_scatter(start_reduce_scatter(x, axis), axis)
    return (
        finish_reduce_scatter(start_reduce_scatter(x.movedim(dim, 0), axis), axis)
        .movedim(0, dim)
        .contiguous()
    )


def part(x: Shaped[Tensor, "*whole"], dim: int, axis: Axis) -> Shaped[Tensor, "*here"]:
    """This rank's equal part of x along dim, a view. Raises ValueError where the axis does not
    divide it.
    """
    if x.shape[dim] % axis.size:
        raise ValueError(
            f"dim {dim} of size {x.shape[dim]} is not divisible by {axis.name} ({axis.size})"
        )
    n = x.shape[dim] // axis.size
    return x.narrow(dim, axis.rank * n, n)


Dim = tuple[int, Axis]
"""A dim of the tensor, and the axis that shards it."""


class _Copy(Function):
    @staticmethod
    def forward(ctx: Context[Axis], x: Tensor, axis: Axis) -> Tensor:
        ctx.kept = axis
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Context[Axis], g: Tensor) -> tuple[Tensor, None]:
        return wait(start_all_reduce(g, ctx.kept), ctx.kept), None


class _AllReduce(Function):
    @staticmethod
    def forward(ctx: Context[None], x: Tensor, axis: Axis) -> Tensor:
        return wait(start_all_reduce(x, axis), axis)

    @staticmethod
    def backward(ctx: Context[None], g: Tensor) -> tuple[Tensor, None]:
        return g, None


class _AllReduceInPlace(_AllReduce):
    @staticmethod
    def forward(ctx: Context[None], x: Tensor, axis: Axis) -> Tensor:
        ctx.mark_dirty(x)
        wait(start_all_reduce_(x, axis), axis)
        return x


class _AllGather(Function):
    @staticmethod
    def forward(ctx: Context[Dim], x: Tensor, dim: int, axis: Axis) -> Tensor:
        ctx.kept = dim, axis
        return _gathered(x, dim, axis)

    @staticmethod
    def backward(ctx: Context[Dim], g: Tensor) -> tuple[Tensor, None, None]:
        return _scattered(g, *ctx.kept), None, None


class _ReduceScatter(Function):
    @staticmethod
    def forward(ctx: Context[Dim], x: Tensor, dim: int, axis: Axis) -> Tensor:
        ctx.kept = dim, axis
        return _scattered(x, dim, axis)

    @staticmethod
    def backward(ctx: Context[Dim], g: Tensor) -> tuple[Tensor, None, None]:
        return _gathered(g, *ctx.kept), None, None


class _Exchange(Function):
    @staticmethod
    def forward(
        ctx: Context[tuple[list[int], list[int], Axis]],
        x: Tensor,
        send: list[int],
        receive: list[int],
        axis: Axis,
    ) -> Tensor:
        ctx.kept = send, receive, axis
        return wait(start_all_to_all(x, receive, send, axis), axis)

    @staticmethod
    def backward(
        ctx: Context[tuple[list[int], list[int], Axis]], g: Tensor
    ) -> tuple[Tensor, None, None, None]:
        send, receive, axis = ctx.kept
        return _Exchange.apply(g, receive, send, axis), None, None, None


def copy(x: Shaped[Tensor, "*shape"], axis: Axis) -> Shaped[Tensor, "*shape"]:
    """I -> R: x enters computation that differs per rank."""
    return x if axis.size == 1 else _Copy.apply(x, axis)


def all_reduce_(x: Shaped[Tensor, "*shape"], axis: Axis) -> Shaped[Tensor, "*shape"]:
    """P -> I: the sum, which every rank then treats as one tensor, in the memory of x, a product
    that nothing else reads or keeps.
    """
    if axis.size == 1:
        return x
    # of a graph, inductor finds by itself that x may be overwritten
    return (_AllReduce if torch.compiler.is_compiling() else _AllReduceInPlace).apply(x, axis)


def all_gather(x: Shaped[Tensor, "*here"], dim: int, axis: Axis) -> Shaped[Tensor, "*whole"]:
    """S(dim) -> R."""
    return x if axis.size == 1 else _AllGather.apply(x, dim, axis)


def reduce_scatter(x: Shaped[Tensor, "*whole"], dim: int, axis: Axis) -> Shaped[Tensor, "*here"]:
    """P -> S(dim). Raises ValueError where the axis does not divide the dim."""
    if axis.size == 1:
        return x
    part(x, dim, axis)
    return _ReduceScatter.apply(x, dim, axis)


def exchange(
    x: Shaped[Tensor, " sent *rest"], send: list[int], receive: list[int], axis: Axis
) -> Shaped[Tensor, " received *rest"]:
    """S(0) -> S(0): the first send[0] rows of x go to rank 0, the next send[1] to rank 1 and so on;
    back come receive[r] rows from each rank r, in the order of ranks. Counts may be 0; those of
    `send` add up to the rows of x.
    """
    return x if axis.size == 1 else _Exchange.apply(x, send, receive, axis)


def sum_(x: Shaped[Tensor, "*shape"], axis: Axis) -> Shaped[Tensor, "*shape"]:
    """x, which is contiguous, summed over the axis, in place and outside autograd, and returned:
    gradients on their way out of backward.
    """
    return x if axis.size == 1 else wait(start_all_reduce_(x, axis), axis)


def reduce_scalar(
    x: Shaped[Tensor, "*shape"], axis: Axis, op: str = "sum"
) -> Shaped[Tensor, "*shape"]:
    """x of every rank combined, outside autograd: counts, norms, flags."""
    return x if axis.size == 1 else wait(start_all_reduce(x.detach(), axis, op), axis)
