"""What a second process costs: each way to split a step over two, against one process on one core,
side by side in one run.

    python benchmarks/scaling.py
        hidden 1024, 8 layers, vocabulary 8192, 8 x 1024 tokens, bf16
    python benchmarks/scaling.py --only dp2-zero1 tp2 --steps 9 --compile

Each side is built in processes of its own, one core and one thread each, and warmed up with three
steps. Then steps are timed in pairs, one of the lone process and one of the side, because cores of
a shared machine are faster in one minute than in the next; a ratio is the median over pairs. Where
the time of a step goes, of the slower rank, in seconds that add up to it:

    floor      its half of the model's FLOPs at the peak of its core, and what the schedule of a
               pipeline leaves idle: no split of this model on these cores is faster
    as one     what the lone process takes above its own floor, half of it: products below the peak,
               and all that is no product. What makes one process faster makes this smaller
    more       CPU time of the main thread, less half of the lone process's: what splitting adds to
               be computed
    waiting    neither: blocked on the other rank, or for bytes on their way; of it
    transport  CPU time of other threads, which is gloo's: it shares the core

Peak memory is the most that a process had resident over the timed steps.

`apart` is the ceiling: two processes that have nothing to do with each other make a step of half
the batch each, at once. What it lacks to 2 is the machine's: cores share memory, caches and clock.
"""

import argparse
import os
import random
import statistics
import sys
import tempfile
import time
import uuid
import warnings
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

if not __package__:  # run as a file: Python then looks for `benchmarks` beside it
    sys.path.insert(0, str(Path(__file__).parents[1]))

from benchmarks.sent import Sent
from benchmarks.team import Team, end_all, forget_peak, peak_memory
from dolmen.core import device
from dolmen.data.batch import Batch
from dolmen.families import ModelConfig, model_from_fields
from dolmen.model.build import build, initialize
from dolmen.model.count import parameters, training_flops_per_token
from dolmen.model.layout import Layout
from dolmen.optim.optimizer import OptimizerConfig, adamw, prime
from dolmen.parallel.simulation import simulate
from dolmen.training.mfu import matmul_peak
from dolmen.training.state import TrainState
from dolmen.training.step import optimizer_step

ONE, APART = "one", "apart"
SIDES = {
    ONE: Layout(dp=1),
    APART: Layout(dp=1),
    "tp2": Layout(tp=2, dp=1),
    "tp2-sp": Layout(tp=2, dp=1, sequence_parallel=True),
    **{f"dp2-zero{z}": Layout(dp=2, zero=z) for z in range(4)},
    "pp2": Layout(pp=2, dp=1),
    "pp2-zero-bubble": Layout(pp=2, dp=1, schedule="zero-bubble"),
    "cp2": Layout(cp=2, dp=1),
}
OPTIMIZER = OptimizerConfig(lr=1e-4, schedule="constant")


def model_of(args) -> ModelConfig:
    return model_from_fields(
        "llama",
        dict(
            vocab_size=args.vocabulary,
            hidden_size=args.hidden,
            intermediate_size=args.hidden * 11 // 4 // 64 * 64,
            num_hidden_layers=args.layers,
            num_attention_heads=args.hidden // 64,
            num_key_value_heads=args.hidden // 64,
            head_dim=64,
            max_position_embeddings=args.sequence,
        ),
    )


def prepare(name: str, args) -> Callable[[], dict]:
    """Build one side on this rank, and make three steps to warm up. The result makes a step: wall
    and CPU seconds, loss, bytes.
    """
    layout, spec = SIDES[name], model_of(args).spec
    mesh, rows = layout.mesh(torch.device("cpu")), args.batch // (2 if name == APART else layout.dp)
    size = 1 if layout.pp > 1 else max(1, min(4096 * layout.cp // args.sequence, rows))
    schedule = layout.make_schedule(rows * layout.dp, size)
    model = build(
        spec,
        mesh,
        layout,
        schedule,
        compute=torch.bfloat16,
        compile=args.compile and not schedule.splits_backward,
    )
    initialize(model, 0)
    optimizer = adamw(model, OPTIMIZER)
    prime(optimizer)
    state = TrainState(model, optimizer, OPTIMIZER, 1000, layout.zero, schedule)
    text = torch.randint(
        spec.vocab_size,
        (args.batch, args.sequence + 1),
        generator=torch.Generator().manual_seed(1),
    )
    batch = Batch.from_windows(text[mesh.dp.rank * rows :][:rows].numpy())
    with Sent() as sent:
        loss = optimizer_step(state, batch, mesh).loss
    for _ in range(2):
        optimizer_step(state, batch, mesh)  # until the heap has grown to what a step needs
    forget_peak()

    def step() -> dict:
        dist.barrier()
        began, main, everything = time.perf_counter(), time.thread_time(), time.process_time()
        optimizer_step(state, batch, mesh)
        wall = time.perf_counter() - began
        main = time.thread_time() - main
        everything = time.process_time() - everything
        return {
            "wall": wall,
            "main": main,
            "transport": everything - main,
            "sent": sum(sent.bytes.values()),
            "memory": peak_memory(),
            "loss": loss,
            "bubble": simulate(schedule).bubble,
        }

    return step


def worker(rank: int, name: str, cores: list[int], store: str, args, asked, told) -> None:
    """One rank of a side: tells its core's peak when it is ready, then makes steps as it
    is asked.
    """
    os.sched_setaffinity(0, {cores[rank]})  # before gloo starts its threads, which inherit it
    warnings.filterwarnings("ignore")
    torch.set_num_threads(1)
    device.keep_freed_memory()  # as dolmen train does
    dist.init_process_group(
        "gloo", store=dist.FileStore(store, len(cores)), rank=rank, world_size=len(cores)
    )
    step = prepare(name, args)
    told.put(matmul_peak(torch.device("cpu"), torch.bfloat16, 1.0) if name == ONE else 0.0)
    while asked.get():
        told.put(step())
    dist.barrier()
    dist.destroy_process_group()


def table(results: dict[str, list[tuple[dict, list[dict]]]], args, peak: float) -> Table:
    """Medians over pairs of steps: of one core, and right after it of a side, rank by rank."""
    spec = model_of(args).spec
    floor = training_flops_per_token(spec, args.sequence) * args.batch * args.sequence / peak
    out = Table(
        "split",
        "step",
        "times one core",
        "floor",
        "as one",
        "more",
        "waiting",
        "transport",
        "sent per rank",
        "peak memory",
        "loss",
        title=f"{parameters(spec) / 1e6:.0f} M parameters, {args.batch} x {args.sequence} "
        f"tokens, bf16"
        f"{', compiled' if args.compile else ''}: two processes of a core each against one",
    )
    alone = [one for pairs in results.values() for one, _ in pairs]
    wall, memory = (statistics.median(one[what] for one in alone) for what in ("wall", "memory"))
    out.add_row(
        ONE,
        f"{wall:.2f} s",
        "",
        f"{floor:.2f} s",
        f"{wall - floor:.2f} s",
        *[""] * 4,
        f"{memory / 2**30:.2f} GiB",
        f"{alone[0]['loss']:.4f}",
    )
    for name, pairs in results.items():
        rows = [parts(one, ranks, floor) for one, ranks in pairs]
        wall, ratio, *seconds = map(statistics.median, zip(*rows, strict=True))
        least, most = (extreme(row[1] for row in rows) for extreme in (min, max))
        ranks = pairs[-1][1]
        out.add_row(
            name,
            f"{wall:.2f} s",
            f"{ratio:.2f} ({least:.2f} to {most:.2f})",
            *(f"{one:.2f} s" for one in seconds),
            f"{max(rank['sent'] for rank in ranks) / 2**20:,.0f} MiB",
            f"{max(rank['memory'] for rank in ranks) / 2**30:.2f} GiB",
            f"{ranks[0]['loss']:.4f}",
        )
    out.caption = (
        f"floors are of {peak / 1e9:.0f} GFLOP/s, which one core has just been measured at; "
        f"medians of {args.rounds} x {args.steps} pairs of steps"
    )
    return out


def parts(one: dict, ranks: list[dict], floor: float) -> tuple[float, ...]:
    """Of a pair of steps: seconds, times one core, and the seconds of each part, where one process
    has this floor.
    """
    slow, wall = max(ranks, key=lambda r: r["main"]), max(r["wall"] for r in ranks)
    idle = floor / 2 * slow["bubble"] / (1 - slow["bubble"])
    return (
        wall,
        one["wall"] / wall,
        floor / 2 + idle,
        one["main"] / 2 - floor / 2,
        slow["main"] - one["main"] / 2,
        wall - slow["main"] - idle,
        slow["transport"],
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    for name, value in (
        ("hidden", 1024),
        ("layers", 8),
        ("vocabulary", 8192),
        ("sequence", 1024),
        ("batch", 8),
        ("rounds", 1),
        ("steps", 3),
    ):
        parser.add_argument(f"--{name}", type=int, default=value)
    parser.add_argument("--compile", action="store_true")
    sides = [name for name in SIDES if name != ONE]
    parser.add_argument("--only", nargs="+", choices=sides, default=sides)
    args = parser.parse_args()
    cores = sorted(os.sched_getaffinity(0))[:2]
    names = list(dict.fromkeys(args.only))
    results: dict[str, list] = {name: [] for name in names}
    with tempfile.TemporaryDirectory() as folder, Progress() as progress:
        bar = progress.add_task("one core", total=args.rounds * len(names) * args.steps)

        def team(name: str, cores: list[int]) -> Team:
            store = f"{folder}/{uuid.uuid4().hex}"
            return Team(worker, len(cores), name, cores, store, args)

        alone = team(ONE, cores[:1])
        (peak,) = alone.answer()
        for round in range(args.rounds):
            for name in random.Random(round).sample(names, len(names)):
                progress.update(bar, description=f"round {round + 1}: {name}")
                split = [cores[:1], cores[1:]] if name == APART else [cores]
                teams = [team(name, some) for some in split]
                for one in teams:
                    one.answer()
                for _ in range(args.steps):
                    (lone,) = alone.work()
                    for one in teams:
                        one.ask()
                    results[name].append((lone, [told for one in teams for told in one.answer()]))
                    progress.advance(bar)
                end_all(teams)
        alone.end()
    Console(width=160).print(table(results, args, peak))


if __name__ == "__main__":
    main()
