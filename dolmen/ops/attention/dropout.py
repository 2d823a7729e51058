"""Attention with dropout on its probabilities, which are formed whole: O(batch heads queries keys)
memory, of which backward keeps the probabilities, their mask, a byte each, and what is left of
them, as 2205.05198 counts them.
"""

import torch
import torch.nn.functional as F
from jaxtyping import Int64
from torch import Tensor

from dolmen.core import device
from dolmen.core.autograd import Context, TypedFunction
from dolmen.core.torch_private import compute
from dolmen.ops import elementwise
from dolmen.ops.attention.spec import Attend, Attended, Keys, Queries, Values, seen


def attention(
    q: Queries, k: Keys, v: Values, attend: Attend, rows: Int64[Tensor, " queries"]
) -> Attended:
    """Return softmax(scores) v with dropout on the probabilities (`attend.dropout`), forming all of
    them, with autograd; else as `spec.AttentionBackend.attention`. `rows`: the queries' indices in
    the sequence; keys are those of the whole sequence, from 0 on.
    """
    assert attend.dropout is not None
    heads, size = q.shape[2:]
    # key-value heads are repeated: memory is dominated by the scores anyway
    k, v = (t.repeat_interleave(heads // t.shape[2], 2).transpose(1, 2) for t in (k, v))
    column = torch.arange(k.shape[2], device=q.device)
    allowed = seen(rows, column, attend.window, attend.starts, attend.reach)
    # copies, which a batch of several sequences needs: small products of views have other bits
    columns = k.transpose(2, 3).contiguous()
    scores = (q.transpose(1, 2).contiguous() @ columns) * attend.scale_of(size)
    scores = _scores(scores, attend, rows, column)
    keep_mask = _keep_mask(attend, rows, column, heads)
    allowed = allowed if allowed.dim() == 2 else allowed[:, None]
    if attend.sinks is not None:  # a last column, seen by all; what it weighs is left out
        column = attend.sinks.to(scores.dtype).expand(q.shape[:3]).transpose(1, 2)[..., None]
        scores = torch.cat((scores, column), -1)
        allowed, keep_mask = (F.pad(t, (0, 1), value=True) for t in (allowed, keep_mask))
    p = _Probabilities.apply(scores, allowed, keep_mask, attend.dropout.p)[..., : k.shape[2]]
    return (p.to(v.dtype) @ v).transpose(1, 2)


def _scores(scores: Tensor, attend: Attend, rows: Tensor, columns: Tensor) -> Tensor:
    """Return scaled products [batch, heads, queries, keys] with soft cap and ALiBi applied, in fp32
    or wider; the products as they are where there is neither.
    """
    if attend.plain:
        return scores
    scores = scores.to(torch.promote_types(scores.dtype, torch.float32))
    if attend.soft_cap is not None:
        scores = (scores / attend.soft_cap).tanh() * attend.soft_cap
    slopes = attend.slopes_of(scores.shape[1])
    if slopes is not None:
        slopes = device.to_device(torch.tensor(slopes, dtype=scores.dtype), scores.device)
        scores = scores + slopes[:, None, None] * (columns - rows[:, None])
    return scores


def _keep_mask(attend: Attend, rows: Tensor, columns: Tensor, heads: int) -> Tensor:
    """Return True for each probability that dropout keeps, [batch, heads, queries, keys], a
    function of its indices in the whole model.
    """
    assert attend.dropout is not None
    p, noise, site = attend.dropout
    # indices in the whole model, so that tp and cp drop the same elements
    head = torch.arange(attend.first_head, attend.first_head + heads, device=rows.device)
    sequence = noise.sequences[:, None, None, None]
    return elementwise.keep(
        p, noise.key, site, sequence, head[:, None, None], rows[:, None], columns
    )


class _Probabilities(TypedFunction):
    """Softmax of scores [batch, heads, queries, keys] over the keys seen, in fp32 or wider, then
    dropout; returns the scores' dtype.

    Autograd alone would keep the softmax in fp32, and the mask of what is seen; here backward has
    it in the scores' dtype.
    """

    @staticmethod
    def forward(
        ctx: Context[tuple[float, torch.dtype]],
        scores: Tensor,
        seen: Tensor,
        keep_mask: Tensor,
        p: float,
    ) -> Tensor:
        """Return the softmax of the scores over the keys `seen` (True: seen), 0 where `keep_mask`
        is False and divided by 1 - p elsewhere, p being the probability of dropping.
        """
        wide = torch.promote_types(scores.dtype, torch.float32)
        probabilities = (
            scores.masked_fill(~seen, -torch.inf).softmax(-1, dtype=wide).to(scores.dtype)
        )
        ctx.kept = p, wide
        ctx.save_for_backward(probabilities, keep_mask)
        # inverted dropout: the expected value is that without
        return torch.where(keep_mask, probabilities / (1 - p), 0)

    @staticmethod
    def backward(
        ctx: Context[tuple[float, torch.dtype]], g: Tensor
    ) -> tuple[Tensor, None, None, None]:
        """Return the gradient of the scores, and None for the masks and p."""
        (probabilities, keep_mask), (p, wide) = ctx.saved_tensors, ctx.kept
        dp = torch.where(keep_mask, g / (1 - p), 0).to(wide)
        dscores = compute.softmax_backward(dp, probabilities.to(wide), -1, wide).to(g.dtype)
        return dscores, None, None, None
