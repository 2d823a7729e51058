"""The arrangement of OLMo 2 (2501.00656, section 3.1): a norm after each layer, of what is added to
the residual stream, and none before it.
"""

from dataclasses import dataclass

from dolmen.model.tree.in_turn import InTurn
from dolmen.model.tree.leaf import Leaves, within


@dataclass(frozen=True)
class After(InTurn):
    """x += norm(mixer(x)); x += norm(mlp(x))."""

    def leaves(self, norm: Leaves, mixer: Leaves, mlp: Leaves) -> Leaves:
        """Of a block, by name and in order, out of those of a norm, of its mixer and of its mlp."""
        return {
            **within("attn", mixer),
            **within("attn_post_norm", norm),
            **within("mlp", mlp),
            **within("mlp_post_norm", norm),
        }
