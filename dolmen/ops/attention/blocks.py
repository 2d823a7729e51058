"""Attention in blocks of queries, each against the keys it can see, with the softmax between two
products (FlashAttention's algebra, 2307.08691: only the output and one log-sum-exp per query are
kept, and the probabilities are formed again in backward). No autograd here: blockwise.py has it.

Everywhere n = batch * kv_heads and rows = queries * group: a key-value head's queries are rows of
one product, (query, head) by (key), so that no key or value is repeated.
"""

import math
from collections import defaultdict
from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from dolmen.ops.attention.spec import seen, visible

BLOCK = 64  # queries at once: the triangle wastes half a block per row
BLOCKS = 16  # most blocks of a sequence, while they hold few scores:
SCORES = 2**20  # of one head at once, so that memory does not grow with length^2


class Rule(NamedTuple):
    """From the products of queries and keys to their scores. Numbers and tensors alone, one after
    the other what the operators of blockwise.py take: `f(*rule)`, `Rule(*arguments)`.
    """

    group: int
    """Queries' heads per key-value head."""
    offset: int
    """The key that the first query is at."""
    scale: float
    window: int | None
    starts: Tensor | None
    """[batch, queries]: where each query's document begins, as an index among the keys."""
    host: Tensor | None
    """The same on the host."""


class Scores(NamedTuple):
    """How the products of one block become its scores."""

    scale: float
    mask: Tensor | None
    """0 or -inf to add, [rows, keys], with starts [batch, 1, rows, keys]; None: 0."""


class Block(NamedTuple):
    """What one block of queries sees, and how."""

    rows: slice
    """Of the products' rows (query, head)."""
    keys: slice | None
    """None: no query of it sees any."""
    scores: Scores | None = None


def _blocks(queries: int, keys: int, rule: Rule, device: torch.device) -> Iterator[Block]:
    """In order. If the last query is at the last key, what a query sees depends on the distance
    from it alone, so every block's mask is a corner of one.
    """
    group, offset, window = rule.group, rule.offset, rule.window
    size = max(BLOCK, min(-(-queries // BLOCKS), SCORES // keys))
    corner = rule.starts is None and offset == keys - queries
    if corner:
        widest = keys if window is None else min(keys, size + window - 1)
        mask = torch.where(
            visible(min(size, queries), widest, window, device), 0.0, -math.inf
        ).repeat_interleave(group, 0)
    oldest = _oldest(rule.host, size)
    for first in range(0, queries, size):
        end = min(first + size, queries)
        start = max(0, oldest[first // size], 0 if window is None else first + offset - window + 1)
        stop = min(keys, end + offset)
        rows, columns = slice(first * group, end * group), slice(start, stop)
        if start >= stop:
            yield Block(rows, None)
            continue
        here = (
            mask[(first - end) * group :, start - stop :]
            if corner
            else _mask(range(first, end), range(start, stop), rule, device)
        )
        yield Block(rows, columns, Scores(rule.scale, here))


def _oldest(host: Tensor | None, size: int):
    """A lower bound of the keys that each block of queries sees; 0 where a fake tensor has no
    values.
    """
    if host is None or type(host) is not Tensor:
        return defaultdict(int)
    return host[:, ::size].amin(0).tolist()


def _mask(queries: range, keys: range, rule: Rule, device: torch.device) -> Tensor | None:
    """0 or -inf for these queries and keys; None where every query sees every key."""
    starts, window = rule.starts, rule.window
    first, stop = queries.start + rule.offset, queries.stop + rule.offset
    if (
        starts is None
        and first >= keys.stop - 1
        and (window is None or keys.start > stop - 1 - window)
    ):
        return None
    allowed = seen(
        torch.arange(first, stop, device=device),
        torch.arange(keys.start, keys.stop, device=device),
        window,
        None if starts is None else starts[:, queries.start : queries.stop],
    )
    mask = torch.where(allowed, 0.0, -math.inf).repeat_interleave(rule.group, -2)
    return mask if starts is None else mask[:, None]


def _scores(qk: Tensor, how: Scores) -> Tensor:
    """Of the products qk [n, rows, keys], in fp32 or wider; -inf where not seen."""
    scores, mask = qk if qk.dtype == torch.float64 else qk.float(), how.mask
    if mask is None:
        return scores * how.scale
    if mask.dim() == 2:
        return torch.add(mask, scores, alpha=how.scale)
    scores = scores.unflatten(0, (mask.shape[0], -1))
    return torch.add(mask, scores, alpha=how.scale).flatten(0, 1)


def exponentials(qk: Tensor, how: Scores) -> tuple[Tensor, Tensor, Tensor]:
    """exp(scores - maximum) in qk's dtype, its sum [n, rows, 1], and log(sum) + maximum: 0, 0 and
    -inf where nothing is seen.
    """
    s = _scores(qk, how)
    maximum = s.amax(-1, keepdim=True).clamp(min=torch.finfo(s.dtype).min)
    e = s.sub_(maximum).exp_()
    total = e.sum(-1, keepdim=True)
    return e.to(qk.dtype), total, maximum + total.log()


def gradient(
    qk: Tensor, dp: Tensor, log_sum: Tensor, delta: Tensor, how: Scores
) -> tuple[Tensor, Tensor]:
    """Probabilities, and the gradient of qk from theirs, dp: both [n, rows, keys] in qk's dtype."""
    p = _scores(qk, how).sub_(log_sum).exp_()
    return p.to(qk.dtype), dp.to(p.dtype).sub_(delta).mul_(p).mul_(how.scale).to(qk.dtype)


def forward(
    q: Tensor, k: Tensor, v: Tensor, rule: Rule, exponentials=exponentials, wide: bool = False
) -> tuple[Tensor, Tensor]:
    """q [n, rows, size], k and v [n, keys, size] -> out like q (`wide`: in log_sum's dtype),
    log_sum [n, rows, 1].
    """
    log_sum = torch.empty_like(q[..., :1], dtype=torch.promote_types(q.dtype, torch.float32))
    out = torch.empty_like(q, dtype=log_sum.dtype if wide else q.dtype)
    for rows, keys, how in _blocks(q.shape[1] // rule.group, k.shape[1], rule, q.device):
        if keys is None:
            out[:, rows], log_sum[:, rows] = 0, -math.inf
            continue
        qk = torch.bmm(q[:, rows], k[:, keys].contiguous().transpose(1, 2))
        e, total, log_sum[:, rows] = exponentials(qk, how)
        # 1 or more, as the maximum is a term; 0 where nothing is seen
        out[:, rows] = torch.bmm(e, v[:, keys]) / total.clamp(min=1)
    return out, log_sum


def backward(
    g: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    delta: Tensor,
    log_sum: Tensor,
    rule: Rule,
    gradient=gradient,
) -> tuple[Tensor, Tensor, Tensor]:
    """dq like q; dk and dv like k in log_sum's dtype."""
    dq = torch.empty_like(q)
    dk = torch.zeros_like(k, dtype=log_sum.dtype)
    dv = torch.zeros_like(v, dtype=log_sum.dtype)
    for rows, keys, how in _blocks(q.shape[1] // rule.group, k.shape[1], rule, q.device):
        if keys is None:
            dq[:, rows] = 0
            continue
        # once, not in each product
        qs, gs, ks, vs = (t.contiguous() for t in (q[:, rows], g[:, rows], k[:, keys], v[:, keys]))
        qk, dp = torch.bmm(qs, ks.transpose(1, 2)), torch.bmm(gs, vs.transpose(1, 2))
        p, ds = gradient(qk, dp, log_sum[:, rows], delta[:, rows], how)
        dq[:, rows] = torch.bmm(ds, ks)
        dk[:, keys] += torch.bmm(ds.transpose(1, 2), qs)
        dv[:, keys] += torch.bmm(p.transpose(1, 2), gs)
    return dq, dk, dv
