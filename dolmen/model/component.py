"""Interfaces of a block's modules: how they are built, their inputs, and the KV cache.

What the model asks of a cache of keys and values; dolmen/serving/kv_cache.py is one.

A forward that reads into a cache is of one sequence, in which the new tokens of every text follow
one another. All that is token-wise knows nothing of texts, and a mixer hands its queries to the
cache, which knows whose they are.

What the layers are given of a microbatch beside the residual stream.

What every module that computes a component of a block has, and is made with.


A branch of the residual stream that is one column-row pair of tensor parallelism: x enters by
column-parallel products, and what comes of them leaves by a row-parallel one.

    x -> enter -> columns -> inner -> row -> leave -> y

Branches of one x, or whose results are added, enter and leave together: one collective each way
for all of them, where each by itself would have its own.

"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, NamedTuple, Protocol, runtime_checkable

import torch
from jaxtyping import Float, Float64, Int64
from torch import Tensor, nn

from dolmen.core import device
from dolmen.model.layers import Row
from dolmen.model.routing_replay import Routes
from dolmen.model.split import Split
from dolmen.model.training import Training
from dolmen.ops.attention import Attend, Documents
from dolmen.ops.elementwise import Noise
from dolmen.parallel import tensor
from dolmen.parallel.data import Unit
from dolmen.parallel.tensor import Linear, TensorParallel

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
        layer = device.scalar_tensor(number, torch.int64, self.noise.key.device)
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


class Passing(nn.Module):
    """Hands on what it is given: a place for hooks, where what passes is no module's result."""

    def forward(self, x: Any) -> Any:
        return x


class Branch(Component):
    """A mixer or an mlp of dense matrices. Hooks of `products` and `result` see what `inner` is
    given and what it makes, however the branch is arranged.
    """

    tp: TensorParallel

    def __init__(self):
        super().__init__()
        self.products, self.result = Passing(), Passing()

    @property
    def columns(self) -> list[Linear]:
        """What each product of x multiplies by, weight [out_i / tp, hidden]."""
        raise NotImplementedError

    @property
    def row(self) -> Row:
        """What multiplies the result of `inner`, S(1)@tp, and sums it over tp."""
        raise NotImplementedError

    def inner(
        self,
        products: Sequence[Float[Tensor, "tokens _"]],
        given: Given,
        cache: LayerCache | None = None,
    ) -> Float[Tensor, "tokens _"]:
        """The products of x with the columns, each [tokens, out_i / tp] S(1)@tp -> [tokens, inputs
        of the row / tp] S(1)@tp.
        """
        raise NotImplementedError

    def between(
        self,
        products: Sequence[Float[Tensor, "tokens _"]],
        given: Given,
        cache: LayerCache | None = None,
    ) -> Float[Tensor, "tokens _"]:
        """`inner`, seen by hooks."""
        return self.result(self.inner(self.products(products), given, cache))

    def forward(
        self, x: Float[Tensor, "here hidden"], given: Given, cache: LayerCache | None = None
    ) -> Float[Tensor, "here hidden"]:
        (products,) = enter([self], x)
        return self.row(self.between(products, given, cache))

    def part(
        self, x: Float[Tensor, "tokens hidden"], given: Given
    ) -> Float[Tensor, "tokens hidden"]:
        """Of x R@tp, which has entered already -> P@tp, to leave with other sums; without the bias
        of the row.
        """
        y = self.between(tensor.products(x, self.columns, self.tp), given)
        return tensor.part_of_rows(y, self.row.linear(), self.tp)


def enter(
    branches: Sequence[Branch], x: Float[Tensor, "here hidden"]
) -> list[tuple[Float[Tensor, "tokens _"], ...]]:
    """The products of x, I@tp (or S(0)@tp), with the columns of each branch."""
    columns = [branch.columns for branch in branches]
    products = tensor.columns(x, [one for ones in columns for one in ones], branches[0].tp)
    ends = list(accumulate(map(len, columns)))
    return [products[end - len(ones) : end] for ones, end in zip(columns, ends, strict=True)]


def leave(
    branches: Sequence[Branch], results: Sequence[Float[Tensor, "tokens _"]]
) -> Float[Tensor, "here hidden"]:
    """The sum of the branches, I@tp (or S(0)@tp), of the result of each one's `inner`."""
    return tensor.rows(results, [branch.row.linear() for branch in branches], branches[0].tp)
