"""kill -9 in the middle of a save: whatever the moment, the newest complete checkpoint is there and
loads bitwise.

Two ways: at every third (with --full, every) rename, removal, mkdir and open that a save makes in
its folder (an audit hook counts them and kills its own process at the n-th), and at random moments
of two ranks that save without pause.
"""

import os
import random
import shutil
import signal
import sys
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from spawning import serving
from torch.distributed.tensor import Shard, distribute_tensor

from dolmen.checkpoint.store import Checkpoints
from dolmen.core import mesh as meshes
from dolmen.core.mesh import SINGLE

EVENTS, REMOVALS = {"os.rename", "os.mkdir", "open"}, {"os.remove", "os.rmdir"}


def tensors(value: float, rows: int = 8) -> dict:
    return {"model/w": torch.full((rows, 64), value), "exp_avg/w": torch.full((rows, 64), -value)}


def check(folder: Path, rows: int = 8) -> tuple[int, float]:
    """Every checkpoint that claims to be whole holds the values its own state.json says. (newest
    step, its value).
    """
    store = Checkpoints(folder, SINGLE, 0)
    assert store.steps(), f"nothing whole is left: {os.listdir(folder)}"
    for step in store.steps():
        out, meta = tensors(0.0, rows), store.meta(step)
        store.load(step, out)
        assert meta["step"] == step
        assert all(torch.equal(t, tensors(meta["value"], rows)[n]) for n, t in out.items()), (
            step,
            meta,
        )
    return store.newest(), meta["value"]


@pytest.fixture(scope="module")
def forks():
    """Processes that start in milliseconds: forks of a fresh one that has imported what
    they need.
    """
    return serving()


def two_saves_until(folder: Path, last: int) -> None:
    """Save step 1 again and step 2, and die at the `last` event."""
    store, count = Checkpoints(folder, SINGLE, 1), 0

    def hook(event, args):
        nonlocal count
        if event in REMOVALS or (event in EVENTS and str(folder) in str(args[0])):
            count += 1
            if count == last:
                os.kill(os.getpid(), signal.SIGKILL)

    sys.addaudithook(hook)
    store.save(1, tensors(1.5), {"step": 1, "value": 1.5}, wait=True)
    store.save(2, tensors(2.0), {"step": 2, "value": 2.0}, wait=True)


@pytest.mark.parametrize("every", [3, pytest.param(1, marks=pytest.mark.full)])
def test_killed_at_every_step_of_a_save(forks, tmp_path, every):
    Checkpoints(tmp_path / "first", SINGLE, 1).save(
        1, tensors(1.0), {"step": 1, "value": 1.0}, wait=True
    )
    seen, last, end = [], 0, -signal.SIGKILL
    while end == -signal.SIGKILL:
        last += every
        folder = tmp_path / str(last)
        shutil.copytree(tmp_path / "first", folder)
        process = forks.Process(target=two_saves_until, args=(folder, last))
        process.start()
        process.join()
        end = process.exitcode
        seen.append(check(folder))
        store = Checkpoints(folder, SINGLE, 1)  # and the next run saves as if nothing had been
        store.save(3, tensors(3.0), {"step": 3, "value": 3.0}, wait=True)
        assert os.listdir(folder) == ["step-00000003"], (last, os.listdir(folder))
        shutil.rmtree(folder)
    assert end == 0 and last > 25
    # never back, none skipped
    assert seen == sorted(seen) and set(seen) == {(1, 1.0), (1, 1.5), (2, 2.0)}


def save_without_pause(rank: int, folder: Path, store: Path, rows: int) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", store=dist.FileStore(str(store), 2), rank=rank, world_size=2)
    mesh = meshes.build_mesh(2, 1, torch.device("cpu"))
    checkpoints = Checkpoints(folder, mesh, 2)
    step = torch.tensor([checkpoints.newest() or 0])
    dist.broadcast(step, 0)
    step = step.item()
    while True:
        step += 1
        parts = {
            n: distribute_tensor(t, mesh.grid["fsdp"], [Shard(0)])
            for n, t in tensors(float(step), rows).items()
        }
        checkpoints.save(step, parts, {"step": step, "value": float(step)})


def test_killed_at_random_moments(forks, tmp_path):
    """Two ranks save without pause; both are killed, one some microseconds after the other; the
    next pair goes on.
    """
    folder, rows, newest, amid, chance = tmp_path / "checkpoints", 4096, 0, 0, random.Random(0)
    for attempt in range(4):
        store = tmp_path / f"store{attempt}"
        processes = [
            forks.Process(target=save_without_pause, args=(rank, folder, store, rows))
            for rank in (0, 1)
        ]
        for p in processes:
            p.start()
        deadline = time.monotonic() + 300
        while (Checkpoints(folder, SINGLE, 0).newest() or 0) <= newest:
            assert time.monotonic() < deadline and all(p.is_alive() for p in processes)
            time.sleep(0.01)
        time.sleep(chance.uniform(0, 0.2))
        chance.shuffle(processes)
        for p in processes:
            p.kill()
        for p in processes:
            p.join()
        amid += bool(list(folder.glob("*.partial")))
        step, value = check(folder, rows)
        assert step > newest and value == step
        newest = step
    assert amid, "no kill fell into a save"
