"""Causal attention on local heads, one signature for every backend: q, k, v are [batch, length, heads, head_dim]."""

import torch
import torch.nn.functional as F
from torch import Tensor


def visible(queries: int, keys: int, window: int | None, device: torch.device) -> Tensor:
    """[queries, keys] bool: which keys each query sees. The last query is at the last key; a window counts itself."""
    row = torch.arange(keys - queries, keys, device=device)[:, None]
    column = torch.arange(keys, device=device)[None, :]
    seen = column <= row
    return seen if window is None else seen & (column > row - window)


def attention(q: Tensor, k: Tensor, v: Tensor, window: int | None = None, dropout: float = 0.0) -> Tensor:
    """softmax(q k^T / sqrt(head_dim)) v over the keys each query may see; [batch, queries, heads, head_dim].

    q [batch, queries, heads, head_dim]; k, v [batch, keys, kv_heads, head_dim], kv_heads dividing heads. Queries are the
    last of the keys, so a cache is simply more keys. `window` is in tokens, the query itself included.
    """
    queries, keys = q.shape[1], k.shape[1]
    causal = queries == keys and (window is None or window >= keys)
    mask = None if causal or queries == 1 and (window is None or window >= keys) else visible(queries, keys, window, q.device)
    out = F.scaled_dot_product_attention(q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), attn_mask=mask,
                                         dropout_p=dropout, is_causal=causal and queries > 1, enable_gqa=q.shape[2] != k.shape[2])
    return out.transpose(1, 2)
