"""Dropout (1207.0580) whose mask depends on what an element is, not on where it is computed: a hash
of (key, site, indices in the whole model). No random stream is consumed, so any split over devices
drops the same elements.
"""

from typing import NamedTuple

import torch
from torch import Tensor

# Where a model drops: of these all but the first in every layer.
EMBEDDING, SCORES, MIXER, MLP = range(4)
# the constants of splitmix64's finaliser, as signed 64-bit
MIX = (-4658895280553007687, -7723592293110705685)


class Noise(NamedTuple):
    """What a forward with dropout needs to know of its batch."""

    key: Tensor
    """[] int64: differs from step to step."""
    sequences: Tensor
    """[batch] int64: index of each sequence in the global batch."""
    layer: Tensor | None = None
    """[] int64: the number of the layer that is given this; None outside of layers. A tensor, so
    that all layers are one program to torch.compile: a number would be a constant of it.
    """

    def site(self, number: int) -> Tensor:
        """[] int64: the site `number` (not EMBEDDING) of this layer, different from that of any
        other.
        """
        return 3 * self.layer + number


def keep(p: float, key: Tensor, site: int | Tensor, *indices: Tensor) -> Tensor:
    """Bool, True with probability 1 - p: elementwise over the broadcast `indices` (int64), fixed by
    them, `key` and `site` (a number, or [] int64).
    """
    z = key
    for index in (site, *indices):
        z = (z ^ index) * MIX[0]
        z = (z ^ (z >> 29)) * MIX[1]
    z = z ^ (z >> 32)
    return (z & 0xFFFFFF) >= int(p * (1 << 24))


def residual(x: Tensor, p: float, noise: Noise, site: int | Tensor, rows: Tensor) -> Tensor:
    """Dropout of x [tokens, hidden]; rows [tokens] int64 are the tokens' indices in the global
    batch.
    """
    kept = keep(p, noise.key, site, rows[:, None], torch.arange(x.shape[1], device=x.device))
    return torch.where(kept, x / (1 - p), 0)


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    seen: Tensor,
    p: float,
    noise: Noise,
    site: int | Tensor,
    first_head: int,
    rows: Tensor | None = None,
) -> Tensor:
    """Attention with dropout on its probabilities, which are formed whole: O(batch heads queries
    keys) memory, of which backward keeps the probabilities, their mask, a byte each, and what is
    left of them, as 2205.05198 counts them.

    q [batch, queries, heads, size], k and v [batch, keys, heads or fewer, size], seen bool
    [queries, keys] or [batch, queries, keys] -> like q. `first_head`: index of q's first head in
    the whole model. rows [queries] int64: the queries' indices in the sequence, where they are not
    0, 1, ...; the keys are always all from 0.
    """
    _, queries, heads, size = q.shape
    k, v = (t.repeat_interleave(heads // t.shape[2], 2).transpose(1, 2) for t in (k, v))
    head = torch.arange(first_head, first_head + heads, device=q.device)[:, None, None]
    row = torch.arange(queries, device=q.device) if rows is None else rows
    column = torch.arange(k.shape[2], device=q.device)
    kept = keep(
        p, noise.key, site, noise.sequences[:, None, None, None], head, row[:, None], column
    )
    scores = (q.transpose(1, 2) @ k.transpose(2, 3)) * size**-0.5
    return (
        _Probabilities.apply(scores, seen if seen.dim() == 2 else seen[:, None], kept, p) @ v
    ).transpose(1, 2)


class _Probabilities(torch.autograd.Function):
    """softmax of the scores [batch, heads, queries, keys] that are seen, in fp32 or wider, then
    dropout; in the scores' dtype.

    Autograd alone would keep the softmax in fp32, and the mask of what is seen; here backward has
    it in the scores' dtype.
    """

    @staticmethod
    def forward(ctx, scores, seen, kept, p):
        wide = torch.promote_types(scores.dtype, torch.float32)
        probabilities = (
            scores.masked_fill(~seen, -torch.inf).softmax(-1, dtype=wide).to(scores.dtype)
        )
        ctx.p, ctx.wide = p, wide
        ctx.save_for_backward(probabilities, kept)
        return torch.where(kept, probabilities / (1 - p), 0)

    @staticmethod
    def backward(ctx, g):
        probabilities, kept = ctx.saved_tensors
        dp = torch.where(kept, g / (1 - ctx.p), 0).to(ctx.wide)
        return (
            torch._softmax_backward_data(dp, probabilities.to(ctx.wide), -1, ctx.wide).to(g.dtype),
            None,
            None,
            None,
        )
