"""Process groups: how ranks are connected, how urgent what they send is, how long it may take.

    default group    all ranks: gloo, and NCCL for GPU tensors; lazily connected over gloo
    background       all ranks, once more: what is saved while training goes on
    of one axis      its ranks alone: gloo, or on GPUs NCCL and nothing else

A rank of 3,072 so has two gloo groups; docs/clusters.md counts their sockets.
"""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta

import torch
import torch.distributed as dist

from dolmen.core.torch_private import processes, spelled


@contextmanager
def lazily() -> Iterator[None]:
    """Within, gloo groups connect two ranks when these first talk, and not all with all at once: of
    3,072 ranks each would open 3,071 sockets per group, three times what a process may (ulimit -n).
    A variable that the user has set stays.

    For groups of collectives alone: a lazy group's first receive waits on the CPU for its sender,
    which is NCCL's rule and would be one more for point-to-point over gloo.
    """
    if spelled.LAZY_GLOO in os.environ:
        yield
        return
    os.environ[spelled.LAZY_GLOO] = "1"
    try:
        yield
    finally:
        del os.environ[spelled.LAZY_GLOO]


def background(timeout: timedelta) -> dist.ProcessGroup:
    """A gloo group of all ranks of its own: on a shared one, what happens in the background and
    training's collectives would meet. All ranks call it at the same point.
    """
    with lazily():
        return _mine(dist.new_group(backend="gloo", timeout=timeout))


def group_of(
    ranks: list[int],
    purpose: str = "dolmen",
    device: torch.device = torch.device("cpu"),
    timeout: timedelta | None = None,
) -> dist.ProcessGroup:
    """The group of `ranks` for `purpose`, made once in the life of the default group: each costs
    threads and descriptors. Only its members meet, so that a rank of thousands makes a dozen
    groups, not all. All ranks make equally many, in one order: torch names a group after its ranks
    and the number of groups before it.

    For a GPU it is NCCL alone, no full mesh of gloo's sockets beside it, on a stream of high
    priority: whatever an axis sends, some rank's next product waits for it, and its kernel would
    otherwise begin only when all blocks of the product under way have. Where the ranks met over
    gloo alone, as those do that share a GPU, which NCCL refuses, it is gloo.
    """
    nccl = device.type == "cuda" and "nccl" in _backends(dist.group.WORLD)
    for group, members in processes.groups():
        known = group.group_desc == purpose and members == ranks
        if known and ("nccl" in _backends(group)) == nccl:
            return group
    backend = options = None
    if nccl:
        backend, options = "nccl", dist.ProcessGroupNCCL.Options(is_high_priority_stream=True)
        if timeout is not None:
            processes.set_timeout(options, timeout)
    return _mine(
        dist.new_group(
            ranks,
            timeout=timeout,
            backend=backend,
            pg_options=options,
            use_local_synchronization=True,
            group_desc=purpose,
        )
    )


def _mine(group: dist.ProcessGroup | int | None) -> dist.ProcessGroup:
    """Of a group without this rank torch gives a number."""
    assert isinstance(group, dist.ProcessGroup)
    return group


def _backends(group: dist.ProcessGroup | None) -> str:
    """Of each kind of device: "cpu:gloo,cuda:nccl". Of no group, none is."""
    assert group is not None
    return processes.backends(group)
