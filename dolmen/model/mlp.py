"""The feed-forward layer: gated, down(act(gate x) * up x), or plain, down(act(up x))."""

import math

from torch import Tensor, nn

from dolmen.core.state import local
from dolmen.model.config import ModelConfig
from dolmen.model.given import Given
from dolmen.model.layers import Column, Row
from dolmen.ops.activation import ACTIVATIONS
from dolmen.parallel import tensor
from dolmen.parallel.tensor import TensorParallel


class MLP(nn.Module):
    """x [tokens, hidden] I@tp (or S(0)@tp) -> the same."""

    def __init__(self, c: ModelConfig, tp: TensorParallel):
        super().__init__()
        if c.intermediate_size % tp.axis.size:
            raise ValueError(
                f"intermediate_size ({c.intermediate_size}) is not divisible by tp "
                f"({tp.axis.size}): set --layout.tp to a divisor"
            )
        self.tp, self.act = tp, ACTIVATIONS[c.activation]
        self.gate = Column(c.hidden_size, c.intermediate_size, c.mlp_bias) if c.gated else None
        self.up = Column(c.hidden_size, c.intermediate_size, c.mlp_bias)
        self.down = Row(
            c.intermediate_size,
            c.hidden_size,
            c.mlp_bias,
            tp,
            1 / math.sqrt(2 * c.num_hidden_layers),
        )

    def forward(self, x: Tensor, given: Given | None = None) -> Tensor:
        ins = [self.up] if self.gate is None else [self.gate, self.up]
        first, *rest = tensor.columns(
            x,
            [local(i.weight) for i in ins],
            [local(i.bias) if i.bias is not None else None for i in ins],
            self.tp,
        )
        hidden = self.act(first)
        return self.down(hidden * rest[0] if rest else hidden)
