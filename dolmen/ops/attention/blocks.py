"""Attention in blocks of queries, each against the keys it can see, with the softmax between two
products (FlashAttention's algebra, 2307.08691: only the output and one log-sum-exp per query are
kept, and the probabilities are formed again in backward). No autograd here: blockwise.py has it.

Everywhere n = batch * kv_heads and rows = queries * group: a key-value head's queries are rows of
one product, (query, head) by (key), so that no key or value is repeated.
"""

import math
from collections import defaultdict

import torch
from torch import Tensor

from dolmen.ops.attention.spec import seen, visible

BLOCK = 64  # queries at once: the triangle wastes half a block per row
BLOCKS = 16  # most blocks of a sequence, while they hold few scores:
SCORES = 2**20  # of one head at once, so that memory does not grow with length^2


def _blocks(
    queries: int,
    keys: int,
    group: int,
    offset: int,
    window: int | None,
    starts: Tensor | None,
    host: Tensor | None,
    device: torch.device,
):
    """Per block of queries: its rows (query, head), the keys it sees (None: none), and 0 or -inf to
    add to its scores (None: 0).

    The first query is at key `offset`; starts [batch, queries] are indices among the keys, `host`
    the same on the host. Masks are [rows, keys], with starts [batch, 1, rows, keys]. If the last
    query is at the last key, what a query sees depends on the distance from it alone, so every
    block's mask is a corner of one.
    """
    size = max(BLOCK, min(-(-queries // BLOCKS), SCORES // keys))
    corner = starts is None and offset == keys - queries
    if corner:
        widest = keys if window is None else min(keys, size + window - 1)
        mask = torch.where(
            visible(min(size, queries), widest, window, device), 0.0, -math.inf
        ).repeat_interleave(group, 0)
    oldest = _oldest(host, size)
    for first in range(0, queries, size):
        end = min(first + size, queries)
        start = max(0, oldest[first // size], 0 if window is None else first + offset - window + 1)
        stop = min(keys, end + offset)
        rows, columns = slice(first * group, end * group), slice(start, stop)
        if start >= stop:
            yield rows, None, None
        elif corner:
            yield rows, columns, mask[(first - end) * group :, start - stop :]
        else:
            yield (
                rows,
                columns,
                _mask(
                    range(first + offset, end + offset),
                    range(start, stop),
                    group,
                    window,
                    None if starts is None else starts[:, first:end],
                    device,
                ),
            )


def _oldest(host: Tensor | None, size: int):
    """A lower bound of the keys that each block of queries sees; 0 where a fake tensor has no
    values.
    """
    if host is None or type(host) is not Tensor:
        return defaultdict(int)
    return host[:, ::size].amin(0).tolist()


def _mask(
    rows: range,
    columns: range,
    group: int,
    window: int | None,
    starts: Tensor | None,
    device: torch.device,
) -> Tensor | None:
    """0 or -inf for each query and key at these indices; None where every query sees every key."""
    if (
        starts is None
        and rows.start >= columns.stop - 1
        and (window is None or columns.start > rows.stop - 1 - window)
    ):
        return None
    allowed = seen(
        torch.arange(rows.start, rows.stop, device=device),
        torch.arange(columns.start, columns.stop, device=device),
        window,
        starts,
    )
    mask = torch.where(allowed, 0.0, -math.inf).repeat_interleave(group, -2)
    return mask if starts is None else mask[:, None]


def _scores(qk: Tensor, mask: Tensor | None, size: int) -> Tensor:
    """q k^T / sqrt(size) in fp32 (or wider), -inf where not seen; qk [n, rows, keys], mask [rows,
    keys] or [batch, 1, rows, keys].
    """
    scores, scale = qk if qk.dtype == torch.float64 else qk.float(), 1 / math.sqrt(size)
    if mask is None:
        return scores * scale
    if mask.dim() == 2:
        return torch.add(mask, scores, alpha=scale)
    return torch.add(mask, scores.unflatten(0, (mask.shape[0], -1)), alpha=scale).flatten(0, 1)


def exponentials(qk: Tensor, mask: Tensor | None, size: int) -> tuple[Tensor, Tensor, Tensor]:
    """exp(scores - maximum) in qk's dtype, its sum [n, rows, 1], and log(sum) + maximum: 0, 0 and
    -inf where nothing is seen.
    """
    s = _scores(qk, mask, size)
    maximum = s.amax(-1, keepdim=True).clamp(min=torch.finfo(s.dtype).min)
    e = s.sub_(maximum).exp_()
    total = e.sum(-1, keepdim=True)
    return e.to(qk.dtype), total, maximum + total.log()


def gradient(
    qk: Tensor, dp: Tensor, log_sum: Tensor, delta: Tensor, mask: Tensor | None, size: int
) -> tuple[Tensor, Tensor]:
    """Probabilities, and the gradient of qk from theirs, dp: both [n, rows, keys] in qk's dtype."""
    p = _scores(qk, mask, size).sub_(log_sum).exp_()
    return p.to(qk.dtype), dp.to(p.dtype).sub_(delta).mul_(p).mul_(1 / math.sqrt(size)).to(qk.dtype)


def forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    group: int,
    offset: int,
    window: int | None,
    starts: Tensor | None,
    host: Tensor | None,
    exponentials=exponentials,
    wide: bool = False,
) -> tuple[Tensor, Tensor]:
    """q [n, rows, size], k and v [n, keys, size] -> out like q (`wide`: in log_sum's dtype),
    log_sum [n, rows, 1].
    """
    log_sum = torch.empty_like(q[..., :1], dtype=torch.promote_types(q.dtype, torch.float32))
    out = torch.empty_like(q, dtype=log_sum.dtype if wide else q.dtype)
    for rows, keys, mask in _blocks(
        q.shape[1] // group, k.shape[1], group, offset, window, starts, host, q.device
    ):
        if keys is None:
            out[:, rows], log_sum[:, rows] = 0, -math.inf
            continue
        qk = torch.bmm(q[:, rows], k[:, keys].contiguous().transpose(1, 2))
        e, total, log_sum[:, rows] = exponentials(qk, mask, q.shape[2])
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
    group: int,
    offset: int,
    window: int | None,
    starts: Tensor | None,
    host: Tensor | None,
    gradient=gradient,
) -> tuple[Tensor, Tensor, Tensor]:
    """dq like q; dk and dv like k in log_sum's dtype."""
    dq = torch.empty_like(q)
    dk = torch.zeros_like(k, dtype=log_sum.dtype)
    dv = torch.zeros_like(v, dtype=log_sum.dtype)
    for rows, keys, mask in _blocks(
        q.shape[1] // group, k.shape[1], group, offset, window, starts, host, q.device
    ):
        if keys is None:
            dq[:, rows] = 0
            continue
        # once, not in each product
        qs, gs, ks, vs = (t.contiguous() for t in (q[:, rows], g[:, rows], k[:, keys], v[:, keys]))
        qk, dp = torch.bmm(qs, ks.transpose(1, 2)), torch.bmm(gs, vs.transpose(1, 2))
        p, ds = gradient(qk, dp, log_sum[:, rows], delta[:, rows], mask, q.shape[2])
        dq[:, rows] = torch.bmm(ds, ks)
        dk[:, keys] += torch.bmm(ds.transpose(1, 2), qs)
        dv[:, keys] += torch.bmm(p.transpose(1, 2), gs)
    return dq, dk, dv
