"""DCP's writer, with three additions: one copy is staged, one rank makes the folder, and the save
ends in a rename.

                  every rank                      rank 0 alone                  DCP sends, on the
                                                                                group of saves
    main thread   stage: copy to CPU memory
    background    plan: my part of each tensor                                  -> gather
                                                  prepare_global_plan: mkdir    -> scatter
                  write_data, fsync                                             -> gather
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
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from torch import Tensor
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

from dolmen.checkpoint import folders, parts, seal, staging


@dataclass(frozen=True)
class Written(WriteResult):
    """What a rank tells of a part that it has written, with the CRC-32 of its numbers."""

    crc: int


ROOM = 2**20  # bytes: with fewer free, a write has failed for want of them


class Writer(FileSystemWriter):
    """Writes the checkpoint of `step` into `folder`, whole or not at all. `state` is the text of
    its state.json.
    """

    def __init__(
        self, folder: Path, step: int, state: str, keep: int, pinned: staging.Pinned | None
    ):
        # no copies ahead: the tensors are on the CPU, and DCP's thread would open a context on the
        # first GPU
        self.partial = folder / (folders.name(step) + folders.PARTIAL)
        super().__init__(self.partial, per_thread_copy_ahead=0)
        self.folder, self.step, self.state, self.keep = folder, step, state, keep
        self.pinned = pinned

    def stage(self, state_dict: dict[str, Tensor]) -> dict[str, Tensor]:
        """One contiguous copy of this rank's part of each tensor, in its shape, in CPU memory;
        training may go on changing them.
        """
        return staging.copies(state_dict, self.pinned)

    def storage_meta(self) -> StorageMeta:
        """Nothing: where the checkpoint was first written is no part of it."""
        return StorageMeta()

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        """Rank 0 makes the folder, in the next step, which comes before anyone's writes."""
        return plan

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        folders.clear_unfinished(self.folder)
        self.partial.mkdir(parents=True)
        return super().prepare_global_plan(plans)

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        with said_why(self.partial):
            results = super().write_data(plan, planner).value()
            done: Future[list[WriteResult]] = Future()
            done.set_result(self._sums(results))
        return done

    def _sums(self, results: list[WriteResult]) -> list[WriteResult]:
        """The results with the checksums, read off the heads of the parts just written."""
        files: dict[str, list[WriteResult]] = defaultdict(list)
        for result in results:
            files[result.storage_data.relative_path].append(result)
        found: list[WriteResult] = []
        for name, written in files.items():
            with open(self.partial / name, "rb") as file:
                for r in written:
                    place = r.storage_data
                    crc = parts.find_numbers(file, place.offset, place.length).crc
                    found.append(Written(r.index, r.size_in_bytes, place, crc))
        return found

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        with said_why(self.partial):
            super().finish(metadata, results)
            with open(self.partial / folders.STATE, "w", encoding="utf-8") as file:
                file.write(self.state)
                file.flush()
                os.fsync(file.fileno())
            files: dict[str, list[tuple[int, int, int]]] = defaultdict(list)
            for r in (r for written in results for r in written):
                assert isinstance(r, Written)
                place = r.storage_data
                files[place.relative_path].append((place.offset, place.length, r.crc))
            seal.write_seal(self.partial, files)
        folders.commit(self.partial)
        folders.prune(self.folder, self.keep, self.step)


NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EIO)


@contextmanager
def said_why(folder: Path) -> Iterator[None]:
    """Within, a failed write is an OSError that says why. torch's own archive writer says `enforce
    fail at inline_container.cc` of a full disk: the reason is an error before it, or, where torch
    has lost that, that `folder` has no room.
    """
    try:
        yield
    except Exception as error:
        if (why := _why(error)) is not None:
            raise why from None
        if _full(folder):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(folder)) from error
        raise


def _why(error: BaseException) -> OSError | None:
    """The OSError that is the declared cause of `error`, or, of what was only being handled when it
    came, one that fails writes.
    """
    declared = True
    before: BaseException | None = error
    while before is not None:
        if isinstance(before, OSError) and (declared or before.errno in NO_ROOM):
            return before
        declared = declared and before.__cause__ is not None
        before = before.__cause__ or before.__context__
    return None


def _full(folder: Path) -> bool:
    with suppress(OSError):  # the folder is gone: that says nothing of room
        return shutil.disk_usage(folder).free < ROOM
    return False
