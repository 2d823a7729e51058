"""What a norm is: RMSNorm (Zhang and Sennrich, 1910.07467) or LayerNorm (Ba et al., 1607.06450)."""

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class Norm:
    """Over the last dim."""

    kind: Literal["rmsnorm", "layernorm"] = "rmsnorm"
    eps: float = 1e-5
    """Added to the variance."""
    bias: bool = False
    zero_centred: bool = False
    """The weight is stored less 1: y = x / rms(x) * (1 + w), and starts at 0 (Gemma)."""
