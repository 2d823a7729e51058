"""Options of exact numerics (--train.numerics exact), and the leaves that its sums are made of. No
torch.

    leaf                 smallest product or sum that is handed to a library: which ones is a
                         function of the model and of recorded limits, never of the layout
    tree                 leaves are added neighbours first (core/reduction.py); a rank holds whole
                         subtrees
    invariant operator   its bits do not depend on the number of rows and columns, on alignment,
                         storage order or threads (ops/invariant.py)

A sum over heads, over the feed-forward width or over the vocabulary has `tp` leaves; a sum over
tokens has one per sequence, and one per `tokens` / `tp` tokens where sequence parallelism cuts a
sequence.
"""

import math
from dataclasses import dataclass
from typing import Literal

from dolmen.core.config import config


@config("train.exact")
class ExactConfig:
    """Limits of exact numerics."""

    tp: Literal[1, 2, 4, 8, 16, 32, 64] = 8
    """Largest --layout.tp whose runs have the same bits. It has to divide heads, key-value heads
    and widths of the model, and another limit gives other bits.
    """


@dataclass(frozen=True)
class Exact:
    """Leaves of the sums of a run with exact numerics."""

    tp: int
    """Leaves of a sum over heads, feed-forward width or vocabulary: the largest tp, a power of
    two.
    """
    tokens: int
    """Tokens of a sequence."""

    @property
    def token_leaf(self) -> int:
        """Tokens of a leaf where sequence parallelism may split a sequence: over as many ranks as
        both `tp` and the sequence are divisible by.
        """
        return self.tokens // math.gcd(self.tokens, self.tp)

    def block(self, vocab_size: int) -> int:
        """Rows of the vocabulary in a leaf; the last leaves may have fewer, or none."""
        return -(-vocab_size // self.tp)
