"""What a block is: a mixer over tokens, a layer over features, norms, and how they are arranged
around the residual stream.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from itertools import groupby

from dolmen.model.tree.attention import Attention
from dolmen.model.tree.experts import Experts
from dolmen.model.tree.leaf import Leaves, Stream
from dolmen.model.tree.mlp import Mlp
from dolmen.model.tree.norm import Norm
from dolmen.model.tree.pre import Pre

Mixer = Attention
Arrangement = Pre


@dataclass(frozen=True)
class Block:
    mixer: Mixer
    mlp: Mlp | Experts
    norm: Norm
    """Of each of its norms; the arrangement says where they stand."""
    arrangement: Arrangement = Pre()

    def leaves(self, stream: Stream) -> Leaves:
        return self.arrangement.leaves(self, stream)


@dataclass(frozen=True)
class Run:
    """`blocks`, one after another, `repeat` times."""

    blocks: tuple[Block, ...]
    repeat: int


def runs_of(blocks: Iterable[Block]) -> tuple[Run, ...]:
    """Neighbours that are alike, as one."""
    return tuple(Run((block,), len(list(same))) for block, same in groupby(blocks))
