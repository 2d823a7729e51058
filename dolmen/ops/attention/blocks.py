"""Attention in blocks of queries, each against the keys it can see, with the softmax between two
products (FlashAttention's algebra, 2307.08691: only the output and one log-sum-exp per query are
kept, and the probabilities are formed again in backward). No autograd here: blockwise.py has it.

Everywhere n = batch * kv_heads and rows = queries * group: a key-value head's queries are rows of
one product, (query, head) by (key), so that no key or value is repeated.
"""

import math
from collections import defaultdict
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from dolmen.core import host
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
    soft_cap: float | None
    slopes: Sequence[float] | None
    """Of each head: those of the first key-value head, of the second, ..."""
    window: int | None
    starts: Tensor | None
    """[batch, queries]: where each query's document begins, as an index among the keys."""
    host: Tensor | None
    """The same on the host."""


class Scores(NamedTuple):
    """How the products of one block become its scores."""

    scale: float
    soft_cap: float | None
    slopes: Tensor | None
    """[kv_heads, 1, group, 1]."""
    distances: Tensor | None
    """[queries, 1, keys]: what slopes are multiplied by, 0 and below where a key is seen."""
    mask: Tensor | None
    """0 or -inf to add, [rows, keys], with starts [batch, 1, rows, keys]; None: 0."""


class Block(NamedTuple):
    """What one block of queries sees, and how."""

    rows: slice
    """Of the products' rows (query, head)."""
    keys: slice | None
    """None: no query of it sees any."""
    scores: Scores | None = None


def _blocks(q: Tensor, keys: int, rule: Rule) -> Iterator[Block]:
    """In order. If the last query is at the last key, what a query sees depends on the distance
    from it alone, so every block's mask is a corner of one.
    """
    group, offset, window = rule.group, rule.offset, rule.window
    queries, device, dtype = q.shape[1] // group, q.device, q.dtype
    size = max(BLOCK, min(-(-queries // BLOCKS), SCORES // keys))
    corner = rule.starts is None and offset == keys - queries
    if corner:
        widest = keys if window is None else min(keys, size + window - 1)
        mask = torch.where(
            visible(min(size, queries), widest, window, device), 0.0, -math.inf
        ).repeat_interleave(group, 0)
    slopes, dtype = None, torch.promote_types(dtype, torch.float32)
    if rule.slopes is not None:
        slopes = host.send(torch.tensor(rule.slopes, dtype=dtype), device).view(-1, 1, group, 1)
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
        distances = None
        if slopes is not None:
            at = torch.arange(first + offset, end + offset, device=device, dtype=dtype)
            distances = torch.arange(start, stop, device=device, dtype=dtype) - at[:, None, None]
        yield Block(rows, columns, Scores(rule.scale, rule.soft_cap, slopes, distances, here))


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


def _bounded(qk: Tensor, how: Scores) -> Tensor:
    """tanh(scale qk / soft_cap) where there is a cap, else qk; in fp32 or wider."""
    qk = qk if qk.dtype == torch.float64 else qk.float()
    return qk if how.soft_cap is None else (qk * (how.scale / how.soft_cap)).tanh_()


def _scores(bounded: Tensor, how: Scores) -> Tensor:
    """Of what `_bounded` makes of products [n, rows, keys]; new, and -inf where not seen."""
    scores, mask = bounded, how.mask
    factor = how.scale if how.soft_cap is None else how.soft_cap
    if how.slopes is not None:
        scores, factor = scores * factor, 1.0
        (kv_heads, _, group, _), keys = how.slopes.shape, scores.shape[2]
        scores.view(-1, kv_heads, scores.shape[1] // group, group, keys).addcmul_(
            how.slopes, how.distances
        )
    if mask is None:
        return scores * factor
    if mask.dim() == 2:
        return torch.add(mask, scores, alpha=factor)
    scores = scores.unflatten(0, (mask.shape[0], -1))
    return torch.add(mask, scores, alpha=factor).flatten(0, 1)


def exponentials(qk: Tensor, how: Scores) -> tuple[Tensor, Tensor, Tensor]:
    """exp(scores - maximum) in qk's dtype, its sum [n, rows, 1], and log(sum) + maximum: 0, 0 and
    -inf where nothing is seen.
    """
    s = _scores(_bounded(qk, how), how)
    maximum = s.amax(-1, keepdim=True).clamp(min=torch.finfo(s.dtype).min)
    e = s.sub_(maximum).exp_()
    total = e.sum(-1, keepdim=True)
    return e.to(qk.dtype), total, maximum + total.log()


def gradient(
    qk: Tensor, dp: Tensor, log_sum: Tensor, delta: Tensor, how: Scores
) -> tuple[Tensor, Tensor]:
    """Probabilities, and the gradient of qk from theirs, dp: both [n, rows, keys] in qk's dtype."""
    bounded = _bounded(qk, how)
    p = _scores(bounded, how).sub_(log_sum).exp_()
    bend = None if how.soft_cap is None else 1 - bounded.square()  # the derivative of tanh
    del bounded  # of half precision a copy, as large as all scores
    ds = dp.to(p.dtype).sub_(delta).mul_(p).mul_(how.scale)
    if bend is not None:
        ds *= bend
    return p.to(qk.dtype), ds.to(qk.dtype)


def empty_out(q: Tensor, v: Tensor, dtype: torch.dtype) -> Tensor:
    """What attention writes: like q, the strides too, where v's heads are as long."""
    if q.shape[-1] == v.shape[-1]:
        return torch.empty_like(q, dtype=dtype)
    return q.new_empty((*q.shape[:-1], v.shape[-1]), dtype=dtype)


def forward(
    q: Tensor, k: Tensor, v: Tensor, rule: Rule, exponentials=exponentials, wide: bool = False
) -> tuple[Tensor, Tensor]:
    """q [n, rows, size], k [n, keys, size], v [n, keys, value size] -> out [n, rows, value size]
    (`wide`: in log_sum's dtype), log_sum [n, rows, 1].
    """
    log_sum = torch.empty_like(q[..., :1], dtype=torch.promote_types(q.dtype, torch.float32))
    out = empty_out(q, v, log_sum.dtype if wide else q.dtype)
    for rows, keys, how in _blocks(q, k.shape[1], rule):
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
    for rows, keys, how in _blocks(q, k.shape[1], rule):
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
