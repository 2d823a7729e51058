"""The arrangement of DeepNet (Wang et al., 2203.00555, equation 4) as GLM-130B and ChatGLM-6B have
it (2210.02414, section 2.1): the residual stream is what the norms give, times a number.
"""

from dataclasses import dataclass

from dolmen.model.tree.leaf import Leaves
from dolmen.model.tree.pre import Pre


@dataclass(frozen=True)
class Deepnorm:
    """y = norm x; x = alpha y + mixer(y); y = norm x; x = alpha y + mlp(y)."""

    alpha: float

    @property
    def norms(self) -> int:
        return 2

    @property
    def streams(self) -> int:
        """As of Pre: what its norms and columns were given."""
        return 4

    @property
    def additions(self) -> int:
        return 2

    def leaves(self, norm: Leaves, mixer: Leaves, mlp: Leaves) -> Leaves:
        """Those of Pre, by its names."""
        return Pre().leaves(norm, mixer, mlp)
