"""The feed-forward layer: gated, down(act(gate x) * up x), or plain, down(act(up x))."""

from collections.abc import Sequence

from jaxtyping import Float
from torch import Tensor

from dolmen.model import tree
from dolmen.model.branch import Branch
from dolmen.model.cached import LayerCache
from dolmen.model.component import Setting
from dolmen.model.given import Given
from dolmen.model.layers import Column, Row
from dolmen.model.tree import Leaves, under
from dolmen.ops.activation import ACTIVATIONS
from dolmen.parallel.tensor import Linear


class MLP(Branch):
    """x [tokens, hidden] I@tp (or S(0)@tp) -> the same."""

    def __init__(self, mlp: tree.Mlp, leaves: Leaves, setting: Setting):
        super().__init__()
        self.tp, self.act = setting.split.tp, ACTIVATIONS[mlp.activation]
        self.gate = Column(under(leaves, "gate")) if mlp.gated else None
        self.up = Column(under(leaves, "up"))
        self.down = Row(under(leaves, "down"), self.tp)

    @property
    def columns(self) -> list[Linear]:
        ins = [self.up] if self.gate is None else [self.gate, self.up]
        return [one.linear() for one in ins]

    @property
    def row(self) -> Row:
        return self.down

    def inner(
        self,
        products: Sequence[Float[Tensor, "tokens _"]],
        given: Given,
        cache: LayerCache | None = None,
    ) -> Float[Tensor, "tokens _"]:
        first, *rest = products
        hidden = self.act(first)
        return hidden * rest[0] if rest else hidden
