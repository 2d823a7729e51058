"""Teach a small model by every recipe of tuning, on two cores, and draw what became of it.

    python -m benchmarks.rlhf [STAGE ...]      make rlhf: all stages, or these, and the page
    python -m benchmarks.rlhf.controls         make rlhf-controls: faults that are to fail
    python -m benchmarks.rlhf.page             the page alone: build/rlhf/rlhf.html

    base -> SFT -> reward model -> PPO     each as soon as what it begins with is there, two
            SFT -> DPO                     side by side, a core each
            SFT -> GRPO

A run of `make rlhf` fails, with exit code 1, where the page's claims do not hold (`checks.py`).
"""

import argparse
import sys
import time
from collections.abc import Iterable
from concurrent.futures import Future, ThreadPoolExecutor

from benchmarks.rlhf import checks, page, task
from benchmarks.rlhf.measure import keep, kept, measure
from benchmarks.rlhf.stages import FOLDER, STAGES, prepare, run

CORES = 2


def main() -> int:
    parser = argparse.ArgumentParser(description="Every recipe of tuning, on two cores.")
    parser.add_argument("stage", nargs="*", choices=(*STAGES, []), help="default: all")
    asked = parser.parse_args().stage or list(STAGES)
    begun = time.monotonic()
    prepare()
    _run([name for name in STAGES if name in asked])
    _measured(asked)
    print(f"all of it: {time.monotonic() - begun:.0f} s")
    return report()


def report() -> int:
    """Prints the claims, with their numbers, and writes the page."""
    found = checks.checked()
    for one in found:
        print(("holds  " if one.holds else "FAILS  ") + one.text)
    print(f"page: {page.write()}")
    return 0 if all(one.holds for one in found) else 1


def _run(names: Iterable[str]) -> None:
    """In that order, in which each comes behind what it begins with. Raises SystemExit where one
    fails; those that begin with it are not run then.
    """
    running: dict[str, Future[None]] = {}

    def timed(name: str) -> None:
        if (before := STAGES[name].after) in running:
            running[before].result()
        begun = time.monotonic()
        code = run(name)
        print(f"{name:8} {time.monotonic() - begun:4.0f} s", flush=True)
        if code:
            raise SystemExit(f"{name} ended with exit code {code}: {FOLDER / name}.log says why")

    with ThreadPoolExecutor(CORES) as pool:
        for name in names:
            running[name] = pool.submit(timed, name)
    for each in running.values():
        each.result()


def _measured(names: Iterable[str]) -> None:
    """Each model that writes, against the start."""
    file, (_, held) = FOLDER / "measured.json", task.subjects()
    found = kept(file)
    for name in names:
        if name != "reward":
            found[name] = measure(FOLDER / name / "hf", FOLDER / "sft" / "hf", held)
    keep(found, file)


if __name__ == "__main__":
    sys.exit(main())
