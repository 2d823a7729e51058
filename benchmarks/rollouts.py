"""Generation's share of a GRPO step, and how far the generator's log-probabilities are from the
trainer's, for each way to generate.

    python -m benchmarks.rollouts MODEL --prompts prompts.jsonl
    python -m benchmarks.rollouts MODEL --prompts prompts.jsonl --sides exact int8 --dtype bfloat16

MODEL is what `--init` takes, the prompts are what GRPO's `--data.path` takes. Sides take turns in
each round, each as a process of its own, and train the same steps, the first of which does not
count (it compiles, and fills caches). Times are medians of CPU seconds (user and system, all
threads) of a step, generation included, over steps and rounds. The mismatch is of sampled tokens:
the mean |difference| of log p, the estimate k3 of the KL of the generator from the trainer
(2009.06367), and of the ratios of truncated importance sampling the largest and the share that the
cap cuts off.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

import dolmen
from dolmen.rl import iteration, rollout

CAP = 2.0
WORLD = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
WORLD |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29511"}
SIDES: Mapping[str, dict[str, Any]] = {
    "exact": {},
    "exact, lookup": {"speculative": {"method": "ngram"}},
    "exact, compiled": {"compile": True},
    "int8": {"weights": "int8"},
    "int8, compiled": {"weights": "int8", "compile": True},
}
COLUMNS = ("step, s", "generation, s", "share", "mean |d log p|", "KL", "largest ratio", "cut off")


def measure(name: str, args: argparse.Namespace) -> dict[str, list[float]]:
    """Train the steps of one side in this process: CPU seconds of each step and of its generation,
    and what its rollouts say of the mismatch.
    """
    generation, ends, generate = [], [], iteration.generate_completions

    def timed(*arguments, **options):
        start = time.process_time()
        try:
            return generate(*arguments, **options)
        finally:
            generation.append(time.process_time() - start)

    iteration.generate_completions = timed
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "run"
        dolmen.worker(
            "grpo",
            on_metrics=lambda row: ends.append(time.process_time()),
            init=args.model,
            data={"path": args.prompts, "cache": f"{folder}/cache"},
            reward="stub",
            out=str(out),
            layout={"dp": 1},
            optimizer={"lr": 1e-5, "schedule": "constant", "warmup_steps": 0},
            train={
                "steps": args.steps + 1,
                "global_batch_size": args.completions,
                "microbatch_size": 8,
                "sequence_length": args.length,
                "dtype": args.dtype,
                "device": "cpu",
            },
            rollout={
                "num_generations": 8,
                "max_new_tokens": args.tokens,
                "importance_sampling_cap": CAP,
                **SIDES[name],
            },
            log={"to": "none", "validate_every": 0},
            checkpoint={"every": args.steps + 1},
        )
        found = [rollout.load(out, i, args.completions) for i in range(args.steps + 1)]
    steps = [b - a for a, b in zip(ends[:-1], ends[1:], strict=True)]
    told = {"step": steps[: args.steps], "generation": generation[1:]}
    differences = torch.cat(
        [(r.old_logprobs - r.sampled_logprobs)[r.trained] for r in found if r is not None]
    ).double()
    ratios = differences.exp()
    return told | {
        "difference": [float(differences.abs().mean())],
        "kl": [float((ratios - 1 - differences).mean())],
        "largest": [float(ratios.max())],
        "cut": [float((ratios > CAP).double().mean())],
        "tokens": [float(len(ratios))],
    }


def table(rounds: Mapping[str, list[dict[str, list[float]]]]) -> str:
    """The table of all sides, in Markdown."""
    lines = ["| | " + " | ".join(COLUMNS) + " |", "|---" + "|--:" * len(COLUMNS) + "|"]
    for name, told in rounds.items():
        all_of = {key: [x for one in told for x in one[key]] for key in told[0]}
        step, generation = (statistics.median(all_of[key]) for key in ("step", "generation"))
        mismatch = [statistics.median(all_of[key]) for key in ("difference", "kl", "largest")]
        cut = statistics.mean(all_of["cut"])
        numbers = (f"{step:.2f}", f"{generation:.2f}", f"{generation / step:.0%}")
        words = (*numbers, *(f"{x:.2g}" for x in mismatch[:2]), f"{mismatch[2]:.3f}", f"{cut:.2g}")
        lines.append(f"| {name} | " + " | ".join(words) + " |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("model")
    add("--prompts", required=True)
    add("--sides", nargs="+", choices=SIDES, default=list(SIDES))
    add("--dtype", choices=("float32", "bfloat16"), default="float32")
    add("--completions", type=int, default=32)
    add("--tokens", type=int, default=96, help="new tokens of a completion")
    add("--length", type=int, default=160, help="tokens of prompt and completion")
    add("--steps", type=int, default=2, help="that count")
    add("--rounds", type=int, default=1)
    add("--threads", type=int, default=1)
    add("--measure", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.measure:
        print(json.dumps(measure(args.measure, args)))
        return
    rounds = {name: [] for name in args.sides}
    for _ in range(args.rounds):
        for name in args.sides:
            words = [sys.executable, "-m", "benchmarks.rollouts", *sys.argv[1:], "--measure", name]
            environment = os.environ | WORLD | {"OMP_NUM_THREADS": str(args.threads)}
            done = subprocess.run(words, env=environment, stdout=subprocess.PIPE, text=True)
            done.check_returncode()
            rounds[name].append(json.loads(done.stdout.splitlines()[-1]))
            print(f"{name}: {rounds[name][-1]}", file=sys.stderr)
    print(table(rounds))


if __name__ == "__main__":
    main()
