"""A pipeline schedule of one's own, timed, drawn, trained with, and compared with one process.

    python examples/schedule.py [FOLDER]

A schedule is a list of actions per rank, and changes how long ranks wait, never the gradients: the
losses of two processes equal those of one, up to the rounding of sums in another order.
"""

import sys
from pathlib import Path

from train import DOCS, MODEL

import dolmen
from dolmen.parallel import simulation
from dolmen.planning import draw

# Two ranks, four microbatches; rank 0 runs one forward further ahead than 1F1B would
ACTIONS = """
F0 F1 F2 B0 F3 B1 B2 B3
F0 B0 F1 B1 F2 B2 F3 B3
"""


def losses(folder: Path, **layout) -> list[float]:
    """The loss of each step of a run split as `layout` says."""
    run = dolmen.train(
        "pretrain",
        model=MODEL,
        layout=layout,
        data={"path": DOCS, "tokenizer": "bpe:512"},
        train={"steps": 6, "sequence_length": 64, "global_batch_size": 8, "microbatch_size": 2},
        log={"validate_every": 0},
        out=folder,
        overwrite=True,
    )
    return run.losses


def main(folder: str = "runs/schedule") -> float:
    """The largest difference between the losses of one process and of two, relative."""
    at = Path(folder)
    at.mkdir(parents=True, exist_ok=True)
    mine = at / "mine.txt"
    mine.write_text(ACTIONS)
    read = simulation.read_schedule(str(mine))
    draw.gantt(simulation.simulate(read), read, at / "mine.svg", "mine")
    one, two = losses(at / "one"), losses(at / "two", pp=2, schedule=mine)
    return max(abs(a - b) / a for a, b in zip(one, two, strict=True))


if __name__ == "__main__":
    print("largest relative difference of a loss:", main(*sys.argv[1:]))
