"""Communication between ranks without autograd: the raw, asynchronous forms under the typed
collectives (core/collectives.py), and sends from one rank to another.

A `start_*` returns at once; its result is waited for by `wait`, of a reduce-scatter by
`finish_reduce_scatter`. (An all-reduce in a fixed order is done when it returns.) Every byte of
compute that moves goes through here (gradients move in parallel/data.py), and each is marked for a
profile with its axis and kind. All trace under torch.compile but sends and rotations.

Sums of several ranks are added in one of two orders (`Axis.reduction`):

    fast     the backend adds on the way, in the order of its rings and trees, which follows the
             number of nodes, the message size and the version of NCCL or gloo
    fixed    ranks exchange parts and each adds up its own by a tree (core/reduction.py)

Over n ranks a fixed sum sends as many bytes per rank as a ring would, 2 (n - 1) / n of the tensor,
and (n - 1) / n to scatter it; but straight to the rank that adds, so of a node with g ranks up to g
times as many bytes leave it.
"""

from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F
from jaxtyping import Shaped
from torch import Tensor

from dolmen.core import profiling
from dolmen.core.mesh import Axis
from dolmen.core.reduction import tree_sum
from dolmen.core.torch_private import processes


def _group(axis: Axis) -> dist.ProcessGroup:
    """Return the process group of an axis, which must have more than one rank."""
    assert axis.group is not None, axis.name
    return axis.group


def _crosses_host(x: Tensor, axis: Axis) -> bool:
    """Return True if x has to cross in host memory: it is on a GPU, and the group is gloo, as where
    several ranks share a GPU. gloo copies a GPU's tensors in an all-reduce by itself; a message's
    address it takes for the host's ("Bad address").
    """
    return axis.gloo and x.device.type != "cpu"


def _start(x: Tensor, axis: Axis, collective: Callable[[Tensor], Tensor]) -> Tensor:
    """Start `collective` on x, or on a copy in host memory where x has to cross there; the result,
    on x's device, is then complete.
    """
    x = x.contiguous()
    if not _crosses_host(x, axis):
        return collective(x)
    return processes.wait(collective(x.cpu())).to(x.device)


def start_all_reduce(
    x: Shaped[Tensor, "*shape"], axis: Axis, op: str = "sum"
) -> Shaped[Tensor, "*shape"]:
    """Start summing (or `op`: max, min) x over the ranks of the axis into a new tensor, to be
    finished by `wait`. A sum in the axis's fixed order is done when this returns.
    """
    if op == "sum" and axis.reduction == "fixed":
        return _add_in_order(x, axis)
    with profiling.record_range(axis.name, "all-reduce"):
        return processes.all_reduce(x.contiguous(), op, _group(axis))


def start_all_reduce_(
    x: Shaped[Tensor, "*shape"], axis: Axis, op: str = "sum"
) -> Shaped[Tensor, "*shape"]:
    """Start an all-reduce in the memory of contiguous x, a temporary that the caller does not read
    again, to be finished by `wait`; `start_all_reduce` would copy it first, as large as the
    activation. `op`: sum, max, min. Under torch.compile the result is a new tensor.
    """
    # inductor decides about memory itself, and functional ops trace
    if torch.compiler.is_compiling():
        return start_all_reduce(x, axis, op)
    if op == "sum" and axis.reduction == "fixed":
        return x.copy_(_add_in_order(x, axis))
    with profiling.record_range(axis.name, "all-reduce"):
        return processes.all_reduce_(x, op, _group(axis).group_name)


def _add_in_order(x: Tensor, axis: Axis) -> Tensor:
    """Return the sum of x over the ranks of the axis, in a fixed order (a tree, neighbours first):
    each rank adds up one part and sends it to all. Waits for the result.
    """
    flat = x.reshape(-1)
    # zeros, so that every rank gets an equal part
    flat = F.pad(flat, (0, -flat.numel() % axis.size))
    shard = finish_reduce_scatter(start_reduce_scatter(flat, axis), axis)
    return wait(start_all_gather(shard, axis), axis)[: x.numel()].view(x.shape)


def start_all_gather(
    x: Shaped[Tensor, " n *rest"], axis: Axis
) -> Shaped[Tensor, " {axis.size}*n *rest"]:
    """Start gathering x of every rank of the axis, concatenated along dim 0; `wait` on what this
    returns finishes it.
    """
    with profiling.record_range(axis.name, "all-gather"):
        return _start(x, axis, lambda x: processes.all_gather(x, 0, _group(axis)))


def start_reduce_scatter(
    x: Shaped[Tensor, " rows *rest"], axis: Axis
) -> Shaped[Tensor, " arriving *rest"]:
    """Start the reduce-scatter of x over the ranks of the axis along dim 0; `finish_reduce_scatter`
    turns what this returns into this rank's part of the sum.

    gloo would all-reduce and keep a part. There, ranks exchange parts and each adds up its own when
    it finishes: 8 MiB of bf16 between two processes takes 5 ms instead of 15, and sums are rounded
    once. The same is done wherever the order of the sum is fixed.
    """
    # parts of x go straight to the rank that adds them
    if axis.adds:
        return start_all_to_all(x, None, None, axis)
    with profiling.record_range(axis.name, "reduce-scatter"):
        return processes.reduce_scatter(x.contiguous(), "sum", 0, _group(axis))


def start_all_to_all(
    x: Shaped[Tensor, " rows *rest"],
    receive: list[int] | None,
    send: list[int] | None,
    axis: Axis,
) -> Shaped[Tensor, " arriving *rest"]:
    """Start sending the first send[0] rows of x to rank 0 of the axis, the next send[1] to rank 1
    and so on; receive[r] rows come from rank r, in the order of ranks. None for both: equally many
    to and from all. Finish by `wait`.
    """
    with profiling.record_range(axis.name, "all-to-all"):
        return _start(x, axis, lambda x: processes.all_to_all(x, receive, send, _group(axis)))


def wait(x: Shaped[Tensor, "*shape"], axis: Axis) -> Shaped[Tensor, "*shape"]:
    """Wait for the result of a `start_*` and return it; a profile records the wait under `axis`."""
    with profiling.record_range(axis.name, "wait"):
        return processes.wait(x)


def finish_reduce_scatter(
    x: Shaped[Tensor, " arriving *rest"], axis: Axis
) -> Shaped[Tensor, " n *rest"]:
    """Wait for what `start_reduce_scatter` returned, and return this rank's equal part, along dim
    0, of the sum over the axis.
    """
    x = wait(x, axis)
    if not axis.adds:
        return x
    # arrived: each rank's part of this rank's rows, one after the other
    parts = x.view(axis.size, x.shape[0] // axis.size, *x.shape[1:])
    return tree_sum(parts) if axis.reduction == "fixed" else parts.sum(0)


class HostReceive(NamedTuple):
    """A message that arrives in host memory, from where `wait` copies it to its tensor."""

    work: dist.Work
    host: Tensor
    into: Tensor

    def wait(self) -> None:
        """Wait until it has arrived, and copy it."""
        self.work.wait()
        self.into.copy_(self.host)

    def is_completed(self) -> bool:
        """Return True if it has arrived in host memory."""
        return self.work.is_completed()


def start_send(x: Shaped[Tensor, "..."], axis: Axis, peer: int) -> dist.Work:
    """Start sending x to rank `peer` of the axis, which calls `start_receive`. x must not be
    written to before the returned work is done. Messages between two ranks arrive in the order of
    sending.

    Over NCCL the first send or receive of two ranks on an axis makes their communicator, and the
    CPU waits there for the other rank: see `connect` in parallel/pipeline.py.
    """
    with profiling.record_range("pp", "send"):
        x = x.cpu() if _crosses_host(x, axis) else x
        return _require_work(dist.isend(x, group=axis.group, group_dst=peer))


def start_receive(into: Shaped[Tensor, "..."], axis: Axis, peer: int) -> dist.Work | HostReceive:
    """Start receiving into the tensor `into` what rank `peer` of the axis sends next to this rank;
    it is there once the returned work is waited for.
    """
    with profiling.record_range("pp", "receive"):
        crosses = _crosses_host(into, axis)
        host = torch.empty(into.shape, dtype=into.dtype) if crosses else into
        work = _require_work(dist.irecv(host, group=axis.group, group_src=peer))
        return HostReceive(work, host, into) if crosses else work


def _require_work(work: dist.Work | None) -> dist.Work:
    """Return the work handle, which must not be None: torch gives None only to a process that is
    not in the group.
    """
    assert work is not None, "torch returns no work handle: this process is not in the group"
    return work


class Rotation(NamedTuple):
    """Tensors on their way to the next rank of a ring; `wait` returns those from the
    previous one.
    """

    coming: list[Tensor]
    going: list[Tensor]  # kept alive until they have left
    works: list[dist.Work]
    axis: Axis
    device: torch.device | None = None
    """Device of the tensors, if they cross in host memory."""

    def wait(self) -> list[Tensor]:
        """Wait until all tensors have arrived and left, and return the received ones, in the order
        of those sent.
        """
        with profiling.record_range(self.axis.name, "wait"):
            for work in self.works:
                work.wait()
        return self.coming if self.device is None else [t.to(self.device) for t in self.coming]


def start_rotate(tensors: list[Shaped[Tensor, "..."]], axis: Axis, shift: int = 1) -> Rotation:
    """Start sending each tensor to the rank `shift` further on the ring of the axis, and receiving
    that of the rank as far behind; `wait` of the returned `Rotation` gives the received ones.
    Shapes are equal on all ranks, and all ranks call this in the same order. What is sent must not
    be written to before `Rotation.wait`. On an axis of one rank the tensors themselves are
    received.

    One batch, so that NCCL takes the communicator of the whole axis, as a collective does, and not
    one for each pair. The CPU waits for the others only while that is made, in the first call; as
    all ranks of the axis make it, and before it the same calls, none waits for ever.
    """
    if axis.size == 1:
        return Rotation(tensors, tensors, [], axis)
    crosses = _crosses_host(tensors[0], axis)
    going = [t.contiguous().cpu() if crosses else t.contiguous() for t in tensors]
    coming = [torch.empty_like(t) for t in going]
    there, behind = (axis.rank + shift) % axis.size, (axis.rank - shift) % axis.size
    with profiling.record_range(axis.name, "send and receive"):
        works = dist.batch_isend_irecv(
            [dist.P2POp(dist.isend, t, group=axis.group, group_peer=there) for t in going]
            + [dist.P2POp(dist.irecv, t, group=axis.group, group_peer=behind) for t in coming]
        )
    return Rotation(coming, going, works, axis, tensors[0].device if crosses else None)
