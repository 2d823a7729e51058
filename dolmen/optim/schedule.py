"""The learning rate as a function of the step: linear warm-up, then cosine, linear, wsd
(2404.06395) or constant.
"""

import math

from dolmen.optim.config import OptimizerConfig


def learning_rate(c: OptimizerConfig, step: int, steps: int) -> float:
    """Learning rate of update `step` (0-based) of `steps`. The last update of a decaying schedule
    uses min_lr's neighbour, not min_lr itself, so that no update is wasted; warm-up's first update
    is lr / warmup_steps, not 0.
    """
    if step < c.warmup_steps:
        return c.lr * (step + 1) / c.warmup_steps
    done = (step - c.warmup_steps) / max(1, steps - c.warmup_steps)  # in [0, 1)
    if c.schedule == "constant":
        return c.lr
    if c.schedule == "cosine":
        return c.min_lr + (c.lr - c.min_lr) * 0.5 * (1 + math.cos(math.pi * min(1.0, done)))
    if c.schedule == "linear":
        return c.min_lr + (c.lr - c.min_lr) * max(0.0, 1 - done)
    start = steps * (1 - c.decay_fraction)
    return (
        c.lr
        if step < start
        else c.min_lr + (c.lr - c.min_lr) * max(0.0, (steps - step) / (steps - start))
    )
