"""The learning rate as a function of the step: linear warm-up, then cosine, linear, wsd
(2404.06395) or constant.
"""

import math

from dolmen.optim.config import OptimizerConfig


def learning_rate(
    config: OptimizerConfig,
    step: float,
    steps: float,
    warmup: float | None = None,
) -> float:
    """Learning rate of update `step` (0-based) of `steps`, of which the first `warmup` (None: as
    `config` has them) warm up. The last update of a decaying schedule uses min_lr's neighbour, not
    min_lr itself, so that no update is wasted; warm-up's first update is lr / warmup, not 0.
    """
    warmup = config.warmup_steps if warmup is None else warmup
    if step < warmup:
        return config.lr * min(1.0, (step + 1) / warmup)
    done = (step - warmup) / max(1, steps - warmup)  # in [0, 1)
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
