"""The arrangement of DeepNet (Wang et al., 2203.00555, equation 4) as GLM-130B and ChatGLM-6B have
it (2210.02414, section 2.1): the residual stream is what the norms give, times a number.
"""

from dataclasses import dataclass

from dolmen.model.tree.in_turn import InTurn
from dolmen.model.tree.leaf import Leaves
from dolmen.model.tree.pre import Pre


@dataclass(frozen=True)
class Deepnorm(InTurn):
    """y = norm x; x = alpha y + mixer(y); y = norm x; x = alpha y + mlp(y)."""

    alpha: float

    def leaves(self, norm: Leaves, mixer: Leaves, mlp: Leaves) -> Leaves:
        """Those of Pre, by its names."""
        return Pre().leaves(norm, mixer, mlp)
