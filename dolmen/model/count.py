"""What a model costs, in closed form: parameters, the floating point operations of a training step,
and the bytes it keeps for backward.
"""

import math
from typing import Literal

from dolmen.model.config import ModelConfig, parameter_shapes


def parameters(c: ModelConfig) -> int:
    """Number of parameters; a tied head counts once."""
    return sum(math.prod(shape) for shape in parameter_shapes(c).values())


def training_flops_per_token(
    c: ModelConfig, sequence_length: int, attention: Literal["causal", "full"] = "causal"
) -> float:
    """FLOPs per token of forward and backward: 2 per multiply-add, backward twice forward, nothing
    for recomputation.

    Matrices: 6 * their elements, of experts those that compute the token, the head's once more
    where it is the embedding. Attention: 12 * heads * head_dim * keys per layer, with keys the mean
    number a causal query sees, (sequence + 1) / 2, or what a sliding window leaves of it. `full`
    counts as if every query saw the whole sequence, as torchtitan does; so does PaLM (2204.02311,
    appendix B: 6 N + 12 L H Q T), whose N has the embedding too.
    """
    shapes = parameter_shapes(c)
    matrices = sum(
        math.prod(s)
        for n, s in shapes.items()
        if len(s) == 2 and n not in ("embed.weight", "positions.weight", "head.weight")
    )
    matrices += c.vocab_size * c.hidden_size
    matrices += sum(
        math.prod(s) // c.num_experts * c.num_experts_per_tok
        for s in shapes.values()
        if len(s) == 3
    )
    return 6.0 * matrices + attention_flops_per_token(c, sequence_length, attention)


def attention_flops_per_token(
    c: ModelConfig, sequence_length: int, attention: Literal["causal", "full"] = "causal"
) -> float:
    """The part of `training_flops_per_token` that is not of matrices."""
    layers = range(c.num_hidden_layers)
    seen = [_mean_keys(sequence_length, c.window(layer)) for layer in layers]
    keys = sum(seen) if attention == "causal" else c.num_hidden_layers * sequence_length
    return 12.0 * c.num_attention_heads * c.head_dim * keys


def activation_bytes_per_layer(
    c: ModelConfig,
    batch: int,
    sequence_length: int,
    *,
    tp: int = 1,
    sequence_parallel: bool = False,
    recompute: str = "none",
    cp: int = 1,
    element_bytes: int = 2,
) -> float:
    """Bytes that a rank keeps of one layer without experts between forward and backward of a
    microbatch of `batch` sequences.

    Korthikanti et al. (2205.05198), eq. 1-6, for any widths: a GPT block with dropout, whose
    probabilities are formed whole, keeps s b h (10 + 24 / t + 5 a s / h t), all of it / t under
    sequence parallelism; selective recomputation drops the last term and full keeps 2 s b h. Beside
    it, what the paper leaves out: the norms' fp32 statistics. Without dropout attention is fused
    (2205.14135): in place of 5 a s it keeps one fp32 number per query and head, besides q, k, v and
    the output. Over cp, that is of a ring; dropout gathers all keys. This is eager execution;
    torch.compile keeps as much or less.

    Raises ValueError for experts, of which the router decides.
    """
    if c.num_experts:
        raise ValueError(f"num_experts ({c.num_experts}): what experts keep depends on the router")
    e = element_bytes
    h = c.hidden_size
    tokens = batch * sequence_length / cp
    stream = 1 / tp if sequence_parallel else 1.0
    if recompute == "full":
        return tokens * e * h * stream
    statistics = 8 if c.norm == "layernorm" else 4
    # inputs of norms and of columns, a mask
    outside = 2 * (2 * e * h + statistics + (h if c.dropout else 0))
    heads, kv_heads = c.num_attention_heads / tp, _kv_heads(c, tp)
    q, k = heads * c.head_dim, kv_heads * c.head_dim
    inside = e * (q + 2 * k) + e * q  # q, k, v; the input of the output projection
    if c.qk_norm:
        inside += e * (q + k) + 4 * (heads + kv_heads)
    if recompute == "none" and c.dropout:  # k, v once per query head; then eq. 1's 5 a s
        inside += e * (2 * q * cp - 2 * k) + (2 * e + 1) * heads * sequence_length
    elif recompute == "none":
        inside += 4 * heads
    width = c.intermediate_size / tp
    # gated: act(gate), up, and their product; relu keeps its result
    kept = (3 if c.gated else 1) + (0 if c.activation == "relu" else 1)
    return tokens * (stream * outside + inside + e * kept * width)


def _kv_heads(c: ModelConfig, tp: int) -> float:
    """Key-value heads that a rank multiplies and attends to; where tp cuts a group of queries
    unevenly, one for each query.
    """
    if c.num_key_value_heads % tp == 0:
        return c.num_key_value_heads / tp
    heads = c.num_attention_heads / tp
    return 1 if c.num_attention_heads // c.num_key_value_heads % heads == 0 else heads


def _mean_keys(length: int, window: int | None) -> float:
    w = min(length, window or length)
    return (w * (w + 1) / 2 + (length - w) * w) / length
