"""How a run rounds and adds up, as data: products in eight bits (--train.precision, --train.fp8)
and how those of one parameter are rounded; exact numerics (--train.numerics exact) and the leaves
that their sums are made of. Needs no torch.

    leaf                 smallest product or sum that is handed to a library: which ones is a
                         function of the model and of recorded limits, never of the layout
    tree                 leaves are added neighbours first (core/reduction.py); a rank holds whole
                         subtrees
    invariant operator   its bits do not depend on the number of rows and columns, on alignment,
                         storage order or threads (ops/invariant.py)

A sum over heads, over the feed-forward width or over the vocabulary has `tp` leaves; a sum over
tokens has `cp` per sequence, one for each pair of chunks that a rank of the largest cp holds
(parallel/context.py), and `tp` times as many where sequence parallelism cuts them.
"""

import math
from dataclasses import dataclass
from typing import Annotated, Literal

from pydantic import Field

from dolmen.core.config import Count, Positive, config

Format = Literal["e4m3", "e5m2"]
Granularity = Literal["tensor", "row", "1x128", "128x128", "mx"]
Precision = Literal["fp8-delayed", "fp8-tensorwise", "fp8-rowwise", "fp8-blockwise", "mxfp8"]
Product = Literal["output", "input-gradient", "weight-gradient"]
Operand = Literal["input", "weight", "gradient"]

OPERANDS: tuple[Operand, ...] = ("input", "weight", "gradient")
GRANULARITY: dict[Precision, Granularity] = {
    "fp8-delayed": "tensor",
    "fp8-tensorwise": "tensor",
    "fp8-rowwise": "row",
    "fp8-blockwise": "1x128",  # of a weight 128x128
    "mxfp8": "mx",
}
DELAYED = ("amax_history", "amax_compute", "margin", "scale_interval")
"""Fields of Fp8Config that are of fp8-delayed alone."""
BLOCKS = {"fp8-blockwise": 128, "mxfp8": 32}
"""Neighbours that share a scale."""


@config("train.fp8")
class Fp8Config:
    """Options of 8-bit training (train.precision fp8-* or mxfp8)."""

    format: Literal["hybrid", "e4m3"] = "hybrid"
    """hybrid: gradients in E5M2 (wider range), activations and weights in E4M3 (finer steps). e4m3:
    all in E4M3.
    """
    unrounded: tuple[Product, ...] = ()
    """Matrix products of each layer that are computed in train.dtype: output, input-gradient,
    weight-gradient.
    """
    first_layers: Count = 0
    """Number of layers at the beginning that are computed in train.dtype."""
    last_layers: Count = 0
    """Number of layers at the end that are computed in train.dtype."""
    amax_history: Positive = 1024
    """fp8-delayed: number of steps in the amax history (largest absolute values)."""
    amax_compute: Literal["max", "most_recent"] = "max"
    """fp8-delayed: value of the amax history from which the scale is computed."""
    margin: Annotated[int, Field(ge=0, le=64)] = 0
    """fp8-delayed: headroom above the largest absolute value, as a power of two."""
    scale_interval: Positive = 1
    """fp8-delayed: updates between two computations of the scales."""


@dataclass(frozen=True)
class Fp8:
    """How the products of one matrix are rounded."""

    precision: Precision
    config: Fp8Config = Fp8Config()

    @property
    def delayed(self) -> bool:
        """True if scales come from the amax history of earlier steps."""
        return self.precision == "fp8-delayed"

    @property
    def block(self) -> int:
        """Neighbours that share a scale; 1 where scales are of tensors or rows."""
        return BLOCKS.get(self.precision, 1)

    def format(self, operand: Operand) -> Format:
        """Return the 8-bit format of an operand: E5M2 for gradients of a hybrid recipe,
        else E4M3.
        """
        # gradients span more powers of two than E4M3 has
        hybrid = self.config.format == "hybrid" and operand == "gradient"
        return "e5m2" if hybrid else "e4m3"

    def granularity(self, operand: Operand) -> Granularity:
        """Return which elements of an operand share a scale: the precision's granularity, but
        128x128 for a weight of fp8-blockwise.
        """
        # as in DeepSeek-V3: one payload of a weight serves both of its products
        if self.precision == "fp8-blockwise" and operand == "weight":
            return "128x128"
        return GRANULARITY[self.precision]

    def rounds(self, product: Product) -> bool:
        """Return True if the product is computed in 8 bits, False if the options list it in
        `unrounded`.
        """
        return product not in self.config.unrounded

    def __str__(self) -> str:
        """Return the recipe in words for the run's header: precision, formats, history, what is not
        rounded.
        """
        config = self.config
        formats = "E4M3, gradients E5M2" if config.format == "hybrid" else "E4M3"
        words = [f"{self.precision}, {formats}"]
        if self.delayed:
            margin = f", margin {config.margin}" if config.margin else ""
            interval = (
                f", every {config.scale_interval} updates" if config.scale_interval > 1 else ""
            )
            words.append(f"{config.amax_compute} of {config.amax_history} steps{margin}{interval}")
        if config.unrounded:
            words.append(f"{' and '.join(config.unrounded)} in train.dtype")
        # layers left in train.dtype, at either end of the model
        ends = {"first": config.first_layers, "last": config.last_layers}
        left = [f"the {end} {number}" for end, number in ends.items() if number]
        if left:
            words.append(f"layers in train.dtype: {' and '.join(left)}")
        return "; ".join(words)


def room(margin: int) -> float:
    """Return 2^margin, by which a format's largest number is divided before scales are computed."""
    # exact: scales with and without margin differ by a power of two
    return math.ldexp(1.0, margin)


@config("train.exact")
class ExactConfig:
    """Limits of exact numerics."""

    tp: Literal[1, 2, 4, 8, 16, 32, 64] = 8
    """Largest --layout.tp whose runs have the same bits. It has to divide heads, key-value heads
    and widths of the model, and another limit gives other bits.
    """
    cp: Literal[1, 2, 4, 8, 16, 32, 64] = 1
    """Largest --layout.cp whose runs have the same bits. Sequences are cut into twice as many
    chunks in every run, and another limit gives other bits.
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
    cp: int = 1
    """Leaves of a sum over the tokens of a sequence: the largest cp, a power of two."""

    @property
    def leaf(self) -> int:
        """Number of tokens of a leaf of a sum over tokens: a sequence, or one of its `cp` pairs of
        chunks.
        """
        return self.tokens // self.cp

    @property
    def token_leaf(self) -> int:
        """Number of tokens of a leaf where sequence parallelism may split a leaf: over as many
        ranks as both `tp` and the leaf are divisible by.
        """
        return self.leaf // math.gcd(self.leaf, self.tp)

    def block(self, vocab_size: int) -> int:
        """Return how many rows of a vocabulary of `vocab_size` are in a leaf; the last leaves may
        have fewer, or none.
        """
        return -(-vocab_size // self.tp)
