"""The options that the command line shows under `--optimizer`. Knows nothing of torch."""

import math
from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class OptimizerConfig:
    """The update: AdamW, its schedule and clipping."""

    lr: float = 3e-4
    """Peak learning rate."""
    warmup_steps: int = 0
    """Steps in which the learning rate rises linearly from 0 to `lr`."""
    schedule: Literal["cosine", "linear", "wsd", "constant"] = "cosine"
    """After warm-up: cosine or linear to `min_lr`, wsd (constant, then linear over the last
    `decay_fraction`), constant.
    """
    min_lr: float = 0.0
    """Learning rate to which cosine, linear and wsd fall: that of a step after the last."""
    decay_fraction: float = 0.2
    """wsd: part of all steps in which the learning rate falls."""
    weight_decay: float = 0.1
    """Decoupled weight decay of matrices; norms and biases have none."""
    beta1: float = 0.9
    """Decay of the first moment."""
    beta2: float = 0.95
    """Decay of the second moment."""
    eps: float = 1e-8
    """Added to the root of the second moment."""
    clip: float = 1.0
    """Largest norm of the whole gradient; 0 switches clipping off."""

    def __post_init__(self):
        for name in ("lr", "min_lr", "weight_decay", "eps", "clip", "warmup_steps"):
            if not 0 <= getattr(self, name) < math.inf:
                raise ValueError(
                    f"optimizer.{name.replace('_', '-')} is {getattr(self, name)}: it must be "
                    f"finite and not negative"
                )
        if not (0 <= self.beta1 < 1 and 0 <= self.beta2 < 1):
            raise ValueError(
                f"optimizer.beta1 ({self.beta1}) and optimizer.beta2 ({self.beta2}) must lie in "
                f"[0, 1)"
            )
        if not 0 < self.decay_fraction <= 1:
            raise ValueError(
                f"optimizer.decay-fraction is {self.decay_fraction}: it must lie in (0, 1]"
            )
