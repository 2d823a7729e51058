"""A norm of the residual stream after each layer (dolmen/model/tree/post.py)."""

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


class Post(Block[Component]):
    """x = norm(x + mixer(x)); x = norm(x + mlp(x))."""

    def __init__(
        self, block: tree.Block, leaves: Leaves, setting: Setting, attn: Component, mlp: Component
    ):
        super().__init__(setting)
        kernels = setting.split.kernels
        self.attn = attn
        self.attn_norm = Norm(block.norm, under(leaves, "attn_norm"), kernels)
        self.mlp = mlp
        self.mlp_norm = Norm(block.norm, under(leaves, "mlp_norm"), kernels)

    def stream(
        self, x: Float[Tensor, "here hidden"], given: Given, cache: LayerCache | None = None
    ) -> Float[Tensor, "here hidden"]:
        x = self.attn_norm(x + self.drop(self.attn(x, given, cache), given, MIXER))
        return self.mlp_norm(x + self.drop(self.mlp(x, given), given, MLP))
