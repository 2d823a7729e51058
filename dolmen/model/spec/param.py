"""`ParamSpec`: everything known of a parameter before there is a tensor, stated once.

Problem. A parameter's shape, sharding, initialisation, optimizer group, gradient reduction and cost
are needed by the module, the sharder, the optimizer, the checkpoint, the planner and the checks of
divisibility. If each derives them from module classes, a new layer has to be taught to all of them.

Idea. Each component spec lists its parameters as `ParamSpec`s by name, and everything else is a
function of them:

    shape, shards    -> placement on (ep, tp), local shapes, "is not divisible by tp" errors
    gradient         -> whether it is summed over tp (partial) or complete
    initial          -> initial values from name and seed
    role             -> optimizer group, weight decay, LoRA targets, fp8
    products         -> FLOPs

    column-parallel  W split over its outputs: this rank's heads, or part of the mlp's width
    row-parallel     W split over its inputs: its product is a partial sum over tp

Which matrices are multiplied in fp8 is a transformation of the specs (`mark_fp8`): all of
attention, mlps and experts inside layers, but not the embedding, head, norms, routers and adapters,
nor layers at either end that a run excludes.
"""

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Literal

from dolmen.core.messages import divisor
from dolmen.ops.numerics import Fp8

Role = Literal[
    "matrix", "embedding", "head", "norm", "bias", "router", "expert", "adapter", "scale"
]
Gradient = Literal["own", "residual", "branch"]
VOCABULARY = "vocab_size"  # the knob of a cut between rows of tokens


@dataclass(frozen=True)
class ShardSpec:
    """How one dim of a parameter is split over a mesh axis: into its `units`, equal indivisible
    pieces such as the heads of a query projection.
    """

    axis: Literal["tp", "ep"]
    dim: int
    units: int
    """Number of indivisible units along the dim, such as heads; the axis size must divide it."""
    option: str
    """Config field that sets `units`, named in error messages."""
    or_replicate: bool = False
    """Replicate if the axis does not divide the units: every rank stores all, uses some, and its
    gradient is partial.
    """
    uneven: bool = False
    """Ranks may have unequal numbers of units (rows of a vocabulary)."""

    def splits(self, size: int) -> bool:
        """Return whether an axis of `size` ranks splits the dim; otherwise it is replicated."""
        return not self.or_replicate or self.units % size == 0

    def check(self, size: int) -> None:
        """Raise ValueError, with the numbers and the option, if an axis of `size` ranks does not
        divide the units, or, for an uneven split, leaves a rank without a row.
        """
        # ranks get ceil(units / size) rows each, so the last ones may get none
        if self.uneven and (size - 1) * -(-self.units // size) >= self.units:
            raise ValueError(
                f"{self.option} ({self.units}) leaves a rank of {self.axis} ({size}) without a "
                f"row: set a smaller --layout.{self.axis}"
            )
        if not self.uneven and self.splits(size) and self.units % size:
            raise ValueError(
                f"{self.option} ({self.units}) is not divisible by {self.axis} ({size}): set "
                f"--layout.{self.axis} to a divisor, such as {divisor(self.units, near=size)}"
            )


@dataclass(frozen=True)
class ParamSpec:
    """One parameter; its name is the key in `ParamSpecs`, relative to its component."""

    shape: tuple[int, ...]
    role: Role
    shards: tuple[ShardSpec, ...] = ()
    gradient: Gradient = "own"
    """Type on tp of the gradient of a replicated parameter. `residual`: it sees this rank's tokens
    of the residual stream, partial under sequence parallelism; `branch`: it sees this rank's heads
    or columns, always partial.
    """
    initial: Literal["normal", "uniform", "ones", "zeros", "beside"] = "normal"
    """uniform: within +- 1 / sqrt(inputs), Kaiming's with a = sqrt(5); beside: derived from another
    weight when that is written (int8 scale, DoRA magnitude).
    """
    std_scale: float = 1.0
    """Standard deviation of `normal`, relative to the model's initializer_range."""
    products: int = 0
    """Multiply-adds per token: the elements of a matrix, k / E of them for stacked experts of which
    a token uses k of E, 0 for a table or a vector.
    """
    trained: bool = True
    """True if the optimizer updates it."""
    train_with_adapters: bool = False
    """True if it is trained beside adapters too: no stored model has it (a scalar head)."""
    precise: bool = False
    """Keep it in fp32 or wider, in memory and on disk, whatever the model's dtype."""
    scale: float = 1.0
    """Factor of the product with this parameter (LoRA's alpha / rank, on B)."""
    int8: bool = False
    """Stored as int8 with a scale per output row (ops/int8.py)."""
    fp8: Fp8 | None = None
    """Recipe by which its products are rounded to fp8 in training; None: they are not."""

    @property
    def elements(self) -> int:
        """Number of elements, of all ranks together."""
        return math.prod(self.shape)

    @property
    def stacked(self) -> bool:
        """True if it stacks one matrix per expert, [experts, out, in]."""
        return len(self.shape) == 3

    @property
    def decays(self) -> bool:
        """True if weight decay applies: by role, to everything but norms and biases."""
        return self.role not in ("norm", "bias")

    @property
    def is_vocabulary(self) -> bool:
        """True if it has a row for each token of the vocabulary: embedding, LM head, its bias."""
        return any(cut.option == VOCABULARY for cut in self.shards)

    def local_shape(self, sizes: Mapping[str, int]) -> tuple[int, ...]:
        """Return the shape of a rank's part, given the number of ranks per axis (1 for axes not in
        `sizes`); of an uneven split that of the largest part.
        """
        shape = list(self.shape)
        for cut in self.shards:
            size = sizes.get(cut.axis, 1)
            if cut.splits(size):
                # rounded up: the first ranks of an uneven split
                shape[cut.dim] = -(-shape[cut.dim] // size)
        return tuple(shape)


ParamSpecs = dict[str, ParamSpec]


@dataclass(frozen=True)
class ResidualStream:
    """Sizes of the residual stream that a component's parameters depend on."""

    hidden_size: int
    layers: int

    @property
    def out_scale(self) -> float:
        """1 / sqrt(2 layers): factor of the initial standard deviation of projections that add to
        the residual stream, two per layer (Radford et al., 2019, section 2.3).
        """
        return 1 / math.sqrt(2 * self.layers)


def check_sharding(params: ParamSpecs, sizes: Mapping[str, int]) -> None:
    """Raise ValueError, with the numbers and the option, if a parameter cannot be split over mesh
    axes of these sizes (axis -> ranks).
    """
    for param in params.values():
        for cut in param.shards:
            cut.check(sizes[cut.axis])


def add_prefix(prefix: str, params: ParamSpecs) -> ParamSpecs:
    """Return the specs with `prefix.` before each name."""
    return {f"{prefix}.{name}": param for name, param in params.items()}


def select_prefix(params: ParamSpecs, prefix: str) -> ParamSpecs:
    """Return the specs whose names start with `prefix.`, with it removed: the inverse of
    `add_prefix`.
    """
    start = f"{prefix}."
    return {
        name.removeprefix(start): param for name, param in params.items() if name.startswith(start)
    }


def column_parallel(
    out: int, inp: int, bias: bool, cut: ShardSpec, gradient: Gradient = "own"
) -> ParamSpecs:
    """Return the specs of weight [out, inp], and bias [out] if `bias`, of a column-parallel linear;
    `gradient`: type of the gradient where `cut` replicates it.
    """
    params = {"weight": ParamSpec((out, inp), "matrix", (cut,), gradient, products=out * inp)}
    if bias:
        params["bias"] = ParamSpec((out,), "bias", (cut,), gradient, "zeros")
    return params


def row_parallel(out: int, inp: int, bias: bool, cut: ShardSpec, std_scale: float) -> ParamSpecs:
    """Return the specs of weight [out, inp], and bias [out] if `bias`, of a row-parallel linear.
    The bias is replicated over tp, as it is added after the sum.
    """
    weight = ParamSpec((out, inp), "matrix", (cut,), std_scale=std_scale, products=out * inp)
    params = {"weight": weight}
    if bias:
        params["bias"] = ParamSpec((out,), "bias", gradient="residual", initial="zeros")
    return params


LAYER = re.compile(r"layers\.([0-9]+)\.(?:attn|mlp)\..*weight")


def mark_fp8(params: ParamSpecs, layers: int, recipe: Fp8) -> ParamSpecs:
    """Return the specs with the recipe on every weight multiplied in fp8: matrices and experts of
    attention and mlp, but for the first and last layers that the recipe excludes. `layers`: number
    of layers.
    """
    # layers multiplied in fp8
    inner = range(recipe.config.first_layers, layers - recipe.config.last_layers)
    return {
        name: replace(param, fp8=recipe) if _uses_fp8(name, param, inner) else param
        for name, param in params.items()
    }


def _uses_fp8(name: str, param: ParamSpec, layers: range) -> bool:
    """Return whether a parameter of attention or mlp in one of `layers` has the role "matrix" or
    "expert".
    """
    match = LAYER.fullmatch(name)
    return match is not None and param.role in ("matrix", "expert") and int(match[1]) in layers


def check_fp8_sharding(params: ParamSpecs, sizes: Mapping[str, int]) -> None:
    """Raise ValueError, with the numbers and the option, if tp would cut a block of elements that
    shares one fp8 scale, or replicate a weight so that ranks would round different parts of its
    gradient.
    """
    tp = sizes["tp"]
    for name, param in params.items():
        if param.fp8 is None or tp == 1:
            continue
        for cut in (cut for cut in param.shards if cut.axis == "tp"):
            if not cut.splits(tp):
                raise ValueError(
                    f"{cut.option} ({cut.units}) is not divisible by tp ({tp}), so ranks would "
                    f"quantise parts of one gradient of {name}: set --layout.tp to a divisor, or "
                    "leave out --train.precision"
                )
            size, block = param.shape[cut.dim] // tp, param.fp8.block
            # a block across ranks would have two scales, and the result would depend on tp
            if size % block:
                raise ValueError(
                    f"{param.fp8.precision} has a scale per {block} elements, but tp ({tp}) splits "
                    f"the {param.shape[cut.dim]} of {name} into parts of {size}: set a smaller "
                    "--layout.tp, or --train.precision fp8-rowwise"
                )


def check_fp8_tokens(recipe: Fp8, tokens: Mapping[str, int]) -> None:
    """Raise ValueError if a rank's number of tokens is no multiple of the block that shares an fp8
    scale in the weight gradient. `tokens`: name of what splits them -> tokens of a rank.
    """
    if not recipe.rounds("weight-gradient"):
        return
    for cuts, size in tokens.items():
        if size % recipe.block:
            raise ValueError(
                f"{recipe.precision} has a scale per {recipe.block} tokens, but {cuts} leaves "
                f"parts of {size}: set --train.sequence-length to a multiple, or "
                "--train.fp8.unrounded weight-gradient"
            )
