"""Teach a small model by every recipe of tuning, on two cores, and draw what became of it.

    python -m benchmarks.rlhf [STAGE ...]      make rlhf: all stages, or these, and the page
    python -m benchmarks.rlhf.controls         make rlhf-controls: faults that are to fail
    python -m benchmarks.rlhf.page             the page alone: build/rlhf/rlhf.html

    base -> SFT -> reward model | DPO | GRPO -> PPO     those between bars side by side, a core each

A run of `make rlhf` fails, with exit code 1, where the page's claims do not hold (`checks.py`).
"""

import argparse
import sys
import time
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor

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
    for start in (None, "base", "sft", "reward"):
        _together(name for name in asked if STAGES[name].after == start)
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


def _together(names: Iterable[str]) -> None:
    """Raises SystemExit where one of them fails."""

    def timed(name: str) -> tuple[str, int, float]:
        begun = time.monotonic()
        return name, run(name), time.monotonic() - begun

    with ThreadPoolExecutor(CORES) as pool:
        for name, code, seconds in pool.map(timed, names):
            print(f"{name:8} {seconds:4.0f} s", flush=True)
            if code:
                raise SystemExit(
                    f"{name} ended with exit code {code}: {FOLDER / name}.log says why"
                )


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
