"""Dropout (1207.0580) whose mask depends on what an element is, not on where it is computed: a hash
of (key, site, indices in the whole model). No random stream is consumed, so any split over devices
drops the same elements.
"""

from typing import NamedTuple

import torch
from jaxtyping import Bool, Float, Int64
from torch import Tensor

# Where a model drops: of these all but the first in every layer.
EMBEDDING, SCORES, MIXER, MLP = range(4)
# the constants of splitmix64's finaliser, as signed 64-bit
MIX = (-4658895280553007687, -7723592293110705685)


class Noise(NamedTuple):
    """What a forward with dropout needs to know of its batch."""

    key: Int64[Tensor, ""]
    """It differs from step to step."""
    sequences: Int64[Tensor, " batch"]
    """Index of each sequence in the global batch."""
    layer: Int64[Tensor, ""] | None = None
    """The number of the layer that is given this; None outside of layers. A tensor, so
    that all layers are one program to torch.compile: a number would be a constant of it.
    """

    def site(self, number: int) -> Int64[Tensor, ""]:
        """The site `number` (not EMBEDDING) of this layer, different from that of any other."""
        assert self.layer is not None, "only a layer has sites"
        return 3 * self.layer + number


class Dropout(NamedTuple):
    """What falls out at one site of a forward."""

    p: float
    """The probability of each element."""
    noise: Noise
    site: int | Int64[Tensor, ""]


def keep(
    p: float,
    key: Int64[Tensor, ""],
    site: int | Int64[Tensor, ""],
    *indices: Int64[Tensor, "#*elements"],
) -> Bool[Tensor, "*elements"]:
    """True with probability 1 - p: of each of the `elements` that `indices` are broadcast to, fixed
    by its indices, `key` and `site`.
    """
    z = key
    for index in (site, *indices):
        z = (z ^ index) * MIX[0]
        z = (z ^ (z >> 29)) * MIX[1]
    z = z ^ (z >> 32)
    return (z & 0xFFFFFF) >= int(p * (1 << 24))


def residual(
    x: Float[Tensor, "tokens hidden"],
    p: float,
    noise: Noise,
    site: int | Int64[Tensor, ""],
    rows: Int64[Tensor, " tokens"],
) -> Float[Tensor, "tokens hidden"]:
    """Dropout of x; `rows` are the tokens' indices in the global batch."""
    kept = keep(p, noise.key, site, rows[:, None], torch.arange(x.shape[1], device=x.device))
    return torch.where(kept, x / (1 - p), 0)
