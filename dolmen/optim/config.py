"""The options under `--optimizer`, and the learning-rate schedule: linear warm-up, then cosine,
linear, wsd (2404.06395) or constant. Needs no torch.
"""

import math
from dataclasses import fields
from typing import Annotated, Literal

from pydantic import Field

from dolmen.core.config import Below1, Count, NonNegative, config

Name = Literal["adamw", "muon"]


@config("optimizer.muon")
class MuonConfig:
    """Options of Muon. Learning rate and weight decay are those of --optimizer."""

    momentum: Below1 = 0.95
    """Decay of the (Nesterov) momentum."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Dtype of the Newton-Schulz iteration; float32: the dtype of the weights, so float64 in a
    float64 run.
    """


@config("optimizer")
class OptimizerConfig:
    """Optimizer, learning-rate schedule and gradient clipping."""

    name: Name = "adamw"
    """adamw: all parameters by AdamW; muon: matrices inside layers by Muon, those of each expert
    separately, and all other parameters (embedding, head, routers, norms, biases) by AdamW.
    """
    lr: NonNegative = 3e-4
    """Peak learning rate."""
    warmup_steps: Count = 0
    """Steps in which the learning rate rises linearly from 0 to `lr`."""
    warmup_tokens: NonNegative | None = None
    """Warm-up length in tokens, such as 1e9, in place of warmup_steps."""
    schedule: Literal["cosine", "linear", "wsd", "constant"] = "cosine"
    """After warm-up: cosine or linear to `min_lr`, wsd (constant, then linear over the last
    `decay_fraction`), constant.
    """
    min_lr: NonNegative = 0.0
    """Final learning rate of cosine, linear and wsd, reached one step after the last."""
    decay_fraction: Annotated[float, Field(gt=0, le=1)] = 0.2
    """wsd: fraction of all steps, at the end, in which the learning rate falls."""
    weight_decay: NonNegative = 0.1
    """Decoupled weight decay of matrices; norms and biases have none."""
    beta1: Below1 = 0.9
    """Decay of the first moment."""
    beta2: Below1 = 0.95
    """Decay of the second moment."""
    eps: NonNegative = 1e-8
    """Added to the square root of the second moment."""
    clip: NonNegative = 1.0
    """Maximum global gradient norm; larger gradients are scaled down to it. 0: no clipping."""
    from_init: bool = False
    """Start with the AdamW moments and update count stored with the weights of --init (a torch_dist
    checkpoint of Megatron has them). The schedule and the data start at step 0.
    """
    muon: MuonConfig = MuonConfig()

    def __post_init__(self):
        """Raise ValueError where an option of Muon is set but `name` is adamw, or `from_init` is
        set but `name` is not adamw.
        """
        changed = [f.name for f in fields(MuonConfig) if getattr(self.muon, f.name) != f.default]
        if self.name != "muon" and changed:
            name = changed[0]
            raise ValueError(
                f"optimizer.muon.{name} is {getattr(self.muon, name)}, but optimizer.name is "
                f"{self.name}: set --optimizer.name muon"
            )
        if self.from_init and self.name != "adamw":
            raise ValueError(
                f"optimizer.from-init needs AdamW, but optimizer.name is {self.name}: set "
                "--optimizer.name adamw, or leave it out"
            )


def learning_rate(
    config: OptimizerConfig,
    step: float,
    steps: float,
    warmup: float | None = None,
) -> float:
    """Return the learning rate of update `step` (0-based) of `steps`, of which the first `warmup`
    (None: `config.warmup_steps`; a fraction is fine) warm up linearly, followed by the schedule of
    `config`. A decaying schedule would reach min_lr one update after the last, so that none is
    wasted; warm-up's first update has lr / warmup, not 0.
    """
    warmup = config.warmup_steps if warmup is None else warmup
    if step < warmup:
        # (step + 1): the first update already moves, the last of warm-up has the peak
        return config.lr * min(1.0, (step + 1) / warmup)
    # progress after warm-up
    done = (step - warmup) / max(1, steps - warmup)  # in [0, 1)
    if config.schedule == "constant":
        return config.lr
    fall = config.lr - config.min_lr
    if config.schedule == "cosine":
        # half a cosine wave, from lr down to min_lr
        return config.min_lr + fall * 0.5 * (1 + math.cos(math.pi * min(1.0, done)))
    if config.schedule == "linear":
        return config.min_lr + fall * max(0.0, 1 - done)
    # wsd: decay_fraction is of all steps, warm-up included
    start = steps * (1 - config.decay_fraction)
    if step < start:
        return config.lr
    return config.min_lr + fall * max(0.0, (steps - step) / (steps - start))
