"""Writes DCP checkpoints: tensors are copied to CPU memory, then saved in the background.

What a save writes is copied to CPU memory first, so that training may go on changing it.

From a GPU the copies go to pinned memory, all of them under way at once on a stream of their own,
and are waited for once. What is written is that memory: there is no second copy. It is allocated in
chunks, from torch's allocator of pinned memory, which keeps them for the next save, and which
rounds each up to a power of 2. A tensor is written from one piece of memory, so it lies in one
chunk; which sizes the chunks have, and what lies where, is what allocates least, of several ways
that are tried. For the recipes' models, cut for 1 to 256 ranks, of which each has at most 192 GiB,
that is at most 1.036 times what a rank has to write.

DCP's writer, with three additions: one copy is staged, one rank makes the folder, and the save
ends in a rename.

                  every rank                      rank 0 alone                  DCP sends, on the
                                                                                group of saves
    main thread   stage: copy to CPU memory
    background    plan: my part of each tensor                                  -> gather
                                                  prepare_global_plan: mkdir    -> scatter
                  write_data, fsync                                             -> gather
                  upload, with a URL
                                                  finish: state.json, rename    -> broadcast

`finish` runs when the results of all ranks' writes have arrived, and every rank's future resolves
after it, with the same success or the same error (torch 2.13: state_dict_saver._save_state_dict,
utils._DistWrapper.all_reduce). A replicated tensor is written by one rank, the one with least to
write (dedup_save_plans).
"""

import errno
import os
import shutil
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

import torch
from torch import Tensor, contiguous_format
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

from dolmen.checkpoint import folders, seal
from dolmen.checkpoint.metadata import find_numbers
from dolmen.checkpoint.remote import RemoteCheckpoints
from dolmen.core import state
from dolmen.files.storage import PARTIAL, StorageError

ALIGNED = 256  # bytes: where a tensor may begin
LARGEST = 1 << 32  # bytes of a chunk, unless a tensor is larger
TRIED = 11  # chunks of that, or of all there is, of half of it, ... to 1/1024


@dataclass(frozen=True)
class Pinned:
    """How a rank copies out of a GPU."""

    allocate: Callable[[int], Tensor]
    """Allocates pinned memory, uint8 [bytes]."""
    copy_stream: Callable[[], AbstractContextManager]
    """Makes a context in which copies run on their own stream, after the work queued before."""
    arrived: Callable[[], None]
    """Waits for all copies started in that context."""


def pinned_for(device: torch.device) -> Pinned | None:
    """Return how to copy tensors from the CUDA device `device` to pinned host memory, on a stream
    of its own; None for any other device, which needs no pinned memory.
    """
    if device.type != "cuda":
        return None
    stream = torch.cuda.Stream(device)

    def copy_stream() -> AbstractContextManager:
        """Return a context in which copies run on their own CUDA stream, after the work queued so
        far on the current stream.
        """
        stream.wait_stream(torch.cuda.current_stream(device))
        return torch.cuda.stream(stream)

    return Pinned(
        lambda size: torch.empty(size, dtype=torch.uint8, pin_memory=True),
        copy_stream,
        stream.synchronize,
    )


def copy_to_cpu(tensors: Mapping[str, Tensor], pinned: Pinned | None) -> dict[str, Tensor]:
    """Return a copy in CPU memory of each tensor, name -> contiguous tensor of the same dtype; of a
    DTensor this rank's shard is copied, and the copy is a DTensor again. With `pinned`, the copies
    go from the GPU to pinned memory all at once and are waited for before returning.
    """
    if pinned is None:
        return {
            n: t.detach().to("cpu", copy=True, memory_format=contiguous_format)
            for n, t in tensors.items()
        }
    sizes, places = plan_chunks(tuple(state.local_view(t).nbytes for t in tensors.values()))
    chunks = [pinned.allocate(size).untyped_storage() for size in sizes]
    out = {}
    with pinned.copy_stream():
        for (name, tensor), (chunk, begin) in zip(tensors.items(), places, strict=True):
            shard = state.local_view(tensor)
            # no more than its bytes: of a part of a storage, who writes it makes a copy
            target = chunks[chunk][begin : begin + shard.nbytes]
            copy = torch.empty(0, dtype=shard.dtype).set_(target)
            copy = copy.view(shard.shape).copy_(shard, non_blocking=True)
            out[name] = state.tensor_like(tensor, copy)
    pinned.arrived()
    return out


@lru_cache(maxsize=4)  # each save of a run has the same sizes
def plan_chunks(sizes: tuple[int, ...]) -> tuple[list[int], list[tuple[int, int]]]:
    """Plan how buffers of `sizes` bytes are packed into chunks of pinned memory, whose allocator
    rounds up to powers of 2. Returns the sizes of the chunks in bytes, powers of 2, and the place
    of each buffer, (index of its chunk, first byte in it). Of 11 chunk sizes the one that needs the
    least memory in total is taken.
    """
    most = min(LARGEST, _round_up(sum(sizes)))
    tried = (_pack_chunks(sizes, max(ALIGNED, most >> power)) for power in range(TRIED))
    return min(tried, key=lambda item: sum(item[0]))


def _pack_chunks(sizes: tuple[int, ...], chunk: int) -> tuple[list[int], list[tuple[int, int]]]:
    """Pack buffers of `sizes` bytes into chunks of `chunk` bytes (more for a larger buffer) by
    first fit, the largest buffers first, so that small ones fill the gaps. Returns the size of each
    chunk, what it uses rounded up to a power of 2, and the place of each buffer, (index of its
    chunk, first byte in it), aligned to 256 bytes.
    """
    rooms: list[int] = []
    used: list[int] = []
    places = [(0, 0)] * len(sizes)
    first, before = 0, -1  # chunks before `first` have no room for any of the size `before`
    for which in sorted(range(len(sizes)), key=lambda which: -sizes[which]):
        size = -(-sizes[which] // ALIGNED) * ALIGNED
        first = first if size == before else 0
        while first < len(rooms) and used[first] + size > rooms[first]:
            first += 1
        if first == len(rooms):
            rooms.append(max(chunk, _round_up(size)))
            used.append(0)
        places[which], before = (first, used[first]), size
        used[first] += size
    return [_round_up(bytes_) for bytes_ in used], places


def _round_up(size: int) -> int:
    """Return `size` bytes rounded up to a power of 2, at least 256, as torch's allocator of pinned
    memory does.
    """
    return 1 << (max(size, ALIGNED) - 1).bit_length()


@dataclass(frozen=True)
class WrittenPart(WriteResult):
    """A rank's report of a part that it wrote, with the CRC-32 of its numbers."""

    crc: int


ROOM = 2**20  # bytes: with fewer free, a write has failed for lack of them


class Writer(FileSystemWriter):
    """DCP storage writer of the checkpoint of `step` in `folder`: complete or not at all. `state`:
    text of its state.json. `keep`: number of newest checkpoints that are kept. `pinned`: how to
    copy from a GPU. `remote`: the checkpoints at a URL, where it is saved too; hosts may then have
    folders of their own.
    """

    def __init__(
        self,
        folder: Path,
        step: int,
        state: str,
        keep: int,
        pinned: Pinned | None,
        rank: int = 0,
        remote: RemoteCheckpoints | None = None,
    ):
        """Prepare the save of the checkpoint of `step` in `folder`; nothing is written. `state`:
        text of its state.json; `keep`: newest checkpoints that are kept (0: all); `pinned`: how to
        copy from a GPU (None: the tensors are on the CPU); `rank`: of this process; `remote`: the
        checkpoints at a URL, where it is saved too.
        """
        # no copies ahead: the tensors are on the CPU, and DCP's thread would open a context on the
        # first GPU
        self.partial = folder / (folders.name(step) + PARTIAL)
        super().__init__(self.partial, per_thread_copy_ahead=0)
        self.folder, self.step, self.state, self.keep = folder, step, state, keep
        self.pinned, self.saving_rank, self.remote = pinned, rank, remote

    def stage(self, state_dict: dict[str, Tensor]) -> dict[str, Tensor]:
        """Return copies in CPU memory of this rank's part of each tensor, so that training may
        change the originals while the copies are written.
        """
        return copy_to_cpu(state_dict, self.pinned)

    def storage_meta(self) -> StorageMeta:
        """Return an empty StorageMeta in place of DCP's own, which would store the path of the
        folder that the checkpoint was first written to.
        """
        return StorageMeta()

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        """Return the plan unchanged, without making a folder as DCP's own writer does: rank 0 makes
        it in `prepare_global_plan`, before any rank writes. With remote checkpoints, delete this
        rank's local files of unfinished saves first.
        """
        if self.remote is not None:
            folders.clear_own_files(self.folder, self.saving_rank)
        return plan

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        """Delete unfinished saves, delete the seal of this step at the URL (if there is one), make
        the partial folder, and return the ranks' plans merged by DCP. Called on rank 0, before any
        rank writes.
        """
        folders.clear_unfinished(self.folder)
        if self.remote is not None:
            self.remote.begin(self.step)
        self.partial.mkdir(parents=True)
        return super().prepare_global_plan(plans)

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Write this rank's file of tensors, upload it if there is a URL, and return, in a future
        that is done, DCP's result of each part with its CRC-32. Raises OSError with the reason
        where a write fails.
        """
        with explain_write_errors(self.partial):
            if self.remote is not None:  # on a host whose folder is not that of rank 0
                self.partial.mkdir(parents=True, exist_ok=True)
            results = super().write_data(plan, planner).value()
            done: Future[list[WriteResult]] = Future()
            done.set_result(self._add_checksums(results))
        if self.remote is not None:
            names = sorted({result.storage_data.relative_path for result in results})
            self.remote.upload(self.step, [self.partial / name for name in names])
        return done

    def _add_checksums(self, results: list[WriteResult]) -> list[WriteResult]:
        """Return each result of DCP's write as a WrittenPart with the CRC-32 of its numbers, read
        from the directory of the archive just written, not computed again.
        """
        files: dict[str, list[WriteResult]] = defaultdict(list)
        for result in results:
            files[result.storage_data.relative_path].append(result)
        write_results: list[WriteResult] = []
        for name, written in files.items():
            with open(self.partial / name, "rb") as file:
                for r in written:
                    place = r.storage_data
                    crc = find_numbers(file, place.offset, place.length).crc
                    write_results.append(WrittenPart(r.index, r.size_in_bytes, place, crc))
        return write_results

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Complete the checkpoint: write .metadata, state.json and the seal, upload them if there
        is a URL, rename the folder to its final name, and delete old checkpoints, here and at the
        URL. DCP calls it on rank 0 after all ranks have written; `results`: of each rank's writes.
        """
        with explain_write_errors(self.partial):
            super().finish(metadata, results)
            with open(self.partial / folders.STATE, "w", encoding="utf-8") as file:
                file.write(self.state)
                file.flush()
                # before the rename: after a power cut the name must not outlive the content
                os.fsync(file.fileno())
            files: dict[str, list[tuple[int, int, int]]] = defaultdict(list)
            for r in (r for written in results for r in written):
                assert isinstance(r, WrittenPart)
                place = r.storage_data
                files[place.relative_path].append((place.offset, place.length, r.crc))
            seal.write_seal(self.partial, files)
        # complete at the URL first: what has its name here is there too
        if self.remote is not None:
            self.remote.finish(self.step, self.partial)
        folders.commit(self.partial)
        folders.prune(self.folder, self.keep, self.step)
        if self.remote is not None:
            with suppress(StorageError):  # the save is complete; the next one deletes them
                self.remote.prune(self.keep, self.step)


NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EIO)


@contextmanager
def explain_write_errors(folder: Path) -> Iterator[None]:
    """Context manager: raise an error of writing into `folder` as the OSError that caused it, found
    in the chain of exceptions, or as "no space left" if the disk is full; other errors are raised
    unchanged. (torch's archive writer reports a full disk as `enforce fail at
    inline_container.cc`.)
    """
    try:
        yield
    except Exception as error:
        # the reason first, without torch's own message
        if (why := _causing_error(error)) is not None:
            raise why from None
        if _is_disk_full(folder):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(folder)) from error
        raise


def _causing_error(error: BaseException) -> OSError | None:
    """Return the first OSError in the exception chain of `error`, itself included: any along
    declared causes (`raise ... from`); beyond an error without a declared cause, only one of a full
    disk, a quota or an I/O error. None without one.
    """
    declared = True
    before: BaseException | None = error
    while before is not None:
        if isinstance(before, OSError) and (declared or before.errno in NO_ROOM):
            return before
        declared = declared and before.__cause__ is not None
        before = before.__cause__ or before.__context__
    return None


def _is_disk_full(folder: Path) -> bool:
    """Return whether the disk of `folder` has less than 1 MiB free; False if that cannot be
    found out.
    """
    with suppress(OSError):  # the folder is gone, which is no sign of a full disk
        return shutil.disk_usage(folder).free < ROOM
    return False
