"""The options that the command line shows under `--optimizer`. Knows nothing of torch."""

import math
from dataclasses import dataclass, fields
from typing import Literal

Name = Literal["adamw", "muon"]


@dataclass(frozen=True)
class Muon:
    """Muon's own; the learning rate and its decay are AdamW's."""

    momentum: float = 0.95
    """Decay of the momentum; it looks ahead by one step (Nesterov)."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """What Newton-Schulz computes in; float32: the dtype of the weights, so float64 in a float64
    run.
    """

    def __post_init__(self):
        if not 0 <= self.momentum < 1:
            raise ValueError(f"optimizer.muon.momentum is {self.momentum}: it must lie in [0, 1)")


@dataclass(frozen=True)
class OptimizerConfig:
    """The update, its schedule and clipping."""

    name: Name = "adamw"
    """adamw: all parameters by AdamW; muon: matrices inside layers by Muon, each expert's by
    itself, and all else (embedding, head, routers, norms, biases) by AdamW.
    """
    lr: float = 3e-4
    """Peak learning rate."""
    warmup_steps: int = 0
    """Steps in which the learning rate rises linearly from 0 to `lr`."""
    warmup_tokens: float | None = None
    """In place of warmup_steps: tokens of the batches of these steps; 1e9 is a way to write it."""
    schedule: Literal["cosine", "linear", "wsd", "constant"] = "cosine"
    """After warm-up: cosine or linear to `min_lr`, wsd (constant, then linear over the last
    `decay_fraction`), constant.
    """
    min_lr: float = 0.0
    """Learning rate to which cosine, linear and wsd fall: they would reach it one step after the
    last.
    """
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
    from_init: bool = False
    """Begin with the moments of AdamW that lie beside the weights of `init`, after as many updates
    as those were; the schedule and the data begin at step 0. A torch_dist checkpoint of Megatron
    has them.
    """
    muon: Muon = Muon()

    def __post_init__(self):
        asked = [f.name for f in fields(Muon) if getattr(self.muon, f.name) != f.default]
        if self.name != "muon" and asked:
            raise ValueError(
                f"optimizer.muon.{asked[0]} is {getattr(self.muon, asked[0])}, but optimizer.name "
                f"is {self.name}, which does not have it: set --optimizer.name muon"
            )
        if self.from_init and self.name != "adamw":
            raise ValueError(
                f"optimizer.from-init takes moments of AdamW, and optimizer.name is {self.name}: "
                "set --optimizer.name adamw, or leave it out"
            )
        for name in ("lr", "min_lr", "weight_decay", "eps", "clip", "warmup_steps"):
            if not 0 <= getattr(self, name) < math.inf:
                raise ValueError(
                    f"optimizer.{name.replace('_', '-')} is {getattr(self, name)}: it must be "
                    f"finite and not negative"
                )
        if self.warmup_tokens is not None and not 0 <= self.warmup_tokens < math.inf:
            raise ValueError(
                f"optimizer.warmup-tokens is {self.warmup_tokens}: it must be finite and not "
                "negative"
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
