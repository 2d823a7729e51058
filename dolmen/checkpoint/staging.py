"""What a save writes is copied to CPU memory first, so that training may go on changing it.

From a GPU the copies go to pinned memory, all of them under way at once on a stream of their own,
and are waited for once. What is written is that memory: there is no second copy. It is asked for in
chunks, from torch's allocator of pinned memory, which keeps them for the next save, and which
rounds each up to a power of 2. A tensor is written from one piece of memory, so it lies in one
chunk; which sizes the chunks have, and what lies where, is what asks for least, of several ways
that are tried. For the recipes' models, cut for 1 to 256 ranks, of which each has at most 192 GiB,
that is at most 1.036 times what a rank has to write.
"""

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor, contiguous_format

from dolmen.core import state

ALIGNED = 256  # bytes: where a tensor may begin
LARGEST = 1 << 32  # bytes of a chunk, unless a tensor is larger
TRIED = 11  # chunks of that, or of all there is, of half of it, ... to 1/1024


@dataclass(frozen=True)
class Pinned:
    """How a rank copies out of a GPU."""

    allocate: Callable[[int], Tensor]
    """So many bytes of pinned memory, uint8."""
    beside: Callable[[], AbstractContextManager]
    """Within, copies run beside what was begun before, on its results."""
    arrived: Callable[[], None]
    """Waits for what was begun within."""


def pinned_for(device: torch.device) -> Pinned | None:
    """None where memory is the CPU's own."""
    if device.type != "cuda":
        return None
    stream = torch.cuda.Stream(device)

    def beside() -> AbstractContextManager:
        stream.wait_stream(torch.cuda.current_stream(device))
        return torch.cuda.stream(stream)

    return Pinned(
        lambda size: torch.empty(size, dtype=torch.uint8, pin_memory=True),
        beside,
        stream.synchronize,
    )


def copies(tensors: Mapping[str, Tensor], pinned: Pinned | None) -> dict[str, Tensor]:
    """One contiguous copy of this rank's part of each tensor, in its shape and dtype, in CPU
    memory.
    """
    if pinned is None:
        return {
            n: t.detach().to("cpu", copy=True, memory_format=contiguous_format)
            for n, t in tensors.items()
        }
    sizes, places = plan(tuple(state.local_view(t).nbytes for t in tensors.values()))
    chunks = [pinned.allocate(size).untyped_storage() for size in sizes]
    out = {}
    with pinned.beside():
        for (name, tensor), (chunk, begin) in zip(tensors.items(), places, strict=True):
            shard = state.local_view(tensor)
            # no more than its bytes: of a part of a storage, who writes it makes a copy
            given = chunks[chunk][begin : begin + shard.nbytes]
            copy = torch.empty(0, dtype=shard.dtype).set_(given)
            copy = copy.view(shard.shape).copy_(shard, non_blocking=True)
            out[name] = state.holding(tensor, copy)
    pinned.arrived()
    return out


@lru_cache(maxsize=4)  # each save of a run asks the same
def plan(wanted: tuple[int, ...]) -> tuple[list[int], list[tuple[int, int]]]:
    """The sizes of the chunks to ask for, powers of 2, and where each of `wanted` so many bytes
    lies: (chunk, its first byte).
    """
    most = min(LARGEST, _rounded(sum(wanted)))
    tried = (_packed(wanted, max(ALIGNED, most >> power)) for power in range(TRIED))
    return min(tried, key=lambda found: sum(found[0]))


def _packed(wanted: tuple[int, ...], chunk: int) -> tuple[list[int], list[tuple[int, int]]]:
    """First fit, the largest first, so that the small fill what the large have left. A chunk is of
    `chunk` bytes, or of what its first needs; and then no larger than it need be.
    """
    rooms: list[int] = []
    used: list[int] = []
    places = [(0, 0)] * len(wanted)
    first, before = 0, -1  # chunks before `first` have no room for any of the size `before`
    for which in sorted(range(len(wanted)), key=lambda which: -wanted[which]):
        size = -(-wanted[which] // ALIGNED) * ALIGNED
        first = first if size == before else 0
        while first < len(rooms) and used[first] + size > rooms[first]:
            first += 1
        if first == len(rooms):
            rooms.append(max(chunk, _rounded(size)))
            used.append(0)
        places[which], before = (first, used[first]), size
        used[first] += size
    return [_rounded(bytes_) for bytes_ in used], places


def _rounded(size: int) -> int:
    """The power of 2 to which the allocator rounds."""
    return 1 << (max(size, ALIGNED) - 1).bit_length()
