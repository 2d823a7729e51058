"""The arrangement of the first Transformer (Vaswani et al., 1706.03762), BERT and OPT-350m: the
residual stream itself is normed, after each layer. What leaves the last block is normed already.
"""

from dataclasses import dataclass

from dolmen.model.tree.in_turn import InTurn
from dolmen.model.tree.leaf import Leaves, within


@dataclass(frozen=True)
class Post(InTurn):
    """x = norm(x + mixer(x)); x = norm(x + mlp(x))."""

    def leaves(self, norm: Leaves, mixer: Leaves, mlp: Leaves) -> Leaves:
        """Of a block, by name and in order, out of those of a norm, of its mixer and of its mlp."""
        return {
            **within("attn", mixer),
            **within("attn_norm", norm),
            **within("mlp", mlp),
            **within("mlp_norm", norm),
        }
