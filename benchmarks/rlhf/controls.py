"""Negative controls of GRPO and PPO, over three seeds: what is claimed of the sound run fails with
each fault of faults.py.

    python -m benchmarks.rlhf.controls                            make rlhf-controls: all
    python -m benchmarks.rlhf.controls --recipe ppo --seed 0      some of them
    python -m benchmarks.rlhf.controls --here --recipe ppo --fault flipped --seed 0     in this
                                                                  process

Two side by side, a core each. Exit code 1 where a fault that was asked for passes, or a sound run
does not, or one of them has not been run to its end; each is measured by the sound run of its seed.
"""

import argparse
import itertools
import subprocess
import sys
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor

from benchmarks.rlhf import page
from benchmarks.rlhf.faults import FAULTS, SEEDS, UNHELD, folder, put_in
from benchmarks.rlhf.outcomes import ended, outcome
from benchmarks.rlhf.stages import FOLDER, ROOT, STAGES
from dolmen import cli

CORES = 2
NEEDED = {"grpo": "sft", "ppo": "reward"}
"""Of each recipe the last stage of `make rlhf` that is behind it."""


def train(recipe: str, name: str, seed: int) -> int:
    """In this process."""
    more = ("--train.seed", str(seed), *(UNHELD[recipe] if name == "no KL" else ()))
    with put_in(name):
        return cli.main(STAGES[recipe].command(folder(recipe, name, seed), more))


def apart(of: tuple[str, str, int]) -> int:
    """In a process of its own; what it says goes to a file beside its folder."""
    recipe, name, seed = of
    log = folder(*of).with_suffix(".log")
    log.parent.mkdir(parents=True, exist_ok=True)
    with open(log, "w") as out:
        words = ["--here", "--recipe", recipe, "--fault", name, "--seed", str(seed)]
        command = [sys.executable, "-m", "benchmarks.rlhf.controls", *words]
        return subprocess.run(command, stdout=out, stderr=out, cwd=ROOT).returncode


def main() -> int:
    parser = argparse.ArgumentParser(description="Faults with which the claims fail.")
    parser.add_argument("--recipe", nargs="+", choices=list(UNHELD), default=list(UNHELD))
    parser.add_argument("--fault", nargs="+", choices=FAULTS, default=FAULTS)
    parser.add_argument("--seed", nargs="+", type=int, choices=SEEDS, default=SEEDS)
    parser.add_argument("--here", action="store_true", help="in this process, without a page")
    asked = parser.parse_args()
    every = list(itertools.product(asked.recipe, asked.fault, asked.seed))
    if asked.here:
        return max(train(*one) for one in every)
    for recipe in asked.recipe:
        if not (FOLDER / NEEDED[recipe] / "summary.json").exists():
            raise SystemExit(f"{recipe} begins with {NEEDED[recipe]}: run `make rlhf` first")
    with ThreadPoolExecutor(CORES) as pool:
        for one, code in zip(every, pool.map(apart, every), strict=True):
            print(*one, f"exit code {code}", flush=True)
    right = told(every)
    print(f"page: {page.write()}")
    return 0 if right else 1


def told(every: Iterable[tuple[str, str, int]]) -> bool:
    """Prints what became of them. Returns whether each did as it should, and all have been run."""
    right = True
    for of, some in itertools.groupby(every, lambda one: one[:2]):
        runs = list(some)
        outcomes = [outcome(*one) for one in runs if ended(*one)]
        right &= len(outcomes) == len(runs)
        right &= all(one.passes == (of[1] == "sound") for one in outcomes)
        each = ", ".join(f"{one.times:.1f} times at {one.kl:.1f} nats" for one in outcomes)
        passed = sum(one.passes for one in outcomes)
        print(f"{of[0]} {of[1]:12} {each}: {passed} of {len(outcomes)} pass, {len(runs)} asked for")
    return right


if __name__ == "__main__":
    sys.exit(main())
