"""Snapshots of a run in the memory of its hosts, which outlive the workers: where a launcher
restarts all of them, they resume from a few steps ago and not from the newest checkpoint.

    /dev/shm/dolmen-UID-RUN-JOB/      mode 0700; RUN and JOB are digests of folder and job
      AGENT/                          one per launcher of workers (torchrun's agent on a host)
        step-00000120/                a checkpoint (folders.py), of which this agent has
          __0_0.distcp ...            the files of its own ranks, and those of another agent's
          .metadata, state.json, seal

Saving. A snapshot is written as a checkpoint is, by the same writer, but into memory, so each host
has the files of its ranks. Every rank then sends its file to a rank of the next agent, and the
small files of rank 0 go to all. So any one agent may be lost with its memory. The two newest are
kept: an agent may have been killed before it gave the newest its name.

Restoring (`restore`). The ranks of a restart, of any number, list what their hosts have. If the
newest step of which every file is somewhere is newer than the newest checkpoint, they write its
files into the run's folder, each file by one rank: it is then a checkpoint, whose seal is compared
as it is loaded. Memory is only read here, and only folders of this user without links.
"""

import hashlib
import json
import os
import shutil
import socket
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner
from torch.distributed.checkpoint.state_dict_saver import save
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future as TorchFuture

from dolmen.checkpoint import folders, seal
from dolmen.checkpoint.writer import Writer, pinned_for
from dolmen.core import consensus
from dolmen.core.mesh import Mesh, background_group
from dolmen.files import gate
from dolmen.files.storage import PARTIAL

ROOT = Path("/dev/shm")
KEPT = 2
SMALL = (folders.METADATA, folders.STATE, folders.SEAL)


def memory_folder(out: Path, job: str, root: Path = ROOT) -> Path:
    """Return the path of the folder in memory (/dev/shm) for snapshots of the run with the folder
    `out`; its name has this user's id and digests of `out` and `job`. `job`: an id that all
    restarts of the job share. Nothing is created.
    """
    run, job = (
        hashlib.blake2b(text.encode(), digest_size=6).hexdigest()
        for text in (str(out.absolute()), job)
    )
    return root / f"dolmen-{os.getuid()}-{run}-{job}"


def copy_targets(agents: Sequence[str]) -> list[int | None]:
    """Return, for each rank, the rank to which it sends a copy of its snapshot file: a rank of the
    next agent (launcher of a host's workers), cyclically, so that the ranks of an agent are spread
    evenly over those of the next. All None with a single agent. `agents`: agent id of each rank.
    """
    ranks: dict[str, list[int]] = {}
    for rank, agent in enumerate(agents):
        ranks.setdefault(agent, []).append(rank)
    order = list(ranks)
    targets: list[int | None] = []
    for rank, agent in enumerate(agents):
        following = ranks[order[(order.index(agent) + 1) % len(order)]]
        place = ranks[agent].index(rank) % len(following)
        targets.append(following[place] if len(order) > 1 else None)
    return targets


def remove_memory(folder: Path) -> None:
    """Delete the snapshots in `folder`, a path of `memory_folder`, on this host: only files that
    saves write, and folders that are empty then. Nothing happens if it is a link, another user's or
    missing.
    """
    if not _is_own(folder):
        return
    for agent in filter(_is_own, folder.iterdir()):
        for path in agent.iterdir():
            if folders.FOLDER.fullmatch(path.name):
                folders.remove_checkpoint(path)
        if not any(agent.iterdir()):
            agent.rmdir()
    if not any(folder.iterdir()):
        folder.rmdir()


def _is_own(path: Path) -> bool:
    """Return whether `path` is an existing folder that this user owns, and no symbolic link."""
    return path.is_dir() and not path.is_symlink() and path.stat().st_uid == os.getuid()


class MemoryWriter(Writer):
    """Writer of a snapshot, whose ranks have folders on several hosts: a rank also sends its file
    to rank `target` and receives those of the ranks `sources`.
    """

    def __init__(
        self,
        folder: Path,
        step: int,
        state: str,
        mesh: Mesh,
        group: dist.ProcessGroup | None,
        targets: Sequence[int | None],
    ):
        """Prepare the write of the snapshot of `step` below `folder`, this agent's in memory.
        `state`: text of its state.json; `group`: process group for the exchange of files;
        `targets`: for each rank, the rank to which it sends its file, or None.
        """
        super().__init__(folder, step, state, KEPT, pinned_for(mesh.device))
        self.group = group
        self.target = targets[mesh.rank]
        self.sources = [rank for rank, target in enumerate(targets) if target == mesh.rank]
        self.file = f"__{mesh.rank}_0.distcp"

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> TorchFuture[list[WriteResult]]:
        """Write this rank's file of tensors to memory, exchange files with the ranks of other
        agents, and return the results of the write with checksums. If the write fails, the exchange
        still takes place, with an empty message, as other ranks wait for it; then the error is
        raised.
        """
        results, failure = None, None
        try:
            # rank 0 has made its own; all ranks of an agent share one
            self.partial.mkdir(mode=0o700, parents=True, exist_ok=True)
            results = super().write_data(plan, planner)
        except Exception as error:
            failure = error
        exchange_failure = self._exchange_files(is_written=results is not None)
        failure = failure or exchange_failure
        if failure is not None:
            raise failure
        assert results is not None
        return results

    def _exchange_files(self, is_written: bool) -> OSError | None:
        """Send this rank's file to the rank `target` (an empty message unless `is_written`), and
        receive and write those of the ranks `sources`. Return the first error of a write, or None:
        it must not end the exchange.
        """
        path, sent, failure = self.partial / self.file, [], None
        if self.target is not None:
            has_file = is_written and path.exists()
            content = gate.read_bytes(path, path.stat().st_size) if has_file else b""
            tensors = [torch.tensor([len(content)])]
            if content:  # torch makes no tensor of an empty buffer
                tensors.append(torch.frombuffer(bytearray(content), dtype=torch.uint8))
            sent = [(t, dist.isend(t, self.target, self.group)) for t in tensors]
        for source in self.sources:
            size = torch.zeros(1, dtype=torch.int64)
            dist.recv(size, source, self.group)
            if size.item():
                received = torch.empty(int(size), dtype=torch.uint8)
                dist.recv(received, source, self.group)
                try:
                    (self.partial / f"__{source}_0.distcp").write_bytes(received.numpy().tobytes())
                except OSError as error:
                    failure = failure or error
        for _, work in sent:
            assert work is not None
            work.wait()
        return failure


class MemorySnapshots:
    """The snapshots of a run, of which every rank makes one. `save` and `finish` are collective;
    one save is in progress at a time. `folder`: that of `memory_folder`; `agent`: id of the
    launcher of this rank's workers.
    """

    def __init__(self, folder: Path, agent: str, mesh: Mesh):
        """Make this agent's folder in memory below `folder` (a path of `memory_folder`), delete
        unfinished snapshots in it, and make a process group for background saves. Collective.
        `agent`: id of the launcher of this host's workers. Raises OSError for a folder of another
        user or a link.
        """
        self.mesh = mesh
        self.group = background_group(timedelta(hours=1)) if mesh.grid is not None else None
        agents = [agent] if self.group is None else consensus.gather_objects(agent)
        self.targets = copy_targets(agents)
        self.leads = agents.index(agent) == mesh.rank
        """True on the first rank of each agent."""
        self.folder = folder / hashlib.blake2b(agent.encode(), digest_size=6).hexdigest()
        for path in (folder, self.folder):
            path.mkdir(mode=0o700, parents=True, exist_ok=True)
            if not _is_own(path):
                raise OSError(f"{path} belongs to another user or is a link: remove it")
        if self.leads:
            folders.clear_unfinished(self.folder)
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="snapshots")
        self._saving: Future[None] | None = None

    def save(self, step: int, tensors: dict[str, Tensor], meta: dict) -> None:
        """Save a snapshot of `step`: wait for the previous one, copy this rank's `tensors` to CPU
        memory and return; a thread writes them, with `meta` as JSON, to the host's memory
        (/dev/shm) and exchanges copies with other hosts. Collective. If the previous one failed,
        its error (see `finish`) is raised after this one has started: on other ranks it may have
        succeeded, and they start this one too.
        """
        failure = None
        try:
            self.finish()
        except (OSError, RuntimeError, CheckpointException) as error:
            failure = error
        state = json.dumps({"format": seal.FORMAT, **meta}, indent=1)
        writer = MemoryWriter(self.folder, step, state, self.mesh, self.group, self.targets)
        self._saving = self._thread.submit(self._write, writer, writer.stage(tensors))
        if failure is not None:
            raise failure

    def _write(self, writer: MemoryWriter, staged: dict[str, Tensor]) -> None:
        """Write one snapshot from the copies `staged`, on every rank, send .metadata, state.json
        and the seal from rank 0 to all agents, rename the folder to its final name, and delete all
        but the two newest. Runs in the thread; collective.
        """
        planner = DefaultSavePlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
        save(
            staged,
            storage_writer=writer,
            planner=planner,
            process_group=self.group,
            no_dist=self.group is None,
        )
        if self.group is None:
            return
        final = writer.partial.with_suffix("")
        content = [
            gate.read_bytes(final / name, seal.LARGEST[name]) if self.mesh.first else b""
            for name in SMALL
        ]
        dist.broadcast_object_list(content, 0, self.group)
        if self.leads and not self.mesh.first:
            for name, text in zip(SMALL, content, strict=True):
                (writer.partial / name).write_bytes(text)
            folders.commit(writer.partial)
            folders.prune(self.folder, KEPT, writer.step)

    def finish(self) -> None:
        """Wait for the snapshot in progress, if any. Raises OSError, RuntimeError or
        CheckpointException where it has failed.
        """
        if self._saving is not None:
            saving, self._saving = self._saving, None
            saving.result()

    def close(self, done: bool) -> None:
        """Wait for the snapshot in progress, ignoring its errors, and end the thread. If the run is
        `done`, delete its snapshots on this host.
        """
        # the run has ended, and its last step is a checkpoint
        with suppress(OSError, RuntimeError, CheckpointException):
            self.finish()
        self._thread.shutdown()
        if done and self.leads:
            remove_memory(self.folder.parent)


Snapshot = tuple[int, str]
"""A snapshot's step and the digest of its seal: the same step may have been saved again by other
ranks.
"""


def list_memory(folder: Path) -> dict[Snapshot, tuple[list[str], dict[str, Path]]]:
    """Return the snapshots that this host has in `folder`, a path of `memory_folder`: (step, digest
    of the seal) -> (names of all files that the snapshot has on any host, path of each that is
    here). Snapshots with a damaged seal or state.json, of another user or behind links are left
    out.
    """
    found: dict[Snapshot, tuple[list[str], dict[str, Path]]] = {}
    if not _is_own(folder):
        return found
    for agent in sorted(filter(_is_own, folder.iterdir())):
        for step, path in folders.list_checkpoints(agent).items():
            try:
                sealed, state = seal.read_sealed(path)
            except (folders.Damaged, ValueError):
                continue
            if not _is_own(path) or state.get("step") != step:
                continue
            names = [*sealed.files, folders.SEAL]
            files = {name: path / name for name in names if (path / name).is_file()}
            key = (
                step,
                seal.digest(gate.read_bytes(path / folders.SEAL, seal.LARGEST[folders.SEAL])),
            )
            found[key] = names, {**files, **found.get(key, (names, {}))[1]}
    return found


def restore(folder: Path, checkpoints: Path, mesh: Mesh) -> int | None:
    """Copy the newest snapshot of which every file is in the memory (`folder`) of some host to
    disk, as a checkpoint in `checkpoints`, if its step is higher than that of any checkpoint there,
    and return its step; return None if there is none. Then delete all snapshots on all hosts.
    Collective: each file is written by the first rank that has it. Raises ValueError on every rank
    where a write fails.
    """
    local = list_memory(folder)
    mine = {key: (names, [*files]) for key, (names, files) in local.items()}
    newest = max(folders.list_checkpoints(checkpoints), default=0)
    listed, newest_checkpoints = zip(*_gather((mine, newest), mesh), strict=True)
    newest = newest_checkpoints[0]  # as the first rank sees the folder
    restored = None
    for key in sorted({key for there in listed for key in there}, reverse=True):
        names = next(there[key][0] for there in listed if key in there)
        # the first rank that has a file writes it
        having = {
            name: [rank for rank, there in enumerate(listed) if name in there.get(key, ((), ()))[1]]
            for name in names
        }
        if key[0] > newest and all(having.values()):
            mine = [local[key][1][name] for name, ranks in having.items() if ranks[0] == mesh.rank]
            _write_checkpoint(checkpoints / folders.name(key[0]), mine, mesh)
            restored = key[0]
            break
    clear_memory(folder, mesh)
    return restored


def clear_memory(folder: Path, mesh: Mesh) -> None:
    """Delete all snapshots in memory of the run to which `folder`, a path of `memory_folder`,
    belongs, on every host, those of its earlier jobs too. Collective: the first rank of each host
    deletes, and all wait for it.
    """
    hosts = _gather(socket.gethostname(), mesh)
    if hosts.index(hosts[mesh.rank]) == mesh.rank:
        for path in folder.parent.glob(f"{folder.name.rpartition('-')[0]}-*"):
            remove_memory(path)
    _gather(None, mesh)  # no rank saves while another deletes


def _gather(mine: Any, mesh: Mesh) -> list[Any]:
    """Return the list of every rank's object `mine`, by rank, on every rank (all-gather)."""
    return [mine] if mesh.size == 1 else consensus.gather_objects(mine)


def _write_checkpoint(final: Path, files: Sequence[Path], mesh: Mesh) -> None:
    """Write the folder `final` of a checkpoint: each rank copies its `files` (on its host) into a
    partial folder, which gets its final name at last. Collective; an error on one rank is raised on
    all.
    """
    partial = final.with_name(final.name + PARTIAL)

    def make_folder() -> None:
        """Delete unfinished saves and make the empty partial folder, on the first rank only."""
        if mesh.first:
            folders.clear_unfinished(final.parent)
            partial.mkdir(parents=True)

    def copy_files() -> None:
        """Copy this rank's files into the partial folder, and fsync them."""
        for file in files:
            shutil.copyfile(file, partial / file.name, follow_symlinks=False)
            folders.sync(partial / file.name)

    def commit() -> None:
        """Rename the partial folder to its final name, on the first rank only."""
        if mesh.first:
            folders.commit(partial)

    for work in (make_folder, copy_files, commit):
        work() if mesh.size == 1 else consensus.run_on_all_ranks(work)
