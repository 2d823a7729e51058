"""Specs of positions: rotary embeddings and their scalings, ALiBi, learned tables.

Rope that depends on how long the text is: within the context that a model was first trained at
its tokens are turned in one way, and in a longer text all of them in another.

The length that counts is that of the whole sequence. Of a text that is written with a cache it is
that of its prompt: keys that lie there are not turned again, so what is generated goes on as it
began, as in Qwen's own code. What has two ways alone is read again, once, where it comes to the
other (`again_beyond`), as in Phi-3's.

How positions enter: rotary in attention (Su et al., 2104.09864), a bias on scores that grows
with distance (ALiBi, Press et al., 2108.12409), or a table added to the embedding.


Blank infilling (GLM; Du et al., 2103.10360, section 2): what of a text is its prefix, and where
its tokens stand, follows from special tokens in it.

A text has a blank, which a mask token marks, and its first <sop> begins what fills it. What is
before <sop> is the prefix, whose tokens see one another.

    a  b  [MASK]  c  <sop>  d  e         prefix: four tokens
    0  1    2     3    2    2  2         first stream of positions: what fills a blank stands there
    0  0    0     0    1    2  3         second: it is counted

A text without <sop>, or without a mask before it, has no blank: its tokens see back alone, the
first stream counts them, and the second stays at 0.

"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal, NamedTuple

from dolmen.model.spec.param import Leaf, Leaves


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


@dataclass(frozen=True)
class Linear:
    """Positions are divided by `factor` (Chen et al., 2306.15595)."""

    attention_factor: ClassVar[float] = 1.0
    factor: float


@dataclass(frozen=True)
class Llama3:
    """Long wavelengths are divided by `factor`, short ones kept, smooth between."""

    attention_factor: ClassVar[float] = 1.0
    factor: float
    low_freq_factor: float
    """Wavelengths longer than original / this are divided."""
    high_freq_factor: float
    """Wavelengths shorter than original / this are kept."""
    original_max_position_embeddings: int
    """Context that the model was first trained at, tokens."""


@dataclass(frozen=True)
class Yarn:
    """By parts, and the scores' temperature with it (Peng et al., 2309.00071)."""

    factor: float
    original_max_position_embeddings: int
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    attention_factor: float = 1.0
    """What cos and sin are multiplied by."""
    truncate: bool = True
    """The bounds between the parts are whole numbers."""


def temperature(factor: float, mscale: float = 1.0) -> float:
    """0.1 mscale ln(factor) + 1 (Peng et al., eq. 22): what YaRN multiplies queries and keys by,
    each once; 1 where nothing is extended.
    """
    return 1.0 if factor <= 1 else 0.1 * mscale * math.log(factor) + 1.0


Scaling = Linear | Llama3 | Yarn | ByLength


@dataclass(frozen=True)
class Rope:
    """Pairs of each head are turned by position * theta^(-2i / size)."""

    carried: ClassVar[int] = 0
    """Numbers that keys carry beside their own."""
    both_ways: ClassVar[bool] = True
    """Whether it says what a key behind the query is to it."""
    size: int
    """Leading part of each head that is rotated; the whole head where it is its size."""
    theta: float = 10000.0
    scaling: Scaling | None = None
    interleaved: bool = False
    """Pairs are neighbours (2i, 2i + 1), not (i, i + size / 2)."""
    streams: int = 1
    """Of positions. Two (ChatGLM-6B): each turns its half of `size` by itself, as if that were the
    size.
    """
    halved: bool = False
    """The angles per position are rounded to half precision, whatever the model computes in."""

    def __post_init__(self):
        if self.size % 2:
            raise ValueError(
                f"head_dim ({self.size}) is odd, rope rotates pairs: set --model.head-dim to an "
                "even size"
            )
        if self.streams not in (1, 2) or self.size % (2 * self.streams):
            raise ValueError(
                f"rope of {self.streams} streams of positions over {self.size} numbers: it has 1, "
                "or 2 that each rotate the pairs of a half"
            )
        if not 0 <= self.theta < math.inf:
            raise ValueError(f"rope_theta is {self.theta!r}: it must be finite and not negative")

    @property
    def by_length(self) -> bool:
        """Whether the length of a text tells how its tokens are turned."""
        return isinstance(self.scaling, ByLength)

    @property
    def again_beyond(self) -> int | None:
        """See LongRope."""
        return self.scaling.again_beyond if isinstance(self.scaling, ByLength) else None

    @property
    def attention_factor(self) -> float:
        """What cos and sin are multiplied by."""
        return 1.0 if self.scaling is None else self.scaling.attention_factor


@dataclass(frozen=True)
class Alibi:
    """score(i, j) += slope_h * (j - i), a slope per head: falling powers of 2, between two powers
    of two heads those of the lower and every other one of the upper.
    """

    carried: ClassVar[int] = 0
    both_ways: ClassVar[bool] = False
    streams: ClassVar[int] = 1
    by_length: ClassVar[bool] = False
    again_beyond: ClassVar[None] = None


@dataclass(frozen=True)
class Steps:
    """ALiBi as Falcon has it: the product of query i and key j, before it is scaled, grows by
    slope_h * j, slope, index and product each rounded to bfloat16. From 256 keys on that is a
    staircase, whose steps a model was trained with. A key-value head has one query head.
    """

    carried: ClassVar[int] = 8
    """The growth, and zeros: 16 bytes in half precision, of which flash asks rows to be made."""
    both_ways: ClassVar[bool] = False
    streams: ClassVar[int] = 1
    by_length: ClassVar[bool] = False
    again_beyond: ClassVar[None] = None


Relative = Rope | Alibi | Steps
"""What attention knows of where a key is, seen from a query."""


@dataclass(frozen=True)
class Table:
    """A learned row per position, added to the embedding."""

    length: int
    """Tokens of a sequence that it has rows for."""
    offset: int = 0
    """Row of position 0 (OPT: 2)."""
    streams: int = 1
    """Of positions. Two (GLM-10B): a table each, with a row more, as the second counts from 1."""
    padding: int | None = None
    """A token that is not counted, whose own position is -1 (RoBERTa); None: all are counted."""

    def leaves(self, hidden: int) -> Leaves:
        """Whole on every rank of tp."""
        shape = (self.offset + self.length + self.streams - 1, hidden)
        table = Leaf(shape, "embedding", gradient="residual")
        names = ("positions.weight", "block_positions.weight")[: self.streams]
        return dict.fromkeys(names, table)


NEVER = 1 << 40  # an index that no text has


class Span(NamedTuple):
    """How the tokens of one text stand, by their indices in it."""

    prefix: int = 0
    """So many first tokens see one another."""
    stay: int = NEVER
    """From this index on the first stream is `at`; before, it is the index."""
    at: int = 0
    begin: int = NEVER
    """The second stream is 1 at this index, counts from there, and is 0 before."""


def of_prefix(length: int, streams: int) -> Span:
    """Of a text with a prefix and no special tokens: of two streams the first stands at the
    prefix's last token behind it, one alone is the index.
    """
    return Span(length) if streams == 1 else Span(length, length, max(0, length - 1), length)


@dataclass(frozen=True)
class Mask:
    """A kind of token that marks a blank."""

    name: str
    token: int | None
    """None: nobody has said which it is."""
    behind: Literal["stays", "counts", "stays after <sop>"] = "stays"
    """The first stream from <sop> on: at the mask, on with the index, or there from the token
    behind <sop> on, which itself has its index.
    """


@dataclass(frozen=True)
class Blanks:
    """Which tokens say it."""

    start: int | None
    """<sop>; None: nobody has said which it is."""
    masks: tuple[Mask, ...]
    """Of several that a prefix has, the first of the first kind here marks the blank; `nearest`:
    the first of any.
    """
    nearest: bool = False

    def check(self) -> None:
        """Raises ValueError where nobody has said which tokens they are."""
        if self.start is None or all(mask.token is None for mask in self.masks):
            missing = [] if self.start is not None else ["sop"]
            if all(mask.token is None for mask in self.masks):
                missing.append(self.masks[0].name)
            said = ", ".join(f'"{name}": id' for name in missing)
            options = " ".join(f"--model.special-tokens.{name} ID" for name in missing)
            raise ValueError(
                f"neither config.json nor tokenizer names {' and '.join(missing)}, by which the "
                f"model knows the positions of a text: use {options}, dolmen.load(..., "
                f'special_tokens={{{said}}}), or in config.json "dolmen": {{"special_tokens": '
                f"{{{said}}}}}"
            )

    def span(self, tokens: Sequence[int]) -> Span:
        """Of a text. Raises as `check`."""
        self.check()
        if self.start not in tokens:
            return Span()
        begin = tokens.index(self.start)
        prefix = tokens[:begin]
        found = [(prefix.index(m.token), m) for m in self.masks if m.token in prefix]
        if not found:
            return Span()
        at, mask = min(found, key=lambda one: one[0]) if self.nearest else found[0]
        stay = {"stays": begin, "counts": NEVER, "stays after <sop>": begin + 1}[mask.behind]
        return Span(begin, stay, at, begin)
