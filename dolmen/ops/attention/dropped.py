"""Attention with dropout on its probabilities, which are formed whole: O(batch heads queries keys)
memory, of which backward keeps the probabilities, their mask, a byte each, and what is left of
them, as 2205.05198 counts them.
"""

import torch
from torch import Tensor

from dolmen.ops import dropout
from dolmen.ops.attention.spec import Attend, seen


def attention(q: Tensor, k: Tensor, v: Tensor, attend: Attend, rows: Tensor) -> Tensor:
    """q [batch, queries, heads, size], k and v [batch, keys, heads or fewer, size] -> like q.
    rows [queries] int64: the queries' indices in the sequence, whose keys are all from 0 on.
    `attend.dropout` says what falls out.
    """
    heads, size = q.shape[2:]
    k, v = (t.repeat_interleave(heads // t.shape[2], 2).transpose(1, 2) for t in (k, v))
    column = torch.arange(k.shape[2], device=q.device)
    allowed = seen(rows, column, attend.window, attend.starts)
    scores = (q.transpose(1, 2) @ k.transpose(2, 3)) * attend.scale_of(size)
    kept = _kept(attend, rows, column, heads)
    allowed = allowed if allowed.dim() == 2 else allowed[:, None]
    return (_Probabilities.apply(scores, allowed, kept, attend.dropout.p) @ v).transpose(1, 2)


def _kept(attend: Attend, rows: Tensor, columns: Tensor, heads: int) -> Tensor:
    """Bool [batch, heads, queries, keys]: which probabilities stay."""
    p, noise, site = attend.dropout
    head = torch.arange(attend.first_head, attend.first_head + heads, device=rows.device)
    sequence = noise.sequences[:, None, None, None]
    return dropout.keep(p, noise.key, site, sequence, head[:, None, None], rows[:, None], columns)


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
