"""The backend of our own blocks, on any device and in any dtype. On a CPU their products go to
oneDNN: bf16, one core, 8 x 512 tokens of 8 heads of 64 and 4 key-value heads, CPU time with rope:
20 + 37 ms forward and backward under torch.compile, where SDPA alone takes 50 + 96.

Half precision rounds the scores q k^T to that precision, as transformers' eager attention does.
"""

from collections.abc import Sequence
from functools import cache

import torch
from torch import Tensor

from dolmen.ops.attention import blocks
from dolmen.ops.attention.blocks import Rule
from dolmen.ops.attention.decode import one_query
from dolmen.ops.attention.spec import Attend


def attention(q: Tensor, k: Tensor, v: Tensor, attend: Attend) -> Tensor:
    """See `spec.Attention`."""
    return (one_query if q.shape[1] == 1 and attend.plain else _blockwise)(q, k, v, attend)


def partial(
    q: Tensor, k: Tensor, v: Tensor, q_start: int, k_start: int, attend: Attend
) -> tuple[Tensor, Tensor]:
    """See `spec.Attention`. The two runs may also overlap, in any way."""
    kv_heads = k.shape[2]
    rows = (_rows(t, kv_heads) for t in (q, k, v))
    out, log_sum = blocks.forward(*rows, _rule(q, k, q_start, k_start, attend), wide=True)
    out = _heads(out, kv_heads, (*q.shape[:3], v.shape[3]))
    return out, _heads(log_sum, kv_heads, (*q.shape[:3], 1)).squeeze(-1)


def partial_backward(
    g: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    log_sum: Tensor,
    q_start: int,
    k_start: int,
    attend: Attend,
) -> tuple[Tensor, Tensor, Tensor]:
    """See `spec.Attention`."""
    kv_heads = k.shape[2]
    delta = (g.to(log_sum.dtype) * out).sum(-1, keepdim=True)
    rows = (_rows(t, kv_heads) for t in (g, q, k, v, delta, log_sum[..., None]))
    grads = blocks.backward(*rows, _rule(q, k, q_start, k_start, attend))
    dq, dk, dv = (_heads(d, kv_heads, t.shape) for d, t in zip(grads, (q, k, v), strict=True))
    return dq, dk, dv


def _rule(q: Tensor, k: Tensor, q_start: int, k_start: int, attend: Attend) -> Rule:
    """Of queries from q_start on and keys from k_start on, both [batch, length, heads, size]."""
    documents, starts, host = attend.documents, None, None
    if documents is not None:
        starts, host = documents.starts - k_start, documents.host - k_start
    return Rule(
        q.shape[2] // k.shape[2],
        q_start - k_start,
        attend.scale_of(q.shape[3]),
        attend.soft_cap,
        attend.slopes_of(q.shape[2]),
        attend.window,
        starts,
        host,
    )


def _rows(x: Tensor, kv_heads: int) -> Tensor:
    """[batch, length, heads, size] -> [batch * kv_heads, length * group, size], group = heads /
    kv_heads.
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


def _blockwise(q: Tensor, k: Tensor, v: Tensor, attend: Attend) -> Tensor:
    kv_heads = k.shape[2]
    rule = _rule(q, k, k.shape[1] - q.shape[1], 0, attend)
    out = _Blockwise.apply(*(_rows(t, kv_heads) for t in (q, k, v)), *rule)
    return _heads(out, kv_heads, (*q.shape[:3], v.shape[3]))


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
    scale: float,
    soft_cap: float | None,
    slopes: Sequence[float] | None,
    window: int | None,
    starts: Tensor | None,
    host: Tensor | None,
) -> tuple[Tensor, Tensor]:
    rule = Rule(group, offset, scale, soft_cap, slopes, window, starts, host)
    return blocks.forward(q, k, v, rule, _fused(blocks.exponentials))


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
    scale: float,
    soft_cap: float | None,
    slopes: Sequence[float] | None,
    window: int | None,
    starts: Tensor | None,
    host: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor]:
    rule = Rule(group, offset, scale, soft_cap, slopes, window, starts, host)
    dq, dk, dv = blocks.backward(g, q, k, v, delta, log_sum, rule, _fused(blocks.gradient))
    return dq, dk.to(k.dtype), dv.to(v.dtype)


@_opaque_forward.register_fake
def _(q, k, v, *rule):
    return blocks.empty_out(q, v, q.dtype), torch.empty_like(
        q[..., :1], dtype=torch.promote_types(q.dtype, torch.float32)
    )


@_opaque_backward.register_fake
def _(g, q, k, v, delta, log_sum, *rule):
    return torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)


class _Blockwise(torch.autograd.Function):
    """q [n, queries * group, size], k [n, keys, size], v [n, keys, value size], and a rule -> [n,
    queries * group, value size]. Kept for backward: these, and one number per row.
    """

    @staticmethod
    def forward(ctx, q, k, v, *rule):
        *ctx.options, starts, host = rule
        if torch.compiler.is_compiling():
            out, log_sum = _opaque_forward(q, k, v, *rule)
        else:
            out, log_sum = blocks.forward(q, k, v, Rule(*rule))
        ctx.save_for_backward(q, k, v, out, log_sum, starts, host)
        return out

    @staticmethod
    def backward(ctx, g):
        q, k, v, out, log_sum, *documents = ctx.saved_tensors
        delta, rule = (g.to(log_sum.dtype) * out).sum(-1, keepdim=True), (*ctx.options, *documents)
        given = g.contiguous(), q, k, v, delta, log_sum
        if torch.compiler.is_compiling():
            dq, dk, dv = _opaque_backward(*given, *rule)
        else:
            dq, dk, dv = blocks.backward(*given, Rule(*rule))
        return dq, dk.to(k.dtype), dv.to(v.dtype), *(None for _ in rule)
