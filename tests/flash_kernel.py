"""A stand-in for the CUDA kernels behind aten::_flash_attention_forward and _backward, registered
for CPU tensors: their published semantics (FlashAttention-2 as torch has it), in float64; and for
cuDNN's attention, whole tensors without a window. Beside them the backward of the fused RMSNorm,
which torch has for a GPU alone: its own decomposition.

What the kernels leave unwritten, or of which nothing is promised, is NaN here: the output of a
query that sees no key, the rows of a tensor that no segment covers, the gradient of keys that no
query of their segment exists for. Glue that relies on any of it fails.
"""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

NAN = float("nan")


@contextmanager
def on_cpu() -> Iterator[list[str]]:
    """Within, the operators run on CPU tensors; their forward calls, `dense`, `varlen` or `cudnn`,
    in order.
    """
    calls: list[str] = []

    def forward(q, k, v, cum_q, cum_k, max_q, max_k, p, causal, debug, **options):
        calls.append("dense" if cum_q is None else "varlen")
        assert p == 0.0 and not debug
        return _forward(q, k, v, cum_q, cum_k, max_q, max_k, causal, **options)

    def backward(
        g, q, k, v, out, lse, cum_q, cum_k, max_q, max_k, p, causal, rng, unused, **options
    ):
        assert p == 0.0 and rng.dtype == torch.uint64 and rng.numel() == 2, "no random state"
        return _backward(g, q, k, v, out, lse, cum_q, cum_k, max_q, max_k, causal, **options)

    def cudnn_forward(q, k, v, bias, log_sum, p=0.0, causal=False, debug=False, *, scale):
        calls.append("cudnn")
        assert bias is None and log_sum and p == 0.0 and not debug
        q, k, v = (t.transpose(1, 2) for t in (q, k, v))
        assert q.shape[1] == k.shape[1] or not causal, "the corner of its diagonal is not ours"
        assert q.shape[3] <= 128 and min(q.shape[1], k.shape[1]) > 1
        out, log_sum, seed, offset, unused = _forward(*q_k_v(q, k, v), causal, scale=scale)
        lengths = unused, unused, q.shape[1], k.shape[1]
        return out.transpose(1, 2), log_sum[..., None], *lengths, seed, offset, unused

    def cudnn_backward(g, q, k, v, out, log_sum, *rest, scale):
        _, _, bias, cum_q, cum_k, longest_q, longest_k, p, causal = rest
        assert bias is None and cum_q is None and cum_k is None and p == 0.0
        g, q, k, v, out = (t.transpose(1, 2) for t in (g, q, k, v, out))
        assert (longest_q, longest_k) == (q.shape[1], k.shape[1])
        lengths = (None, None, longest_q, longest_k, causal)
        grads = _backward(g, q, k, v, out, log_sum.squeeze(-1), *lengths, scale=scale)
        return tuple(d.transpose(1, 2) for d in grads)

    library = torch.library.Library("aten", "IMPL")
    library.impl("_scaled_dot_product_cudnn_attention", cudnn_forward, "CPU")
    library.impl("_scaled_dot_product_cudnn_attention_backward", cudnn_backward, "CPU")
    library.impl("_flash_attention_forward", forward, "CPU")
    library.impl("_flash_attention_backward", backward, "CPU")
    rms_norm = torch.ops.aten._fused_rms_norm_backward.default
    library.impl("_fused_rms_norm_backward", torch._decomp.decomposition_table[rms_norm], "CPU")
    try:
        yield calls
    finally:
        library._destroy()


def q_k_v(q, k, v):
    """The first arguments of `_forward` for whole tensors."""
    return q, k, v, None, None, q.shape[1], k.shape[1]


def _segments(q, k, cum_q, cum_k, max_q, max_k):
    """(queries, keys) of each segment, as slices of the first dim of flattened tensors."""
    assert q.stride(-1) == k.stride(-1) == 1 and q.shape[-1] % 8 == 0 and q.shape[-1] <= 256
    if cum_q is None:
        assert q.dim() == k.dim() == 4 and (max_q, max_k) == (q.shape[1], k.shape[1])
        for i in range(len(q)):
            yield slice(i * max_q, (i + 1) * max_q), slice(i * max_k, (i + 1) * max_k)
        return
    assert q.dim() == k.dim() == 3 and cum_q.shape == cum_k.shape
    for cum, longest, total in ((cum_q, max_q, len(q)), (cum_k, max_k, len(k))):
        assert cum.dtype == torch.int32 and cum.is_contiguous() and cum[0] == 0
        assert cum.diff().min() >= 0 and cum.diff().max() <= longest and cum[-1] <= total
    ends = zip(*(cum.tolist()[i:] for cum in (cum_q, cum_k) for i in (0, 1)), strict=False)
    for a, b, c, d in ends:
        yield slice(a, b), slice(c, d)


def _allowed(queries: int, keys: int, max_k: int, causal: bool, left: int, right: int) -> Tensor:
    """[queries, keys] bool: the diagonal ends at the last query and the last key. A bound on one
    side alone makes the other as many keys as there are, as FlashAttention-2 does.
    """
    right = 0 if causal else right
    left, right = (-1 if bound >= max_k else bound for bound in (left, right))
    if left >= 0 and right < 0:
        right = max_k
    if right >= 0 and left < 0:
        left = max_k
    back = torch.arange(queries)[:, None] + keys - queries - torch.arange(keys)
    return (
        torch.ones(queries, keys, dtype=torch.bool)
        if left < 0
        else (back <= left) & (back >= -right)
    )


def _bounds(options) -> tuple[int, int]:
    given = (options.get("window_size_left"), options.get("window_size_right"))
    return tuple(-1 if bound is None else bound for bound in given)


def _forward(q, k, v, cum_q, cum_k, max_q, max_k, causal, **options):
    assert q.shape[-1] == k.shape[-1] == v.shape[-1], "heads of one size"
    flat_q, flat_k, flat_v = (t.reshape(-1, *t.shape[-2:]).double() for t in (q, k, v))
    out = torch.full_like(flat_q, NAN)
    lse = torch.full(flat_q.shape[:2], NAN, dtype=torch.float64)
    for mine, theirs in _segments(q, k, cum_q, cum_k, max_q, max_k):
        scores = _scores(flat_q[mine], flat_k[theirs], max_k, causal, options)
        if scores.shape[2] == 0:
            continue
        sums = scores.logsumexp(-1)  # [heads, queries]
        p = (scores - sums[..., None]).exp()  # NaN where nothing is seen
        out[mine] = torch.einsum("hqk,khd->qhd", p, _spread(flat_v[theirs], q.shape[-2]))
        lse[mine] = sums.t()
    lse = lse.to(torch.promote_types(q.dtype, torch.float32))
    lse = lse.view(*q.shape[:2], -1).transpose(1, 2) if cum_q is None else lse.t()
    state = torch.zeros(2, dtype=torch.uint64), torch.zeros((), dtype=torch.uint64)
    # an output has no strides of its own where autograd keeps it: new memory
    return out.view(q.shape).to(q.dtype), lse.contiguous(), *state, q.new_empty(0)


def _scores(q, k, max_k, causal, options):
    scores = torch.einsum("qhd,khd->hqk", q, _spread(k, q.shape[1])) * options["scale"]
    allowed = _allowed(len(q), len(k), max_k, causal, *_bounds(options))
    return scores.masked_fill(~allowed, -torch.inf)


def _spread(t: Tensor, heads: int) -> Tensor:
    return t.repeat_interleave(heads // t.shape[-2], -2)


def _backward(g, q, k, v, out, lse, cum_q, cum_k, max_q, max_k, causal, **options):
    assert lse.is_contiguous()
    flat = [t.reshape(-1, *t.shape[-2:]).double() for t in (g, q, k, v, out)]
    lse = lse.transpose(-1, -2).reshape(-1, q.shape[-2]).double()
    dq, dk, dv = (torch.full_like(flat[i], NAN) for i in (1, 2, 3))
    for mine, theirs in _segments(q, k, cum_q, cum_k, max_q, max_k):
        gs, qs, outs = (flat[i][mine] for i in (0, 1, 4))
        ks, vs = (flat[i][theirs] for i in (2, 3))
        if not len(qs) or not len(ks):
            continue
        p = (_scores(qs, ks, max_k, causal, options) - lse[mine].t()[..., None]).exp()
        dp = torch.einsum("qhd,khd->hqk", gs, _spread(vs, q.shape[-2]))
        ds = p * (dp - (gs * outs).sum(-1).t()[..., None]) * options["scale"]
        dq[mine] = torch.einsum("hqk,khd->qhd", ds, _spread(ks, q.shape[-2]))
        dk[theirs] = _gather(torch.einsum("hqk,qhd->khd", ds, qs), ks.shape[1])
        dv[theirs] = _gather(torch.einsum("hqk,qhd->khd", p, gs), ks.shape[1])
    return tuple(d.view(t.shape).to(t.dtype) for d, t in zip((dq, dk, dv), (q, k, v), strict=True))


def _gather(t: Tensor, heads: int) -> Tensor:
    return t.unflatten(1, (heads, -1)).sum(2)
