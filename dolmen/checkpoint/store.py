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
from dolmen.checkpoint.remote import RemoteCheckpoints, Superseded
from dolmen.checkpoint.writer import Writer, pinned_for
from dolmen.core.mesh import Mesh, background_group
from dolmen.files.storage import StorageError

T = TypeVar("T")


class NotSaved(RuntimeError):
    """A save has failed; earlier checkpoints are intact."""


KINDS = (Damaged, Superseded, StorageError, ValueError)
"""Errors of one rank that all ranks raise alike; any other becomes a ValueError on the others."""


class _Done(NamedTuple):
    """A rank's report to the others on its part of a collective job."""

    step: int
    """Step of the checkpoint that the job was about."""
    error: str | None
    kind: type[Exception]
    """The class, one of KINDS, that the other ranks raise for the error."""
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
        """Prepare the checkpoints in `folder`, of which the `keep` newest stay (0: all); no file is
        read. Makes a process group for background saves (collective), unless there is one process
        or `group` is given, which must have all ranks and take CPU tensors. `remote`: a URL where
        each checkpoint is saved too, and from where files that the folder lacks are read.
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
        """Save the checkpoint of `step`: copy this rank's part of `tensors` to CPU memory and
        return; files are written in the background, or before returning with `wait`. `meta` is
        stored as JSON (state.json). Waits for the previous save first. Collective. Raises NotSaved
        where that one (or with `wait` this one) has failed, and TypeError where `meta` cannot be
        stored as JSON.
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
        """Return whether no save is in progress, without waiting: none was started, or it has ended
        or failed, which `finish` raises. Ranks may see it some microseconds apart.
        """
        return self._saving is None or self._saving[1].done()

    def finish(self) -> None:
        """Wait for the save in progress, if any. Raises NotSaved, the same on every rank, if it has
        failed, and Superseded. Collective.
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
            if isinstance(reason, Superseded):
                raise reason from error
            raise NotSaved(
                f"step {step} was not saved in {self.folder}: {reason!r}. "
                f"{folders.describe_newest(self.folder)}: make room or use another folder, and "
                "save again"
            ) from error

    def steps(self) -> list[int]:
        """Return the steps of the complete checkpoints in the local folder, in ascending order."""
        return list(folders.list_checkpoints(self.folder))

    def newest(self) -> int | None:
        """Return the highest step of the complete checkpoints in the local folder; None if there is
        none.
        """
        return max(self.steps(), default=None)

    def path(self, step: int) -> Path:
        """Return the local folder of the complete checkpoint of `step`. Raises ValueError if there
        is none.
        """
        checkpoints = folders.list_checkpoints(self.folder)
        if step not in checkpoints:
            raise ValueError(
                f"{self.folder} has no checkpoint of step {step}, only of steps {list(checkpoints)}"
            )
        return checkpoints[step]

    def open_reader(self, step: int) -> Reader:
        """Return a Reader of the checkpoint of `step`: its seal, state.json and .metadata are read,
        tensors are not; files that the folder lacks come from the URL, if there is one. Raises
        ValueError without such a checkpoint, Damaged for a damaged one.
        """
        remote = None if self.remote is None else self.remote.open_step(step)
        return Reader(self.path(step), remote)

    def meta(self, step: int) -> dict:
        """Return the content of the state.json of the checkpoint of `step`, as it was passed to
        `save`. Raises ValueError without such a checkpoint, Damaged for a damaged one.
        """
        return seal.read_sealed(self.path(step))[1]

    def damage_error(self, step: int, error: Exception) -> Damaged:
        """Return (not raise) the Damaged error for a run whose newest checkpoint, that of `step`,
        cannot be read because of `error`. Its message says which folder to remove, and the step
        from which the run then resumes, or that it starts again.
        """
        older = max((s for s in self.steps() if s < step), default=None)
        way = f"to resume from step {older}" if older is not None else "to start again"
        return Damaged(
            f"the newest checkpoint cannot be read ({error}): remove {self.path(step)} {way}"
        )

    def put_aside(self, step: int) -> Path:
        """Rename the damaged checkpoint of `step`, at the URL too, to a name that is never read or
        pruned, and return its new local path. Collective: rank 0 renames it, other hosts delete
        their local copies, and all ranks raise rank 0's error.
        """

        def rename() -> Path | None:
            """Rename the checkpoint's folder on rank 0 and return its new path; do nothing and
            return None on the others.
            """
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
        """Fill `tensors` in place with those of the checkpoint of `step`, saved at any layout, cast
        to the dtype of each. A whole kind (the part of names before `/`) may be left out. Each rank
        reads its own shards; then all agree on success, and divide the verification of checksums of
        stored parts of which only some rows were read. `elsewhere`: stored names that other
        pipeline stages have. Collective; waits for a save in progress first. Raises, on every rank,
        KeyError for missing or unexpected names, ValueError for other shapes, Damaged, NotSaved.
        """
        self.finish()

        def read() -> set:
            """Fill this rank's tensors; return the stored parts of which only some rows were read,
            so that their checksums are still unverified.
            """
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
        """Call `work()` on each rank and return the results of all ranks, by rank. Collective. If
        `work` raises KeyError, ValueError or OSError on any rank, every rank raises: Damaged if a
        rank found damage, else its own error, or one of the kind (KINDS) and with the text of the
        first failed rank's. Raises ValueError too unless all ranks have the same `step`, that of
        the checkpoint concerned.
        """
        error = value = None
        try:
            value = work()
        except (KeyError, ValueError, OSError) as caught:
            error = caught
        kind = next((kind for kind in KINDS if isinstance(error, kind)), ValueError)
        mine = _Done(step, error and str(error), kind, value)
        gathered: list[Any] = [mine]
        if self._group is not None:
            gathered = [None] * dist.get_world_size(self._group)
            dist.all_gather_object(gathered, mine, group=self._group)
        # Which error a rank raises. All must raise the same kind, for a restart goes on from an
        # older checkpoint after Damaged alone:
        # 1. its own, unless that is another kind and some rank has found damage;
        # 2. else that of the first rank that has one, with its number;
        # 3. else, where ranks have come with different steps, that they have.
        damaged = any(done.kind is Damaged for done in gathered)
        if error and (kind is Damaged or not damaged):
            raise error
        for rank, done in enumerate(gathered):
            if done.error and (done.kind is Damaged or not damaged):
                raise done.kind(f"rank {rank}: {done.error}")
        for rank, done in enumerate(gathered):
            if done.step != step:
                raise ValueError(
                    f"rank {rank} loads step {done.step}, this rank step {step}, from {self.folder}"
                )
        return [done.value for done in gathered]
