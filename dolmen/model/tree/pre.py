"""The arrangement of GPT-2, Llama and most since: a norm before each layer (Xiong et al.,
2002.04745).
"""

from dataclasses import dataclass

from dolmen.model.tree.in_turn import InTurn
from dolmen.model.tree.leaf import Leaves, within


@dataclass(frozen=True)
class Pre(InTurn):
    """x += scale mixer(norm x); x += scale mlp(norm x)."""

    scale: float = 1.0
    """Of what is added (Granite: residual_multiplier)."""

    def leaves(self, norm: Leaves, mixer: Leaves, mlp: Leaves) -> Leaves:
        """Of a block, by name and in order, out of those of a norm, of its mixer and of its mlp."""
        return {
            **within("attn_norm", norm),
            **within("attn", mixer),
            **within("mlp_norm", norm),
            **within("mlp", mlp),
        }
