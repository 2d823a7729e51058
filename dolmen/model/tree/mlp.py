"""What a dense feed-forward layer is: down(act(up x)), or gated, down(act(gate x) * up x)
(Shazeer, 2002.05202).
"""

from dataclasses import dataclass
from typing import Literal

Activation = Literal["silu", "gelu", "gelu_tanh", "relu"]


@dataclass(frozen=True)
class Mlp:
    size: int
    """Width inside."""
    gated: bool = True
    activation: Activation = "silu"
    """gelu is the exact erf form."""
    bias: bool = False
