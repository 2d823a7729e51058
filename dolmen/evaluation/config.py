"""What `verify` and `evaluate` may be told. Without torch."""

from dataclasses import asdict, dataclass
from typing import Literal

from dolmen.core.paths import refuse_empty
from dolmen.data.config import TextConfig
from dolmen.model.layout import Layout
from dolmen.serving.config import Split


@dataclass(frozen=True)
class VerifyConfig:
    """A model, and what it is compared with."""

    folder: str
    """Transformers directory or hub id; a run's folder (its newest whole checkpoint is taken), or
    one checkpoint in it; a Megatron checkpoint, or Meta's files of a Llama.
    """
    against: str | None = None
    """What transformers loads. Default: the same."""
    length: int = 64
    """Tokens of the random sequences."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """auto takes the GPUs if any are visible, else the CPU."""
    layout: Split = Split()


@dataclass(frozen=True)
class Axes:
    """How the model is split, and its work shared."""

    tp: int = 1
    """Tensor parallelism: processes that share every layer."""
    cp: int = 1
    """Context parallelism: processes that share every sequence."""
    pp: int = 1
    """Pipeline parallelism: processes that hold different layers."""
    dp: int | None = None
    """Data parallelism: processes that read different texts. Default: what the processes leave."""
    ep: int = 1
    """Expert parallelism: processes of dp x cp that hold different experts. Adds no processes."""

    def __post_init__(self):
        _ = self.layout  # which refuses its own

    @property
    def layout(self) -> Layout:
        """As a run has it."""
        return Layout(**asdict(self))


@dataclass(frozen=True)
class EvaluateConfig:
    """A model, and what it is measured by."""

    source: str
    """Transformers directory or hub id; a run's folder (its newest whole checkpoint is taken), or
    one checkpoint in it; a Megatron checkpoint, or Meta's files of a Llama.
    """
    window: int | None = None
    """Tokens of a text that are read at once: a longer document is cut into windows. Default:
    max_position_embeddings, all that the model takes.
    """
    stride: int | None = None
    """Tokens from the beginning of a window to that of the next: a smaller one sees more and costs
    more. Default: that of --window, so that windows do not overlap.
    """
    json: str | None = None
    """File to write the numbers to."""
    dtype: Literal["float32", "bfloat16", "float16"] | None = None
    """Type to compute in. Default: that of config.json."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """auto takes the GPUs if any are visible, else the CPU."""
    data: TextConfig = TextConfig()
    layout: Axes = Axes()

    def __post_init__(self):
        refuse_empty("json", self.json)
