"""What a second process costs: each way to split a step over two, against one process on one core, side by side in one run.

    python benchmarks/scaling.py                         hidden 1024, 8 layers, vocabulary 8192, 8 x 1024 tokens, bf16, three rounds
    python benchmarks/scaling.py --only one dp2-zero1 tp2 --rounds 5 --compile

A round builds each side, makes one step to warm up, and times one; rounds repeat in another order. Processes have a core each
and one thread. Where the time of a step goes, of the slower rank:

    compute    CPU time of the main thread, less its fair share of the one process's: what splitting adds to be computed
    transport  CPU time of other threads, which is gloo's: it shares the core
    wait       neither: blocked on the other rank, in a bubble or for bytes on their way

`apart` is the ceiling: two processes that have nothing to do with each other make a step of half the batch each, at once. What
it lacks to 2 is the machine's: cores share memory, caches and clock.
"""

import argparse
import gc
import os
import random
import statistics
import tempfile
import time
import warnings
from collections import Counter

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from rich.console import Console
from rich.progress import Progress
from rich.table import Table
from torch.utils._python_dispatch import TorchDispatchMode

from dolmen.core import heap
from dolmen.data.batch import Batch
from dolmen.model.config import ModelConfig
from dolmen.model.count import parameters, training_flops_per_token
from dolmen.model.layout import Layout
from dolmen.optim.optimizer import OptimizerConfig, adamw, prime
from dolmen.parallel.schedule import simulate
from dolmen.train.build import build, initialize
from dolmen.train.peak import matmul_peak
from dolmen.train.step import TrainState, optimizer_step

ONE, APART = "one", "apart"
SIDES = {ONE: Layout(dp=1), APART: Layout(dp=1), "tp2": Layout(tp=2, dp=1), "tp2-sp": Layout(tp=2, dp=1, sequence_parallel=True),
         **{f"dp2-zero{z}": Layout(dp=2, zero=z) for z in range(4)},
         "pp2": Layout(pp=2, dp=1), "pp2-zero-bubble": Layout(pp=2, dp=1, schedule="zero-bubble"), "cp2": Layout(cp=2, dp=1)}
OPTIMIZER = OptimizerConfig(lr=1e-4, schedule="constant")


def config(args) -> ModelConfig:
    return ModelConfig(vocab_size=args.vocabulary, hidden_size=args.hidden, intermediate_size=args.hidden * 11 // 4 // 64 * 64,
                       num_hidden_layers=args.layers, num_attention_heads=args.hidden // 64, num_key_value_heads=args.hidden // 64,
                       head_dim=64, max_position_embeddings=args.sequence)


class Sent(TorchDispatchMode):
    """Bytes that this rank gives to others in collectives (a ring's (n - 1) / n, twice for a sum) and in sends."""

    def __init__(self):
        super().__init__()
        self.bytes = Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        name = func.__name__.split(".")[0].strip("_")
        if func.namespace in ("c10d", "_c10d_functional"):
            tensors = [t for a in args[:2] for t in torch.utils._pytree.tree_leaves(a) if isinstance(t, torch.Tensor)]
            largest = max((t.nbytes for t in [*tensors, *([out] if isinstance(out, torch.Tensor) else [])]), default=0)
            if "all_reduce" in name or "allreduce" in name: self.bytes["sums"] += largest
            elif "gather" in name: self.bytes["gathers"] += largest // 2
            elif "reduce_scatter" in name or "all_to_all" in name: self.bytes["scatters"] += largest // 2
            elif name in ("send", "isend"): self.bytes["sends"] += largest
        return out


def measure(name: str, args) -> dict:
    """One side of one round, on this rank: wall and CPU seconds of a step, loss, bytes."""
    layout, model_config = SIDES[name], config(args)
    mesh, rows = layout.mesh(torch.device("cpu")), args.batch // (2 if name == APART else layout.dp)
    size = 1 if layout.pp > 1 else max(1, min(4096 * layout.cp // args.sequence, rows))
    schedule = layout.make_schedule(rows * layout.dp, size)
    model = build(model_config, mesh, layout, schedule, compute=torch.bfloat16, compile=args.compile and not schedule.splits_backward)
    initialize(model, 0)
    optimizer = adamw(model, OPTIMIZER)
    prime(optimizer)
    state = TrainState(model, optimizer, OPTIMIZER, 1000, layout.zero, schedule)
    text = torch.randint(model_config.vocab_size, (args.batch, args.sequence + 1), generator=torch.Generator().manual_seed(1))
    batch = Batch.of_windows(text[mesh.dp.rank * rows :][:rows].numpy())
    with Sent() as sent: optimizer_step(state, batch, mesh)
    dist.barrier()
    began, main, everything = time.perf_counter(), time.thread_time(), time.process_time()
    loss = optimizer_step(state, batch, mesh).loss
    wall, main, everything = time.perf_counter() - began, time.thread_time() - main, time.process_time() - everything
    return {"wall": wall, "main": main, "transport": everything - main, "sent": dict(sent.bytes), "loss": loss,
            "bubble": simulate(schedule).bubble}


def worker(rank: int, cores: list[int], store: str, args, asked, told) -> None:
    """Measure the sides that are asked for, until there are no more."""
    world = len(cores)
    os.sched_setaffinity(0, {cores[rank]})                 # before gloo starts its threads, which inherit it
    warnings.filterwarnings("ignore")
    torch.set_num_threads(1)
    heap.keep()
    dist.init_process_group("gloo", store=dist.FileStore(f"{store}-{world}-{cores[0]}", world), rank=rank, world_size=world)
    told.put(matmul_peak(torch.device("cpu"), torch.bfloat16, 1.0) if world == 1 else None)
    while name := asked.get():
        told.put(measure(name, args))
        gc.collect()
        heap.release()                                     # the next side's processes need it
    dist.barrier()
    dist.destroy_process_group()


class Team:
    """Processes of one world, one a core."""

    def __init__(self, cores: list[int], folder: str, args):
        context = mp.get_context("spawn")
        self.asked, self.told = [context.SimpleQueue() for _ in cores], [context.SimpleQueue() for _ in cores]
        self.processes = [context.Process(target=worker, args=(r, cores, f"{folder}/store", args, self.asked[r], self.told[r]))
                          for r in range(len(cores))]
        for p in self.processes: p.start()
        self.peak = [told.get() for told in self.told][0]

    def ask(self, name: str | None) -> None:
        for queue in self.asked: queue.put(name)

    def answer(self) -> list[dict]: return [told.get() for told in self.told]


def table(results: dict[str, list[list[dict]]], args, peak: float) -> Table:
    """Medians over rounds; ratios are of steps of one round."""
    out = Table("split", "step", "times one core", "computing more", "transport", "waiting", "bubble", "sent a rank", "loss",
                title=f"{parameters(config(args)) / 1e6:.0f} M parameters, {args.batch} x {args.sequence} tokens, bf16"
                      f"{', compiled' if args.compile else ''}: two processes of a core each against one")
    one = [ranks[0]["wall"] for ranks in results[ONE]]
    floor = training_flops_per_token(config(args), args.sequence) * args.batch * args.sequence / peak
    for name, rounds in results.items():
        slow = [max(ranks, key=lambda r: r["main"]) for ranks in rounds]
        wall, share = [max(r["wall"] for r in ranks) for ranks in rounds], 1 if name == ONE else 2
        part = lambda values, wall=wall: f"{statistics.median(v / w for v, w in zip(values, wall, strict=True)):.1%}"
        more = [s["main"] - ranks[0]["main"] / share for s, ranks in zip(slow, results[ONE], strict=True)]
        ratio = statistics.median(a / b for a, b in zip(one, wall, strict=True))
        sent = sum(slow[0]["sent"].values())
        out.add_row(name, f"{statistics.median(wall):.2f} s", "" if name == ONE else f"{ratio:.2f}", "" if name == ONE else part(more),
                    part([s["transport"] for s in slow]), part([s["wall"] - s["main"] for s in slow]), f"{slow[0]['bubble']:.0%}",
                    f"{sent / 2**20:,.0f} MiB", f"{slow[0]['loss']:.4f}")
    out.caption = (f"floor of one core: {floor:.2f} s at its measured {peak / 1e9:.0f} GFLOP/s; waiting and computing are of the rank that computes "
                   f"most, as parts of its step; {args.rounds} rounds, medians")
    return out


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, value in (("hidden", 1024), ("layers", 8), ("vocabulary", 8192), ("sequence", 1024), ("batch", 8), ("rounds", 3)):
        parser.add_argument(f"--{name}", type=int, default=value)
    parser.add_argument("--compile", action="store_true")
    parser.add_argument("--only", nargs="+", choices=SIDES, default=list(SIDES))
    args = parser.parse_args()
    cores = sorted(os.sched_getaffinity(0))[:2]
    names = list(dict.fromkeys([ONE, *args.only]))
    results: dict[str, list] = {name: [] for name in names}
    with tempfile.TemporaryDirectory() as folder, Progress() as progress:
        alone, other, pair = (Team(some, folder, args) for some in (cores[:1], cores[1:], cores))
        bar = progress.add_task("measuring", total=args.rounds * len(names))
        for round in range(args.rounds):
            for name in random.Random(round).sample(names, len(names)):
                progress.update(bar, description=f"round {round + 1}: {name}")
                teams = {ONE: [alone], APART: [alone, other]}.get(name, [pair])
                for team in teams: team.ask(name)
                results[name].append([told for team in teams for told in team.answer()])
                progress.advance(bar)
        for team in (alone, other, pair): team.ask(None)
    Console(width=150).print(table(results, args, alone.peak))


if __name__ == "__main__": main()
