"""What a dense feed-forward layer is: down(act(up x)), or gated, down(act(gate x) * up x)
(Shazeer, 2002.05202).
"""

from dataclasses import dataclass
from typing import Literal

from dolmen.model.tree.leaf import Cut, Leaves, Stream, column, row, within

Activation = Literal["silu", "gelu", "gelu_tanh", "relu"]


@dataclass(frozen=True)
class Mlp:
    """Over the features of each token by itself."""

    size: int
    """Width inside."""
    gated: bool = True
    activation: Activation = "silu"
    """gelu is the exact erf form."""
    bias: bool = False

    @property
    def experts(self) -> int:
        """How many a router chooses from."""
        return 0

    def biased(self) -> "Mlp":
        """The same with a router whose choice a bias balances; here is none."""
        return self

    def leaves(self, stream: Stream) -> Leaves:
        hidden, knob = stream.hidden_size, "intermediate_size"
        inner = column(self.size, hidden, self.bias, Cut("tp", 0, self.size, knob))
        down = row(hidden, self.size, self.bias, Cut("tp", 1, self.size, knob), stream.out_scale)
        return {
            **(within("gate", inner) if self.gated else {}),
            **within("up", inner),
            **within("down", down),
        }
