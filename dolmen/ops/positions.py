"""Position ids: what rope and learned tables take for a token's place. They are made where a batch
is, and each layer is given what follows from them; of a batch without any, a token's is its index
in the sequence.

One stream begins anew with each document. Of two (GLM, 2103.10360, section 2.3, as ChatGLM-6B reads
them) the first says where in the prefix a token is, and stands at its last token behind it; the
second counts from there:

    a prefix a b c, and d e f     a  b  c  d  e  f
    first stream                  0  1  2  2  2  2
    second                        0  0  0  1  2  3
"""

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from jaxtyping import Int64
from torch import Tensor

from dolmen.core.device import send


@dataclass(frozen=True, eq=False)
class PositionIds:
    """Of the tokens of a batch."""

    ids: Int64[Tensor, "batch streams length"]
    longest: int
    """Tokens of a sequence that tables must have rows for (tree.Table), or more."""

    @staticmethod
    def of(ids: Int64[Tensor, "batch streams length"]) -> "PositionIds":
        """Of ids on the host."""
        largest = [max(map(max, stream.tolist())) for stream in ids.unbind(1)]
        return PositionIds(ids, max([largest[0] + 1, *largest[1:]]))

    def each(self, change: Callable[[Tensor], Tensor]) -> "PositionIds":
        """The same of what `change` makes of the ids."""
        return replace(self, ids=change(self.ids))

    def on(self, device: torch.device) -> "PositionIds":
        """The same on `device`; the host does not wait for it."""
        return self.each(lambda ids: send(ids, device))


def of_prefix(
    index: Int64[Tensor, "*tokens"], prefix: Int64[Tensor, "*tokens"]
) -> Int64[Tensor, "2 ..."]:
    """Both streams, of tokens at `index` in documents with prefixes of so many tokens."""
    return of_span(index, prefix, (prefix - 1).clamp(min=0), prefix)


def of_span(
    index: Int64[Tensor, "*tokens"],
    stay: Int64[Tensor, "*tokens"],
    at: Int64[Tensor, "*tokens"],
    begin: Int64[Tensor, "*tokens"],
) -> Int64[Tensor, "2 ..."]:
    """Both streams, of tokens at `index` in documents of these spans (model/tree/blanks.py)."""
    return torch.stack((torch.where(index < stay, index, at), (index - begin + 1).clamp(min=0)))
