"""Cost of a model in closed form: parameters, FLOPs of a training step, and bytes of activations
that backward needs.
"""

from typing import Literal

from dolmen.model.spec import AttentionSpec, ModelSpec, MoESpec
from dolmen.model.spec.block import Mixer


def parameters(spec: ModelSpec) -> int:
    """Return the number of parameters; a tied head counts once."""
    return sum(param.elements for param in spec.params.values())


def trainable_parameters(spec: ModelSpec) -> int:
    """Return the number of parameters that are trained: with LoRA, those of the adapters."""
    return sum(param.elements for param in spec.params.values() if param.trained)


def training_flops_per_token(
    spec: ModelSpec, sequence_length: int, attention: Literal["causal", "full"] = "causal"
) -> float:
    """Return the FLOPs per token of forward and backward: 2 per multiply-add, backward twice
    forward, nothing for recomputation.

    Matrices: 6 FLOPs per element (4 if frozen, without a weight gradient); experts count as far as
    they compute the token, and an embedding only if it is tied to the head. Attention: 12 * heads *
    head_dim * keys per layer, where keys is the mean number a causal query sees, (sequence + 1) /
    2, or what a sliding window leaves of it. `attention` "full" counts as if every query saw the
    whole sequence, as torchtitan and PaLM do (2204.02311, appendix B: 6 N + 12 L H Q T; its N has
    the embedding too).
    """
    matrices = sum(
        param.products * (6.0 if param.trained else 4.0) for param in spec.params.values()
    )
    # `products` of a leaf counts experts as k / E, and tables as 0
    return matrices + attention_flops_per_token(spec, sequence_length, attention)


def attention_flops_per_token(
    spec: ModelSpec, sequence_length: int, attention: Literal["causal", "full"] = "causal"
) -> float:
    """Return the FLOPs per token of attention scores (q k^T, weighted sum of v), forward and
    backward, without projections. A query counts the keys that it sees on average, by mask and
    window; a bidirectional one, and with `attention` "full" each, counts the whole sequence.
    """

    def keys(mixer: Mixer) -> float:
        """Return the mean number of keys a query of this mixer sees."""
        if attention == "full" or mixer.mask == "both":
            return sequence_length
        return _mean_keys(sequence_length, mixer.window)

    mixers = [block.mixer for block in spec.blocks]
    return 6.0 * sum(mixer.products(keys(mixer)) for mixer in mixers)


def activation_bytes_per_layer(
    spec: ModelSpec,
    batch: int,
    sequence_length: int,
    *,
    dropout: float = 0.0,
    tp: int = 1,
    sequence_parallel: bool = False,
    recompute: str = "none",
    cp: int = 1,
    element_bytes: int = 2,
) -> float:
    """Return the bytes that a rank keeps of the first layer between forward and backward of a
    microbatch of `batch` sequences.

    Korthikanti et al. (2205.05198), eq. 1-6, for any widths: a GPT block with dropout, whose
    probabilities are materialised, keeps s b h (10 + 24 / t + 5 a s / h t), all of it / t under
    sequence parallelism; selective recomputation drops the last term and full keeps 2 s b h. Added
    to that is what the paper leaves out: the norms' fp32 statistics. Without dropout attention is
    fused (2205.14135): in place of 5 a s it keeps one fp32 number per query and head, besides q, k,
    v and the output. Over cp ring attention is assumed; with dropout all keys are gathered. This is
    for eager execution; torch.compile keeps as much or less.

    Raises ValueError for MoE layers, whose bytes depend on the routing, and for latent attention.
    """
    block = spec.blocks[0]
    if not isinstance(block.mixer, AttentionSpec):
        raise ValueError(
            f"{block.mixer.words}: activation memory is known only for plain attention"
        )
    if isinstance(block.mlp, MoESpec):
        raise ValueError(
            f"num_experts ({block.mlp.number}): activation memory of experts depends on the routing"
        )
    attention, mlp = block.mixer, block.mlp
    e = element_bytes
    h = spec.hidden_size
    tokens = batch * sequence_length / cp
    # part of the residual stream that a rank has
    stream = 1 / tp if sequence_parallel else 1.0
    # only the input of the layer
    if recompute == "full":
        return tokens * e * h * stream
    # fp32 rstd per token, and for LayerNorm the mean
    statistics = 8 if block.norm.kind == "layernorm" else 4
    around = block.arrangement
    outside = around.streams * e * h + around.norm_count * statistics
    outside += around.additions * h if dropout else 0  # masks
    # per rank
    heads, kv_heads = attention.heads / tp, _kv_heads(attention, tp)
    # numbers per token
    q, k = heads * attention.head_size, kv_heads * attention.head_size
    inside = e * (q + 2 * k) + e * q  # q, k, v; the input of the output projection
    if attention.qk_norm:
        width, norm_per_head = (attention.qk_norm_of == of for of in ("width", "each head"))
        per_head = 2 if attention.qk_norm.kind == "layernorm" else 1
        numbers = 2 if width else per_head * (heads + kv_heads)
        # what the weight of each head multiplies is kept too
        inside += (2 if norm_per_head else 1) * e * (q + k) + 4 * numbers
    # clamp keeps its input for the mask of its gradient
    if attention.clip is not None:
        inside += e * (q + 2 * k)
    if recompute == "none" and dropout:  # k, v once per query head; then eq. 1's 5 a s
        inside += e * (2 * q * cp - 2 * k) + (2 * e + 1) * heads * sequence_length
    elif recompute == "none":
        inside += 4 * heads
    width = mlp.size / tp
    # gated: act(gate), up, and their product; relu keeps its result
    saved = (3 if mlp.gated else 1) + (0 if mlp.activation == "relu" else 1)
    return tokens * (stream * outside + inside + e * saved * width)


def _kv_heads(attention: AttentionSpec, tp: int) -> float:
    """Return the number of key-value heads that a tp rank computes: kv_heads / tp where tp divides
    them, else 1 if all query heads of the rank use the same one, else one per query head.
    """
    if attention.kv_heads % tp == 0:
        return attention.kv_heads / tp
    heads = attention.heads / tp
    return 1 if attention.heads // attention.kv_heads % heads == 0 else heads


def _mean_keys(length: int, window: int | None) -> float:
    """Return the mean over the positions of a sequence of `length` of the keys a causal query sees,
    at most `window` (None: no limit).
    """
    w = min(length, window or length)
    # the first w queries see 1, 2, ..., w keys, all later ones w
    return (w * (w + 1) / 2 + (length - w) * w) / length
