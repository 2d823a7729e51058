"""run_spawned(n, fn, *args): fn on n gloo processes, once. A process group is expensive to start,
so give it many layouts.

Not in conftest.py: a second conftest would take its name, and workers find functions by module
name.

Processes are forked from a server that has imported what takes seconds and has started no thread.
"""

import os
import tempfile
import time
import traceback

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

PRELOAD = ["torch", "torch.distributed.tensor", "torch.distributed.fsdp", "dolmen.train.run"]
TIME_LIMIT = 600  # seconds: a rank that waits for ever is a failure, with a name


def _worker(rank, world, path, fn, args, queue):
    torch.set_num_threads(1)
    try:
        dist.init_process_group(
            "gloo", store=dist.FileStore(path, world), rank=rank, world_size=world
        )
        result = fn(*args)
        if rank == 0:
            queue.put(("ok", result))
        dist.barrier()
        dist.destroy_process_group()
    except BaseException:
        queue.put((f"rank {rank}", traceback.format_exc()))
        os._exit(1)


def run_spawned(world, fn, *args):
    """fn(*args) on `world` gloo processes; rank 0's result (picklable). The first traceback of any
    rank is raised.
    """
    context = mp.get_context("forkserver")
    context.set_forkserver_preload(PRELOAD)
    queue = context.SimpleQueue()  # writes at once: a worker that exits has told what it had to
    with tempfile.TemporaryDirectory() as folder:
        processes = [
            context.Process(target=_worker, args=(r, world, f"{folder}/store", fn, args, queue))
            for r in range(world)
        ]
        for p in processes:
            p.start()
        end = time.monotonic() + TIME_LIMIT
        while queue.empty() and any(p.is_alive() for p in processes):
            time.sleep(0.02)
            if time.monotonic() > end:
                for p in processes:
                    p.kill()
                raise AssertionError(
                    f"{fn.__name__} on {world} processes gave no result in {TIME_LIMIT} s"
                )
        who, result = ("all ranks", "ended without a result") if queue.empty() else queue.get()
        if who != "ok":
            for p in processes:
                p.kill()
            raise AssertionError(f"{who} failed:\n{result}")
        for p in processes:
            p.join()
    return result
