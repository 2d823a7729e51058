"""The arrangement of GPT-J, PaLM (Chowdhery et al., 2204.02311, section 2) and Falcon (Almazrouei
et al., 2311.16867): mixer and mlp side by side.
"""

from dataclasses import dataclass
from typing import Literal

from dolmen.model.tree.leaf import Leaves, within


@dataclass(frozen=True)
class Parallel:
    """x += mixer(norm x) + mlp(norm x)."""

    norms: Literal[1, 2] = 1
    """One for both, or one each."""

    @property
    def streams(self) -> int:
        """As of InTurn: x, and what each norm makes of it."""
        return 1 + self.norms

    @property
    def additions(self) -> int:
        return 1

    def leaves(self, norm: Leaves, mixer: Leaves, mlp: Leaves) -> Leaves:
        both = self.norms == 1
        return {
            **within("norm" if both else "attn_norm", norm),
            **within("attn", mixer),
            **({} if both else within("mlp_norm", norm)),
            **within("mlp", mlp),
        }
