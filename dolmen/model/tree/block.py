"""What a block is: a mixer over tokens, a layer over features, norms, and how they are arranged
around the residual stream.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby

from dolmen.model.tree.arrangement import Arrangement, Sequential
from dolmen.model.tree.attention import Attention
from dolmen.model.tree.experts import Experts
from dolmen.model.tree.latent import LatentAttention
from dolmen.model.tree.leaf import Leaves, Stream, within
from dolmen.model.tree.mlp import Mlp
from dolmen.model.tree.norm import Norm

Mixer = Attention | LatentAttention


@dataclass(frozen=True)
class Block:
    """One layer, which adds to the residual stream what its mixer and its mlp make of it."""

    mixer: Mixer
    mlp: Mlp | Experts
    norm: Norm
    """Of each of its norms; the arrangement says where they stand."""
    arrangement: Arrangement = Sequential()

    def leaves(self, stream: Stream) -> Leaves:
        """Parameters by name, in the order of the arrangement."""
        norm = self.norm.leaves(stream.hidden_size)
        branches = {"attn": self.mixer.leaves(stream), "mlp": self.mlp.leaves(stream)}
        leaves: Leaves = {}
        for name in self.arrangement.modules:
            leaves |= within(name, branches.get(name, norm))
        return leaves


@dataclass(frozen=True)
class Run:
    """`blocks`, one after another, `repeat` times."""

    blocks: tuple[Block, ...]
    repeat: int


def runs_of(blocks: Sequence[Block]) -> tuple[Run, ...]:
    """The one way to say these layers: the shortest pattern that makes all of them if repeated, and
    otherwise equal neighbours together.
    """
    layers = tuple(blocks)
    for period in range(1, len(layers) // 2 + 1):
        if len(layers) % period == 0 and layers[period:] == layers[:-period]:
            return (Run(layers[:period], len(layers) // period),)
    return tuple(Run((block,), len(list(same))) for block, same in groupby(layers))
