"""Causal attention on local heads: q, k, v are [batch, length, heads, head_dim].

    spec.py       what a query sees, and the interface that every backend has
    blocks.py     the algebra of one block of queries, on any device
    blockwise.py  the backend of those blocks
    flash.py      the backends of torch's FlashAttention operators and of cuDNN's
    operators.py  the calls of both
    score_bias.py ALiBi and attention sinks, on top of any backend
    decode.py     one query of each text, to keys in the pages of a cache
    dropout.py    attention with dropout, the same for all backends
    reference.py  the definition, in float64

Which backend computes is chosen where a model is built (ops/kernels.py), and no tensor is queried
for its device.
"""

from dolmen.ops.attention import blockwise, flash
from dolmen.ops.attention.spec import (
    Attend,
    AttentionBackend,
    Documents,
    begins,
    document_ends,
    run,
    visible,
)
from dolmen.ops.attention_support import AttentionName

BACKENDS: dict[AttentionName, AttentionBackend] = {
    "blocks": blockwise,
    "flash": flash,
    "flash3": flash,  # the same operators, once `operators.activate_attention` has replaced them
    "cudnn": flash.Cudnn(),
}
