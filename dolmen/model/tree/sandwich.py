"""The arrangement of Gemma 2 (2408.00118): a norm before each layer, and one after it, of what is
added to the residual stream.
"""

from dataclasses import dataclass

from dolmen.model.tree.in_turn import InTurn
from dolmen.model.tree.leaf import Leaves, within


@dataclass(frozen=True)
class Sandwich(InTurn):
    """x += norm(mixer(norm x)); x += norm(mlp(norm x)); four norms with weights of their own."""

    @property
    def norms(self) -> int:
        return 4

    def leaves(self, norm: Leaves, mixer: Leaves, mlp: Leaves) -> Leaves:
        """Of a block, by name and in order, out of those of a norm, of its mixer and of its mlp."""
        return {
            **within("attn_norm", norm),
            **within("attn", mixer),
            **within("attn_post_norm", norm),
            **within("mlp_norm", norm),
            **within("mlp", mlp),
            **within("mlp_post_norm", norm),
        }
