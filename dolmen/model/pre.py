"""A norm before each layer (dolmen/model/tree/pre.py)."""

from jaxtyping import Float
from torch import Tensor

from dolmen.model import tree
from dolmen.model.block import Block
from dolmen.model.cached import LayerCache
from dolmen.model.component import Component, Setting
from dolmen.model.given import Given
from dolmen.model.layers import Norm
from dolmen.model.tree import Leaves, under
from dolmen.ops.dropout import MIXER, MLP


class Pre(Block[Component]):
    """x += scale mixer(norm x); x += scale mlp(norm x)."""

    def __init__(
        self, block: tree.Block, leaves: Leaves, setting: Setting, attn: Component, mlp: Component
    ):
        super().__init__(setting)
        kernels = setting.split.kernels
        self.attn_norm = Norm(block.norm, under(leaves, "attn_norm"), kernels)
        self.attn = attn
        self.mlp_norm = Norm(block.norm, under(leaves, "mlp_norm"), kernels)
        self.mlp = mlp
        assert isinstance(block.arrangement, tree.Pre)
        self.scale = block.arrangement.scale

    def stream(
        self, x: Float[Tensor, "here hidden"], given: Given, cache: LayerCache | None = None
    ) -> Float[Tensor, "here hidden"]:
        x = x + self._scaled(self.drop(self.attn(self.attn_norm(x), given, cache), given, MIXER))
        return x + self._scaled(self.drop(self.mlp(self.mlp_norm(x), given), given, MLP))

    def _scaled(self, y: Tensor) -> Tensor:
        return y if self.scale == 1 else y * self.scale
