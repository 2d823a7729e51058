"""Causal attention on local heads, one signature for every backend: q, k, v are [batch, length,
heads, head_dim].

A GPU, and a step of decoding, use PyTorch's SDPA. On a CPU the products go to oneDNN in blocks of
queries, each against the keys it can see, with the softmax between them (FlashAttention's algebra,
2307.08691: only the output and one log-sum-exp per query are kept, and the probabilities are formed
again in backward). bf16, one core, 8 x 512 tokens of 8 heads of 64 and 4 key-value heads, CPU time
with rope: 20 + 37 ms forward and backward under torch.compile, where SDPA alone takes 50 + 96.
"""

import math
from collections import defaultdict
from functools import cache

import torch
import torch.nn.functional as F
from torch import Tensor

from dolmen.ops import flash

BLOCK = 64  # queries at once: the triangle wastes half a block per row
BLOCKS = 16  # most blocks of a sequence, while they hold few scores:
SCORES = 2**20  # of one head at once, so that memory does not grow with length^2


def seen(rows: Tensor, columns: Tensor, window: int | None, starts: Tensor | None = None) -> Tensor:
    """Which keys each query sees: bool [queries, keys], with starts [batch, queries, keys].

    rows [queries], columns [keys] int64: indices in the sequence. A window counts the query itself.
    starts [batch, queries] int64: index of the first token of the query's document, so key j is
    seen iff max(starts, row - window + 1) <= j <= row.
    """
    rows = rows[:, None]
    out = columns <= rows
    if window is not None:
        out = out & (columns > rows - window)
    return out if starts is None else out & (columns >= starts[..., None])


def visible(
    queries: int, keys: int, window: int | None, device: torch.device, starts: Tensor | None = None
) -> Tensor:
    """`seen` where the last query is at the last key, and the keys are counted from 0."""
    return seen(
        torch.arange(keys - queries, keys, device=device),
        torch.arange(keys, device=device),
        window,
        starts,
    )


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    window: int | None = None,
    starts: Tensor | None = None,
    dropout: float = 0.0,
) -> Tensor:
    """softmax(q k^T / sqrt(head_dim)) v over the keys each query may see; [batch, queries, heads,
    head_dim].

    q [batch, queries, heads, head_dim]; k, v [batch, keys, kv_heads, head_dim], kv_heads dividing
    heads. Queries are the last of the keys, so a cache is simply more keys. `window` is in tokens,
    the query itself included. `starts` [batch, queries] int64, where several documents share a
    sequence: index, among the keys, of the first token of the query's; it never falls from a query
    to the next. Half precision on a CPU rounds the scores q k^T to that precision, as transformers'
    eager attention does; the softmax is fp32 everywhere. On a GPU, starts and a window that binds
    are a boolean mask, whose memory is O(queries keys).
    """
    queries, keys = q.shape[1], k.shape[1]
    if q.device.type == "cpu" and queries > 1 and dropout == 0:
        return _blockwise(q, k, v, window, starts)
    all_before = starts is None and (window is None or window >= keys)
    causal = queries == keys and all_before
    mask = (
        None
        if causal or queries == 1 and all_before
        else visible(queries, keys, window, q.device, starts)
    )
    if starts is not None:
        mask = mask[:, None]
    out = F.scaled_dot_product_attention(
        q.transpose(1, 2),
        k.transpose(1, 2),
        v.transpose(1, 2),
        attn_mask=mask,
        dropout_p=dropout,
        is_causal=causal and queries > 1,
        enable_gqa=q.shape[2] != k.shape[2],
    )
    return out.transpose(1, 2)


def partial(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    q_start: int,
    k_start: int,
    window: int | None = None,
    starts: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Attention of a run of queries to a run of keys, as if there were no other keys, and what
    merges it with other runs.

    q [batch, queries, heads, size] are the tokens q_start, q_start + 1, ... of the sequence, k and
    v [batch, keys, kv_heads, size] those from k_start; starts [batch, queries] as in `seen`. -> out
    like q, in fp32 or wider (a GPU's flash kernel: in q's dtype), and log_sum [batch, queries,
    heads], the log of the sum of exponentials, in fp32 or wider. A query that sees none of the keys
    has out 0 and log_sum -inf. No autograd: `partial_backward` is its gradient.
    """
    if flash.can(q, k, v, q_start - k_start, window, starts):
        return flash.forward(q, k, v, q_start == k_start)
    kv_heads, starts = k.shape[2], None if starts is None else starts - k_start
    out, log_sum = _forward(
        *(_rows(t, kv_heads) for t in (q, k, v)),
        q.shape[2] // kv_heads,
        q_start - k_start,
        window,
        starts,
        wide=True,
    )
    return _heads(out, kv_heads, q.shape), _heads(log_sum, kv_heads, (*q.shape[:3], 1)).squeeze(-1)


def partial_backward(
    g: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    log_sum: Tensor,
    q_start: int,
    k_start: int,
    window: int | None = None,
    starts: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """What this run of keys adds to (dq, dk, dv), the last two in fp32 or wider.

    g, out [batch, queries, heads, size] and log_sum [batch, queries, heads] are of the attention to
    all keys: a block of probabilities is exp(scores - log_sum), and needs nothing of the other
    blocks but these.
    """
    if flash.can(q, k, v, q_start - k_start, window, starts):
        return flash.backward(g, q, k, v, out, log_sum, q_start == k_start)
    kv_heads, starts = k.shape[2], None if starts is None else starts - k_start
    delta = (g.to(log_sum.dtype) * out).sum(-1, keepdim=True)
    dq, dk, dv = _backward(
        *(_rows(t, kv_heads) for t in (g, q, k, v, delta, log_sum[..., None])),
        q.shape[2] // kv_heads,
        q_start - k_start,
        window,
        starts,
    )
    return (
        _heads(dq, kv_heads, q.shape),
        _heads(dk, kv_heads, k.shape),
        _heads(dv, kv_heads, v.shape),
    )


def _rows(x: Tensor, kv_heads: int) -> Tensor:
    """[batch, length, heads, size] -> [batch * kv_heads, length * group, size], group = heads /
    kv_heads.

    A key-value head's queries become rows of one product, (query, head) by (key): no key or value
    is repeated.
    """
    batch, length, heads, size = x.shape
    if heads > kv_heads:
        # else, a copy of the gradient under torch.compile
        x = x.reshape(batch, length, kv_heads, heads // kv_heads, size)
    return x.transpose(1, 2).reshape(batch * kv_heads, -1, size)


def _heads(x: Tensor, kv_heads: int, shape: tuple[int, ...]) -> Tensor:
    """The inverse of `_rows`: [batch * kv_heads, length * group, size] -> shape [batch, length,
    heads, size].
    """
    batch, length, heads, size = shape
    return x.view(batch, kv_heads, length, heads // kv_heads, size).transpose(1, 2).reshape(shape)


def _blockwise(
    q: Tensor, k: Tensor, v: Tensor, window: int | None, starts: Tensor | None
) -> Tensor:
    kv_heads = k.shape[2]
    out = _Blockwise.apply(
        *(_rows(t, kv_heads) for t in (q, k, v)), q.shape[2] // kv_heads, window, starts
    )
    return _heads(out, kv_heads, q.shape)


def _blocks(
    queries: int,
    keys: int,
    group: int,
    offset: int,
    window: int | None,
    starts: Tensor | None,
    device: torch.device,
):
    """Per block of queries: its rows (query, head), the keys it sees (None: none), and 0 or -inf to
    add to its scores (None: 0).

    The first query is at key `offset`; starts [batch, queries] are indices among the keys. Masks
    are [rows, keys], with starts [batch, 1, rows, keys]. If the last query is at the last key, what
    a query sees depends on the distance from it alone, so every block's mask is a corner of one.
    """
    size = max(BLOCK, min(-(-queries // BLOCKS), SCORES // keys))
    corner = starts is None and offset == keys - queries
    if corner:
        widest = keys if window is None else min(keys, size + window - 1)
        mask = torch.where(
            visible(min(size, queries), widest, window, device), 0.0, -math.inf
        ).repeat_interleave(group, 0)
    oldest = _oldest(starts, size)
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


def _oldest(starts: Tensor | None, size: int):
    """A lower bound of the keys that each block of queries sees. Read where that waits for no
    device and there are values.
    """
    if starts is None or starts.device.type != "cpu" or type(starts) is not Tensor:
        return defaultdict(int)
    return starts[:, ::size].amin(0).tolist()


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


def _exponentials(qk: Tensor, mask: Tensor | None, size: int) -> tuple[Tensor, Tensor, Tensor]:
    """exp(scores - maximum) in qk's dtype, its sum [n, rows, 1], and log(sum) + maximum: 0, 0 and
    -inf where nothing is seen.
    """
    s = _scores(qk, mask, size)
    maximum = s.amax(-1, keepdim=True).clamp(min=torch.finfo(s.dtype).min)
    e = s.sub_(maximum).exp_()
    total = e.sum(-1, keepdim=True)
    return e.to(qk.dtype), total, maximum + total.log()


def _gradient(
    qk: Tensor, dp: Tensor, log_sum: Tensor, delta: Tensor, mask: Tensor | None, size: int
) -> tuple[Tensor, Tensor]:
    """Probabilities, and the gradient of qk from theirs, dp: both [n, rows, keys] in qk's dtype."""
    p = _scores(qk, mask, size).sub_(log_sum).exp_()
    return p.to(qk.dtype), dp.to(p.dtype).sub_(delta).mul_(p).mul_(1 / math.sqrt(size)).to(qk.dtype)


def _forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    group: int,
    offset: int,
    window: int | None,
    starts: Tensor | None,
    exponentials=_exponentials,
    wide: bool = False,
) -> tuple[Tensor, Tensor]:
    """q [n, rows, size], k and v [n, keys, size] -> out like q (`wide`: in log_sum's dtype),
    log_sum [n, rows, 1].
    """
    log_sum = torch.empty_like(q[..., :1], dtype=torch.promote_types(q.dtype, torch.float32))
    out = torch.empty_like(q, dtype=log_sum.dtype if wide else q.dtype)
    for rows, keys, mask in _blocks(
        q.shape[1] // group, k.shape[1], group, offset, window, starts, q.device
    ):
        if keys is None:
            out[:, rows], log_sum[:, rows] = 0, -math.inf
            continue
        qk = torch.bmm(q[:, rows], k[:, keys].contiguous().transpose(1, 2))
        e, total, log_sum[:, rows] = exponentials(qk, mask, q.shape[2])
        # 1 or more, as the maximum is a term; 0 where nothing is seen
        out[:, rows] = torch.bmm(e, v[:, keys]) / total.clamp(min=1)
    return out, log_sum


def _backward(
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
    gradient=_gradient,
) -> tuple[Tensor, Tensor, Tensor]:
    """dq like q; dk and dv like k in log_sum's dtype."""
    dq = torch.empty_like(q)
    dk = torch.zeros_like(k, dtype=log_sum.dtype)
    dv = torch.zeros_like(v, dtype=log_sum.dtype)
    for rows, keys, mask in _blocks(
        q.shape[1] // group, k.shape[1], group, offset, window, starts, q.device
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


# Under torch.compile each direction is one opaque operator, whose passes between the products are
# compiled by themselves: traced into the block, the loop was unrolled, and its slices and
# concatenations fused into slow kernels (59 ms backward, not 37).
@cache
def _fused(passes):
    """Compiled at the first call: inductor takes a second to import, which runs without it do not
    owe.
    """
    return torch.compile(passes, dynamic=True)


@torch.library.custom_op("dolmen::attention_forward", mutates_args=())
def _opaque_forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    group: int,
    offset: int,
    window: int | None,
    starts: Tensor | None,
) -> tuple[Tensor, Tensor]:
    return _forward(q, k, v, group, offset, window, starts, _fused(_exponentials))


@torch.library.custom_op("dolmen::attention_backward", mutates_args=())
def _opaque_backward(
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
) -> tuple[Tensor, Tensor, Tensor]:
    dq, dk, dv = _backward(
        g, q, k, v, delta, log_sum, group, offset, window, starts, _fused(_gradient)
    )
    return dq, dk.to(k.dtype), dv.to(v.dtype)


@_opaque_forward.register_fake
def _(q, k, v, group, offset, window, starts):
    return torch.empty_like(q), torch.empty_like(
        q[..., :1], dtype=torch.promote_types(q.dtype, torch.float32)
    )


@_opaque_backward.register_fake
def _(g, q, k, v, delta, log_sum, group, offset, window, starts):
    return torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)


class _Blockwise(torch.autograd.Function):
    """q [n, queries * group, size], k and v [n, keys, size] -> like q. Kept for backward: these,
    and one number per row.
    """

    @staticmethod
    def forward(ctx, q, k, v, group, window, starts):
        ctx.options = group, k.shape[1] - q.shape[1] // group, window
        out, log_sum = (_opaque_forward if torch.compiler.is_compiling() else _forward)(
            q, k, v, *ctx.options, starts
        )
        ctx.save_for_backward(q, k, v, out, log_sum, starts)
        return out

    @staticmethod
    def backward(ctx, g):
        q, k, v, out, log_sum, starts = ctx.saved_tensors
        delta = (g.to(log_sum.dtype) * out).sum(-1, keepdim=True)
        backward = _opaque_backward if torch.compiler.is_compiling() else _backward
        dq, dk, dv = backward(g.contiguous(), q, k, v, delta, log_sum, *ctx.options, starts)
        return dq, dk.to(k.dtype), dv.to(v.dtype), None, None, None
