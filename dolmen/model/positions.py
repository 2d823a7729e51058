"""What rope turns a token's heads by, and what ALiBi adds to their scores, as a component of the
tree says it (dolmen/model/tree/positions.py).
"""

import torch
from jaxtyping import Float, Int
from torch import Tensor

from dolmen.model import tree
from dolmen.model.given import Where
from dolmen.model.tree.positions import Relative
from dolmen.ops import rope
from dolmen.ops.attention import alibi

SCALED = {
    type(None): lambda inv, r: inv,
    tree.Linear: lambda inv, r: rope.linear(inv, r.scaling.factor),
    tree.Llama3: lambda inv, r: rope.llama3(
        inv,
        r.scaling.factor,
        r.scaling.low_freq_factor,
        r.scaling.high_freq_factor,
        r.scaling.original_max_position_embeddings,
    ),
    tree.Yarn: lambda inv, r: rope.yarn(
        inv,
        r.theta,
        r.scaling.factor,
        r.scaling.original_max_position_embeddings,
        r.scaling.beta_fast,
        r.scaling.beta_slow,
        r.scaling.truncate,
    ),
}


def frequencies(
    r: tree.Rope, device: torch.device | None = None, dtype: torch.dtype = torch.float32
) -> Float[Tensor, " {r.size}//(2*{r.streams})"]:
    """Of `dtype`: the angle per position of each pair, of one stream."""
    if r.halved:
        inv = rope.inverse_frequencies(r.size // r.streams, r.theta, device).half().to(dtype)
    else:
        inv = rope.inverse_frequencies(r.size // r.streams, r.theta, device, dtype)
    return SCALED[type(r.scaling)](inv, r)


def tables(
    p: Relative | None, heads: int, positions: Int[Tensor, "streams b s"], dtype: torch.dtype
) -> Where:
    """Of `positions`, those of each sequence, or of all (b = 1), for layers of so many heads; cos
    and sin in `dtype`, times the attention factor of rope, stream after stream.
    """
    match p:
        case tree.Rope():
            inv = frequencies(p, positions.device, dtype)
            cos, sin = rope.tables(positions[0], inv)
            if p.streams == 2:
                second = rope.tables(positions[1], inv)
                cos, sin = (torch.cat(t, -1) for t in zip((cos, sin), second, strict=True))
            factor = p.attention_factor
            return Where(cos, sin) if factor == 1 else Where(cos * factor, sin * factor)
        case tree.Steps():
            return Where(steps=alibi.steps(heads, positions[0]))
    return Where()


def pairs(p: Relative | None) -> tuple[bool, int]:
    """Whether the pairs that rope turns are neighbours, and by how many streams it does."""
    match p:
        case tree.Rope():
            return p.interleaved, p.streams
    return False, 1


def slopes(p: Relative | None, heads: int) -> tuple[float, ...] | None:
    """By which the scores of each of `heads` heads grow with the key's index; None: they do not."""
    match p:
        case tree.Alibi():
            return alibi.slopes(heads)
    return None
