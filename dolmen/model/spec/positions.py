"""Specs of positions: rotary embeddings (Su et al., 2104.09864) and their scalings, ALiBi (Press et
al., 2108.12409), learned tables, and blank infilling.

Some scalings depend on the length of the sequence: within the original context tokens are rotated
in one way, in a longer sequence all of them in another. With a KV cache the length is that of the
prompt, because cached keys are not rotated again: generation continues as it started, as in Qwen's
code. LongRoPE has only two sets of factors, so a sequence that grows past the original context is
prefilled again, once (`reprefill_beyond`), as in Phi-3's code.

Blank infilling (GLM; Du et al., 2103.10360, section 2): prefix and positions of a sequence follow
from its special tokens. A mask token marks the blank, and the first <sop> starts its completion;
tokens before <sop> are the prefix and see one another.

    a  b  [MASK]  c  <sop>  d  e         prefix: four tokens
    0  1    2     3    2    2  2         first stream: the completion stays at the blank
    0  0    0     0    1    2  3         second: counts within the completion

A sequence without <sop>, or without a mask before it, is causal; the first stream counts it, and
the second stays at 0.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal, NamedTuple

from dolmen.model.spec.param import ParamSpec, ParamSpecs


@dataclass(frozen=True)
class LongRopeScaling:
    """LongRoPE: the wavelength of each pair is multiplied by its own factor (Ding et al.,
    2402.13753).
    """

    attention_factor: float
    """Factor of cos and sin, at every length."""
    short: tuple[float, ...]
    """Factor of each pair in sequences of at most the original length; `long`: in longer ones."""
    long: tuple[float, ...]
    original_max_position_embeddings: int

    @property
    def reprefill_beyond(self) -> int | None:
        """Length in tokens beyond which all of a sequence is rotated by other factors, so that its
        cache must be prefilled again; None for scalings without such a length.
        """
        return self.original_max_position_embeddings


@dataclass(frozen=True)
class DynamicScaling:
    """Dynamic NTK-aware scaling (Peng et al., 2309.00071, section 3.1): in a sequence of n tokens,
    longer than the original length, the base is multiplied by (factor n / original - factor +
    1)^(size / (size - 2)).
    """

    attention_factor: ClassVar[float] = 1.0
    reprefill_beyond: ClassVar[None] = None
    factor: float
    original_max_position_embeddings: int


@dataclass(frozen=True)
class QwenScaling:
    """Qwen's scaling (2309.16609, section 2.3), for inference only. In a sequence of n tokens the
    base is multiplied by a^(size / (size - 2)), a = 2^ceil(log2(n / original) + 1) - 1, at least 1.
    """

    attention_factor: ClassVar[float] = 1.0
    reprefill_beyond: ClassVar[None] = None
    original_max_position_embeddings: int
    ntk: bool = True
    """Apply the NTK-aware base."""
    log_n: bool = True
    """Multiply the query of token i, counted from 1, by log(i) / log(original) if i is over the
    original length.
    """


LengthScaling = LongRopeScaling | DynamicScaling | QwenScaling


@dataclass(frozen=True)
class LinearScaling:
    """Position interpolation: positions are divided by `factor` (Chen et al., 2306.15595)."""

    attention_factor: ClassVar[float] = 1.0
    factor: float


@dataclass(frozen=True)
class Llama3Scaling:
    """Llama 3.1's scaling: long wavelengths are divided by `factor`, short ones kept, with a smooth
    transition between.
    """

    attention_factor: ClassVar[float] = 1.0
    factor: float
    low_freq_factor: float
    """Wavelengths longer than original / this are divided."""
    high_freq_factor: float
    """Wavelengths shorter than original / this are kept."""
    original_max_position_embeddings: int
    """Context that the model was first trained at, tokens."""


@dataclass(frozen=True)
class YarnScaling:
    """YaRN: interpolate frequencies by parts, and scale cos and sin (Peng et al., 2309.00071)."""

    factor: float
    original_max_position_embeddings: int
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    attention_factor: float = 1.0
    """Factor of cos and sin."""
    truncate: bool = True
    """Round the bounds between the interpolated and the unchanged pairs to whole pair indices."""


def yarn_temperature(factor: float, mscale: float = 1.0) -> float:
    """Return 0.1 mscale ln(factor) + 1 (Peng et al., eq. 22), by which YaRN multiplies queries and
    keys each; 1 if the context is not extended.
    """
    return 1.0 if factor <= 1 else 0.1 * mscale * math.log(factor) + 1.0


RopeScaling = LinearScaling | Llama3Scaling | YarnScaling | LengthScaling


@dataclass(frozen=True)
class RopeSpec:
    """Rotary positions: pair i of each head is rotated by position * theta^(-2i / size)."""

    extra_key_dims: ClassVar[int] = 0
    """Extra dims appended to queries and keys to express the positions' score bias."""
    both_ways: ClassVar[bool] = True
    """True if it is defined for keys after the query (bidirectional attention)."""
    size: int
    """Leading part of each head that is rotated; the whole head where it is its size."""
    theta: float = 10000.0
    scaling: RopeScaling | None = None
    interleaved: bool = False
    """Pairs are neighbours (2i, 2i + 1), not (i, i + size / 2)."""
    streams: int = 1
    """Number of position streams. Two (ChatGLM-6B): each rotates one half of the `size` elements,
    as if that half were the whole.
    """
    halved: bool = False
    """Round the frequencies (angle per position) to fp16, whatever the model's dtype."""

    def __post_init__(self):
        """Raise ValueError for a size that is no whole pairs per stream, and a theta that is
        negative or not finite.
        """
        if self.size % 2:
            raise ValueError(
                f"head_dim ({self.size}) is odd, but rope rotates pairs: set --model.head-dim to "
                "an even size"
            )
        if self.streams not in (1, 2) or self.size % (2 * self.streams):
            raise ValueError(
                f"rope with {self.streams} position streams over {self.size} elements: it must "
                "have 1, or 2 for one half each"
            )
        if not 0 <= self.theta < math.inf:
            raise ValueError(f"rope_theta is {self.theta!r}: it must be finite and not negative")

    @property
    def by_length(self) -> bool:
        """True if the angles depend on the length of the sequence."""
        return isinstance(self.scaling, LengthScaling)

    @property
    def reprefill_beyond(self) -> int | None:
        """Length in tokens beyond which a cached sequence must be prefilled again, as all of it is
        rotated by other factors (LongRoPE); None if there is none.
        """
        return self.scaling.reprefill_beyond if isinstance(self.scaling, LengthScaling) else None

    @property
    def attention_factor(self) -> float:
        """Factor of cos and sin that the scaling requires (YaRN, LongRoPE); 1 otherwise."""
        return 1.0 if self.scaling is None else self.scaling.attention_factor


@dataclass(frozen=True)
class AlibiSpec:
    """ALiBi: score(i, j) += slope_h * (j - i). Slopes are falling powers of 2; for a number of
    heads between two powers of 2, those of the lower one and every other one of the upper.
    """

    extra_key_dims: ClassVar[int] = 0
    both_ways: ClassVar[bool] = False
    streams: ClassVar[int] = 1
    by_length: ClassVar[bool] = False
    reprefill_beyond: ClassVar[None] = None


@dataclass(frozen=True)
class FalconAlibiSpec:
    """Falcon's ALiBi: slope_h * j is added to the product of query i and key j before scaling, with
    slope, index and product each rounded to bfloat16. From 256 keys on the rounding makes it a
    staircase, which the models were trained with. One query head per key-value head.
    """

    extra_key_dims: ClassVar[int] = 8
    """The bias, and zeros up to 16 bytes in half precision, because flash requires rows of a
    multiple.
    """
    both_ways: ClassVar[bool] = False
    streams: ClassVar[int] = 1
    by_length: ClassVar[bool] = False
    reprefill_beyond: ClassVar[None] = None


AttentionPositions = RopeSpec | AlibiSpec | FalconAlibiSpec
"""Positions that act inside attention, relative to the query."""


@dataclass(frozen=True)
class PositionTable:
    """Learned position embedding: one row per position, added to the token embedding."""

    length: int
    """Longest sequence that the table has rows for, tokens."""
    offset: int = 0
    """Row of position 0 (OPT: 2)."""
    streams: int = 1
    """Number of position streams. Two (GLM-10B): one table per stream, each with one more row,
    because the second stream counts from 1.
    """
    padding: int | None = None
    """Id of the padding token, which positions do not count and whose own position is -1 (RoBERTa);
    None: all tokens are counted.
    """

    def params(self, hidden: int) -> ParamSpecs:
        """Return the specs of the table (of two, for two position streams) by name: [offset +
        length (+ 1), hidden], replicated over tp.
        """
        shape = (self.offset + self.length + self.streams - 1, hidden)
        table = ParamSpec(shape, "embedding", gradient="residual")
        names = ("positions.weight", "block_positions.weight")[: self.streams]
        return dict.fromkeys(names, table)


NEVER = 1 << 40  # an index that no text has


class PositionSpan(NamedTuple):
    """Prefix and position streams of one sequence, stated by token indices."""

    prefix: int = 0
    """Number of leading tokens that attend to one another (bidirectional prefix)."""
    stay: int = NEVER
    """Token index from which on the first stream has the constant position `at`; before it, the
    position is the index.
    """
    at: int = 0
    begin: int = NEVER
    """Token index at which the second stream is 1 and starts counting; before it, it is 0."""


def prefix_span(length: int, streams: int) -> PositionSpan:
    """Return the positions of a prompt of `length` tokens without special tokens: all of it is a
    bidirectional prefix, and tokens generated after it are causal. A single position stream
    is the token index. Of two streams (GLM), for generated tokens the first stays at the prompt's
    last index, and the second counts 1, 2, ...
    """
    return (
        PositionSpan(length)
        if streams == 1
        else PositionSpan(length, length, max(0, length - 1), length)
    )


@dataclass(frozen=True)
class BlankMask:
    """A mask token that marks the blank to be filled."""

    name: str
    token: int | None
    """Its token id; None: unknown."""
    behind: Literal["stays", "counts", "stays after <sop>"] = "stays"
    """First stream after <sop>. stays: the mask's position, from <sop> on; counts: goes on with the
    index; stays after <sop>: <sop> has its index, and all later tokens the mask's position.
    """


@dataclass(frozen=True)
class BlankInfilling:
    """Special tokens of blank infilling (GLM), which mark the blank and the start of its
    completion.
    """

    start: int | None
    """Token id of <sop>; None: unknown."""
    masks: tuple[BlankMask, ...]
    """Mask tokens in order of priority: the first kind that the prefix contains marks the blank;
    with `nearest`, the first occurrence of any kind does.
    """
    nearest: bool = False

    def check(self) -> None:
        """Raise ValueError if the id of <sop>, or of every mask token, is unknown."""
        if self.start is None or all(mask.token is None for mask in self.masks):
            missing = [] if self.start is not None else ["sop"]
            if all(mask.token is None for mask in self.masks):
                missing.append(self.masks[0].name)
            ids = ", ".join(f'"{name}": id' for name in missing)
            options = " ".join(f"--model.special-tokens.{name} ID" for name in missing)
            raise ValueError(
                f"neither config.json nor tokenizer defines {' and '.join(missing)}, on which the "
                f"model's positions depend: use {options}, dolmen.load(..., "
                f'special_tokens={{{ids}}}), or in config.json "dolmen": {{"special_tokens": '
                f"{{{ids}}}}}"
            )

    def span(self, tokens: Sequence[int]) -> PositionSpan:
        """Return prefix and position streams of a sequence of token ids; plain causal positions if
        it has no <sop>, or no mask token before it. Raises ValueError if the special tokens are
        unknown.
        """
        self.check()
        if self.start not in tokens:
            return PositionSpan()
        begin = tokens.index(self.start)
        prefix = tokens[:begin]
        # in order of priority: the first is taken unless `nearest`
        masked = [(prefix.index(m.token), m) for m in self.masks if m.token in prefix]
        if not masked:
            return PositionSpan()
        at, mask = min(masked, key=lambda entry: entry[0]) if self.nearest else masked[0]
        stay = {"stays": begin, "counts": NEVER, "stays after <sop>": begin + 1}[mask.behind]
        return PositionSpan(begin, stay, at, begin)
