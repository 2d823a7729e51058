"""One query, as in a step of decoding, by PyTorch's SDPA: there is no square to avoid, on any
device.
"""

import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor

from dolmen.ops.attention.spec import Attend, visible


def one_query(
    q: Float[Tensor, "batch 1 heads size"],
    k: Float[Tensor, "batch keys kv_heads size"],
    v: Float[Tensor, "batch keys kv_heads value_size"],
    attend: Attend,
) -> Float[Tensor, "batch 1 heads value_size"]:
    """Of a query at the last key, whose scores are `plain`; a mask has one row. The queries of a
    key-value head are rows of one product, so that no key or value is repeated.
    """
    keys, window, starts, mask = k.shape[1], attend.window, attend.starts, None
    if starts is not None or (window is not None and window < keys):
        mask = visible(1, keys, window, q.device, starts)
        mask = mask if starts is None else mask[:, None]
    out = F.scaled_dot_product_attention(
        q.reshape(len(q), k.shape[2], -1, q.shape[3]),
        k.transpose(1, 2),
        v.transpose(1, 2),
        attn_mask=mask,
        scale=attend.scale_of(q.shape[3]),
    )
    return out.reshape(len(q), 1, q.shape[2], -1)
