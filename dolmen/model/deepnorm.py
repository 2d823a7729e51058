"""A residual stream of norms (dolmen/model/tree/deepnorm.py)."""

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


class Deepnorm(Block[Component]):
    """y = norm x; x = alpha y + mixer(y); y = norm x; x = alpha y + mlp(y)."""

    def __init__(
        self, block: tree.Block, leaves: Leaves, setting: Setting, attn: Component, mlp: Component
    ):
        super().__init__(setting)
        assert isinstance(block.arrangement, tree.Deepnorm)
        kernels, self.alpha = setting.split.kernels, block.arrangement.alpha
        self.attn_norm = Norm(block.norm, under(leaves, "attn_norm"), kernels)
        self.attn = attn
        self.mlp_norm = Norm(block.norm, under(leaves, "mlp_norm"), kernels)
        self.mlp = mlp

    def stream(
        self, x: Float[Tensor, "here hidden"], given: Given, cache: LayerCache | None = None
    ) -> Float[Tensor, "here hidden"]:
        y = self.attn_norm(x)
        x = self.alpha * y + self.drop(self.attn(y, given, cache), given, MIXER)
        y = self.mlp_norm(x)
        return self.alpha * y + self.drop(self.mlp(y, given), given, MLP)
