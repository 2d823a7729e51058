"""Options of `diff`. Imports no torch."""

from typing import Annotated, Literal

from dolmen.core.config import Below1, LocalName, Mark, NonNegative, Positive, config
from dolmen.model.layout import Layout
from dolmen.optim.config import OptimizerConfig

SideName = Literal["A", "B"]
DTypes = Literal["float32", "bfloat16", "float16", "float64"]


@config()
class SideConfig:
    """Settings of one of the two computations."""

    dtype: DTypes = "float32"
    """Data type of the computation. With bfloat16 and float16, dolmen stores weights in float32, as
    in training; transformers stores them in this type.
    """
    layout: Layout = Layout()


@config("optimizer")
class Update:
    """The AdamW update of A and B."""

    lr: NonNegative = OptimizerConfig.lr
    """Learning rate."""
    weight_decay: NonNegative = OptimizerConfig.weight_decay
    """Decoupled weight decay of matrices; norms and biases have none."""
    beta1: Below1 = OptimizerConfig.beta1
    """Decay of the first moment."""
    beta2: Below1 = OptimizerConfig.beta2
    """Decay of the second moment."""
    eps: NonNegative = OptimizerConfig.eps
    """Added to the square root of the second moment."""
    clip: NonNegative = OptimizerConfig.clip
    """Maximum global gradient norm; 0: no clipping."""

    @property
    def config(self) -> OptimizerConfig:
        """The same settings as the `OptimizerConfig` of training. Raises ValueError for values out
        of range.
        """
        return OptimizerConfig(**vars(self))


@config()
class DiffConfig:
    """Compare two computations of one model, A and B, and report the first tensor that differs:
    dolmen with two layouts, or dolmen and transformers. Compares weights by name, then activations
    of forward, gradients from the head down, and one AdamW update. Exit code 1 if they differ.

        dolmen diff MODEL transformers --a.layout.tp 2
    """

    first: Annotated[str, Mark.POSITIONAL]
    """A: a transformers directory or hub id, a run's folder (its newest complete checkpoint), one
    checkpoint in it, or a Megatron checkpoint. Computed by dolmen, or by transformers with the
    prefix `transformers:`.
    """
    second: Annotated[str, Mark.POSITIONAL]
    """B, the reference that A is compared with: given like A. `transformers` without a path
    computes A's model with transformers.
    """
    a: SideConfig = SideConfig()
    b: SideConfig = SideConfig()
    until: Literal["weights", "forward", "backward", "update"] = "update"
    """Last stage that is compared: weights by name, activations of forward, gradients, or one AdamW
    update.
    """
    length: Positive = 64
    """Length of the random sequences in tokens; rounded up where a layout requires it."""
    optimizer: Update = Update()
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """auto takes the GPUs if any are visible, else the CPU."""
    json: LocalName | None = None
    """JSON file to write all comparisons to."""


@config()
class DiffWork(DiffConfig):
    """The request that `diff` gives to each process it starts for a side."""

    side: SideName = "A"
    folder: str = ""
    """Folder to record into."""
