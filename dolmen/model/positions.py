"""Rope's cos and sin, and ALiBi's biases, as the specs in dolmen/model/spec/positions.py say.

A layer's positions are one value, `PositionInputs`, computed once per forward for each distinct
(spec, heads) and shared by all layers that have it. Angles are computed in fp32 or wider: at
position 30,000 a bf16 angle is off by up to 64 radians.

    scaling    frequencies depend on                        computed
    linear, llama3, yarn    the config only                 once per forward (SCALED)
    dynamic, longrope, qwen the length of each sequence     per token's sequence (BY_LENGTH)

With a KV cache, keys are not rotated again: a sequence continues with the frequencies of its
prompt's length. LongRoPE has only two sets, so a sequence that grows past the original context is
prefilled again once (`reprefill_beyond`).
"""

from dataclasses import replace

import torch
from jaxtyping import Float, Int
from torch import Tensor

from dolmen.core.device import scalar_tensor
from dolmen.model import spec
from dolmen.model.component import PositionInputs
from dolmen.model.spec.positions import AttentionPositions, RopeScaling
from dolmen.ops import rope
from dolmen.ops.attention import score_bias

SCALED = {
    type(None): lambda inv, r: inv,
    spec.LinearScaling: lambda inv, r: rope.linear(inv, r.scaling.factor),
    spec.Llama3Scaling: lambda inv, r: rope.llama3(
        inv,
        r.scaling.factor,
        r.scaling.low_freq_factor,
        r.scaling.high_freq_factor,
        r.scaling.original_max_position_embeddings,
    ),
    spec.YarnScaling: lambda inv, r: rope.yarn(
        inv,
        r.theta,
        r.scaling.factor,
        r.scaling.original_max_position_embeddings,
        r.scaling.beta_fast,
        r.scaling.beta_slow,
        r.scaling.truncate,
    ),
}
# of scalings by the length n of a text -> (frequencies, rope, n of each token)
BY_LENGTH = {
    spec.LongRopeScaling: lambda inv, r, n: rope.longrope(
        inv, r.scaling.short, r.scaling.long, n > r.scaling.original_max_position_embeddings
    ),
    spec.DynamicScaling: lambda inv, r, n: rope.dynamic(
        inv, r.scaling.factor, n / r.scaling.original_max_position_embeddings
    ),
    spec.QwenScaling: lambda inv, r, n: (
        rope.dynamic_by_powers(inv, n / r.scaling.original_max_position_embeddings)
        if r.scaling.ntk
        else inv
    ),
}


def frequencies(
    r: spec.RopeSpec,
    device: torch.device | None = None,
    dtype: torch.dtype = torch.float32,
    lengths: Int[Tensor, "*tokens"] | None = None,
) -> Float[Tensor, "*_ half"]:
    """Return the rope frequencies, the angle per position of each pair, in `dtype`, for one
    position stream: [half], or, for length-dependent scalings, [*tokens, half] for sequences of
    `lengths` (None: short ones).
    """
    if r.halved:
        # ChatGLM-6B and GLM-130B were trained with fp16 frequencies
        inv = rope.inverse_frequencies(r.size // r.streams, r.theta, device).half().to(dtype)
    else:
        inv = rope.inverse_frequencies(r.size // r.streams, r.theta, device, dtype)
    if r.by_length:
        if lengths is None:
            # 1: not longer than any original length
            lengths = scalar_tensor(1, torch.int64, inv.device)[None, None]
        return BY_LENGTH[type(r.scaling)](inv, r, lengths)
    return SCALED[type(r.scaling)](inv, r)


def tables(
    p: AttentionPositions | None,
    heads: int,
    positions: Int[Tensor, "streams b s"],
    dtype: torch.dtype,
    lengths: Int[Tensor, "#b #s"] | None = None,
    training: bool = False,
) -> PositionInputs:
    """Return the position inputs of a layer of `heads` heads with positions spec `p`: rope's cos
    and sin in `dtype`, times the attention factor, streams concatenated; or Falcon's ALiBi key
    biases; or empty (no positions, and ALiBi by slopes).

    `positions` are per sequence, or of all (b = 1). `lengths`: length of each token's sequence, for
    scalings that depend on it. `training` turns inference-only scaling (Qwen) off.
    """
    match p:
        case spec.RopeSpec(scaling=spec.QwenScaling()) if training:
            return tables(replace(p, scaling=None), heads, positions, dtype)
        case spec.RopeSpec():
            inv = frequencies(p, positions.device, dtype, lengths)
            cos, sin = rope.tables(positions[0], inv)
            if p.streams == 2:
                # ChatGLM-6B: each half of a head is rotated by its own stream
                second = rope.tables(positions[1], inv)
                cos, sin = (torch.cat(t, -1) for t in zip((cos, sin), second, strict=True))
            # on cos and sin, so that queries and keys are each scaled once
            factor = p.attention_factor
            if factor != 1:
                cos, sin = cos * factor, sin * factor
            return PositionInputs(cos, sin, growth=_query_scale(p.scaling, positions[0], dtype))
        case spec.FalconAlibiSpec():
            # plain ALiBi needs no tables: its slopes go to the kernel (`slopes`)
            return PositionInputs(steps=score_bias.alibi_key_bias(heads, positions[0]))
    return PositionInputs()


def _query_scale(
    scaling: RopeScaling | None, positions: Int[Tensor, "b s"], dtype: torch.dtype
) -> Float[Tensor, "b s 1 1"] | None:
    """Return Qwen's log-n factor of the queries at `positions`; None where the scaling has none
    (factor 1).
    """
    match scaling:
        case spec.QwenScaling(original, _, True):
            return rope.log_n(positions, original).to(dtype)[..., None, None]
    return None


def pairs(p: AttentionPositions | None) -> tuple[bool, int]:
    """Return (True if rope's pairs are neighbours (2i, 2i + 1), number of position streams);
    (False, 1) without rope.
    """
    match p:
        case spec.RopeSpec():
            return p.interleaved, p.streams
    return False, 1


def slopes(p: AttentionPositions | None, heads: int) -> tuple[float, ...] | None:
    """Return the ALiBi slope of each of `heads` heads; None if the positions are not ALiBi."""
    match p:
        case spec.AlibiSpec():
            return score_bias.alibi_slopes(heads)
    return None
