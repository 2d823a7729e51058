"""What a norm is: RMSNorm (Zhang and Sennrich, 1910.07467) or LayerNorm (Ba et al., 1607.06450)."""

import math
from dataclasses import dataclass
from typing import Literal

from dolmen.model.tree.leaf import Cut, Gradient, Leaf, Leaves


@dataclass(frozen=True)
class Norm:
    """Over the last dim."""

    kind: Literal["rmsnorm", "layernorm"] = "rmsnorm"
    eps: float = 1e-5
    """Added to the variance."""
    bias: bool = False
    affine: bool = True
    """Its result is multiplied by a weight (OLMo: it is not)."""
    zero_centred: bool = False
    """The weight is stored less 1: y = x / rms(x) * (1 + w), and starts at 0 (Gemma)."""

    def __post_init__(self):
        if not 0 <= self.eps < math.inf:
            raise ValueError(f"a norm's eps is {self.eps!r}: it must be finite and not negative")
        if not self.affine and (self.bias or self.kind != "layernorm"):
            raise ValueError(
                f"{self} has no weight: dolmen computes that of layernorm without bias alone"
            )
        if self.zero_centred and self.kind != "rmsnorm":
            raise ValueError(f"{self} is zero-centred: dolmen computes that of rmsnorm alone")

    def leaves(
        self, *shape: int, gradient: Gradient = "residual", cuts: tuple[Cut, ...] = ()
    ) -> Leaves:
        """Of a norm over so many features, or of one with a weight for each of several, [several,
        features]; whole on every rank of tp but for its `cuts`.
        """
        if not self.affine:
            return {}
        initial = "zeros" if self.zero_centred else "ones"
        leaves = {"weight": Leaf(shape, "norm", cuts, gradient, initial)}
        if self.bias:
            leaves["bias"] = Leaf(shape, "bias", cuts, gradient, "zeros")
        return leaves
