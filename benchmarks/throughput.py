"""Training throughput side by side with peers: one run, the same shapes, initial weights, data,
fp32 masters, bf16 compute, fused AdamW and clipping for all sides, and ratios at the end.

    python benchmarks/throughput.py
        on a CPU: one process of two threads, then tp=2 over two of one thread each
        on GPUs: about 1B parameters, sequence 4096, and the model FLOPs utilisation (MFU)

Sides take turns, each in processes of its own: every round times one step of each, and a ratio is
the median over rounds of the ratio within a round. CPU time is of the first process: on a machine
that others use it says more than the clock (with one thread; waiting threads spin). One step is
forward, loss, backward, clip, update and new bf16 copies of the masters. Peak memory is the most
that a process of the side had resident over the timed steps, on a GPU the most it had allocated.

A side whose first losses are not those of the first side trains something else, and says so.

All processes on a CPU keep the memory that they free, as those of `dolmen train` do
(core/device.py), and dolmen is compared with peers that have the same; `--freed returned` is
glibc's default, for all.
"""

import argparse
import statistics
import sys
import tempfile
import time
import warnings
from dataclasses import replace
from pathlib import Path

import torch
import torch.distributed as dist

if not __package__:  # run as a file: Python then looks for `benchmarks` beside it
    sys.path.insert(0, str(Path(__file__).parents[1]))

from benchmarks.peers import nanochat_side, picotron_side
from benchmarks.sides import Work, dolmen_side, fsdp_side, masters_side, timed
from benchmarks.team import Team, end_all, forget_peak, peak_memory
from dolmen.core import device as allocator
from dolmen.core import mesh as meshes
from dolmen.families import model_from_fields
from dolmen.training.mfu import datasheet


def shape(
    hidden: int,
    layers: int,
    heads: int,
    kv_heads: int,
    ffn: int,
    vocab: int,
    sequence: int,
    batch: int,
) -> Work:
    """The model and the batch of every side."""
    model = model_from_fields(
        "llama",
        dict(
            vocab_size=vocab,
            hidden_size=hidden,
            intermediate_size=ffn,
            num_hidden_layers=layers,
            num_attention_heads=heads,
            num_key_value_heads=kv_heads,
            head_dim=hidden // heads,
            max_position_embeddings=sequence,
        ),
    )
    return Work(model, sequence, batch)


SHAPES = {
    "cpu": shape(512, 8, 8, 4, 1536, 8192, 512, 8),
    "cuda": shape(2048, 16, 16, 8, 8192, 32768, 4096, 4),
}
SIDES = {
    1: {
        "dolmen": lambda s, m: dolmen_side(s, m, True),
        "dolmen eager": lambda s, m: dolmen_side(s, m, False),
        "transformers eager": lambda s, m: masters_side(s, m, False),
        "transformers compile": lambda s, m: masters_side(s, m, True),
        "transformers compile, eager attention": lambda s, m: masters_side(s, m, True, "eager"),
        "transformers compile FSDP2": lambda s, m: fsdp_side(s, m, True),
        "nanochat's way, compile": lambda s, m: nanochat_side(s, m),
        "picotron's way, eager": lambda s, m: picotron_side(s, m),
    },
    2: {
        "dolmen": lambda s, m: dolmen_side(s, m, True),
        "dolmen eager": lambda s, m: dolmen_side(s, m, False),
        "dolmen sequence parallel": lambda s, m: dolmen_side(s, m, True, True),
        "DTensor eager": lambda s, m: fsdp_side(s, m, False),
        "DTensor compile": lambda s, m: fsdp_side(s, m, True),
        "picotron's way, eager": lambda s, m: picotron_side(s, m),
    },
}


WARM = 3
SAME = 2**-11  # of losses: bf16 rounds what is summed in another order, WARM updates apart


def member(rank, name, world, store, options, asked, told):
    """One process of a side. Says its first losses, then of each step (seconds, CPU seconds, peak
    memory).
    """
    warnings.filterwarnings("ignore")
    device = torch.device("cuda", rank) if options.device == "cuda" else torch.device("cpu")
    if device.type == "cuda":
        torch.cuda.set_device(device)
    else:
        torch.set_num_threads(max(1, options.threads // world))
        if options.freed == "kept":
            allocator.keep_freed_memory()
    backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
    dist.init_process_group(
        backend, store=dist.FileStore(store, world), rank=rank, world_size=world
    )
    step = SIDES[world][name](options.work, meshes.build_mesh(1, world, device))
    told.put([float(step()) for _ in range(WARM)])
    on_gpu = device.type == "cuda"
    torch.cuda.reset_peak_memory_stats() if on_gpu else forget_peak()
    while asked.get():
        dist.barrier()
        seconds, cpu = timed(step, device)
        told.put((seconds, cpu, torch.cuda.max_memory_allocated() if on_gpu else peak_memory()))
    dist.barrier()
    dist.destroy_process_group()


def _section(world, folder, options):
    """One number of processes: start the sides one after the other, take turns, print."""
    names = [name for name in SIDES[world] if not options.only or name in options.only]
    teams, losses = {}, {}
    for i, name in enumerate(names):
        start = time.perf_counter()
        teams[name] = Team(member, world, name, world, f"{folder}/{i}", options)
        losses[name] = teams[name].answer()[0]
        shown = " ".join(f"{x:.4f}" for x in losses[name])
        print(
            f"  built {name:40s} {time.perf_counter() - start:5.1f} s   losses {shown}", flush=True
        )
    rounds = {name: [] for name in names}
    for _ in range(options.rounds):
        for name, team in teams.items():
            rounds[name].append(tuple(map(max, zip(*team.work(), strict=True))))
    end_all(list(teams.values()))
    if rounds:
        _print(options, world, rounds, losses)


def _print(options, world, rounds, losses):
    work, on_gpu = options.work, options.device == "cuda"
    where = (
        torch.cuda.get_device_name(0)
        if on_gpu
        else f"{max(1, options.threads // world)} thread(s) each, memory {options.freed}"
    )
    print(
        f"\n{world} process(es), {where}; torch {torch.__version__}; {options.rounds} rounds; "
        f"{work}"
    )
    peak = datasheet(where, torch.bfloat16)
    first = next(iter(rounds))
    for name, times in rounds.items():
        wall, cpu, memory = map(statistics.median, zip(*times, strict=True))
        ratio, cpu_ratio = (
            statistics.median(t[i] / o[i] for t, o in zip(times, rounds[first], strict=True))
            for i in (0, 1)
        )
        rate = (
            f"MFU {work.flops / wall / peak / world:5.1%}"
            if peak
            else f"{work.flops / wall / 1e9:4.0f} GFLOP/s"
        )
        same = all(
            abs(a - b) <= SAME * abs(b) for a, b in zip(losses[name], losses[first], strict=True)
        )
        print(
            f"{name:40s} {wall * 1e3:6.0f} ms (min {min(times)[0] * 1e3:5.0f}, CPU "
            f"{cpu * 1e3:5.0f}) {work.tokens / wall:7.0f} tokens/s  {rate}  "
            f"peak {memory / 2**30:.2f} GiB  {first} {ratio:.2f}x (CPU time {cpu_ratio:.2f}x)"
            f"{'' if same else '  OTHER LOSSES: it trains something else'}",
            flush=True,
        )


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--device", default="cuda" if torch.cuda.is_available() else "cpu", choices=["cpu", "cuda"]
    )
    parser.add_argument(
        "--tp",
        type=int,
        nargs="+",
        help="sections to run; default: 1, and 2 where there are two devices",
    )
    parser.add_argument(
        "--threads", type=int, default=2, help="CPU threads of all processes together"
    )
    parser.add_argument("--rounds", type=int, default=9, help="timed steps of each side")
    parser.add_argument("--only", nargs="+", help="sides to run, by name")
    parser.add_argument(
        "--freed",
        default="kept",
        choices=["kept", "returned"],
        help="what every process on a CPU does with memory that it frees",
    )
    parser.add_argument("--batch", type=int, help="sequences per step")
    options = parser.parse_args()
    options.work = SHAPES[options.device]
    if options.batch:
        options.work = replace(options.work, batch=options.batch)
    for world in options.tp or (
        [1, 2] if options.device == "cpu" or torch.cuda.device_count() > 1 else [1]
    ):
        with tempfile.TemporaryDirectory() as folder:
            _section(world, folder, options)


if __name__ == "__main__":
    main()
