"""Matrix products in eight bits over any layout, and what ZeRO gathers for them.

What ZeRO gathers of a matrix that is multiplied in eight bits: its payloads and their scales, in
place of values of two bytes each.

    a rank's shard    fp32 -> bf16 -> payloads [rows / n, in], scales [rows / n / 128, in / 128]
    sent              both: 1 + 4 / 128^2 bytes per number
    a rank's copy     payload times scale, in bf16

Products know nothing of it: they round the copy once more, and to round what is rounded gives the
same payloads and scales, so the answer has the same bits (tests/parallel/test_gathered.py). Of a
block whose largest number is a, itself one of bf16, the scale s is a / 448, and

    the largest     448 s in fp32 is within 2^-23 of a, whose nearest in bf16 is a: so s is the same
    any other       p s is within 2^-9 of itself in bf16, and neighbours of a payload p are at least
                    2^-4 of it apart: so it is rounded to p

That takes one payload for both products of a weight, and scales that no other rank has a part in:
blocks of 128 x 128 (fp8-blockwise) that no shard cuts. By rows, and by MX, a weight is rounded
along each of its dims, and two payloads are as many bytes; a scale of a whole tensor would have to
be known before it is gathered, and one of the steps before is not that of the copy's largest.

Products of a model that does not train round nothing, and it gathers values.

Products of a dense matrix whose factors are rounded to eight bits (ops/fp8.py), over any layout.

    output             y [t, o] = x [t, i]  W [o, i]^T      adds up over i
    input gradient     dx [t, i] = g [t, o]  W [o, i]       over o
    weight gradient    dW [o, i] = g [t, o]^T  x [t, i]     over t

A scale is a factor of the sum only where all that is added shares it. So scales of rows and of
blocks are taken along the dim that a product adds up over, and each factor is rounded twice, once
along each of its dims; one scale for a whole tensor serves both of its products.

Scales do not depend on the layout: where an axis splits the dim that a scale is shared along, the
largest |x| is that of all its ranks. Which axes those are:

    tokens     fsdp (dp x cp), since a microbatch is what all its ranks compute at once; tp as well,
               of a weight that is whole where each rank has tokens of its own; of experts edp,
               whose ranks hold the same ones
    inputs     tp, of a row-parallel weight
    outputs    tp, of a column-parallel weight

Blocks are cut where those of the whole tensor are, so nothing is sent for them; a layout that cuts
one is refused (model/spec/param.py).

Delayed scaling (Transformer Engine's recipe of that name): the scale of a step comes from the
largest numbers of the steps before. Of one step the largest over microbatches and ranks is kept
aside (`Delayed.now`, a maximum, so what is computed again counts once), and becomes one entry of
the history when the step has updated: nothing that a step computes changes its own scales. In
Transformer Engine a history follows the calls of a module.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch
import torch.nn.functional as F
from jaxtyping import Float, Shaped
from torch import Tensor, nn
from torch.nn.functional import ScalingType

from dolmen.core import collectives
from dolmen.core.mesh import Axis, Mesh
from dolmen.core.torch_private import sharding
from dolmen.ops import fp8, int8
from dolmen.ops.numerics import OPERANDS, Fp8, Granularity, Operand, room
from dolmen.parallel.data import units
from dolmen.parallel.exact import LeafProduct

GRANULARITY = "128x128"
BLOCK = fp8.BLOCKS[GRANULARITY]


def gather_payloads(model: nn.Module, recipes: Mapping[str, Fp8]) -> list[str]:
    """Make FSDP all-gather 8-bit payloads and scales, not values, of each weight in `recipes` (by
    parameter name) whose products share one payload and whose shards cut no block; other weights
    stay. `model` is allocated and split by `data.shard_model`. Returns the names of the weights
    changed.
    """
    # FSDP has parameters as objects; recipes have them by name
    names = {p: name for name, p in model.named_parameters()}
    states = []
    for record in (record for unit in units(model) for record in sharding.records(unit)):
        name = names[record.sharded_param]
        if name in recipes and one_payload(recipes[name]) and has_whole_blocks(record):
            sharding.gather_as(record, quantise_shard, dequantise_gathered)
            states.append(name)
    return states


def one_payload(recipe: Fp8) -> bool:
    """Return True if the output and the input gradient are both computed in 8 bits and use the same
    payload of the weight: scales of blocks of 128 x 128.
    """
    rounds = recipe.rounds("output") and recipe.rounds("input-gradient")
    return rounds and recipe.granularity("weight") == GRANULARITY


def has_whole_blocks(record: sharding.Record) -> bool:
    """Return True if a parameter is gathered in bf16 from several ranks whose shards each hold the
    same number of uncut 128 x 128 blocks.
    """
    ranks, full = sharding.ranks(record), sharding.gathered_shape(record)
    if (
        ranks == 1
        or record.fsdp_placement.dim != 0
        or record.mp_policy.param_dtype != torch.bfloat16
    ):
        return False
    # of stacked matrices a shard has whole ones
    return full[0] % (ranks if len(full) > 2 else ranks * BLOCK) == 0


def quantise_shard(shard: Tensor, module: nn.Module) -> tuple[Tensor, ...]:
    """Return the tensors that one rank sends of its shard, rounded to bf16: (e4m3 payload [...,
    rows, in], its scales [..., rows / 128, in / 128]) while `module` trains, else the bf16 values
    alone.
    """
    values = shard.to(torch.bfloat16)
    if not module.training:
        return (values,)
    return fp8.quantise(values, format="e4m3", granularity=GRANULARITY)


def dequantise_gathered(parts: Sequence[Tensor]) -> Tensor:
    """Return the gathered weight in bf16: payload times scale, or values where `quantise_shard`
    sent those.
    """
    if len(parts) == 1:
        return parts[0]
    payload, scale = parts
    return fp8.dequantise(payload, scale, granularity=GRANULARITY, dtype=torch.bfloat16)


Dim = Literal["tokens", "inputs", "outputs"]
DIMS: dict[Operand, tuple[Dim, Dim]] = {
    "input": ("tokens", "inputs"),
    "weight": ("outputs", "inputs"),
    "gradient": ("tokens", "outputs"),
}


class ProductAxes(NamedTuple):
    """Mesh axes that split each dim of a product."""

    tokens: tuple[Axis, ...] = ()
    inputs: tuple[Axis, ...] = ()
    outputs: tuple[Axis, ...] = ()

    def axes_of(self, dim: Dim) -> tuple[Axis, ...]:
        """Return the axes of more than one rank that split `dim`."""
        axes = {"tokens": self.tokens, "inputs": self.inputs, "outputs": self.outputs}[dim]
        return tuple(axis for axis in axes if axis.size > 1)


HISTORY, SCALE = "amax_history", "fp8_scale"
"""Kinds of tensors that delayed scaling keeps per weight."""


class Delayed:
    """Delayed-scaling state (amax history and scales) of one weight's products, or of each
    expert's: the same on all ranks that hold the layer. `on` makes its tensors.
    """

    def __init__(self, recipe: Fp8, experts: int | None):
        """Describe the state of one weight, or of a stack of `experts` weights (None: one);
        `allocate` makes its tensors.
        """
        self.recipe = recipe
        self.shape = (3,) if experts is None else (experts, 3)
        self.initialized = False
        """Whether there has been an update, so that there are scales."""

    def allocate(self, device: torch.device) -> None:
        """Allocate the history, scales and running maxima on `device`, with their values before the
        first step.
        """
        self.history: Float[Tensor, "steps *experts 3"] = torch.zeros(
            self.recipe.config.amax_history, *self.shape, device=device
        )
        """By OPERANDS. The first entry is 0: the place of the step that is under way."""
        self.scale: Float[Tensor, "*experts 3"] = torch.ones(self.shape, device=device)
        """Factor of an operand before it is rounded, as Transformer Engine defines scales: the
        inverse of ops/fp8.py's.
        """
        self.now: Float[Tensor, "*experts 3"] = torch.zeros(self.shape, device=device)
        """The largest of the step under way."""

    def forget(self) -> None:
        """Reset the history and the scales to their values before the first step."""
        self.initialized = False
        self.history.zero_()
        self.scale.fill_(1)

    def begin(
        self, history: Float[Tensor, "known *experts 3"], scale: Float[Tensor, "*experts 3"]
    ) -> None:
        """Resume from a checkpoint's `history`, aligned at its newest entry (the oldest are left
        out where it is longer than this one), and its scales.
        """
        steps = min(len(history), len(self.history)) - 1  # the first entry: the step under way
        # histories are aligned at their newest entries: the lengths may differ
        self.history[len(self.history) - steps :].copy_(history[len(history) - steps :])
        self.scale.copy_(scale)
        self.initialized = True

    @property
    def tensors(self) -> dict[str, Tensor]:
        """Tensors that a checkpoint stores, by kind (`amax_history`, `fp8_scale`): the same on all
        ranks that hold the layer.
        """
        return {HISTORY: self.history, SCALE: self.scale}

    def note(self, operand: Operand, first: int, amaxes: Sequence[Tensor]) -> None:
        """Raise this step's running maxima of |operand| to `amaxes`, one per expert from index
        `first` on (or one for a dense weight).
        """
        # a maximum: recomputed activations and further microbatches may note it twice
        place = self._select_experts(self.now, operand, first, len(amaxes))
        torch.maximum(place, torch.stack(list(amaxes)).view_as(place), out=place)

    def scales(self, operand: Operand, first: int, number: int) -> list[Tensor] | None:
        """Return, for each of `number` experts from `first` on (a dense weight is one), the scale
        that an operand is divided by; None before the first update.
        """
        if not self.initialized:
            return None
        return list(self._select_experts(self.scale, operand, first, number).view(-1).reciprocal())

    @staticmethod
    def _select_experts(values: Tensor, operand: Operand, first: int, number: int) -> Tensor:
        """Return a view of `values` [*experts, 3] for one operand and `number` experts from `first`
        on; the operand's scalar for a dense weight.
        """
        mine = values[..., OPERANDS.index(operand)]
        return mine if mine.ndim == 0 else mine.narrow(0, first, number)

    def enter(self, amaxes: Float[Tensor, "*experts 3"], updates: int) -> None:
        """Append a step's maxima over all ranks to the history, and every `scale_interval` updates
        recompute the scales from it: largest number of the format / 2^margin / maximum. `updates`:
        the run's updates before this one. An operand whose maximum is 0 or not finite keeps its
        scale.
        """
        config = self.recipe.config
        self.history[0] = amaxes
        largest = self.history.amax(0) if config.amax_compute == "max" else amaxes
        # entry 0 moves to the end as the newest; the oldest moves to 0 and is cleared
        self.history.copy_(self.history.roll(-1, 0))
        self.history[0] = 0
        self.now.zero_()
        if not self.initialized or updates % config.scale_interval == 0:
            by = torch.empty_like(largest)
            for i, operand in enumerate(OPERANDS):
                most = fp8.LARGEST[self.recipe.format(operand)] / room(config.margin)
                by[..., i] = most / largest[..., i]
            known = (largest > 0) & largest.isfinite()
            # of one so small that its inverse is infinite, the largest whose own is not
            by = by.clamp(max=1 / fp8.SMALLEST_SCALE)
            self.scale.copy_(torch.where(known, by, self.scale))
        self.initialized = True


def end_step(states: Iterable[Delayed], mesh: Mesh, updates: int | None) -> None:
    """Append a step's maxima, reduced over tp and fsdp, to the history of each of this stage's
    `states`, and update their scales; collective. `updates`: the run's updates before this one;
    None: the step was skipped, and its maxima are dropped.
    """
    states = list(states)
    if updates is None:
        for state in states:
            state.now.zero_()
    if not states or updates is None:
        return
    # one collective per axis for all layers of the stage, not one per weight
    current = torch.cat([state.now.flatten() for state in states])
    for axis in (mesh.tp, mesh.fsdp):
        current = collectives.reduce_scalar(current, axis, "max")
    for state, amaxes in zip(states, current.split([s.now.numel() for s in states]), strict=True):
        state.enter(amaxes.view(state.shape), updates)


@dataclass(frozen=True, eq=False)
class Rounding:
    """How the factors of one weight's products are rounded."""

    recipe: Fp8
    cut: Dim | None
    """The dim of the weight that tp splits."""
    experts: bool = False
    """True for a stack of one matrix per expert."""
    delayed: Delayed | None = None

    def build_product(
        self, axes: ProductAxes, kernel: Literal["rounded", "scaled_mm"], first: int
    ) -> "Fp8Product":
        """Return the products of this weight in 8 bits, with scales shared over `axes`, computed by
        `kernel`, for the experts from index `first` on.
        """
        return Fp8Product(self, axes, kernel, first)


class Operands(NamedTuple):
    """One side of a product, of each expert, or of the one matrix there is."""

    payloads: list[Shaped[Tensor, "_ _"]]
    scales: list[Float[Tensor, "..."]]
    granularity: Granularity
    along: int
    """The dim that the product adds up over."""

    @property
    def fits(self) -> bool:
        """True if torch's scaled products accept it: both dims in whole 16 bytes."""
        return all(n > 0 and n % 16 == 0 for p in self.payloads for n in p.shape)

    def values(self, dtype: torch.dtype) -> list[Float[Tensor, "_ _"]]:
        """Return the dequantised payload of each expert, in `dtype` but fp32 or wider."""
        wide = torch.promote_types(dtype, torch.float32)
        return [
            fp8.dequantise(p, s, granularity=self.granularity, axis=self.along, dtype=wide)
            for p, s in zip(self.payloads, self.scales, strict=True)
        ]


@dataclass(frozen=True, eq=False)
class Fp8Product:
    """The three products of a weight with factors rounded to 8 bits. Each takes lists: one matrix,
    or one per expert. Sums are accumulated in fp32 (fp64 for fp64); results have the unrounded
    factor's dtype.
    """

    rounding: Rounding
    axes: ProductAxes
    kernel: Literal["rounded", "scaled_mm"] = "rounded"
    """How products are computed: `Kernels.fp8`."""
    first: int = 0
    """Index of the first local expert."""

    def output(
        self, xs: Sequence[Tensor], weights: Sequence[Tensor]
    ) -> list[Float[Tensor, "tokens out"]]:
        """Return the output x W^T of each (x, weight), with both factors quantised to 8 bits unless
        the recipe leaves this product unrounded.
        """
        if not self.rounding.recipe.rounds("output"):
            return [F.linear(x, w) for x, w in zip(xs, weights, strict=True)]
        x = self.quantise(xs, "input", 1)
        return self._products(x, self.quantise(weights, "weight", 1), xs[0].dtype)

    def input_gradient(
        self, grads: Sequence[Tensor], weights: Sequence[Tensor]
    ) -> list[Float[Tensor, "tokens in"]]:
        """Return the input gradient g W of each (g, weight), with both factors quantised to 8 bits
        unless the recipe leaves this product unrounded.
        """
        if not self.rounding.recipe.rounds("input-gradient"):
            return [g @ w for g, w in zip(grads, weights, strict=True)]
        g = self.quantise(grads, "gradient", 1)
        return self._products(g, self.quantise(weights, "weight", 0), grads[0].dtype)

    def weight_gradient(
        self, grads: Sequence[Tensor], xs: Sequence[Tensor]
    ) -> list[Float[Tensor, "out in"]]:
        """Return the weight gradient g^T x of each (g, x), with both factors quantised to 8 bits
        unless the recipe leaves this product unrounded, or scales are per block and the weight is
        an expert's.
        """
        recipe = self.rounding.recipe
        # Blocks would be of the rows of experts, which come in another order, and begin elsewhere,
        # on each layout.
        if not recipe.rounds("weight-gradient") or (self.rounding.experts and recipe.block > 1):
            return [g.t() @ x for g, x in zip(grads, xs, strict=True)]
        g = self.quantise(grads, "gradient", 0)
        return self._products(g, self.quantise(xs, "input", 0), grads[0].dtype)

    def quantise(self, parts: Sequence[Tensor], operand: Operand, along: int) -> Operands:
        """Return the payloads and scales of one operand's matrices, `parts`, for a product that
        adds up over their dim `along`. Scales come from the largest |x| over the ranks that share
        them (a collective), or with delayed scaling from earlier steps; this step's maxima are then
        recorded.
        """
        recipe, delayed = self.rounding.recipe, self.rounding.delayed
        granularity, format = recipe.granularity(operand), recipe.format(operand)
        amaxes = [fp8.amax(part, granularity, along) for part in parts]
        known = None
        if delayed is not None:
            delayed.note(operand, self.first, amaxes)
            known = delayed.scales(operand, self.first, len(parts))
        if known is None:
            full = self._reduce_amax(amaxes, operand, along)
            scales = [fp8.scale_of(weight, format, granularity) for weight in full]
        else:
            # nothing is sent; and what is not finite here makes its scale NaN, as elsewhere
            scales = [scale + shard * 0 for scale, shard in zip(known, amaxes, strict=True)]
        # each payload is x / scale, clamped and rounded to 8 bits
        payloads = [
            fp8.quantise_with_scale(part, scale, format, granularity, along)
            for part, scale in zip(parts, scales, strict=True)
        ]
        return Operands(payloads, scales, granularity, along)

    def _reduce_amax(self, amaxes: list[Tensor], operand: Operand, along: int) -> list[Tensor]:
        """Return the largest |x| of each scale over all ranks that hold a part of what shares it
        (`amaxes`: this rank's). Blocks are never cut, so theirs are returned without a collective.
        """
        dims = DIMS[operand]
        match self.rounding.recipe.granularity(operand):
            case "tensor":
                over = [axis for dim in dims for axis in self.axes.axes_of(dim)]
            # a row's scale spans the contracted dim alone
            case "row":
                over = list(self.axes.axes_of(dims[along]))
            case _:
                return amaxes
        if not over:
            return amaxes
        # one message for all experts
        flat = torch.cat([shard.flatten() for shard in amaxes])
        for axis in over:
            flat = collectives.reduce_scalar(flat, axis, "max")
        parts = flat.split([shard.numel() for shard in amaxes])
        return [part.view_as(shard) for part, shard in zip(parts, amaxes, strict=True)]

    def _products(self, left: Operands, right: Operands, dtype: torch.dtype) -> list[Tensor]:
        """Return left right^T of each pair in `dtype`, both contracted over their dim `along`: by
        torch's scaled_mm where chosen and sizes fit, else of dequantised values in fp32.
        """
        if self.kernel == "scaled_mm" and left.fits and right.fits:
            return _scaled_mm_products(left, right, dtype)
        sides = zip(left.values(dtype), right.values(dtype), strict=True)
        return [
            # `along` is 1 for [rows, contracted] and 0 for [contracted, rows]
            torch.mm(a if left.along else a.t(), b.t() if right.along else b).to(dtype)
            for a, b in sides
        ]


@dataclass(frozen=True, eq=False)
class Int8Product:
    """The two products of a frozen weight in eight bits (ops/int8.py), or of each expert's. Layouts
    change nothing: each rank has the scales of its outputs.
    """

    scale: Float[Tensor, "*experts out"]

    def output(
        self, xs: Sequence[Tensor], weights: Sequence[Tensor]
    ) -> list[Float[Tensor, "tokens out"]]:
        """Return the output x W^T of each (x, 8-bit weight), with the weight's scales applied."""
        factors = zip(xs, weights, self._scales, strict=True)
        return [int8.output(x, w, scale) for x, w, scale in factors]

    def input_gradient(
        self, grads: Sequence[Tensor], weights: Sequence[Tensor]
    ) -> list[Float[Tensor, "tokens in"]]:
        """Return the input gradient g W of each (g, 8-bit weight), with the weight's scales
        applied.
        """
        factors = zip(grads, weights, self._scales, strict=True)
        return [int8.input_gradient(g, w, scale) for g, w, scale in factors]

    def weight_gradient(
        self, grads: Sequence[Tensor], xs: Sequence[Tensor]
    ) -> list[Float[Tensor, "out in"]]:
        """Never called, as a weight in 8 bits is frozen: raises AssertionError."""
        raise AssertionError("a weight in eight bits is frozen")

    @property
    def _scales(self) -> Sequence[Tensor]:
        """Scales [out] of each matrix: of the one there is, or of every expert."""
        return [self.scale] if self.scale.ndim == 1 else self.scale.unbind()


Product = Fp8Product | Int8Product | LeafProduct
"""Products that replace torch's own: for 8-bit weights or operands, and for exact numerics."""


def _scaled_mm_products(left: Operands, right: Operands, dtype: torch.dtype) -> list[Tensor]:
    """Return left right^T of each pair in `dtype`, both contracted over their dim `along`, by
    F.scaled_mm on the payloads; the kernel contracts the last dim of both sides, so a side that
    adds up over dim 0 is transposed first. For scales per tensor or per row.
    """
    kinds = {"tensor": ScalingType.TensorWise, "row": ScalingType.RowWise}
    kind = kinds[left.granularity]
    sides = [
        (a if left.along else a.t().contiguous(), b if right.along else b.t().contiguous(), sa, sb)
        for a, sa, b, sb in zip(*left[:2], *right[:2], strict=True)
    ]
    if left.granularity == "row":
        # scaled_mm needs row scales as [m, 1] and [1, n]
        sides = [(a, b, sa.view(-1, 1), sb.view(1, -1)) for a, b, sa, sb in sides]
    return [F.scaled_mm(a, b.t(), sa, kind, sb, kind, output_dtype=dtype) for a, b, sa, sb in sides]
