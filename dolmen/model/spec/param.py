"""x

A leaf: everything that is known of one parameter before there is a tensor, once. What places,
initialises, groups, counts and checks parameters reads it here.

    column   W cut over its outputs: this rank's heads, or its part of the feed-forward width
    row      W cut over its inputs: what it makes is a partial sum, which leaves the block


Which matrices are multiplied in eight bits: all of attention, mlps and experts inside layers. By
rule the embedding, the head, norms, routers and adapters are not, nor are the layers at either end
that a run leaves out.

"""

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Literal

from dolmen.core.messages import divisor
from dolmen.ops.fp8_recipe import Fp8

Role = Literal[
    "matrix", "embedding", "head", "norm", "bias", "router", "expert", "adapter", "scale"
]
Gradient = Literal["own", "residual", "branch"]
VOCABULARY = "vocab_size"  # the knob of a cut between rows of tokens


@dataclass(frozen=True)
class Cut:
    """How one dim of a parameter is split over a mesh axis: `units` equal pieces of it may not be
    parted further, such as the heads of a query projection.
    """

    axis: Literal["tp", "ep"]
    dim: int
    units: int
    """What the size of the axis must divide."""
    knob: str
    """Name of the field that sets `units`, for the refusal."""
    or_whole: bool = False
    """Where the axis does not divide the units: every rank stores all of it, uses some, and its
    gradient is partial.
    """
    uneven: bool = False
    """The pieces need not be equal (rows of a vocabulary)."""

    def splits(self, size: int) -> bool:
        """Whether an axis of `size` ranks splits the dim; else each of them has all of it."""
        return not self.or_whole or self.units % size == 0

    def check(self, size: int) -> None:
        """Raises ValueError, with the numbers and the knob, where an axis of `size` ranks cannot
        split the dim as it must.
        """
        if self.uneven and (size - 1) * -(-self.units // size) >= self.units:
            raise ValueError(
                f"{self.knob} ({self.units}) leaves a rank of {self.axis} ({size}) without a row: "
                f"set a smaller --layout.{self.axis}"
            )
        if not self.uneven and self.splits(size) and self.units % size:
            raise ValueError(
                f"{self.knob} ({self.units}) is not divisible by {self.axis} ({size}): set "
                f"--layout.{self.axis} to a divisor, such as {divisor(self.units, near=size)}"
            )


@dataclass(frozen=True)
class Leaf:
    """One parameter, by the name that it has in its component."""

    shape: tuple[int, ...]
    role: Role
    cuts: tuple[Cut, ...] = ()
    gradient: Gradient = "own"
    """Of what every rank of tp stores whole: its type on tp. `residual`: it sees this rank's tokens
    of the residual stream, partial under sequence parallelism; `branch`: it sees this rank's heads
    or columns, always partial.
    """
    initial: Literal["normal", "uniform", "ones", "zeros", "beside"] = "normal"
    """uniform: within 1 / sqrt(inputs) of 0, what Kaiming's with a = sqrt(5) is; beside: it is
    written with the weight that it is the scale of.
    """
    std_scale: float = 1.0
    """Of `normal`: times the model's initializer_range."""
    products: int = 0
    """Multiply-adds per token: the elements of a matrix, of k of E experts k / E of them, none of
    a table or a vector.
    """
    trained: bool = True
    """Whether gradients move it."""
    with_adapters: bool = False
    """Whether they move it in a model with adapters too: no stored model has it (a scalar head)."""
    precise: bool = False
    """In fp32 or wider, here and on disk, whatever the others are in."""
    scale: float = 1.0
    """What its product is multiplied by."""
    int8: bool = False
    """Held in eight bits, with a scale per output beside it (ops/int8.py)."""
    fp8: Fp8 | None = None
    """How the factors of its products are rounded; None: they are not."""

    @property
    def elements(self) -> int:
        """Numbers that it has, on all ranks together."""
        return math.prod(self.shape)

    @property
    def stacked(self) -> bool:
        """Whether it is one matrix of every expert."""
        return len(self.shape) == 3

    @property
    def decays(self) -> bool:
        """Whether weight decay pulls it to 0: matrices and tables, not norms and biases."""
        return self.role not in ("norm", "bias")

    @property
    def of_vocabulary(self) -> bool:
        """Whether it has a row for each token."""
        return any(cut.knob == VOCABULARY for cut in self.cuts)

    def held(self, sizes: Mapping[str, int]) -> tuple[int, ...]:
        """The shape that a rank holds, where each axis has so many ranks (1, where not named); of
        an uneven cut the largest.
        """
        shape = list(self.shape)
        for cut in self.cuts:
            size = sizes.get(cut.axis, 1)
            if cut.splits(size):
                shape[cut.dim] = -(-shape[cut.dim] // size)
        return tuple(shape)


Leaves = dict[str, Leaf]


@dataclass(frozen=True)
class Stream:
    """What the parameters of a component depend on beside itself: the residual stream."""

    hidden_size: int
    layers: int

    @property
    def out_scale(self) -> float:
        """std_scale of the projections that add to the stream, two per layer (Radford et al., 2019,
        section 2.3).
        """
        return 1 / math.sqrt(2 * self.layers)


def check_cuts(leaves: Leaves, sizes: Mapping[str, int]) -> None:
    """Raises ValueError, with the numbers and the knob, where axes of these sizes cannot split a
    parameter as it must be split.
    """
    for leaf in leaves.values():
        for cut in leaf.cuts:
            cut.check(sizes[cut.axis])


def within(prefix: str, leaves: Leaves) -> Leaves:
    """The same under `prefix.`"""
    return {f"{prefix}.{name}": leaf for name, leaf in leaves.items()}


def under(leaves: Leaves, prefix: str) -> Leaves:
    """The inverse of `within`: those under `prefix.`, without it."""
    start = f"{prefix}."
    return {
        name.removeprefix(start): leaf for name, leaf in leaves.items() if name.startswith(start)
    }


def column(out: int, inp: int, bias: bool, cut: Cut, gradient: Gradient = "own") -> Leaves:
    """Weight [out, inp] and bias of a column-parallel linear; `gradient` where it is whole."""
    leaves = {"weight": Leaf((out, inp), "matrix", (cut,), gradient, products=out * inp)}
    if bias:
        leaves["bias"] = Leaf((out,), "bias", (cut,), gradient, "zeros")
    return leaves


def row(out: int, inp: int, bias: bool, cut: Cut, std_scale: float) -> Leaves:
    """Weight [out, inp] of a row-parallel linear, and its bias, which is added once the partial
    sums are.
    """
    weight = Leaf((out, inp), "matrix", (cut,), std_scale=std_scale, products=out * inp)
    leaves = {"weight": weight}
    if bias:
        leaves["bias"] = Leaf((out,), "bias", gradient="residual", initial="zeros")
    return leaves


LAYER = re.compile(r"layers\.(\d+)\.(?:attn|mlp)\..*weight")


def rounded(leaves: Leaves, layers: int, recipe: Fp8) -> Leaves:
    """The parameters of a model of so many layers, with what `recipe` rounds."""
    inner = range(recipe.config.first_layers, layers - recipe.config.last_layers)
    return {
        name: replace(leaf, fp8=recipe) if _inside(name, leaf, inner) else leaf
        for name, leaf in leaves.items()
    }


def _inside(name: str, leaf: Leaf, layers: range) -> bool:
    found = LAYER.fullmatch(name)
    return found is not None and leaf.role in ("matrix", "expert") and int(found[1]) in layers


def check_rounding(leaves: Leaves, sizes: Mapping[str, int]) -> None:
    """Raises ValueError, with the numbers and the knob, where tp would cut a block that shares a
    scale, or a part of what is rounded as one.
    """
    tp = sizes["tp"]
    for name, leaf in leaves.items():
        if leaf.fp8 is None or tp == 1:
            continue
        for cut in (cut for cut in leaf.cuts if cut.axis == "tp"):
            if not cut.splits(tp):
                raise ValueError(
                    f"{cut.knob} ({cut.units}) is not divisible by tp ({tp}), so ranks would round "
                    f"parts of one gradient of {name}: set --layout.tp to a divisor, or leave out "
                    "--train.precision"
                )
            size, block = leaf.shape[cut.dim] // tp, leaf.fp8.block
            if size % block:
                raise ValueError(
                    f"{leaf.fp8.precision} shares a scale among {block} neighbours, and tp ({tp}) "
                    f"cuts the {leaf.shape[cut.dim]} of {name} into parts of {size}: set a smaller "
                    "--layout.tp, or --train.precision fp8-rowwise"
                )


def check_tokens(recipe: Fp8, tokens: Mapping[str, int]) -> None:
    """Raises ValueError where a rank's part of the tokens, by what cuts them, ends inside a block
    that shares a scale of the weight gradient.
    """
    if not recipe.rounds("weight-gradient"):
        return
    for cuts, size in tokens.items():
        if size % recipe.block:
            raise ValueError(
                f"{recipe.precision} shares a scale among {recipe.block} neighbouring tokens, and "
                f"{cuts} leaves parts of {size}: set --train.sequence-length to a multiple, or "
                "--train.fp8.unrounded weight-gradient"
            )
