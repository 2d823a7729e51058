"""Mixer and mlp side by side (dolmen/model/tree/parallel.py).

    one norm                           two norms
    x -> norm -> enter -> mixer \\      x -> norm -> enter -> mixer \\
                       -> mlp   + ->   x -> norm -> enter -> mlp   + -> leave, added to x

What they make is added while it is a partial sum over tp: a layer leaves by one collective forward,
and with one norm enters by one backward, where layers one after the other have two each. Two norms
are two inputs, each with a gradient to be summed.
"""

from collections.abc import Sequence

from jaxtyping import Float
from torch import Tensor

from dolmen.model import tree
from dolmen.model.block import Block
from dolmen.model.branch import Branch, enter, leave
from dolmen.model.cached import LayerCache
from dolmen.model.component import Setting
from dolmen.model.given import Given
from dolmen.model.layers import Norm
from dolmen.model.tree import Leaves, under
from dolmen.ops.dropout import MLP


class Parallel(Block[Branch]):
    """x += mixer(norm x) + mlp(norm x); dropout is of the sum."""

    takes = Branch
    norm: Norm | None
    """Of both; None: each has its own."""
    attn_norm: Norm
    mlp_norm: Norm

    def __init__(
        self, block: tree.Block, leaves: Leaves, setting: Setting, attn: Branch, mlp: Branch
    ):
        super().__init__(setting)
        one = block.arrangement.norms == 1

        def norm(name: str) -> Norm:
            return Norm(block.norm, under(leaves, name), setting.split.kernels)

        self.norm = norm("norm") if one else None
        if not one:
            self.attn_norm = norm("attn_norm")
        self.attn = attn
        if not one:
            self.mlp_norm = norm("mlp_norm")
        self.mlp = mlp

    def stream(
        self, x: Float[Tensor, "here hidden"], given: Given, cache: LayerCache | None = None
    ) -> Float[Tensor, "here hidden"]:
        both, (attn, mlp) = [self.attn, self.mlp], self.entered(x)
        results = [self.attn.between(attn, given, cache), self.mlp.between(mlp, given)]
        return x + self.drop(leave(both, results), given, MLP)

    def entered(
        self, x: Float[Tensor, "here hidden"]
    ) -> Sequence[Sequence[Float[Tensor, "tokens _"]]]:
        """The products with the columns of the mixer, and with those of the mlp."""
        if self.norm is not None:
            return enter([self.attn, self.mlp], self.norm(x))
        return [*enter([self.attn], self.attn_norm(x)), *enter([self.mlp], self.mlp_norm(x))]
