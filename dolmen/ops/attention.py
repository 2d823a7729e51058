"""Causal attention on local heads, one signature for every backend: q, k, v are [batch, length, heads, head_dim].

A GPU, and a step of decoding, use PyTorch's SDPA. On a CPU the products go to oneDNN in blocks of queries, each against
the keys it can see, with the softmax between them (FlashAttention's algebra, 2307.08691: only the output and one
log-sum-exp a query are kept, and the probabilities are formed again in backward). bf16, one core, 8 x 512 tokens of 8 heads
of 64 and 4 key-value heads, CPU time with rope: 20 + 37 ms forward and backward under torch.compile, where SDPA alone takes
50 + 96.
"""

import math
from functools import cache

import torch
import torch.nn.functional as F
from torch import Tensor

BLOCK = 64                                                 # queries at once: the triangle wastes half a block a row
BLOCKS = 16                                                # most blocks of a sequence: torch.compile unrolls them


def visible(queries: int, keys: int, window: int | None, device: torch.device) -> Tensor:
    """[queries, keys] bool: which keys each query sees. The last query is at the last key; a window counts itself."""
    row = torch.arange(keys - queries, keys, device=device)[:, None]
    column = torch.arange(keys, device=device)[None, :]
    seen = column <= row
    return seen if window is None else seen & (column > row - window)


def attention(q: Tensor, k: Tensor, v: Tensor, window: int | None = None, dropout: float = 0.0) -> Tensor:
    """softmax(q k^T / sqrt(head_dim)) v over the keys each query may see; [batch, queries, heads, head_dim].

    q [batch, queries, heads, head_dim]; k, v [batch, keys, kv_heads, head_dim], kv_heads dividing heads. Queries are the
    last of the keys, so a cache is simply more keys. `window` is in tokens, the query itself included. Half precision on a
    CPU rounds the scores q k^T to that precision, as transformers' eager attention does; the softmax is fp32 everywhere.
    """
    queries, keys = q.shape[1], k.shape[1]
    if q.device.type == "cpu" and queries > 1 and dropout == 0: return _blockwise(q, k, v, window)
    causal = queries == keys and (window is None or window >= keys)
    mask = None if causal or queries == 1 and (window is None or window >= keys) else visible(queries, keys, window, q.device)
    out = F.scaled_dot_product_attention(q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), attn_mask=mask,
                                         dropout_p=dropout, is_causal=causal and queries > 1, enable_gqa=q.shape[2] != k.shape[2])
    return out.transpose(1, 2)


def _blockwise(q: Tensor, k: Tensor, v: Tensor, window: int | None) -> Tensor:
    """A key-value head's queries become rows of one product, (query, head) by (key): no key or value is repeated."""
    (batch, queries, heads, size), kv_heads = q.shape, k.shape[2]
    group = heads // kv_heads
    rows = q.reshape(batch, queries, kv_heads, group, size).transpose(1, 2).reshape(batch * kv_heads, queries * group, size)
    k, v = (t.transpose(1, 2).reshape(batch * kv_heads, -1, size) for t in (k, v))
    out = _Blockwise.apply(rows, k, v, group, window)
    return out.view(batch, kv_heads, queries, group, size).transpose(1, 2).reshape(batch, queries, heads, size)


def _blocks(queries: int, keys: int, group: int, window: int | None, device: torch.device):
    """Per block of queries: its rows (query, head), the keys it sees, and 0 or -inf to add to its scores [rows, keys].

    What a query sees depends on the distance from the last key alone, so every block's mask is a corner of one."""
    size = max(BLOCK, -(-queries // BLOCKS))
    widest = keys if window is None else min(keys, size + window - 1)
    mask = torch.where(visible(min(size, queries), widest, window, device), 0.0, -math.inf).repeat_interleave(group, 0)
    for first in range(0, queries, size):
        end = min(first + size, queries)
        start = 0 if window is None else max(0, first + keys - queries - window + 1)
        stop = end + keys - queries
        yield slice(first * group, end * group), slice(start, stop), mask[(first - end) * group :, start - stop :]


def _scores(qk: Tensor, mask: Tensor, size: int) -> Tensor:
    """q k^T / sqrt(size) in fp32 (or wider), -inf where not seen; qk [n, rows, keys], mask [rows, keys]."""
    return torch.add(mask, qk if qk.dtype == torch.float64 else qk.float(), alpha=1 / math.sqrt(size))


def _exponentials(qk: Tensor, mask: Tensor, size: int) -> tuple[Tensor, Tensor, Tensor]:
    """exp(scores - maximum) in qk's dtype, its sum [n, rows, 1], and log(sum) + maximum."""
    s = _scores(qk, mask, size)
    maximum = s.amax(-1, keepdim=True)
    e = s.sub_(maximum).exp_()
    total = e.sum(-1, keepdim=True)
    return e.to(qk.dtype), total, maximum + total.log()


def _gradient(qk: Tensor, dp: Tensor, log_sum: Tensor, delta: Tensor, mask: Tensor, size: int) -> tuple[Tensor, Tensor]:
    """Probabilities, and the gradient of qk from theirs, dp: both [n, rows, keys] in qk's dtype."""
    p = _scores(qk, mask, size).sub_(log_sum).exp_()
    return p.to(qk.dtype), (dp - delta).mul_(1 / math.sqrt(size)).mul_(p).to(qk.dtype)


def _forward(q: Tensor, k: Tensor, v: Tensor, group: int, window: int | None, exponentials=_exponentials) -> tuple[Tensor, Tensor]:
    out, log_sum = torch.empty_like(q), torch.empty_like(q[..., :1], dtype=torch.promote_types(q.dtype, torch.float32))
    for rows, keys, mask in _blocks(q.shape[1] // group, k.shape[1], group, window, q.device):
        qk = torch.bmm(q[:, rows], k[:, keys].contiguous().transpose(1, 2))
        e, total, log_sum[:, rows] = exponentials(qk, mask, q.shape[2])
        out[:, rows] = torch.bmm(e, v[:, keys]) / total
    return out, log_sum


def _backward(g: Tensor, q: Tensor, k: Tensor, v: Tensor, delta: Tensor, log_sum: Tensor, group: int, window: int | None,
              gradient=_gradient) -> tuple[Tensor, Tensor, Tensor]:
    dq, dk, dv = torch.empty_like(q), torch.zeros_like(k, dtype=log_sum.dtype), torch.zeros_like(v, dtype=log_sum.dtype)
    for rows, keys, mask in _blocks(q.shape[1] // group, k.shape[1], group, window, q.device):
        qs, gs, ks, vs = (t.contiguous() for t in (q[:, rows], g[:, rows], k[:, keys], v[:, keys]))    # once, not in each product
        qk, dp = torch.bmm(qs, ks.transpose(1, 2)), torch.bmm(gs, vs.transpose(1, 2))
        p, ds = gradient(qk, dp, log_sum[:, rows], delta[:, rows], mask, q.shape[2])
        dq[:, rows] = torch.bmm(ds, ks)
        dk[:, keys] += torch.bmm(ds.transpose(1, 2), qs)
        dv[:, keys] += torch.bmm(p.transpose(1, 2), gs)
    return dq, dk.to(k.dtype), dv.to(v.dtype)


# Under torch.compile each direction is one opaque operator, whose passes between the products are compiled by themselves:
# traced into the block, the loop was unrolled, and its slices and concatenations fused into slow kernels (59 ms backward, not 37).
@cache
def _fused(passes):
    """Compiled at the first call: inductor takes a second to import, which runs without it do not owe."""
    return torch.compile(passes, dynamic=True)


@torch.library.custom_op("dolmen::attention_forward", mutates_args=())
def _opaque_forward(q: Tensor, k: Tensor, v: Tensor, group: int, window: int | None) -> tuple[Tensor, Tensor]:
    return _forward(q, k, v, group, window, _fused(_exponentials))


@torch.library.custom_op("dolmen::attention_backward", mutates_args=())
def _opaque_backward(g: Tensor, q: Tensor, k: Tensor, v: Tensor, delta: Tensor, log_sum: Tensor, group: int,
                     window: int | None) -> tuple[Tensor, Tensor, Tensor]:
    return _backward(g, q, k, v, delta, log_sum, group, window, _fused(_gradient))


@_opaque_forward.register_fake
def _(q, k, v, group, window):
    return torch.empty_like(q), torch.empty_like(q[..., :1], dtype=torch.promote_types(q.dtype, torch.float32))


@_opaque_backward.register_fake
def _(g, q, k, v, delta, log_sum, group, window): return torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)


class _Blockwise(torch.autograd.Function):
    """q [n, queries * group, size], k and v [n, keys, size] -> like q. Kept for backward: these, and one number a row."""

    @staticmethod
    def forward(ctx, q, k, v, group, window):
        out, log_sum = (_opaque_forward if torch.compiler.is_compiling() else _forward)(q, k, v, group, window)
        ctx.group, ctx.window = group, window
        ctx.save_for_backward(q, k, v, out, log_sum)
        return out

    @staticmethod
    def backward(ctx, g):
        q, k, v, out, log_sum = ctx.saved_tensors
        delta = (g.to(log_sum.dtype) * out).sum(-1, keepdim=True)
        backward = _opaque_backward if torch.compiler.is_compiling() else _backward
        return *backward(g.contiguous(), q, k, v, delta, log_sum, ctx.group, ctx.window), None, None
