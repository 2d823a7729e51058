"""Private names of torch for tensors without values, and for seeing every operator."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import (
    _create_work_from_future,  # pyright: ignore[reportAttributeAccessIssue]  # its stub lacks it
)
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode

Fake = FakeTensorMode
"""Within, operators give tensors that have shapes and storages, and no memory. The public
`torch.device("meta")` has another device, and reads it nowhere. 2.11 to 2.13."""

Dispatch = TorchDispatchMode
"""Called for every operator below autograd, in `__torch_dispatch__`. 2.11 to 2.13."""

Arriving = AsyncCollectiveTensor
"""Stands for the result of a functional collective until it is used: a wrapper, whose storage is
that of nothing. 2.11 to 2.13."""


def join_fake(world: int, rank: int = 0) -> None:
    """Initialise a default group in which this process is `rank` of `world` ranks, and nothing is
    sent. 2.11 to 2.13.
    """
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world)


def completed_work() -> torch.ScriptObject:
    """Return a c10d work object that is completed already, boxed as operators return it. It stands
    in for the work of a fake process group, which, like gloo's, completes only when waited for.
    For torch 2.11 to 2.13.
    """
    future: torch.futures.Future[None] = torch.futures.Future()
    future.set_result(None)
    return _create_work_from_future(future).boxed()


def next_sequence_number() -> int:
    """Return the sequence number of the next autograd node: they are counted as forward makes them.
    2.11 to 2.13.
    """
    return torch._C._autograd._get_sequence_nr()  # pyright: ignore[reportAttributeAccessIssue]


def backward_sequence_number() -> int | None:
    """Return the sequence number of the node that backward executes; None outside of it. 2.11 to
    2.13.
    """
    node = torch._C._current_autograd_node()
    return None if node is None else node._sequence_nr()


@contextmanager
def observe_resizes(seen: Callable[[torch.UntypedStorage], None]) -> Iterator[None]:
    """Context manager: inside, call `seen(storage)` after each resize of a storage: FSDP frees
    gathered parameters that way, and no operator shows it. 2.11 to 2.13.
    """
    resize = torch.UntypedStorage.resize_

    def resize_and_report(storage: torch.UntypedStorage, size: int) -> None:
        """Resize the storage, then call `seen` with it."""
        resize(storage, size)
        seen(storage)

    torch.UntypedStorage.resize_ = resize_and_report  # pyright: ignore[reportAttributeAccessIssue]
    try:
        yield
    finally:
        torch.UntypedStorage.resize_ = resize
