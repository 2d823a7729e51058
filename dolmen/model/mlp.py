"""The feed-forward layer: gated, down(act(gate x) * up x), or plain, down(act(up x))."""

from torch import Tensor

from dolmen.core.state import local
from dolmen.model import tree
from dolmen.model.component import Component, Setting
from dolmen.model.given import Given
from dolmen.model.layers import Column, Row
from dolmen.model.tree import Leaves, under
from dolmen.ops.activation import ACTIVATIONS
from dolmen.parallel import tensor


class MLP(Component):
    """x [tokens, hidden] I@tp (or S(0)@tp) -> the same."""

    def __init__(self, mlp: tree.Mlp, leaves: Leaves, setting: Setting):
        super().__init__()
        self.tp, self.act = setting.split.tp, ACTIVATIONS[mlp.activation]
        self.gate = Column(under(leaves, "gate")) if mlp.gated else None
        self.up = Column(under(leaves, "up"))
        self.down = Row(under(leaves, "down"), self.tp)

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
