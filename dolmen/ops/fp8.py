"""Tensors in eight bits: a payload in one of two formats (E4M3, E5M2; Micikevicius et al.,
2209.05433) and the scales that it is multiplied by to be the tensor again.

    amax      the largest |x| of everything that shares a scale
    scale     amax / the format's largest number, so that nothing is cut off; 1 where amax is 0
    payload   x / scale, clamped to +- the largest number, rounded to nearest, ties to even

What shares a scale:

    tensor     all of it
    row        all along `axis`, which is what a product adds up over: a token, an output, ...
    1x128      128 neighbours along `axis`                 (DeepSeek-V3, 2412.19437, section 3.3.2)
    128x128    128 x 128 of the last two dims              (the same, of weights)
    mx         32 neighbours along `axis`, and the scale is a power of two that E8M0 holds (OCP
               Microscaling Formats 1.0, section 6.3). The specification's example takes the largest
               that amax is not under, and cuts off up to 1/8 of a number; ours is the smallest
               that cuts off nothing (2506.08027, section 3.1).

A number that is not finite makes all that share its scale NaN. The same arithmetic on every device,
so that payloads and scales have the same bits.
"""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from jaxtyping import Float, Shaped
from torch import Tensor

from dolmen.ops.numerics import Format, Granularity

DTYPES = {"e4m3": torch.float8_e4m3fn, "e5m2": torch.float8_e5m2}
LARGEST = {"e4m3": 448.0, "e5m2": 57344.0}
BLOCKS = {"1x128": 128, "128x128": 128, "mx": 32}
"""Neighbours that share a scale, of the granularities that have blocks."""
SMALLEST_SCALE = 2.0**-126
"""The smallest normal number of fp32, so that what is divided by it is finite."""


def quantise(
    x: Float[Tensor, "*shape"], *, format: Format, granularity: Granularity, axis: int = -1
) -> tuple[Shaped[Tensor, "*shape"], Float[Tensor, "..."]]:
    """Return x as (payload, scale): payload in x's shape and the format's dtype; scale in fp32,
    shape () for a tensor, else x's shape with one number per block (the last block smaller where
    blocks do not divide the dim). `axis` is the dim that scales are shared along.
    """
    scale = scale_of(amax(x, granularity, axis), format, granularity)
    return quantise_with_scale(x, scale, format, granularity, axis), scale


def dequantise(
    payload: Shaped[Tensor, "*shape"],
    scale: Float[Tensor, "..."],
    *,
    granularity: Granularity,
    axis: int = -1,
    dtype: torch.dtype = torch.float32,
) -> Float[Tensor, "*shape"]:
    """Return payload times scale, computed in fp32, as `dtype`: the inverse of `quantise`."""
    # of all 256 payloads what each stands for: a CPU takes 39 us to look up 49,152 of them, and 222
    # to convert each
    codes = torch.arange(256, dtype=torch.uint8, device=payload.device)
    places = payload.contiguous().view(torch.uint8).flatten().int()
    values = codes.view(payload.dtype).float().index_select(0, places).view(payload.shape)
    return _apply_scale(values, scale, granularity, axis, torch.Tensor.mul_).to(dtype)


def amax(x: Float[Tensor, "*shape"], granularity: Granularity, axis: int) -> Float[Tensor, "..."]:
    """Return the largest |x| of all elements that share a scale, fp32, shaped as `quantise` shapes
    scales: 0 of nothing, infinite where x has NaN (a maximum over ranks may drop NaN). The maximum
    of the parts' results is that of the whole.
    """
    return _block_amax(x.detach(), granularity, axis).nan_to_num(torch.inf, torch.inf)


def _block_amax(x: Tensor, granularity: Granularity, axis: int) -> Tensor:
    """Return the largest |x| of all elements that share a scale, in fp32: NaN where x has one, 0
    for an empty x.
    """
    if granularity == "tensor":
        return x.abs().amax().float() if x.numel() else torch.zeros((), device=x.device)
    blocks = _split_blocks(x, granularity, axis)
    if not x.numel():
        return torch.zeros(blocks.shape[::2], device=x.device)
    return blocks.abs().amax(tuple(range(1, blocks.ndim, 2))).float()


def scale_of(
    amax: Float[Tensor, "*scales"], format: Format, granularity: Granularity
) -> Float[Tensor, "*scales"]:
    """Return the scale for each largest magnitude: amax / the format's largest number (mx: rounded
    up to a power of two), 1 where amax is 0, else at least SMALLEST_SCALE; not finite where amax is
    not.
    """
    # a tensor of the device: by a number, a GPU multiplies by its rounded inverse, and half of the
    # scales differ from a CPU's in their last bit
    largest = amax.new_full((), LARGEST[format])
    by = (amax / largest).clamp(min=SMALLEST_SCALE)
    if granularity == "mx":
        by = _power_above(by)
    return torch.where(amax == 0, 1.0, by)


def _power_above(x: Tensor) -> Tensor:
    """Return the smallest power of two that is at least x, a normal number of fp32; NaN where x is
    not finite, as E8M0 has no infinity.
    """
    bits = x.view(torch.int32)
    exponent = (bits + 0x7FFFFF) & 0x7F800000  # its own where the mantissa is 0, else the next
    return torch.where(x.isfinite(), exponent.view(torch.float32), torch.nan)


def quantise_with_scale(
    x: Float[Tensor, "*shape"],
    scale: Float[Tensor, "..."],
    format: Format,
    granularity: Granularity,
    axis: int,
) -> Shaped[Tensor, "*shape"]:
    """Return the payload of x, x / scale clamped to the format's range and rounded, in x's shape
    and the format's dtype, for a given scale, shaped as `quantise` shapes it. NaN stays NaN.
    """
    most = LARGEST[format]
    # what is made once is changed in place: on a CPU new memory costs more than what is computed
    values = x.detach().to(torch.float32, copy=True)
    values = _apply_scale(values, scale, granularity, axis, torch.Tensor.div_)
    return values.clamp_(-most, most).to(DTYPES[format])


def _apply_scale(
    x: Tensor,
    scale: Tensor,
    granularity: Granularity,
    axis: int,
    op: Callable[[Tensor, Tensor], Tensor],
) -> Tensor:
    """Apply `op` (multiply or divide, in place) to each element of x and the scale that it shares;
    return the result in x's shape.
    """
    if granularity in ("tensor", "row"):
        return op(x, scale)
    done = op(
        _split_blocks(x, granularity, axis),
        scale.view([n for dim in scale.shape for n in (dim, 1)]),
    )
    full = [n * size for n, size in zip(done.shape[::2], done.shape[1::2], strict=True)]
    return done.view(full)[tuple(slice(n) for n in x.shape)]


def _split_blocks(x: Tensor, granularity: Granularity, axis: int) -> Tensor:
    """Return a view of x with each dim as (blocks, elements of a block), x being padded with 0 to
    whole blocks.
    """
    sizes = _block(x, granularity, axis)
    padding = [n for size, dim in zip(sizes, x.shape, strict=True) for n in (-dim % size, 0)]
    if any(padding):
        x = F.pad(x, padding[::-1])
    return x.view(
        [n for size, dim in zip(sizes, x.shape, strict=True) for n in (dim // size, size)]
    )


def _block(x: Tensor, granularity: Granularity, axis: int) -> list[int]:
    """Return how many elements share a scale along each dim of x; not for granularity `tensor`, of
    which all do.
    """
    sizes = [1] * x.ndim
    match granularity:
        case "row":
            sizes[axis] = max(1, x.shape[axis])
        case "128x128":
            sizes[-2:] = [BLOCKS[granularity]] * 2
        case _:
            sizes[axis] = BLOCKS[granularity]
    return sizes
