"""A GPU's FlashAttention kernel (2307.08691) for one run of queries and one of keys, with the
numbers that merge it with others.

`F.scaled_dot_product_attention` keeps the log-sum-exp to itself, so its operators are called by
name. They know "all before" and "causal from the first key" only: masks, windows and other dtypes
go by `ops/attention.py`'s blocks.
"""

import torch
from torch import Tensor
from torch.backends.cuda import SDPAParams, can_use_flash_attention


def can(
    q: Tensor, k: Tensor, v: Tensor, offset: int, window: int | None, starts: Tensor | None
) -> bool:
    """Whether the kernel has the answer: q [batch, queries, heads, size] at key `offset` of k and v
    [batch, keys, kv_heads, size].
    """
    if q.device.type != "cuda" or q.dtype not in (torch.float16, torch.bfloat16) or q.shape[3] % 8:
        return False
    keys = k.shape[1]
    simple = offset == 0 and q.shape[1] == keys or offset >= keys
    if not simple or starts is not None or window is not None and window < offset + q.shape[1]:
        return False
    return can_use_flash_attention(
        SDPAParams(*_turned(q, k, v), None, 0.0, offset == 0, q.shape[2] != k.shape[2])
    )


def _turned(*tensors: Tensor) -> list[Tensor]:
    """[batch, length, heads, size] <-> [batch, heads, length, size]."""
    return [t.transpose(1, 2) for t in tensors]


def forward(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> tuple[Tensor, Tensor]:
    """-> out like q, log_sum [batch, queries, heads] fp32."""
    out, log_sum, *_ = torch.ops.aten._scaled_dot_product_flash_attention(
        *_turned(q, k, v), 0.0, causal
    )
    return out.transpose(1, 2), log_sum.transpose(1, 2)


def backward(
    g: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, log_sum: Tensor, causal: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """(dq, dk, dv) of this run of keys from out and log_sum over all keys; dk and dv in fp32."""
    unused = torch.empty(0, dtype=torch.uint64, device=q.device)  # the random state of dropout
    grads = torch.ops.aten._scaled_dot_product_flash_attention_backward(
        *_turned(g, q, k, v, out),
        log_sum.transpose(1, 2).contiguous(),
        None,
        None,
        q.shape[1],
        k.shape[1],
        0.0,
        causal,
        unused,
        unused,
    )
    dq, dk, dv = _turned(*grads)
    return dq, dk.float(), dv.float()
