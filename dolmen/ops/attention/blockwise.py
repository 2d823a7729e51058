"""The backend of our own blocks, on any device and in any dtype. On a CPU their products go to
oneDNN: bf16, one core, 8 x 512 tokens of 8 heads of 64 and 4 key-value heads, CPU time with rope:
20 + 37 ms forward and backward under torch.compile, where SDPA alone takes 50 + 96.

Half precision rounds the scores q k^T to that precision, as transformers' eager attention does.
"""

from collections.abc import Callable
from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from dolmen.core.autograd import Context, TypedFunction
from dolmen.ops.attention import blocks
from dolmen.ops.attention.blocks import Rule
from dolmen.ops.attention.score_bias import join_sinks, sink_gradient
from dolmen.ops.attention.spec import Attend, Attended, Keys, LogSum, Place, Queries, Values
from dolmen.ops.elementwise import accumulate


def attention(q: Queries, k: Keys, v: Values, attend: Attend, later: int = 0) -> Attended:
    """Return softmax(scores) v of each query over the keys that it may see, by blocks of queries,
    with autograd: `spec.AttentionBackend.attention`. `attend`: scale, soft cap, ALiBi, window,
    documents, sinks. The queries are the last of the keys but `later`, which only prefixes let them
    see.
    """
    kv_heads, rule = k.shape[2], _rule(q, k, Place(k.shape[1] - later - q.shape[1], 0, attend))
    sinks = attend.sinks
    if sinks is not None and sinks.ndim == 1:
        sinks = sinks.view(kv_heads, 1, rule.group)
    elif sinks is not None:
        sinks = sinks.unflatten(2, (kv_heads, rule.group)).transpose(1, 2)
    out = _Blockwise.apply(*(_rows(t, kv_heads) for t in (q, k, v)), sinks, *rule)
    return _heads(out, kv_heads, (*q.shape[:3], v.shape[3]))


def cached_attention(q: Queries, k: Keys, v: Values, attend: Attend, length: int) -> Attended:
    """Return attention of the last tokens of sequences, q, to all tokens so far, k and v, with
    the bits that `attention` gives them in whole sequences of `length` tokens. No autograd.

    The bits of a row follow from the number of its block's keys. So queries are computed in the
    blocks of whole sequences: 0 stands for the other queries of a block, and for keys to come,
    which are masked. A block costs as much for one query as for all.
    """
    (past, keys), length = (k.shape[1] - q.shape[1], k.shape[1]), max(length, k.shape[1])
    size, out = blocks.block_size(length, length), []
    for first in range(past // size * size, keys, size):
        stop = min(first + size, length)
        begin, end = max(first, past), min(stop, keys)
        rows = F.pad(q[:, begin - past : end - past], (0, 0, 0, 0, begin - first, stop - end))
        ks, vs = (F.pad(t[:, :end], (0, 0, 0, 0, 0, stop - end)) for t in (k, v))
        kv_heads, rule = ks.shape[2], _rule(rows, ks, Place(first, 0, attend))
        rows_q, rows_k, rows_v = (_rows(t, kv_heads) for t in (rows, ks, vs))
        weighted, total, _ = blocks.forward(rows_q, rows_k, rows_v, rule, size=size)
        y = _heads((weighted / total).to(q.dtype), kv_heads, (*rows.shape[:3], v.shape[3]))
        out.append(y[:, begin - first : end - first])
    return torch.cat(out, 1)


def partial(q: Queries, k: Keys, v: Values, at: Place) -> tuple[Attended, LogSum]:
    """Return (out, log_sum), both fp32 or wider, of attention from a run of queries to a run of
    keys as if there were no other keys, by blocks, without autograd:
    `spec.AttentionBackend.partial`. `at` says where the runs lie in the sequence; they may also
    overlap, in any way.
    """
    kv_heads, rule = k.shape[2], _rule(q, k, at)
    rows_q, rows_k, rows_v = (_rows(t, kv_heads) for t in (q, k, v))
    weighted, total, log_sum = blocks.forward(rows_q, rows_k, rows_v, rule)
    out = _heads(weighted / total, kv_heads, (*q.shape[:3], v.shape[3]))
    return out, _heads(log_sum, kv_heads, (*q.shape[:3], 1)).squeeze(-1)


def partial_backward(
    g: Attended, q: Queries, k: Keys, v: Values, full: tuple[Attended, LogSum], at: Place
) -> tuple[Queries, Keys, Values]:
    """Return what a run of keys adds to (dq, dk, dv), by blocks, from the output's gradient g and
    `full`, which is (out, log_sum) of attention to all keys:
    `spec.AttentionBackend.partial_backward`. dk and dv have log_sum's dtype.
    """
    kv_heads, rule, (out, log_sum) = k.shape[2], _rule(q, k, at), full
    delta = _delta(g, out, log_sum)
    rows_g, rows_q, rows_k, rows_v, rows_delta, rows_log_sum = (
        _rows(t, kv_heads) for t in (g, q, k, v, delta, log_sum[..., None])
    )
    dq, dk, dv = blocks.backward(rows_g, rows_q, rows_k, rows_v, rows_delta, rows_log_sum, rule)
    return (
        _heads(dq, kv_heads, q.shape),
        _heads(dk, kv_heads, k.shape),
        _heads(dv, kv_heads, v.shape),
    )


def _rule(q: Tensor, k: Tensor, at: Place) -> Rule:
    """Return how products of q and k, both [batch, length, heads, size], at the positions `at`
    become scores; documents are turned into indices among these keys.
    """
    attend = at.attend
    masks: tuple[Tensor | None, ...] = (None,) * 4
    if attend.documents is not None:
        here = attend.documents.map_tensors(lambda t: t - at.k_start)
        masks = here.starts, here.host_starts, here.reach, here.host_reach
    return Rule(
        q.shape[2] // k.shape[2],
        at.q_start - at.k_start,
        attend.scale_of(q.shape[3]),
        attend.soft_cap,
        attend.slopes_of(q.shape[2]),
        attend.window,
        *masks,
    )


def _delta(g: Tensor, out: Tensor, log_sum: Tensor) -> Tensor:
    """Return, per row, the sum of g * out over the last dim, [..., 1], in log_sum's dtype."""
    return (g.to(log_sum.dtype) * out).sum(-1, keepdim=True)


def _rows(x: Tensor, kv_heads: int) -> Tensor:
    """Reshape [batch, length, heads, size] -> [batch * kv_heads, length * group, size], group =
    heads / kv_heads: the rows of blocks.py's products.
    """
    batch, length, heads, size = x.shape
    if heads > kv_heads:
        # else, a copy of the gradient under torch.compile
        x = x.reshape(batch, length, kv_heads, heads // kv_heads, size)
    return x.transpose(1, 2).reshape(batch * kv_heads, -1, size)


def _heads(x: Tensor, kv_heads: int, shape: tuple[int, ...]) -> Tensor:
    """Reshape [batch * kv_heads, length * group, size] back to `shape` [batch, length, heads,
    size]: the inverse of `_rows`.
    """
    batch, length, heads, size = shape
    return x.view(batch, kv_heads, length, heads // kv_heads, size).transpose(1, 2).reshape(shape)


def _split_heads(x: Tensor, sinks: Tensor) -> Tensor:
    """Return a view of x [batch * kv_heads, queries * group, size] as [batch, kv_heads, queries,
    group, size]: without its last dim, sinks [kv_heads, 1, group], or of each query [batch,
    kv_heads, queries, group], broadcast to it.
    """
    kv_heads, _, group = sinks.shape[-3:]
    return x.view(-1, kv_heads, x.shape[1] // group, group, x.shape[2])


# Under torch.compile each direction is one opaque operator, whose passes between the products are
# compiled by themselves: traced into the block, the loop was unrolled, and its slices and
# concatenations fused into slow kernels (59 ms backward, not 37).
@cache
def _compile(passes: Callable[..., Any]) -> Callable[..., Any]:
    """Return torch.compile of a function of blocks.py, the same object for the same function
    (cached). Call it where the function runs, not at import: the call imports inductor, which takes
    a second.
    """
    return torch.compile(passes, dynamic=True)


# A Rule, one after the other, as both operators are declared to take it: from annotations torch
# would read the same, of a list of arguments for each
_RULE = (
    "SymInt group, SymInt offset, float scale, float? soft_cap, float[]? slopes, SymInt? window, "
    "Tensor? starts, Tensor? host_starts, Tensor? reach, Tensor? host_reach"
)


@torch.library.custom_op(
    "dolmen::attention_forward",
    mutates_args=(),
    schema=f"(Tensor q, Tensor k, Tensor v, {_RULE}) -> (Tensor, Tensor, Tensor)",
)
def _opaque_forward(q: Tensor, k: Tensor, v: Tensor, *rule: Any) -> tuple[Tensor, Tensor, Tensor]:
    """Return what `blocks.forward` does, (weighted, total, log_sum), its passes compiled, as one
    operator to torch.compile. `rule`: an unpacked Rule.
    """
    return blocks.forward(q, k, v, Rule(*rule), _compile(blocks.exponentials))


@torch.library.custom_op(
    "dolmen::attention_backward",
    mutates_args=(),
    schema="(Tensor g, Tensor q, Tensor k, Tensor v, Tensor delta, Tensor log_sum, "
    f"{_RULE}) -> (Tensor, Tensor, Tensor)",
)
def _opaque_backward(
    g: Tensor, q: Tensor, k: Tensor, v: Tensor, delta: Tensor, log_sum: Tensor, *rule: Any
) -> tuple[Tensor, Tensor, Tensor]:
    """Return what `blocks.backward` does, (dq, dk, dv), its passes compiled, as one operator to
    torch.compile; all in the inputs' dtype. `rule`: an unpacked Rule.
    """
    fused = _compile(blocks.gradient), _compile(accumulate)
    dq, dk, dv = blocks.backward(g, q, k, v, delta, log_sum, Rule(*rule), *fused)
    return dq, dk.to(k.dtype), dv.to(v.dtype)


@_opaque_forward.register_fake
def _(q: Tensor, k: Tensor, v: Tensor, *rule: Any) -> tuple[Tensor, Tensor, Tensor]:
    """Return what `_opaque_forward` does as empty tensors of the right shapes and dtypes, for
    torch.compile.
    """
    total = torch.empty_like(q[..., :1], dtype=torch.promote_types(q.dtype, torch.float32))
    return blocks.empty_out(q, v), total, torch.empty_like(total)


@_opaque_backward.register_fake
def _(
    g: Tensor, q: Tensor, k: Tensor, v: Tensor, delta: Tensor, log_sum: Tensor, *rule: Any
) -> tuple[Tensor, Tensor, Tensor]:
    """Return what `_opaque_backward` does as empty tensors of the right shapes and dtypes, for
    torch.compile.
    """
    return torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)


class _Blockwise(TypedFunction):
    """Autograd of block attention: q [n, queries * group, size], k [n, keys, size], v [n, keys,
    value size], sinks as `_split_heads` takes them or None, and an unpacked Rule -> [n, queries *
    group, value size]. Kept for backward: these, and one number per row.
    """

    @staticmethod
    def forward(
        ctx: Context[tuple[Any, ...]],
        q: Tensor,
        k: Tensor,
        v: Tensor,
        sinks: Tensor | None,
        *rule: Any,
    ) -> Tensor:
        """Return the attention output, sinks included, in q's dtype."""
        rule_ = Rule(*rule)
        if torch.compiler.is_compiling():
            weighted, total, log_sum = _opaque_forward(q, k, v, *rule_)
        else:
            weighted, total, log_sum = blocks.forward(q, k, v, rule_)
        # of all at once, which the compiler joins with the copy that turns it back to heads
        out = (weighted / total).to(q.dtype)
        if sinks is not None:
            parts = join_sinks(
                _split_heads(out, sinks), _split_heads(log_sum, sinks).squeeze(-1), sinks
            )
            out, log_sum = parts[0].view(out.shape), parts[1].view(log_sum.shape)
        masks = rule_.starts, rule_.host_starts, rule_.reach, rule_.host_reach  # the last of a Rule
        ctx.save_for_backward(q, k, v, sinks, out, log_sum, *masks)
        ctx.kept = rule_[: -len(masks)]
        return out

    @staticmethod
    def backward(ctx: Context[tuple[Any, ...]], g: Tensor) -> tuple[Tensor | None, ...]:
        """Return the gradients of q, k, v and the sinks, and None for the numbers of the Rule."""
        q, k, v, sinks, out, log_sum, *masks = ctx.saved_tensors
        rule, delta = Rule(*ctx.kept, *masks), _delta(g, out, log_sum)
        g = g.contiguous()
        if torch.compiler.is_compiling():
            dq, dk, dv = _opaque_backward(g, q, k, v, delta, log_sum, *rule)
        else:
            dq, dk, dv = blocks.backward(g, q, k, v, delta, log_sum, rule)
        dsinks = None
        if sinks is not None and ctx.needs_input_grad[3]:
            g, out, log_sum = (_split_heads(t, sinks) for t in (g, out, log_sum))
            dsinks = sink_gradient(g, out, log_sum.squeeze(-1), sinks)
        return dq, dk.to(k.dtype), dv.to(v.dtype), dsinks, *[None] * len(rule)
