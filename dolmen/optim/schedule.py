"""The learning rate as a function of the step: linear warm-up, then cosine, linear, wsd
(2404.06395) or constant.
"""

import math

from dolmen.optim.config import OptimizerConfig


def learning_rate(config: OptimizerConfig, step: int, steps: int) -> float:
    """Learning rate of update `step` (0-based) of `steps`. The last update of a decaying schedule
    uses min_lr's neighbour, not min_lr itself, so that no update is wasted; warm-up's first update
    is lr / warmup_steps, not 0.
    """
    if step < config.warmup_steps:
        return config.lr * (step + 1) / config.warmup_steps
    done = (step - config.warmup_steps) / max(1, steps - config.warmup_steps)  # in [0, 1)
    if config.schedule == "constant":
        return config.lr
    fall = config.lr - config.min_lr
    if config.schedule == "cosine":
        return config.min_lr + fall * 0.5 * (1 + math.cos(math.pi * min(1.0, done)))
    if config.schedule == "linear":
        return config.min_lr + fall * max(0.0, 1 - done)
    start = steps * (1 - config.decay_fraction)
    if step < start:
        return config.lr
    return config.min_lr + fall * max(0.0, (steps - step) / (steps - start))
