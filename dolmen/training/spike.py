"""Which steps to skip for a gradient that is far over the usual: a batch of nonsense, or of another
world, undoes hours.

The usual is the median of the norms of the last WINDOW steps, those skipped among them: so a
lasting change becomes the usual after half a window, and a single giant, which would spoil a mean,
does not count (PaLM, arXiv:2204.02311, skipped some hundred batches around each spike by hand).
Pure and the same on every rank, as the norm is.
"""

import math
from collections import deque
from statistics import median

WINDOW = 64  # steps remembered
LEAST = 16  # of them, before anything is a spike: a run's start is no usual


class SpikePolicy:
    """`factor` times the median is a spike; None: nothing is."""

    def __init__(self, factor: float | None = None):
        self.factor, self.norms = factor, deque(maxlen=WINDOW)

    def allow(self, norm: float) -> bool:
        """Whether a step of this gradient norm may change parameters; remembers it, if it is
        finite. One that is not is refused.
        """
        if not math.isfinite(norm):
            return False
        spike = (
            self.factor is not None
            and len(self.norms) >= LEAST
            and norm > self.factor * median(self.norms)
        )
        self.norms.append(norm)
        return not spike

    def state(self) -> list[float]:
        """What a checkpoint keeps, so that a resumed run decides as one never stopped; exact in
        JSON.
        """
        return list(self.norms)

    def load(self, norms: list[float]) -> None:
        """Go on from `state()`."""
        self.norms = deque(norms, maxlen=WINDOW)
