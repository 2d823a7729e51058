"""What `verify` and `evaluate` may be told. Without torch."""

from dataclasses import dataclass
from typing import Literal

from dolmen.data.config import TextConfig
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
class EvaluateConfig:
    """A model, and the text it predicts."""

    source: str
    """Transformers directory or hub id; a run's folder (its newest whole checkpoint is taken), or
    one checkpoint in it; a Megatron checkpoint, or Meta's files of a Llama.
    """
    sequence_length: int | None = None
    """Tokens of a window: a longer one sees more and costs more. Default: max_position_embeddings,
    at most 2048.
    """
    dtype: Literal["float32", "bfloat16", "float16"] | None = None
    """Type to compute in. Default: that of config.json."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """auto takes the GPUs if any are visible, else the CPU."""
    data: TextConfig = TextConfig()
    layout: Split = Split()
