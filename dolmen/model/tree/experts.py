"""What a sparse feed-forward layer is: a router sends each token to some of many experts, which are
gated MLPs (Shazeer et al., 1701.06538; DeepSeek-V2, 2405.04434, and V3, 2412.19437).
"""

from dataclasses import dataclass
from typing import Literal

from dolmen.model.tree.mlp import Activation, Mlp


@dataclass(frozen=True)
class Router:
    """Which experts compute a token, and with what weight."""

    score: Literal["softmax", "sigmoid"] = "softmax"
    normalise: bool = True
    """The weights of a token's experts are divided by their sum."""
    scale: float = 1.0
    """What the weights are multiplied by, last."""
    groups: int = 1
    """Experts lie in as many groups of equal size, ..."""
    groups_per_token: int = 1
    """... of which a token's experts come from so many."""
    group_score: Literal["max", "top2"] = "max"
    """A group's score: that of its best expert, or the sum of its best two."""
    bias: bool = False
    """A bias added for the choice alone, not moved by gradients."""
    aux_loss_coef: float = 0.0
    """Weight of the balance loss that its config.json states; --train.router can say otherwise."""


@dataclass(frozen=True)
class Experts:
    number: int
    per_token: int
    size: int
    """Width inside an expert."""
    activation: Activation = "silu"
    router: Router = Router()
    shared: Mlp | None = None
    """A dense layer beside the experts, which every token passes."""

    def __post_init__(self):
        if not 1 <= self.per_token <= self.number:
            raise ValueError(
                f"num_experts_per_tok ({self.per_token}) must lie in 1 to num_experts "
                f"({self.number}): set model.num-experts-per-tok"
            )
