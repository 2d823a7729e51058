"""Two ranks that share the one GPU: NCCL refuses that, gloo takes tensors of a GPU for all-reduces,
and the rest crosses in host memory (core/transfers.py). Each layout is compared with one rank.
"""

import json
import multiprocessing
import os
import tempfile
import time
import traceback
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist

from benchmarks.gpu import children, compare, house, shapes
from benchmarks.gpu.case import Case, Context, Record
from dolmen.core.mesh import Mesh
from dolmen.model import build
from dolmen.model.layout import Layout
from dolmen.model.spec import ModelSpec
from dolmen.training.step import optimizer_step

LAYOUTS = {
    "tp 2": Layout(tp=2, dp=1),
    "tp 2, sequence parallel": Layout(tp=2, dp=1, sequence_parallel=True),
    "pp 2": Layout(pp=2, dp=1),
    "cp 2, ring": Layout(cp=2, dp=1),
    "cp 2, gather": Layout(cp=2, dp=1, context="gather"),
    "dp 2, ZeRO 1": Layout(dp=2),
    "dp 2, ZeRO 3": Layout(dp=2, zero=3),
    "ep 2": Layout(dp=2, ep=2),
}
FEW = ("tp 2", "dp 2, ZeRO 1")
SEQUENCES, LENGTH, UPDATES = 4, 32, 3
SECONDS = 60  # of all of a layout: a rank that waits for one that was refused waits for ever
BOUND = 1e-5  # fp32, sums in another order: ten times what the golden table sees on CPU


def cases(context: Context) -> Iterator[Case]:
    for name in LAYOUTS:
        if context.full or name in FEW:
            yield Case(name, 15, partial(layout, context, name))


def spec(name: str) -> ModelSpec:
    tiny = Context(shape="tiny")
    return shapes.of(tiny, "mixtral-8x7b" if name.startswith("ep") else "llama-1b").spec


def losses(name: str, mesh: Mesh, layout: Layout) -> list[float]:
    """Of UPDATES steps in fp32, from values that no layout changes."""
    model = spec(name)
    state = house.training(
        model, mesh, SEQUENCES, torch.float32, layout=layout, micro=1, initial=start
    )
    whole = house.batch(model, SEQUENCES, LENGTH)
    batch = whole.split(mesh.dp.size)[mesh.dp.rank]
    return [optimizer_step(state, batch, mesh).loss for _ in range(UPDATES)]


def start(model) -> None:
    build.initialize(model, 0)


def layout(context: Context, name: str, record: Record) -> None:
    device = torch.device(context.place)
    with house.alone(device) as mesh:
        true = losses(name, mesh, Layout())
    record.tell(alone=true)
    with tempfile.TemporaryDirectory() as folder:
        told = together(name, context.place, Path(folder))
    record.tell(together=told)
    if not all("losses" in rank for rank in told):
        refused = [rank["error"].strip().splitlines()[-1] for rank in told if "error" in rank]
        raise RuntimeError(f"{name}: {refused[0] if refused else 'a rank told nothing'}")
    for i, rank in enumerate(told):
        off = compare.apart(rank["losses"], true)
        record.check(f"losses of rank {i}", off, BOUND, "a layout never changes the answer")


def together(name: str, device: str, folder: Path) -> list[dict]:
    """What each of two ranks tells: its losses, or its error."""
    spawn = multiprocessing.get_context("spawn")
    given = [(name, device, r, str(folder), os.getpid()) for r in range(2)]
    ranks = [spawn.Process(target=_rank, args=each) for each in given]
    for process in ranks:
        process.start()
    end = time.monotonic() + SECONDS
    files = [folder / f"{rank}.json" for rank in range(2)]
    while any(p.is_alive() for p in ranks) and time.monotonic() < end:
        time.sleep(0.1)
        if any(file.exists() and "error" in json.loads(file.read_text()) for file in files):
            time.sleep(2)  # for the other to fail by itself
            break
    for process in ranks:
        process.kill()
        process.join()
    return [json.loads(f.read_text()) if f.exists() else {} for f in files]


def _rank(name: str, device: str, rank: int, folder: str, parent: int) -> None:
    children.die_with(parent)
    torch.set_num_threads(1)
    try:
        store = dist.FileStore(f"{folder}/store", 2)
        dist.init_process_group("gloo", store=store, rank=rank, world_size=2)
        split = LAYOUTS[name]
        told = {"losses": losses(name, split.mesh(torch.device(device)), split)}
    except Exception:
        told = {"error": traceback.format_exc()[-3000:]}
    file = Path(folder) / f"{rank}.part"
    file.write_text(json.dumps(told))
    file.replace(file.with_suffix(".json"))
    dist.destroy_process_group()
