"""Elementwise operations: activations of the feed-forward layer, dropout, and accumulation of
gradients in a wider dtype.

Dropout (1207.0580) masks depend on what an element is, not on where it is computed: a hash of (key,
site, indices in the whole model). No random stream is consumed, so any split over devices drops the
same elements.
"""

from collections.abc import Callable, Sequence
from functools import cache, partial
from typing import NamedTuple

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int64
from torch import Tensor

ACTIVATIONS = {
    "silu": F.silu,
    "gelu": F.gelu,
    "gelu_tanh": partial(F.gelu, approximate="tanh"),
    "relu": F.relu,
}


def clamped_swiglu(
    gate: Float[Tensor, "rows size"],
    up: Float[Tensor, "rows size"],
    alpha: float,
    limit: float,
    sigmoid: Callable[[Tensor], Tensor] = torch.sigmoid,
) -> Float[Tensor, "rows size"]:
    """Return SwiGLU with clamped inputs (GPT-OSS, 2508.10925): with a = min(gate, limit) and b = up
    clamped to +- limit, a sigmoid(alpha a) (b + 1). `sigmoid`: how sigmoids are computed.
    """
    gate = gate.clamp(max=limit)
    return gate * sigmoid(gate * alpha) * (up.clamp(-limit, limit) + 1)


# Where a model drops: of these all but the first in every layer.
EMBEDDING, SCORES, MIXER, MLP = range(4)
# the constants of splitmix64's finaliser, as signed 64-bit
MIX = (-4658895280553007687, -7723592293110705685)


class Noise(NamedTuple):
    """The batch's inputs to dropout masks: step key, sequence indices, layer number."""

    key: Int64[Tensor, ""]
    """Random key of the step."""
    sequences: Int64[Tensor, " batch"]
    """Index of each sequence in the global batch."""
    layer: Int64[Tensor, ""] | None = None
    """The number of the layer that is given this; None outside of layers. A tensor, so
    that all layers are one program to torch.compile: a number would be a constant of it.
    """

    def site(self, number: int) -> Int64[Tensor, ""]:
        """Return the site number of dropout `number` (SCORES, MIXER or MLP) in this layer, which no
        other place of the model has. Asserts that there is a layer.
        """
        assert self.layer is not None, "only a layer has sites"
        return 3 * self.layer + number


class Dropout(NamedTuple):
    """Dropout at one site of a forward: probability, noise and site."""

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
    """Return True for each of the `elements`, to which `indices` broadcast, that dropout keeps,
    with probability 1 - p: a hash of its indices, `key` and `site`, so the same on any device or
    layout.
    """
    # splitmix64's mixing, once per index
    z = key
    for index in (site, *indices):
        z = (z ^ index) * MIX[0]
        z = (z ^ (z >> 29)) * MIX[1]
    z = z ^ (z >> 32)
    # 24 bits decide: p is met to 6e-8
    return (z & 0xFFFFFF) >= int(p * (1 << 24))


def dropout(
    x: Float[Tensor, "tokens hidden"],
    p: float,
    noise: Noise,
    site: int | Int64[Tensor, ""],
    rows: Int64[Tensor, " tokens"],
) -> Float[Tensor, "tokens hidden"]:
    """Return x with each element set to 0 with probability p, else divided by 1 - p. Which ones
    follows from the step's key in `noise`, `site`, the column and `rows`, the tokens' indices in
    the global batch.
    """
    keep_mask = keep(p, noise.key, site, rows[:, None], torch.arange(x.shape[1], device=x.device))
    return torch.where(keep_mask, x / (1 - p), 0)


def accumulate(totals: Sequence[Tensor], parts: Sequence[Tensor]) -> None:
    """Add each of `parts` to its total, in place. Where dtypes differ torch first copies the part
    to the total's.
    """
    for total, part in zip(totals, parts, strict=True):
        total.add_(part)


Accumulate = Callable[[Sequence[Tensor], Sequence[Tensor]], None]
"""`accumulate`, plain or compiled."""


@cache
def compile_accumulate() -> Accumulate:
    """Return `accumulate` compiled to one pass (bf16 to fp32, on a CPU: a third of the time),
    cached. Call it on first use, as inductor takes a second to import.
    """
    return torch.compile(accumulate, dynamic=True)
