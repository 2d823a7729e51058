"""Interfaces of a block's modules: how they are built, their inputs, and the KV cache.

What the model asks of a cache of keys and values; dolmen/serving/kv_cache.py is one.

A forward that reads into a cache is of one sequence, in which the new tokens of every text follow
one another. All that is token-wise knows nothing of texts, and a mixer hands its queries to the
cache, which knows whose they are.

What the layers are given of a microbatch beside the residual stream.

What every module that computes a component of a block has, and is made with.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol, runtime_checkable

import torch
from jaxtyping import Float, Float64, Int64
from torch import Tensor, nn

from dolmen.core import device
from dolmen.model.replay import Routes
from dolmen.model.split import Split
from dolmen.model.training import Training
from dolmen.ops.attention import Attend, Documents
from dolmen.ops.elementwise import Noise
from dolmen.parallel.data import Unit

OfPages = Callable[..., Tensor]
"""of_pages(q [texts, heads, size], *kept [pages, kv_heads, page, ...], pages: Pages | Alone) ->
[texts, heads, value size]: one query of each text.
"""
OfTexts = Callable[..., Tensor]
"""of_texts(q [texts, new, heads, size], *kept [texts, length, kv_heads, ...], documents: Documents
| None) -> [texts, new, heads, value size]: the last `new` of all `length` tokens of texts that are
equally long, and what prefixes they have.
"""


@runtime_checkable
class LayerCache(Protocol):
    """Of one layer and one forward."""

    def attended(
        self,
        q: Float[Tensor, "1 tokens heads size"],
        new: Sequence[Float[Tensor, "1 tokens kv_heads _"]],
        of_pages: OfPages,
        of_texts: OfTexts,
    ) -> Float[Tensor, "tokens heads value_size"]:
        """Keep what the mixer has `new` of each token, such as keys and values, and attend to what
        is kept of the same text, by either function. No autograd.
        """
        ...


@runtime_checkable
class Cached(Protocol):
    """Of one forward: its tokens, and each layer."""

    @property
    def positions(self) -> Int64[Tensor, "streams 1 tokens"]:
        """Of each token in its own text."""
        ...

    @property
    def lengths(self) -> Int64[Tensor, "1 tokens"] | None:
        """Of each token, how long its text is taken to be; None where no layer asks."""
        ...

    @property
    def longest(self) -> int:
        """Tokens of the longest text, with those that are read."""
        ...

    @property
    def layers(self) -> Sequence[LayerCache]: ...


class Balance(NamedTuple):
    """How the auxiliary losses of one layer of experts enter the gradient, and what is counted."""

    scale: Float[Tensor, ""]
    """What the losses of one sequence are multiplied by."""
    tally: Float64[Tensor, " experts+2"]
    """Zeros. Its gradient is what backward counted: the pairs of each expert, and the
    sums of balance and z loss over sequences. A gradient adds up over microbatches by itself, and
    counts none twice that is computed again.
    """


class Where(NamedTuple):
    """What a layer needs to know of its tokens' positions, those of each sequence or of all (batch
    1).
    """

    cos: Float[Tensor, "batch length 1 half"] | None = None
    """What rope turns each position by, of half its size; None where it turns nothing."""
    sin: Float[Tensor, "batch length 1 half"] | None = None
    steps: Float[Tensor, "batch length heads"] | None = None
    """What products with each key grow by; None: by nothing."""
    growth: Float[Tensor, "batch length 1 1"] | None = None
    """What queries are multiplied by; None: by nothing."""


class Given(NamedTuple):
    """Of this rank of cp's part of the sequences; `length` tokens of each."""

    batch: int
    """Sequences of the microbatch."""
    cos: Float[Tensor, "batch length 1 half"] | None = None
    """As in Where, of the layer that is given this."""
    sin: Float[Tensor, "batch length 1 half"] | None = None
    steps: Float[Tensor, "batch length heads"] | None = None
    growth: Float[Tensor, "batch length 1 1"] | None = None
    documents: Documents | None = None
    """Of this rank's tokens; None: each sequence is one, without a prefix."""
    noise: Noise | None = None
    """What dropout needs, of the layer that is given this; None where there is none."""
    rows: Int64[Tensor, " here"] | None = None
    """Of each token of the residual stream on this rank, its index in the global batch: for
    dropout.
    """
    balance: Balance | None = None
    """Of a layer of experts; None: no gradient is wanted."""
    chosen: Int64[Tensor, "n k"] | None = None
    """Of a layer of experts, those that each token goes to; None: its router says."""
    told: Callable[[Tensor], None] | None = None
    """Of a layer of experts: is told which each token goes to."""

    def of_layer(
        self, number: int, where: Where, balance: Balance | None, routes: Routes | None = None
    ) -> "Given":
        """The same for layer `number`, which knows its positions as `where`."""
        here = self._replace(**where._asdict(), balance=balance)
        if routes is not None:
            here = here._replace(chosen=routes.chosen.get(number), told=routes.listener(number))
        if self.noise is None:
            return here
        layer = device.number(number, torch.int64, self.noise.key.device)
        return here._replace(noise=self.noise._replace(layer=layer))


@dataclass(frozen=True)
class Setting:
    """Where a component stands: what its module needs to know beside it and its leaves."""

    layer: int
    split: Split
    training: Training


class Component(nn.Module):
    """A mixer, x [batch * length / cp, hidden] I@tp (or S(0)@tp) -> the same, by `forward(x, given,
    cache)`; or an mlp, by `forward(x, given)`.
    """

    @property
    def static(self) -> bool:
        """Whether no shape depends on the values of tensors, and nothing is read from the
        device.
        """
        return True

    @property
    def balance_bias(self) -> Float[Tensor, " experts"] | None:
        """Of its router, where a bias balances experts."""
        return None

    @staticmethod
    def attend(mixer: Any) -> Attend:
        """What attention a mixer of the tree is: of any microbatch, and all heads of the model."""
        raise NotImplementedError

    def units(self) -> list[Unit]:
        """What is gathered and reduced apart from the rest of its block, in the order of use."""
        return []
