"""Resident memory of a model with its own weights and with `--weights int8`, each in a process of
its own (Linux).

    python benchmarks/int8.py MODEL
"""

import argparse
import os
import resource
import subprocess
import sys
from pathlib import Path

if not __package__:  # run as a file: Python then looks for `benchmarks` beside it
    sys.path.insert(0, str(Path(__file__).parents[1]))

from dolmen.conversion.source import open_source
from dolmen.parallel.inference_linear import Weights
from dolmen.serving.engine import Engine, load_decoder
from dolmen.serving.request import Request, SamplingParams


def resident(folder: str, weights: Weights) -> None:
    """Tells what is resident before there is a model, once it writes, and at the most."""
    source = open_source(folder)
    before = _resident()
    with Engine(load_decoder(source, weights=weights), weights=weights) as engine:
        engine.add(Request([5, 6, 7], SamplingParams(temperature=0, max_new_tokens=16)))
        while engine.busy:
            engine.step()
        now = _resident()
    most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**10
    print(f"{weights}: {now - before:.0f} MiB once it writes, {most - before:.0f} at the most")


def _resident() -> float:
    """MiB of this process."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") / 2**20


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model")
    parser.add_argument("--memory-of", choices=("stated", "int8"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.memory_of:
        return resident(options.model, options.memory_of)
    for weights in ("stated", "int8"):
        words = [sys.executable, __file__, options.model, "--memory-of", weights]
        subprocess.run(words, check=True)


if __name__ == "__main__":
    main()
