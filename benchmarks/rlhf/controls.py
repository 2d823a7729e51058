"""Negative controls of GRPO, over three seeds: what is claimed of the sound run fails with each
fault of faults.py.

    python -m benchmarks.rlhf.controls                 make rlhf-controls: all, a core each
    python -m benchmarks.rlhf.controls NAME SEED       one of them, in this process

Exit code 1 where a fault passes, or a sound run does not.
"""

import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

from benchmarks.rlhf import page
from benchmarks.rlhf.faults import FAULTS, SEEDS, WORDS, folder, put_in
from benchmarks.rlhf.outcomes import table
from benchmarks.rlhf.stages import FOLDER, ROOT, STAGES
from dolmen import cli

CORES, STEPS = 2, 100


def train(name: str, seed: int) -> int:
    """In this process."""
    more = ("--train.steps", str(STEPS), "--train.seed", str(seed), *WORDS.get(name, ()))
    with put_in(name):
        return cli.main(STAGES["grpo"].command(folder(name, seed), more))


def apart(of: tuple[str, int]) -> int:
    """In a process of its own; what it says goes to a file beside its folder."""
    name, seed = of
    log = folder(name, seed).with_suffix(".log")
    log.parent.mkdir(parents=True, exist_ok=True)
    with open(log, "w") as out:
        words = [sys.executable, "-m", "benchmarks.rlhf.controls", name, str(seed)]
        return subprocess.run(words, stdout=out, stderr=out, cwd=ROOT).returncode


def main() -> int:
    if len(sys.argv) == 3:
        return train(sys.argv[1], int(sys.argv[2]))
    if not (FOLDER / "sft" / "summary.json").exists():
        raise SystemExit("the controls begin with SFT's model: run `make rlhf` first")
    every = [(name, seed) for name in FAULTS for seed in SEEDS]
    with ThreadPoolExecutor(CORES) as pool:
        for (name, seed), code in zip(every, pool.map(apart, every), strict=True):
            print(f"{name}, seed {seed}: exit code {code}", flush=True)
    right = True
    for name, found in table():
        wanted = name == "sound"
        right &= all(one.passes == wanted for one in found)
        told = ", ".join(f"{one.times:.1f} times at {one.kl:.1f} nats" for one in found)
        print(f"{name:12} {told}: {'passes' if found[0].passes else 'fails'}")
    print(f"page: {page.write()}")
    return 0 if right and table() else 1


if __name__ == "__main__":
    sys.exit(main())
