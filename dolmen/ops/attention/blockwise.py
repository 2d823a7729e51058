"""The backend of our own blocks, on any device and in any dtype. On a CPU their products go to
oneDNN: bf16, one core, 8 x 512 tokens of 8 heads of 64 and 4 key-value heads, CPU time with rope:
20 + 37 ms forward and backward under torch.compile, where SDPA alone takes 50 + 96.

Half precision rounds the scores q k^T to that precision, as transformers' eager attention does.
"""

from functools import cache

import torch
from torch import Tensor

from dolmen.ops.attention import blocks
from dolmen.ops.attention.decode import one_query
from dolmen.ops.attention.spec import Documents


def attention(
    q: Tensor, k: Tensor, v: Tensor, window: int | None = None, documents: Documents | None = None
) -> Tensor:
    """See `spec.Attention`."""
    if q.shape[1] == 1:
        return one_query(q, k, v, window, documents)
    return _blockwise(q, k, v, window, documents)


def partial(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    q_start: int,
    k_start: int,
    window: int | None = None,
    documents: Documents | None = None,
) -> tuple[Tensor, Tensor]:
    """See `spec.Attention`. The two runs may also overlap, in any way."""
    kv_heads = k.shape[2]
    out, log_sum = blocks.forward(
        *(_rows(t, kv_heads) for t in (q, k, v)),
        q.shape[2] // kv_heads,
        q_start - k_start,
        window,
        *_among(documents, k_start),
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
    documents: Documents | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """See `spec.Attention`."""
    kv_heads = k.shape[2]
    delta = (g.to(log_sum.dtype) * out).sum(-1, keepdim=True)
    dq, dk, dv = blocks.backward(
        *(_rows(t, kv_heads) for t in (g, q, k, v, delta, log_sum[..., None])),
        q.shape[2] // kv_heads,
        q_start - k_start,
        window,
        *_among(documents, k_start),
    )
    return (
        _heads(dq, kv_heads, q.shape),
        _heads(dk, kv_heads, k.shape),
        _heads(dv, kv_heads, v.shape),
    )


def _among(documents: Documents | None, key: int) -> tuple[Tensor | None, Tensor | None]:
    """Starts on the device and on the host, as indices among the keys from `key` on."""
    return (None, None) if documents is None else (documents.starts - key, documents.host - key)


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


def _blockwise(
    q: Tensor, k: Tensor, v: Tensor, window: int | None, documents: Documents | None
) -> Tensor:
    kv_heads = k.shape[2]
    starts, host = (None, None) if documents is None else (documents.starts, documents.host)
    out = _Blockwise.apply(
        *(_rows(t, kv_heads) for t in (q, k, v)), q.shape[2] // kv_heads, window, starts, host
    )
    return _heads(out, kv_heads, q.shape)


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
    host: Tensor | None,
) -> tuple[Tensor, Tensor]:
    passes = _fused(blocks.exponentials)
    return blocks.forward(q, k, v, group, offset, window, starts, host, passes)


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
    host: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor]:
    passes = _fused(blocks.gradient)
    dq, dk, dv = blocks.backward(
        g, q, k, v, delta, log_sum, group, offset, window, starts, host, passes
    )
    return dq, dk.to(k.dtype), dv.to(v.dtype)


@_opaque_forward.register_fake
def _(q, k, v, group, offset, window, starts, host):
    return torch.empty_like(q), torch.empty_like(
        q[..., :1], dtype=torch.promote_types(q.dtype, torch.float32)
    )


@_opaque_backward.register_fake
def _(g, q, k, v, delta, log_sum, group, offset, window, starts, host):
    return torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)


class _Blockwise(torch.autograd.Function):
    """q [n, queries * group, size], k and v [n, keys, size] -> like q. Kept for backward: these,
    and one number per row.
    """

    @staticmethod
    def forward(ctx, q, k, v, group, window, starts, host):
        ctx.options = group, k.shape[1] - q.shape[1] // group, window
        out, log_sum = (_opaque_forward if torch.compiler.is_compiling() else blocks.forward)(
            q, k, v, *ctx.options, starts, host
        )
        ctx.save_for_backward(q, k, v, out, log_sum, starts, host)
        return out

    @staticmethod
    def backward(ctx, g):
        q, k, v, out, log_sum, starts, host = ctx.saved_tensors
        delta = (g.to(log_sum.dtype) * out).sum(-1, keepdim=True)
        backward = _opaque_backward if torch.compiler.is_compiling() else blocks.backward
        dq, dk, dv = backward(g.contiguous(), q, k, v, delta, log_sum, *ctx.options, starts, host)
        return dq, dk.to(k.dtype), dv.to(v.dtype), None, None, None, None
