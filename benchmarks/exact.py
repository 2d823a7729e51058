"""What exact numerics cost: a whole training step of one process, exact against fast, by CPU time.

    OMP_NUM_THREADS=1 python benchmarks/exact.py [--dtype bfloat16] [--experts 8 --ffn 384]

Steps take turns, on the same batch; what is printed are medians, and the median over rounds of the
ratio within a round.
"""

import argparse
import statistics
import sys
import time
from pathlib import Path

import torch

if not __package__:  # run as a file: Python then looks for `dolmen` beside it
    sys.path.insert(0, str(Path(__file__).parents[1]))

from dolmen.core import device as allocator
from dolmen.core.mesh import Mesh, process_group_context
from dolmen.data.batch import Batch
from dolmen.families import model_from_fields
from dolmen.model.build import build, initialize
from dolmen.model.layout import Layout
from dolmen.model.training import Training
from dolmen.ops.numerics import Exact
from dolmen.optim.optimizer import DTYPES, OptimizerConfig, make_optimizer
from dolmen.parallel.simulation import make_schedule
from dolmen.training.receipt import digest_weights
from dolmen.training.state import TrainState
from dolmen.training.step import optimizer_step


def start(options: argparse.Namespace, exact: Exact | None, mesh: Mesh) -> TrainState:
    """A run of one process before its first step."""
    sparse = {"num_local_experts": options.experts} if options.experts else {}
    spec = model_from_fields(
        "mixtral" if sparse else "llama",
        dict(
            **sparse,
            vocab_size=options.vocab,
            hidden_size=options.hidden,
            intermediate_size=options.ffn,
            num_hidden_layers=options.layers,
            num_attention_heads=options.hidden // 32,
            num_key_value_heads=8,
        ),
    ).spec
    schedule = make_schedule("1f1b", 1, options.micros, 1)
    layout, compute = Layout(dp=1, zero=1), DTYPES[options.dtype]
    training = Training(exact=exact)
    model = build(spec, mesh, layout, schedule, training=training, compute=compute)
    initialize(model, 0)
    config = OptimizerConfig()
    return TrainState(model, make_optimizer(model, config, mesh), config, 10**6, 1, schedule)


def seconds(state: TrainState, batch: Batch, mesh: Mesh) -> float:
    """CPU time of one step."""
    before = time.process_time()
    optimizer_step(state, batch, mesh)
    return time.process_time() - before


def digest_seconds(state: TrainState, mesh: Mesh) -> float:
    """CPU time of the digests of all weights, which each step's receipt has."""
    before = time.process_time()
    digest_weights(state.model, mesh)
    return time.process_time() - before


def main() -> None:
    parser = argparse.ArgumentParser()
    defaults = dict(hidden=256, layers=4, ffn=768, vocab=8192, rows=4, tokens=256, rounds=9)
    for name, default in defaults.items():
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--experts", type=int, default=0, help="of each layer, two per token")
    parser.add_argument("--micros", type=int, default=1, help="microbatches of a step")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    parser.add_argument("--limits", type=int, nargs="*", default=[1, 4, 8])
    parser.add_argument("--cp", type=int, nargs="*", default=[1], help="limits of cp")
    options = parser.parse_args()
    allocator.keep_freed_memory()
    with process_group_context(None, torch.device("cpu")):
        compare(options)


def compare(options: argparse.Namespace) -> None:
    """Time steps in turns, and print a line for each side."""
    mesh = Layout(dp=1).mesh(torch.device("cpu"))
    seeded = torch.Generator().manual_seed(0)
    tokens = torch.randint(options.vocab, (options.rows, options.tokens + 1), generator=seeded)
    batch = Batch(tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous())
    sides = {"fast": start(options, None, mesh)}
    for tp in options.limits:
        for cp in options.cp:
            name = f"exact, tp up to {tp}" + (f", cp up to {cp}" if cp > 1 else "")
            sides[name] = start(options, Exact(tp, options.tokens, cp), mesh)
    found = {name: [] for name in sides}
    for state in sides.values():
        seconds(state, batch, mesh)  # allocates
    for _ in range(options.rounds):
        for name, state in sides.items():
            found[name].append(seconds(state, batch, mesh))
    width = max(20, *map(len, found))
    for name, times in found.items():
        ratios = [a / b for a, b in zip(times, found["fast"], strict=True)]
        typical, ratio = statistics.median(times), statistics.median(ratios)
        print(f"{name:{width}} {typical:.3f} s  x {ratio:.2f}")
    digests = [digest_seconds(sides["fast"], mesh) for _ in range(options.rounds)]
    count = sum(p.numel() for p in sides["fast"].model.parameters())
    print(
        f"{'digests of a receipt':{width}} {statistics.median(digests):.3f} s  of {count:,} weights"
    )


if __name__ == "__main__":
    main()
