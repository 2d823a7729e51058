"""Linear layers for inference, where no gradient is kept: prepacked weights and multi-LoRA.

Weights are prepacked once, when an engine starts:

    OneDnn                fp32 or bf16 in oneDNN's packed format. F.linear of a few rows reads 4 to
                          10 GB/s on one core (an EPYC) in fp32, by another library, this 14 to 27;
                          of bf16 it reads half as much a second as this, with the same bits.
    IntegerLinear         each row of W [out, in] an int8 times a scale of its own, each row of x a
                          u8 times one (ops/int8.py). Sums of integers are exact: the bits of a row
                          of y depend neither on the other rows nor on how many there are.
    SplitIntegerLinear    the same of a W whose inputs tp cuts (row-parallel): scales are of whole
                          rows, and integers cross tp, so the bits do not depend on tp either.
    Int8Rows              W as above, x in bf16: where a CPU or torch has no exact u8 x s8 product,
                          or sums may leave int32.

All hold the weight with its adapter merged in. Weights that share an input, such as q, k and v, are
packed as one matrix (`prepack_together`), which is read once and called once.

Multi-LoRA: each token of a forward uses one of several named adapters, or none (Punica, 2310.18547;
S-LoRA, 2311.03285).

    y = x W^T                                     of all tokens together, with W prepacked or int8
    y[i] += (x[i] A_n^T) B_n^T                    for each adapter n in use; i are the tokens that
                                                  use it, B_n includes the adapter's scale
    y[i] *= g_n                                   DoRA only, g_n = m_n / |W + B_n A_n| [out]
    y += b

Nothing is merged, and each adapter has a rank of its own, so the added cost of a forward is that of
the adapters that its tokens use. Adapters are cut over tp as a single one is (tensor.py), so
nothing more is sent.
"""

import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, reduce
from operator import add
from typing import Literal, NamedTuple, Protocol, runtime_checkable

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int64, Shaped
from torch import Tensor

from dolmen.core.collectives import reduce_scalar
from dolmen.core.device import to_device
from dolmen.core.mesh import SINGLE, Axis
from dolmen.core.torch_private import compute
from dolmen.ops import int8

Weights = Literal["stated", "int8"]
"""How weights are held: in the requested dtype, or as int8."""

ROWS = 64  # what a weight is laid out for; as fast with 4 rows and with 256
# 1,040: fp32 holds every sum of as many products exactly
MAX_FLOAT_INPUTS = (1 << 24) // int8.LARGEST**2
# 133,144: sums of more products may leave int32
MAX_INT32_INPUTS = (1 << 31) // int8.LARGEST**2
PIECE = 32  # inputs; of rows of 72 or 200 the int8 product of torch 2.13 was wrong, or crashed
WORTH = 1 << 14  # elements; of fewer what a product costs is its call


@runtime_checkable
class PrepackedProduct(Protocol):
    """A prepacked product with a weight."""

    def __call__(
        self, x: Float[Tensor, "tokens in"], bias: Float[Tensor, " out"] | None
    ) -> Float[Tensor, "tokens out"]:
        """Return x W^T + b (b may be None), without autograd."""
        ...


class OneDnn:
    """Product with a weight in oneDNN's packed format. A row has the same bits in a batch of
    any size, except for a single row of 2,048 inputs or more (torch 2.13, an EPYC).
    """

    def __init__(self, weight: Float[Tensor, "out in"]):
        """Keep a packed copy of `weight`."""
        self.weight = compute.prepack_weight(weight.detach(), ROWS)

    def __call__(
        self, x: Float[Tensor, "tokens in"], bias: Float[Tensor, " out"] | None
    ) -> Float[Tensor, "tokens out"]:
        """Return x W^T + b in the weight's dtype, fp32 or bf16, without autograd."""
        return compute.prepacked_linear(x, self.weight, bias)


def _add_bias(y: Tensor, bias: Tensor | None, dtype: torch.dtype) -> Tensor:
    """Return y + b (y if b is None) in `dtype`; overwrites y."""
    return (y if bias is None else y.add_(bias)).to(dtype)


class IntegerLinear:
    """Product of integers with a weight rounded to int8, one fp32 scale per output; each token is
    rounded to u8 by a scale of its own.
    """

    def __init__(self, weight: Float[Tensor, "out in"]):
        """Keep `weight` rounded to int8 with a scale of each row, and packed."""
        payload, self.scale = int8.quantise(weight)
        self.weight = compute.prepack_integers(payload)
        self.zeros = torch.zeros(len(weight), dtype=torch.int32)

    def __call__(
        self, x: Float[Tensor, "tokens in"], bias: Float[Tensor, " out"] | None
    ) -> Float[Tensor, "tokens out"]:
        """Return x W^T + b in x's dtype: the product in integers, then scales and bias in fp32.
        Each token of x is rounded to u8.
        """
        scale = int8.token_scales(x)
        full = int8.quantise_tokens(x, scale)
        y = compute.multiply_integers(full, self.weight, self.scale, self.zeros, int8.ZERO_POINT)
        y = y.mul_(scale)
        return _add_bias(y, bias, x.dtype)


class SplitIntegerLinear:
    """`IntegerLinear` of a weight whose inputs are cut over an axis of several ranks. Each rank
    multiplies blocks of at most MAX_FLOAT_INPUTS inputs, whose sums fp32 holds exactly, and adds
    them up as integers.
    """

    def __init__(self, weight: Float[Tensor, "out in"], axis: Axis):
        """Keep this rank's part of the weight rounded to int8 by the scales of whole rows, and
        packed in blocks of inputs. Collective over `axis`, which cuts the inputs.
        """
        wide = torch.promote_types(weight.dtype, torch.float32)
        amax = weight.detach().abs().amax(-1).to(wide)
        payload, self.scale = int8.quantise(weight, _max_over(amax, axis))
        # contiguous, as the operators ignore strides
        parts = [part.contiguous() for part in payload.split(MAX_FLOAT_INPUTS, 1)]
        self.blocks = [compute.prepack_integers(part) for part in parts]
        self.axis = axis
        # of all ranks together
        self.fits_float = weight.shape[1] * axis.size <= MAX_FLOAT_INPUTS
        self.ones = torch.ones(len(weight))
        self.zeros = torch.zeros(len(weight), dtype=torch.int32)

    def token_scales(self, x: Float[Tensor, "tokens in"]) -> Float[Tensor, "tokens 1"]:
        """Return the scale of each whole token, of which x has this rank's part: infinite where a
        rank has NaN. Collective over the axis.
        """
        return _max_over(int8.token_scales(x), self.axis)

    def sums(
        self, x: Float[Tensor, "tokens in"], scale: Float[Tensor, "tokens 1"]
    ) -> Shaped[Tensor, "tokens out"]:
        """Return this rank's part of the integer sums of the product, from x rounded to u8 by
        `scale`: in fp32 where it holds the sums of all ranks together exactly, else in int32.
        """
        full = int8.quantise_tokens(x, scale)
        sums = [
            compute.multiply_integers(
                part.contiguous(), block, self.ones, self.zeros, int8.ZERO_POINT
            )
            for part, block in zip(full.split(MAX_FLOAT_INPUTS, 1), self.blocks, strict=True)
        ]
        return sums[0] if self.fits_float else reduce(add, (part.int() for part in sums))

    def apply_scales(
        self, sums: Shaped[Tensor, "here out"], scale: Float[Tensor, "here 1"]
    ) -> Float[Tensor, "here out"]:
        """Return sums of all ranks times the scale of each output and then of each token, in fp32:
        what `IntegerLinear` computes of them.
        """
        return (sums.float() * self.scale).mul_(scale)

    def __call__(
        self, x: Float[Tensor, "tokens in"], bias: Float[Tensor, " out"] | None
    ) -> Float[Tensor, "tokens out"]:
        """Return this rank's partial sum of x W^T, plus b, in x's dtype. Collective over the axis,
        as a token's scale is of all its ranks.
        """
        scale = self.token_scales(x)
        y = self.apply_scales(self.sums(x, scale), scale)
        return _add_bias(y, bias, x.dtype)


def _max_over(x: Tensor, axis: Axis) -> Tensor:
    """Return the elementwise maximum of x, which must not be negative, over the ranks of an axis;
    infinite where one has NaN, which gloo's maximum loses unless the first rank has it. Collective.
    """
    return reduce_scalar(x.nan_to_num(nan=torch.inf, posinf=torch.inf), axis, "max")


class Int8Rows:
    """Product with a weight rounded to int8, one fp32 scale per output; x is rounded to bf16."""

    def __init__(self, weight: Float[Tensor, "out in"]):
        """Keep `weight` rounded to int8 with a scale of each row, its rows padded to whole
        pieces.
        """
        payload, self.scale = int8.quantise(weight)
        # torch's operator reads whole pieces of a row, behind the end of one that is shorter
        self.padding = -weight.shape[1] % PIECE
        self.weight = F.pad(payload, (0, self.padding))
        # scales are applied in fp32: as bf16 each would be up to 0.4 % off
        self.ones = torch.ones_like(self.scale, dtype=torch.bfloat16)

    def __call__(
        self, x: Float[Tensor, "tokens in"], bias: Float[Tensor, " out"] | None
    ) -> Float[Tensor, "tokens out"]:
        """Return x W^T + b in x's dtype; x is rounded to bf16."""
        x_whole = F.pad(x.bfloat16(), (0, self.padding)) if self.padding else x.bfloat16()
        y = compute.int8_product(x_whole, self.weight, self.ones).float() * self.scale
        return _add_bias(y, bias, x.dtype)


def prepack(weight: Tensor, kind: Weights, inputs: Axis = SINGLE.tp) -> PrepackedProduct | None:
    """Return the product with a prepacked copy of `weight` for a CPU. `kind` int8: quantised,
    multiplied as integers where the CPU can, else dequantised. `kind` stated: fp32 or bf16 in
    oneDNN's layout, or None where that is no faster (a small weight, no oneDNN, bf16 without
    instructions for it). None for what is not one matrix. `inputs`: the axis that splits the
    weight's inputs (row-parallel); with int8 collective over it.
    """
    if weight.ndim != 2 or not _gains(weight.shape[0], weight.shape[1], weight.dtype, kind):
        return None
    if kind == "int8":
        if not multiplies_integers() or weight.shape[1] * inputs.size > MAX_INT32_INPUTS:
            return Int8Rows(weight)
        return IntegerLinear(weight) if inputs.size == 1 else SplitIntegerLinear(weight, inputs)
    return OneDnn(weight)


def _gains(outputs: int, inputs: int, dtype: torch.dtype, kind: Weights) -> bool:
    """Return True if a prepacked product with a weight [outputs, inputs] is faster than F.linear's:
    a large one in fp32, or in bf16 on a CPU with instructions for it, where torch has oneDNN.
    Always for int8, as it is what the user requested.
    """
    large = outputs * inputs >= WORTH and min(outputs, inputs) >= ROWS
    # without these instructions oneDNN has no products of bf16, or slow ones
    fast = dtype == torch.float32 or dtype == torch.bfloat16 and compute.has_fast_bfloat16()
    return kind == "int8" or large and fast and compute.can_prepack()


@dataclass(frozen=True, eq=False)
class FusedPart:
    """The outputs of one weight in the packed product of several that share an input."""

    product: PrepackedProduct
    sizes: tuple[int, ...]
    """Outputs of each weight."""
    index: int
    """Index of this weight among them."""

    def split(self, x: Float[Tensor, "tokens in"]) -> tuple[Float[Tensor, "tokens _"], ...]:
        """Return the products of x with all the weights that are packed together, without biases:
        views of one tensor, in the order in which they were packed.
        """
        return self.product(x, None).split_with_sizes(self.sizes, 1)

    def __call__(
        self, x: Float[Tensor, "tokens in"], bias: Float[Tensor, " out"] | None
    ) -> Float[Tensor, "tokens out"]:
        """Return x W^T + b of this weight alone; computes the products of all and uses one."""
        y = self.split(x)[self.index]
        return y if bias is None else y + bias


def prepack_together(weights: Sequence[Tensor], kind: Weights) -> list[PrepackedProduct | None]:
    """Return, per weight [out_i, in] of `weights`, which share an input, its part of one product
    with all of them packed as one matrix, in the format `kind`. A list of None if there is no gain,
    which is known before anything is copied: see `prepack`.
    """
    sizes = tuple(len(weight) for weight in weights)
    first = weights[0]
    gains = _gains(sum(sizes), first.shape[1], first.dtype, kind)
    product = prepack(torch.cat(list(weights)), kind) if gains else None
    return [None if product is None else FusedPart(product, sizes, i) for i in range(len(sizes))]


@cache
def multiplies_integers() -> bool:
    """Return True if torch multiplies u8 by s8 on this CPU, and exactly; else warn that --weights
    int8 is slower, and return False. Cached.
    """
    problem = "this torch has no product of u8 and s8"
    if compute.has_integer_product():
        if is_exact():
            return True
        problem = "this CPU has no VNNI: its products of u8 and s8 saturate"
    warnings.warn(
        f"{problem}. --weights int8 multiplies in bf16 by int8 weights, which is slower",
        stacklevel=2,
    )
    return False


def is_exact() -> bool:
    """Return True if this CPU's products of the largest u8 and s8 numbers are exact. Without VNNI,
    AVX2 adds pairs of products in int16, where 2 * 255 * 127 saturates.
    """
    x, payload = torch.full((16, 64), 255, dtype=torch.uint8), torch.full((64, 64), 127)
    weight = compute.prepack_integers(payload.to(torch.int8))
    ones, zeros = torch.ones(64), torch.zeros(64, dtype=torch.int32)
    want = 64 * (255 - int8.ZERO_POINT) * 127
    return all(
        bool((compute.multiply_integers(rows, weight, ones, zeros, int8.ZERO_POINT) == want).all())
        for rows in (x[:1], x)
    )


class Pair(NamedTuple):
    """One LoRA adapter of one weight, as this rank multiplies it."""

    down: Float[Tensor, "rank in"]
    """A."""
    up: Float[Tensor, "out rank"]
    """B, times the scale of the adapter."""
    gain: Float[Tensor, " out"] | None = None
    """DoRA's factor of the outputs."""

    def cut(self, mine: Callable[[Tensor], Tensor]) -> "Pair":
        """Return the pair for the output rows that `mine` selects: `mine` is applied to B and to
        DoRA's gain; A is kept whole.
        """
        return Pair(self.down, mine(self.up), None if self.gain is None else mine(self.gain))


class Segment(NamedTuple):
    """Tokens of a forward that have the same adapter."""

    name: str
    tokens: Int64[Tensor, " own"] | None
    """Indices of the tokens in the forward; None: all of them."""


@dataclass
class AdapterAssignment:
    """Adapter of each token of the current forward. The engine sets `segments` before each forward,
    and every multi-LoRA product reads them.
    """

    segments: Sequence[Segment] = ()


def segments(
    names: Sequence[str | None], counts: Sequence[int], device: torch.device
) -> list[Segment]:
    """Return the tokens of concatenated sequences grouped by adapter, in the order of their first
    use: `names` and token `counts` of each sequence. Tokens without an adapter (None) are in no
    segment. A segment that has all tokens has no indices.
    """
    adapter_rows: dict[str, list[int]] = {}
    first = 0
    for name, count in zip(names, counts, strict=True):
        if name is not None:
            adapter_rows.setdefault(name, []).extend(range(first, first + count))
        first += count
    return [
        Segment(name, None if len(index) == first else to_device(torch.tensor(index), device))
        for name, index in adapter_rows.items()
    ]


class MultiLora(NamedTuple):
    """The adapters of one weight, by name, and the assignment of tokens to them."""

    pairs: Mapping[str, Pair]
    """Adapters of this weight, by name."""
    turn: AdapterAssignment

    def cut(self, mine: Callable[[Tensor], Tensor]) -> "MultiLora":
        """Return all adapters restricted to the output rows that `mine` selects (see
        `Pair.cut`).
        """
        return MultiLora({name: pair.cut(mine) for name, pair in self.pairs.items()}, self.turn)

    def add_to(
        self, y: Float[Tensor, "tokens out"], x: Float[Tensor, "tokens in"]
    ) -> Float[Tensor, "tokens out"]:
        """Return y = x W^T plus, for each token that has an adapter of this weight, the adapter's
        product (x A^T) B^T, times DoRA's gain. y must not include the bias, and may be overwritten:
        use the result.
        """
        for name, rows in self.turn.segments:
            pair = self.pairs.get(name)
            if pair is None:
                continue
            low = (x if rows is None else x[rows]) @ pair.down.t()
            if pair.gain is not None:
                full = (y if rows is None else y[rows]).addmm(low, pair.up.t()) * pair.gain
                y = full if rows is None else y.index_copy_(0, rows, full)
            elif rows is None:
                y.addmm_(low, pair.up.t())
            else:
                y.index_add_(0, rows, low @ pair.up.t())
        return y
