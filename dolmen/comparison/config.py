"""Options of `diff`. Imports no torch."""

from typing import Annotated, Literal

from dolmen.core.config import Below1, Mark, NonNegative, Positive, config
from dolmen.model.layout import Layout
from dolmen.optim.config import OptimizerConfig

SideName = Literal["A", "B"]
DTypes = Literal["float32", "bfloat16", "float16", "float64"]


@config()
class SideConfig:
    """How one side is computed."""

    dtype: DTypes = "float32"
    """Type to compute in. Of half precision dolmen's weights rest in float32, as when it trains,
    and those of transformers in that type.
    """
    layout: Layout = Layout()


@config("optimizer")
class Update:
    """The one update by AdamW, on both sides."""

    lr: NonNegative = OptimizerConfig.lr
    """Learning rate."""
    weight_decay: NonNegative = OptimizerConfig.weight_decay
    """Decoupled weight decay of matrices; norms and biases have none."""
    beta1: Below1 = OptimizerConfig.beta1
    """Decay of the first moment."""
    beta2: Below1 = OptimizerConfig.beta2
    """Decay of the second moment."""
    eps: NonNegative = OptimizerConfig.eps
    """Added to the root of the second moment."""
    clip: NonNegative = OptimizerConfig.clip
    """Largest norm of the whole gradient; 0 switches clipping off."""

    @property
    def config(self) -> OptimizerConfig:
        """Settings for the optimizer. Raises ValueError for values out of range."""
        return OptimizerConfig(**vars(self))


@config()
class DiffConfig:
    """Find the first tensor in which two programs of one model part: dolmen under one layout and
    under another, or beside transformers. Weights by name, then what forward computes, gradients
    from the head down, and one update. Exit code 1 if they part.

        dolmen diff MODEL transformers --a.layout.tp 2
    """

    first: Annotated[str, Mark.POSITIONAL]
    """A: a transformers directory or hub id, a run (its newest whole checkpoint is taken), one
    checkpoint in it, or one of Megatron: computed by dolmen. `transformers:` before it has
    transformers compute.
    """
    second: Annotated[str, Mark.POSITIONAL]
    """B, what A is held to: the same; `transformers` alone is that program on A's model."""
    a: SideConfig = SideConfig()
    b: SideConfig = SideConfig()
    until: Literal["weights", "forward", "backward", "update"] = "update"
    """The last that is compared: weights by name, what forward computes, gradients, or one update
    by AdamW.
    """
    length: Positive = 64
    """Tokens of the random sequences; a layout may need a few more."""
    optimizer: Update = Update()
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """auto takes the GPUs if any are visible, else the CPU."""
    json: str | None = None
    """File to write everything that was compared to."""


@config()
class DiffWork(DiffConfig):
    """The request that `diff` gives to each process it starts for a side."""

    side: SideName = "A"
    folder: str = ""
    """Folder to record into."""
