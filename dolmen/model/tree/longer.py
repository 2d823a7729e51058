"""Rope that depends on how long the text is: within the context that a model was first trained at
its tokens are turned in one way, and in a longer text all of them in another.

The length that counts is that of the whole sequence. Of a text that is written with a cache it is
that of its prompt: keys that lie there are not turned again, so what is generated goes on as it
began, as in Qwen's own code. What has two ways alone is read again, once, where it comes to the
other (`again_beyond`), as in Phi-3's.
"""

from dataclasses import dataclass
from typing import ClassVar


@dataclass(frozen=True)
class LongRope:
    """The wavelength of each pair times a factor of its own (Ding et al., 2402.13753)."""

    attention_factor: float
    """What cos and sin are multiplied by, however long the text is."""
    short: tuple[float, ...]
    """Factors of texts of at most the original length."""
    long: tuple[float, ...]
    original_max_position_embeddings: int

    @property
    def again_beyond(self) -> int | None:
        """Tokens that a text is turned otherwise beyond, all of it; None: there is no one such."""
        return self.original_max_position_embeddings


@dataclass(frozen=True)
class Dynamic:
    """The base grows with the text, so that the longest wavelength does as by `factor` (NTK-aware
    scaling, which Peng et al., 2309.00071, section 3.1, describe): of n tokens it is multiplied by
    (factor n / original - factor + 1)^(size / (size - 2)), if n is over the original length.
    """

    attention_factor: ClassVar[float] = 1.0
    again_beyond: ClassVar[None] = None
    factor: float
    original_max_position_embeddings: int


@dataclass(frozen=True)
class Evaluated:
    """Qwen's (2309.16609, section 2.3), which acts where nothing is trained. Of a text of n tokens
    the base is multiplied by a^(size / (size - 2)), a = 2^ceil(log2(n / original) + 1) - 1, or 1.
    """

    attention_factor: ClassVar[float] = 1.0
    again_beyond: ClassVar[None] = None
    original_max_position_embeddings: int
    ntk: bool = True
    """Whether the base is multiplied."""
    log_n: bool = True
    """Whether the query of token i, counted from 1, is multiplied by log(i) / log(original), if i
    is over the original length.
    """


ByLength = LongRope | Dynamic | Evaluated
