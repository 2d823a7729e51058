"""Snapshots in memory: any one agent may be lost with its files, and what is left is the state, bit
by bit, at another layout too. One spawn.
"""

import errno
import shutil
from concurrent.futures import wait
from pathlib import Path

import pytest
import torch.distributed as dist
from spawning import run_spawned
from torch.distributed.checkpoint.api import CheckpointException
from worlds import Layout, Run, differing

from dolmen.checkpoint import folders
from dolmen.checkpoint.memory import (
    MemorySnapshots,
    copy_targets,
    list_memory,
    memory_folder,
    remove_memory,
    restore,
)
from dolmen.checkpoint.store import Checkpoints
from dolmen.checkpoint.writer import Writer
from dolmen.core import consensus

SAVED, OTHER = Layout(4, 1, zero=1), Layout(2, 2, zero=1)
AGENTS = ("one", "one", "two", "two")


def test_files_go_to_the_next_agent():
    assert copy_targets(["a", "a"]) == [None, None]
    assert copy_targets(["a", "a", "b", "b"]) == [2, 3, 0, 1]
    assert copy_targets(["a", "b", "c"]) == [1, 2, 0]
    # agents of unequal size: ranks of the smaller one receive several
    assert copy_targets(["a", "a", "a", "b"]) == [3, 3, 3, 0]
    assert copy_targets(["a", "b", "b", "b"]) == [1, 0, 0, 0]


def restored(memory: Path, out: Path, run: Run) -> tuple[int | None, list[str]]:
    """The step that is restored into `out`, and the tensors that differ from those of `run`."""
    mesh = OTHER.mesh()
    step = restore(memory, out, mesh)
    if step is None:
        return None, []
    again = Run(OTHER, mesh, seed=7).load(Checkpoints(out, mesh, 0), step)
    return step, differing(run.whole(), again.whole())


def lost(folder: Path) -> dict[str, tuple[int | None, list[str]]]:
    """What is restored after each loss, from snapshots of steps 1 and 2."""
    mesh = SAVED.mesh()
    memory, first = memory_folder(folder / "run", "job", folder), mesh.rank == 0
    snapshots = MemorySnapshots(memory, AGENTS[mesh.rank], mesh)
    early = Run(SAVED, mesh).train(1)
    snapshots.save(1, early.tensors(), {"step": 1})
    late = Run(SAVED, mesh).train(2)
    snapshots.save(2, late.tensors(), {"step": 2})
    late_training = Run(SAVED, mesh).train(2)  # while the save is in progress
    snapshots.close(done=False)
    dist.barrier()

    def remains(name: str, forget) -> Path:
        """A copy of the memory, of which `forget` deletes something."""
        copy = folder / name
        if first:
            shutil.copytree(memory, copy)
            forget(copy)
        dist.barrier()
        return copy

    agents = sorted(path.name for path in memory.iterdir())
    out = {"agents": len(agents)}
    for number, agent in enumerate(agents):
        left = remains(f"agent{number}-x", lambda copy, agent=agent: shutil.rmtree(copy / agent))
        out[f"agent {number}"] = restored(left, folder / f"to-{number}", late_training)

    def delete_file(copy: Path) -> None:
        """Delete the newest file of one rank everywhere."""
        for file in copy.glob("*/step-00000002/__3_0.distcp"):
            file.unlink()

    def kill_commit(copy: Path) -> None:
        """As if one agent had been killed before it gave the newest its name, and one lost."""
        shutil.rmtree(copy / agents[0])
        (copy / agents[1] / "step-00000002").rename(copy / agents[1] / "step-00000002.partial")

    for name, forget in (("file", delete_file), ("commit", kill_commit)):
        out[name] = restored(remains(f"{name}-x", forget), folder / f"to-{name}", early)
    out["again"] = restored(memory, folder / "to-0", late)
    return out


@pytest.fixture(scope="module")
def losses(tmp_path_factory):
    folder = tmp_path_factory.mktemp("memory")
    return folder, run_spawned(4, lost, folder)


def failed(folder: Path) -> tuple[list[list[str]], int | None]:
    """Errors of each rank where rank 2 cannot write its file, a received one, or the small files of
    its agent, and the step that is left.
    """
    mesh, errors = SAVED.mesh(), []
    memory, run = memory_folder(folder / "run", "job", folder), Run(SAVED, mesh).train(1)
    snapshots = MemorySnapshots(memory, AGENTS[mesh.rank], mesh)

    def full(*_, **__):
        raise OSError(errno.ENOSPC, "full")

    faults = (Writer, "write_data"), (Path, "write_bytes"), (folders, "commit"), None
    for step, fault in enumerate(faults, 1):
        patch = pytest.MonkeyPatch()
        if fault is not None and mesh.rank == 2:
            patch.setattr(*fault, full)
        try:
            snapshots.save(step, run.tensors(), {"step": step})
        except (OSError, CheckpointException) as error:
            errors.append(f"{step - 1}: {type(error).__name__}")
        wait([snapshots._saving])
        dist.barrier()
        patch.undo()
    snapshots.close(done=False)
    return consensus.gather_objects(errors), restore(memory, folder / "to", mesh)


def test_a_failed_write_ends_no_run(tmp_path):
    """All ranks learn of it, or go on without, and the next snapshot is whole."""
    everywhere = ["1: CheckpointException", "2: CheckpointException"]
    errors, step = run_spawned(4, failed, tmp_path)
    assert errors == [everywhere, everywhere, [*everywhere, "3: OSError"], everywhere]
    assert step == 4


def test_any_agent_may_be_lost(losses):
    _, found = losses
    assert found["agents"] == 2
    assert found["agent 0"] == found["agent 1"] == (2, [])


def test_an_incomplete_snapshot_is_not_used(losses):
    """The one before is, which is kept for that; and none that is no newer than a checkpoint."""
    _, found = losses
    assert found["file"] == found["commit"] == (1, [])
    assert found["again"] == (None, [])


def test_what_is_written_is_a_checkpoint_and_memory_is_freed(losses):
    folder, _ = losses
    assert [*folders.list_checkpoints(folder / "to-0")] == [2]
    assert not [*folder.glob("dolmen-*")]


def test_folders_of_others_are_not_read(tmp_path):
    """A link to a folder, and a damaged seal; another job has another folder."""
    memory = memory_folder(tmp_path / "run", "job", tmp_path)
    assert memory != memory_folder(tmp_path / "run", "other", tmp_path)
    agent = memory / "agent" / "step-00000001"
    agent.mkdir(parents=True)
    (agent / "seal").write_text("dolmen checkpoint 2, nonsense\n")
    assert list_memory(memory) == {}
    (tmp_path / "link").symlink_to(memory)
    remove_memory(tmp_path / "link")
    (agent / "theirs.txt").write_text("not written by dolmen")
    remove_memory(memory)
    assert [path.name for path in memory.rglob("*.txt")] == ["theirs.txt"]
