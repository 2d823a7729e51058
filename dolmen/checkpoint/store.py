"""A run's checkpoints: saved in the background at one layout, loaded at any other. Tensors go
through DCP (torch.distributed.checkpoint), everything else is JSON. writer.py: who does what when.
folders.py: why no kill harms.
"""

import json
import warnings
from collections.abc import Callable, Collection
from concurrent.futures import Future
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.state_dict_saver import async_save

from dolmen.checkpoint import folders, seal
from dolmen.checkpoint.folders import Damaged
from dolmen.checkpoint.reader import Reader
from dolmen.checkpoint.remote import RemoteCheckpoints
from dolmen.checkpoint.writer import Writer, pinned_for
from dolmen.core.mesh import Mesh, background_group

T = TypeVar("T")


class NotSaved(RuntimeError):
    """A save has failed; earlier checkpoints are intact."""


class _Done(NamedTuple):
    """A rank's report to the others on its part of a collective job."""

    step: int
    """Step of the checkpoint that the job was about."""
    error: str | None
    damaged: bool
    """True if the error is Damaged."""
    value: Any


class Checkpoints:
    """The checkpoints in `folder`, of which the `keep` newest are kept (0: all). Every rank of the
    mesh makes one.

    `save`, `finish`, `put_aside`, `load` and `together` are collective: all ranks call them at the
    same point. One save is in progress at a time, by one run. Call `finish` before the process
    group is destroyed. `group`: of all ranks, for CPU tensors, and not used otherwise while a save
    is in progress; by default a new one. `remote`: a URL where each checkpoint is saved too, and
    from where files are read that the folder lacks.
    """

    def __init__(
        self,
        folder: Path,
        mesh: Mesh,
        keep: int,
        group: dist.ProcessGroup | None = None,
        remote: RemoteCheckpoints | None = None,
    ):
        """Make a process group for background saves (collective), unless `group` is given or there
        is one process; no file is read.
        """
        self.folder, self.keep, self.remote = Path(folder), keep, remote
        self.pinned = pinned_for(mesh.device)
        self._saving: tuple[int, Future] | None = None
        if group is None and mesh.grid is not None:
            group = background_group(timedelta(hours=1))
        self._group = group
        self._rank = 0 if self._group is None else dist.get_rank(self._group)
        if self._group is None:
            warnings.filterwarnings("ignore", "torch.distributed is disabled", UserWarning)

    def save(self, step: int, tensors: dict[str, Tensor], meta: dict, wait: bool = False) -> None:
        """Copy `tensors` to CPU memory and return; they are written in the background. `wait`:
        write them before returning. `meta` is stored as JSON.

        Finishes the previous save first. Raises NotSaved where that one (or with `wait` this one)
        has failed, and TypeError where `meta` cannot be stored as JSON.
        """
        # before anything is copied: a TypeError must not leave a save half begun
        state = json.dumps({"format": seal.FORMAT, **meta}, indent=1)
        self.finish()
        writer = Writer(self.folder, step, state, self.keep, self.pinned, self._rank, self.remote)
        planner = DefaultSavePlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
        future = async_save(
            tensors,
            storage_writer=writer,
            planner=planner,
            process_group=self._group,
            no_dist=self._group is None,
        )
        assert isinstance(future, Future)  # all that a process that writes no file by itself gets
        self._saving = step, future
        if wait:
            self.finish()

    def poll(self) -> bool:
        """True if no save is in progress. Ranks may see it some microseconds apart. An error is
        raised by `finish`, not here.
        """
        return self._saving is None or self._saving[1].done()

    def finish(self) -> None:
        """Wait for the save in progress, if any. Raises NotSaved, the same on every rank, if it
        failed.
        """
        if self._saving is None:
            return
        (step, future), self._saving = self._saving, None
        try:
            future.result()
        except (CheckpointException, Exception) as error:  # DCP's is a BaseException
            reason = (
                min(error.failures.items())[1][0]
                if isinstance(error, CheckpointException)
                else error
            )
            raise NotSaved(
                f"step {step} was not saved in {self.folder}: {reason!r}. "
                f"{folders.describe_newest(self.folder)}: make room or use another folder, and "
                "save again"
            ) from error

    def steps(self) -> list[int]:
        """Steps of the complete checkpoints on disk, oldest first."""
        return list(folders.list_checkpoints(self.folder))

    def newest(self) -> int | None:
        """Step of the newest complete checkpoint, None if there is none."""
        return max(self.steps(), default=None)

    def path(self, step: int) -> Path:
        """Folder of the checkpoint of `step`. Raises ValueError if there is no complete one."""
        checkpoints = folders.list_checkpoints(self.folder)
        if step not in checkpoints:
            raise ValueError(
                f"{self.folder} has no checkpoint of step {step}, only of steps {list(checkpoints)}"
            )
        return checkpoints[step]

    def open_reader(self, step: int) -> Reader:
        """Open the checkpoint of `step`. Raises as `path` and Reader."""
        remote = None if self.remote is None else self.remote.open_step(step)
        return Reader(self.path(step), remote)

    def meta(self, step: int) -> dict:
        """Content of the checkpoint's state.json, as it was passed to `save`. Raises Damaged."""
        return seal.read_sealed(self.path(step))[1]

    def damage_error(self, step: int, error: Exception) -> Damaged:
        """Return the error to raise where `step`, the newest checkpoint, cannot be read because of
        `error`; its message names what to remove and the step the run then resumes from.
        """
        older = max((s for s in self.steps() if s < step), default=None)
        way = f"to resume from step {older}" if older is not None else "to start again"
        return Damaged(
            f"the newest checkpoint cannot be read ({error}): remove {self.path(step)} {way}"
        )

    def put_aside(self, step: int) -> Path:
        """Rename a damaged checkpoint to a name that is never read or pruned; return its new path.
        Rank 0 renames it, and all ranks raise its error.
        """

        def rename() -> Path | None:
            """Rename the folder on rank 0; None on the others."""
            if self._rank:
                return None
            if self.remote is not None:
                self.remote.put_aside(step)
            return folders.put_aside(self.path(step))

        # rank 0's result
        aside = self.together(step, rename)[0]
        assert aside is not None
        if self.remote is not None:
            with suppress(OSError):  # the copy of a host whose folder is not that of rank 0
                folders.remove_checkpoint(self.folder / folders.name(step))
        return aside

    def load(self, step: int, tensors: dict[str, Tensor], elsewhere: Collection[str] = ()) -> None:
        """Fill `tensors` in place with those of `step`, saved at any layout and cast to the
        target's dtype. A whole kind (the part of names before `/`) may be left out. Each rank reads
        its own part, then all agree on success; checksums of stored parts that were read in part
        are verified, divided over ranks. `elsewhere`: stored names that other pipeline stages have.

        Finishes the save in progress, which uses the same group. Raises, on every rank, KeyError
        for missing or unexpected names, ValueError for other shapes, Damaged.
        """
        self.finish()

        def read() -> set:
            """Read this rank's part; return the stored parts that were read in part only."""
            reader = self.open_reader(step)
            with torch.no_grad():
                reader.load(tensors, elsewhere)
            return reader.partly

        partly = self.together(step, read)
        parts = sorted(set().union(*partly), key=lambda index: (index.fqn, index.offset))
        if parts:
            # each part once, by one rank: reading them again costs 1 / ranks of the checkpoint at
            # most
            mine = parts[self._rank :: len(partly)]
            self.together(step, lambda: self.open_reader(step).verify(mine))

    def together(self, step: int, work: Callable[[], T]) -> list[T]:
        """Run `work()`, which concerns `step`, on each rank, and return the results of all ranks
        (all-gather). If it fails on one rank, all raise: KeyError, ValueError, OSError, or Damaged
        if any has. Raises ValueError too where ranks come with different steps.
        """
        error = value = None
        try:
            value = work()
        except (KeyError, ValueError, OSError) as caught:
            error = caught
        mine = _Done(step, error and str(error), isinstance(error, Damaged), value)
        gathered: list[Any] = [mine]
        if self._group is not None:
            gathered = [None] * dist.get_world_size(self._group)
            dist.all_gather_object(gathered, mine, group=self._group)
        # Which error a rank raises. All must raise the same kind, for a restart goes on from an
        # older checkpoint after Damaged alone:
        # 1. its own, unless that is another kind and some rank has found damage;
        # 2. else that of the first rank that has one, with its number;
        # 3. else, where ranks have come with different steps, that they have.
        damaged = any(done.damaged for done in gathered)
        if error and (mine.damaged or not damaged):
            raise error
        for rank, done in enumerate(gathered):
            if done.error and (done.damaged or not damaged):
                raise (Damaged if damaged else ValueError)(f"rank {rank}: {done.error}")
        for rank, done in enumerate(gathered):
            if done.step != step:
                raise ValueError(
                    f"rank {rank} loads step {done.step}, this rank step {step}, from {self.folder}"
                )
        return [done.value for done in gathered]
