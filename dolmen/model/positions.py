"""What rope turns a token's heads by, and what ALiBi adds to their scores, as a component of the
tree says it (dolmen/model/spec/positions.py).
"""

from dataclasses import replace

import torch
from jaxtyping import Float, Int
from torch import Tensor

from dolmen.core.device import scalar_tensor
from dolmen.model import spec
from dolmen.model.component import Where
from dolmen.model.spec.positions import Relative, Scaling
from dolmen.ops import rope
from dolmen.ops.attention import score_bias

SCALED = {
    type(None): lambda inv, r: inv,
    spec.Linear: lambda inv, r: rope.linear(inv, r.scaling.factor),
    spec.Llama3: lambda inv, r: rope.llama3(
        inv,
        r.scaling.factor,
        r.scaling.low_freq_factor,
        r.scaling.high_freq_factor,
        r.scaling.original_max_position_embeddings,
    ),
    spec.Yarn: lambda inv, r: rope.yarn(
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
    spec.LongRope: lambda inv, r, n: rope.longrope(
        inv, r.scaling.short, r.scaling.long, n > r.scaling.original_max_position_embeddings
    ),
    spec.Dynamic: lambda inv, r, n: rope.dynamic(
        inv, r.scaling.factor, n / r.scaling.original_max_position_embeddings
    ),
    spec.Evaluated: lambda inv, r, n: (
        rope.by_powers(inv, n / r.scaling.original_max_position_embeddings)
        if r.scaling.ntk
        else inv
    ),
}


def frequencies(
    r: spec.Rope,
    device: torch.device | None = None,
    dtype: torch.dtype = torch.float32,
    lengths: Int[Tensor, "*tokens"] | None = None,
) -> Float[Tensor, "*_ half"]:
    """Of `dtype`: the angle per position of each pair, of one stream; where the length of a text
    tells, of each token in one of these `lengths`. None: of short ones.
    """
    if r.halved:
        inv = rope.inverse_frequencies(r.size // r.streams, r.theta, device).half().to(dtype)
    else:
        inv = rope.inverse_frequencies(r.size // r.streams, r.theta, device, dtype)
    if r.by_length:
        if lengths is None:
            lengths = scalar_tensor(1, torch.int64, inv.device)[None, None]
        return BY_LENGTH[type(r.scaling)](inv, r, lengths)
    return SCALED[type(r.scaling)](inv, r)


def tables(
    p: Relative | None,
    heads: int,
    positions: Int[Tensor, "streams b s"],
    dtype: torch.dtype,
    lengths: Int[Tensor, "#b #s"] | None = None,
    training: bool = False,
) -> Where:
    """Of `positions`, those of each sequence, or of all (b = 1), for layers of so many heads; cos
    and sin in `dtype`, times the attention factor of rope, stream after stream. `lengths`: of texts
    that have each token, where they tell something; in `training` not all of it.
    """
    match p:
        case spec.Rope(scaling=spec.Evaluated()) if training:
            return tables(replace(p, scaling=None), heads, positions, dtype)
        case spec.Rope():
            inv = frequencies(p, positions.device, dtype, lengths)
            cos, sin = rope.tables(positions[0], inv)
            if p.streams == 2:
                second = rope.tables(positions[1], inv)
                cos, sin = (torch.cat(t, -1) for t in zip((cos, sin), second, strict=True))
            factor = p.attention_factor
            if factor != 1:
                cos, sin = cos * factor, sin * factor
            return Where(cos, sin, growth=_growth(p.scaling, positions[0], dtype))
        case spec.Steps():
            return Where(steps=score_bias.alibi_key_bias(heads, positions[0]))
    return Where()


def _growth(
    scaling: Scaling | None, positions: Int[Tensor, "b s"], dtype: torch.dtype
) -> Float[Tensor, "b s 1 1"] | None:
    """What queries at `positions` are multiplied by; None: by nothing."""
    match scaling:
        case spec.Evaluated(original, _, True):
            return rope.log_n(positions, original).to(dtype)[..., None, None]
    return None


def pairs(p: Relative | None) -> tuple[bool, int]:
    """Whether the pairs that rope turns are neighbours, and by how many streams it does."""
    match p:
        case spec.Rope():
            return p.interleaved, p.streams
    return False, 1


def slopes(p: Relative | None, heads: int) -> tuple[float, ...] | None:
    """By which the scores of each of `heads` heads grow with the key's index; None: they do not."""
    match p:
        case spec.Alibi():
            return score_bias.alibi_slopes(heads)
    return None
