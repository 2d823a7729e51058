"""Dropout (1207.0580) whose mask depends on what an element is, not on where it is computed: a hash of (key, site, indices
in the whole model). No random stream is consumed, so any split over devices drops the same elements.
"""

from typing import NamedTuple

import torch
from torch import Tensor

MIX = (-4658895280553007687, -7723592293110705685)         # the constants of splitmix64's finaliser, as signed 64-bit


class Noise(NamedTuple):
    """What a forward with dropout needs to know of its batch."""

    key: Tensor
    """[] int64: differs from step to step."""
    sequences: Tensor
    """[batch] int64: index of each sequence in the global batch."""


def keep(p: float, key: Tensor, site: int, *indices: Tensor) -> Tensor:
    """Bool, True with probability 1 - p: elementwise over the broadcast `indices` (int64), fixed by them, `key` and `site`."""
    z = key
    for index in (site, *indices):
        z = (z ^ index) * MIX[0]
        z = (z ^ (z >> 29)) * MIX[1]
    z = z ^ (z >> 32)
    return (z & 0xFFFFFF) >= int(p * (1 << 24))


def residual(x: Tensor, p: float, noise: Noise, site: int, rows: Tensor) -> Tensor:
    """Dropout of x [tokens, hidden]; rows [tokens] int64 are the tokens' indices in the global batch."""
    kept = keep(p, noise.key, site, rows[:, None], torch.arange(x.shape[1], device=x.device))
    return torch.where(kept, x / (1 - p), 0)


def attention(q: Tensor, k: Tensor, v: Tensor, seen: Tensor, p: float, noise: Noise, site: int, first_head: int) -> Tensor:
    """Attention with dropout on its probabilities, which are formed whole: O(batch heads queries keys) memory.

    q [batch, queries, heads, size], k and v [batch, keys, heads or fewer, size], seen [queries, keys] bool -> like q.
    `first_head`: index of q's first head in the whole model.
    """
    _, queries, heads, size = q.shape
    k, v = (t.repeat_interleave(heads // t.shape[2], 2).transpose(1, 2) for t in (k, v))
    scores = (q.transpose(1, 2) @ k.transpose(2, 3)) * size**-0.5
    probabilities = scores.masked_fill(~seen, -torch.inf).softmax(-1, dtype=torch.promote_types(q.dtype, torch.float32)).to(q.dtype)
    head = torch.arange(first_head, first_head + heads, device=q.device)[:, None, None]
    row, column = torch.arange(queries, device=q.device)[:, None], torch.arange(k.shape[2], device=q.device)
    kept = keep(p, noise.key, site, noise.sequences[:, None, None, None], head, row, column)
    return (torch.where(kept, probabilities / (1 - p), 0) @ v).transpose(1, 2)
