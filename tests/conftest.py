"""spawn(n)(fn, *args): run fn(mesh_factory_args...) on n gloo processes, once; a process group is expensive, so give it many layouts."""

import os
import tempfile
import time
import traceback

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp


def _worker(rank, world, path, fn, args, queue):
    torch.set_num_threads(1)
    try:
        dist.init_process_group("gloo", store=dist.FileStore(path, world), rank=rank, world_size=world)
        result = fn(*args)
        if rank == 0: queue.put(("ok", result))
        dist.barrier()
        dist.destroy_process_group()
    except BaseException:
        queue.put((f"rank {rank}", traceback.format_exc()))
        os._exit(1)


def run_spawned(world, fn, *args):
    """fn(*args) on `world` gloo processes; rank 0's result (picklable). The first traceback of any rank is raised."""
    context = mp.get_context("spawn")
    queue = context.SimpleQueue()                          # writes at once: a worker that exits has told what it had to
    with tempfile.TemporaryDirectory() as folder:
        processes = [context.Process(target=_worker, args=(r, world, f"{folder}/store", fn, args, queue)) for r in range(world)]
        for p in processes: p.start()
        while queue.empty() and any(p.is_alive() for p in processes): time.sleep(0.02)
        who, result = ("all ranks", "ended without a result") if queue.empty() else queue.get()
        if who != "ok":
            for p in processes: p.kill()
            raise AssertionError(f"{who} failed:\n{result}")
        for p in processes: p.join()
    return result


@pytest.fixture
def spawn():
    return lambda world: lambda fn, *args: run_spawned(world, fn, *args)
