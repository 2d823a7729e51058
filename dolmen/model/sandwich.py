"""A norm before each layer and one after it (dolmen/model/tree/sandwich.py)."""

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


class Sandwich(Block[Component]):
    """x += norm(mixer(norm x)); x += norm(mlp(norm x))."""

    def __init__(
        self, block: tree.Block, leaves: Leaves, setting: Setting, attn: Component, mlp: Component
    ):
        super().__init__(setting)

        def norm(name: str) -> Norm:
            return Norm(block.norm, under(leaves, name), setting.split.kernels)

        self.attn_norm = norm("attn_norm")
        self.attn = attn
        self.attn_post_norm = norm("attn_post_norm")
        self.mlp_norm = norm("mlp_norm")
        self.mlp = mlp
        self.mlp_post_norm = norm("mlp_post_norm")

    def stream(
        self, x: Float[Tensor, "here hidden"], given: Given, cache: LayerCache | None = None
    ) -> Float[Tensor, "here hidden"]:
        y = self.attn_post_norm(self.attn(self.attn_norm(x), given, cache))
        x = x + self.drop(y, given, MIXER)
        y = self.mlp_post_norm(self.mlp(self.mlp_norm(x), given))
        return x + self.drop(y, given, MLP)
