"""What `generate` may be told, and how every verb that reads a model is split. Without torch."""

from dataclasses import dataclass
from typing import Literal

from dolmen.serving.options import Options


@dataclass(frozen=True)
class Split:
    """How the model is split."""

    tp: int = 1
    """Tensor parallelism: processes that share every layer."""

    def __post_init__(self):
        if self.tp < 1:
            raise ValueError(f"layout.tp is {self.tp}: it must be at least 1")


@dataclass(frozen=True)
class GenerateConfig:
    """Prompts, and how they are continued."""

    folder: str
    """Transformers directory or hub id; a run's folder (its newest whole checkpoint is taken), or
    one checkpoint in it; a Megatron checkpoint, or Meta's files of a Llama.
    """
    prompt: tuple[str, ...]
    """Text to continue."""
    max_new_tokens: int = 64
    """Most tokens to add; an end-of-text token ends earlier."""
    temperature: float = 0.0
    """0 takes the likeliest token; 1 draws from the model's own distribution."""
    top_k: int | None = None
    """Draw from this many likeliest tokens."""
    top_p: float | None = None
    """Draw from the likeliest tokens that hold this much probability."""
    seed: int = 0
    """Of the draws."""
    dtype: Literal["float32", "bfloat16", "float16"] | None = None
    """Type to compute in. Default: that of config.json."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """auto takes the GPUs if any are visible, else the CPU."""
    layout: Split = Split()

    @property
    def of_tokens(self) -> Options:
        """How each token is chosen."""
        return Options(self.temperature, self.top_k, self.top_p, max_new_tokens=self.max_new_tokens)
