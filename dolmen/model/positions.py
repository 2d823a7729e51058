"""What rope turns a token's heads by, as a component of the tree says it
(dolmen/model/tree/positions.py).
"""

import torch
from torch import Tensor

from dolmen.model import tree
from dolmen.ops import rope

SCALED = {
    type(None): lambda inv, scaling: inv,
    tree.Linear: lambda inv, scaling: rope.linear(inv, scaling.factor),
    tree.Llama3: lambda inv, scaling: rope.llama3(
        inv,
        scaling.factor,
        scaling.low_freq_factor,
        scaling.high_freq_factor,
        scaling.original_max_position_embeddings,
    ),
}


def frequencies(
    r: tree.Rope, device: torch.device | None = None, dtype: torch.dtype = torch.float32
) -> Tensor:
    """[size / 2] of `dtype`: the angle per position of each pair."""
    inv = rope.inverse_frequencies(r.size, r.theta, device, dtype)
    return SCALED[type(r.scaling)](inv, r.scaling)


def tables(
    r: tree.Rope | None, positions: Tensor, dtype: torch.dtype
) -> tuple[Tensor | None, Tensor | None]:
    """cos and sin of `positions` [b or 1, s], in `dtype`; Nones where nothing is turned."""
    if r is None:
        return None, None
    return rope.tables(positions, frequencies(r, positions.device, dtype))
