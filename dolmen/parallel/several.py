"""Adapters of several names beside one weight: each token of a forward has one of them, or none
(Punica, 2310.18547; S-LoRA, 2311.03285).

    y = x W^T                                     of all tokens together, W as it lies: laid out,
                                                  in eight bits
    y[own] += (x[own] A_n^T) B_n^T                of each adapter n that a token has; `own` are the
                                                  tokens that have it, B_n has its scale in it
    y[own] *= g_n                                 of DoRA, g_n = m_n / |W + B_n A_n| [out]
    y += b

Nothing is merged, and each has a rank of its own: what a forward costs more is that of the adapters
that its tokens have. Over tp they lie as one does (tensor.py), so nothing more is sent. For
generation: no gradient is kept.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from jaxtyping import Float, Int64
from torch import Tensor

from dolmen.core.device import send


class Pair(NamedTuple):
    """One adapter beside one weight, as this rank multiplies it."""

    down: Float[Tensor, "rank in"]
    """A."""
    up: Float[Tensor, "out rank"]
    """B, times the scale of the adapter."""
    gain: Float[Tensor, " out"] | None = None
    """Of DoRA, what its outputs are multiplied by."""

    def cut(self, mine: Callable[[Tensor], Tensor]) -> "Pair":
        """With those rows of outputs that `mine` takes."""
        return Pair(self.down, mine(self.up), None if self.gain is None else mine(self.gain))


class Segment(NamedTuple):
    """Tokens of a forward that have the same adapter."""

    name: str
    tokens: Int64[Tensor, " own"] | None
    """Their indices; None: all of them."""


@dataclass
class Turn:
    """Which tokens of the forward at hand have which adapter: said before it begins by who knows
    whose they are, and read by every product. The one way from the texts to the products.
    """

    segments: Sequence[Segment] = ()


def segments(
    names: Sequence[str | None], counts: Sequence[int], device: torch.device
) -> list[Segment]:
    """Of texts whose tokens follow one another: the adapter of each, and how many tokens of it
    there are.
    """
    own: dict[str, list[int]] = {}
    first = 0
    for name, count in zip(names, counts, strict=True):
        if name is not None:
            own.setdefault(name, []).extend(range(first, first + count))
        first += count
    return [
        Segment(name, None if len(index) == first else send(torch.tensor(index), device))
        for name, index in own.items()
    ]


class Several(NamedTuple):
    """The adapters beside one weight, by their names, and who has which."""

    pairs: Mapping[str, Pair]
    """Of those that adapt this weight."""
    turn: Turn

    def cut(self, mine: Callable[[Tensor], Tensor]) -> "Several":
        """See `Pair.cut`."""
        return Several({name: pair.cut(mine) for name, pair in self.pairs.items()}, self.turn)

    def added(
        self, y: Float[Tensor, "tokens out"], x: Float[Tensor, "tokens in"]
    ) -> Float[Tensor, "tokens out"]:
        """y, the product of x just made, without its bias, with what each token's adapter makes of
        it: in y's memory.
        """
        for name, own in self.turn.segments:
            pair = self.pairs.get(name)
            if pair is None:
                continue
            low = (x if own is None else x[own]) @ pair.down.t()
            if pair.gain is not None:
                whole = (y if own is None else y[own]).addmm(low, pair.up.t()) * pair.gain
                y = whole if own is None else y.index_copy_(0, own, whole)
            elif own is None:
                y.addmm_(low, pair.up.t())
            else:
                y.index_add_(0, own, low @ pair.up.t())
        return y
