"""What a block is: a mixer over tokens, a layer over features, norms, and how they are arranged
around the residual stream.
"""

from dataclasses import dataclass

from dolmen.model.tree.attention import Attention
from dolmen.model.tree.experts import Experts
from dolmen.model.tree.mlp import Mlp
from dolmen.model.tree.norm import Norm


@dataclass(frozen=True)
class Pre:
    """x += mixer(norm x); x += mlp(norm x)."""


Mixer = Attention
Arrangement = Pre


@dataclass(frozen=True)
class Block:
    mixer: Mixer
    mlp: Mlp | Experts
    norm: Norm
    """Of each of its norms; the arrangement says where they stand."""
    arrangement: Arrangement = Pre()


@dataclass(frozen=True)
class Run:
    """`blocks`, one after another, `repeat` times."""

    blocks: tuple[Block, ...]
    repeat: int
