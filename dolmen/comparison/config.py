"""Options of `diff`. Imports no torch."""

from dataclasses import dataclass
from typing import Literal

from dolmen.model.layout import Layout
from dolmen.optim.config import OptimizerConfig

SideName = Literal["A", "B"]
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
class Update:
    """The one update by AdamW, on both sides."""

    lr: float = OptimizerConfig.lr
    """Learning rate."""
    weight_decay: float = OptimizerConfig.weight_decay
    """Decoupled weight decay of matrices; norms and biases have none."""
    beta1: float = OptimizerConfig.beta1
    """Decay of the first moment."""
    beta2: float = OptimizerConfig.beta2
    """Decay of the second moment."""
    eps: float = OptimizerConfig.eps
    """Added to the root of the second moment."""
    clip: float = OptimizerConfig.clip
    """Largest norm of the whole gradient; 0 switches clipping off."""

    def __post_init__(self):
        _ = self.config

    @property
    def config(self) -> OptimizerConfig:
        """Raises ValueError for what cannot be."""
        return OptimizerConfig(**vars(self))


@dataclass(frozen=True)
class DiffConfig:
    """Two programs of one model, run on the same tokens."""

    first: str
    """A: a transformers directory or hub id, a run (its newest whole checkpoint is taken), one
    checkpoint in it, or one of Megatron: computed by dolmen. `transformers:` before it has
    transformers compute.
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
    optimizer: Update = Update()
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """auto takes the GPUs if any are visible, else the CPU."""
    json: str | None = None
    """File to write everything that was compared to."""

    def __post_init__(self):
        if self.length < 1:
            raise ValueError(f"length is {self.length}: use --length 1 or more")


@dataclass(frozen=True)
class DiffWork(DiffConfig):
    """The request that `diff` gives to each process it starts for a side."""

    side: SideName = "A"
    folder: str = ""
    """Folder to record into."""
