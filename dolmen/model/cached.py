"""What the model asks of a cache of keys and values; dolmen/serving/cache.py is one.

A forward that reads into a cache is of one sequence, in which the new tokens of every text follow
one another. All that is token-wise knows nothing of texts, and a mixer hands its queries to the
cache, which knows whose they are.
"""

from collections.abc import Callable, Sequence
from typing import Protocol, runtime_checkable

from jaxtyping import Float, Int64
from torch import Tensor

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
