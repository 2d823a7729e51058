"""What `diff` may be told. Without torch."""

from dataclasses import dataclass
from typing import Literal

from dolmen.model.layout import Layout
from dolmen.optim.config import OptimizerConfig

DTypes = Literal["float32", "bfloat16", "float16", "float64"]


@dataclass(frozen=True)
class SideConfig:
    """How one side is computed."""

    dtype: DTypes = "float32"
    """Type to compute in. Of half precision dolmen's weights rest in float32, as when it trains,
    and those of transformers in that type.
    """
    layout: Layout = Layout()


@dataclass(frozen=True)
class DiffConfig:
    """Two programs of one model, run on the same tokens."""

    first: str
    """A: a transformers directory or hub id, a run (its newest whole checkpoint is taken) or
    checkpoint: computed by dolmen. `transformers:` before it has transformers compute.
    """
    second: str
    """B, what A is held to: the same; `transformers` alone is that program on A's model."""
    a: SideConfig = SideConfig()
    b: SideConfig = SideConfig()
    until: Literal["weights", "forward", "backward", "update"] = "update"
    """The last that is compared: weights by name, what forward computes, gradients, or one update
    by AdamW.
    """
    length: int = 64
    """Tokens of the random sequences; a layout may need a few more."""
    optimizer: OptimizerConfig = OptimizerConfig()
    """Of the update, on both sides: the first of a run, without its warm-up."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """auto takes the GPUs if any are visible, else the CPU."""
    json: str | None = None
    """File to write everything that was compared to."""
    worker: str | None = None
    """Which side, and the folder, that a process which `diff` itself starts records into."""

    def __post_init__(self):
        if self.length < 1:
            raise ValueError(f"length is {self.length}: use --length 1 or more")
        if self.optimizer.warmup_steps:
            raise ValueError(
                f"optimizer.warmup-steps is {self.optimizer.warmup_steps}: one update is compared, "
                "leave it out"
            )
        if self.optimizer.name != "adamw":
            raise ValueError(
                f"optimizer.name is {self.optimizer.name}: an update is compared by adamw alone"
            )
