"""The arrangement of GPT-2, Llama and most since: a norm before each layer (Xiong et al.,
2002.04745).
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING

from dolmen.model.tree.leaf import Leaves, Stream, within

if TYPE_CHECKING:
    from dolmen.model.tree.block import Block


@dataclass(frozen=True)
class Pre:
    """x += mixer(norm x); x += mlp(norm x)."""

    def leaves(self, block: "Block", stream: Stream) -> Leaves:
        norm = block.norm.leaves(stream.hidden_size)
        return {
            **within("attn_norm", norm),
            **within("attn", block.mixer.leaves(stream)),
            **within("mlp_norm", norm),
            **within("mlp", block.mlp.leaves(stream)),
        }
