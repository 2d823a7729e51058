"""When Python's garbage collector runs in training: after the same step on every rank, and not when
each rank's own count of objects says so. A whole collection takes 0.1 to 0.3 s, and a step takes as
long as that of the slowest rank.

Tensors are freed without it: tests/training/test_garbage.py holds that a step leaves none in a
cycle. Activation recomputation leaves 28 small objects per layer, and FSDP of torch 2.11 some 30
per layer and microbatch.
"""

import gc
from collections.abc import Iterator
from contextlib import contextmanager

YOUNG = 50  # steps between collections of what is new
ALL = 1000  # steps between whole ones: of what was kept for a while, as by a save or a validation


@contextmanager
def by_hand() -> Iterator[None]:
    """Within, nothing is collected but by `collect`. Afterwards the collector is as it was."""
    was = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was:
            gc.enable()


def collect(step: int) -> None:
    """After `step` steps: all garbage, what is new of it, or none."""
    if step % ALL == 0:
        gc.collect()
    elif step % YOUNG == 0:
        gc.collect(1)
