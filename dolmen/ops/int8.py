"""Frozen weights in eight bits: whole numbers and a scale for each output, symmetric (LLM.int8(),
2208.07339, section 2.1: what it calls row-wise), so that zero stays zero.

    scale     amax / 127, amax the largest |w| of an output; 1 where amax is 0        fp32 [out]
    payload   w / scale, rounded to nearest, ties to even: -127 to 127                int8 [out, in]

Both follow from a row alone, so rows may be cut among ranks; what is cut along the inputs is cut
after it was rounded. Each weight is off by half a scale at most. Products multiply the payload as
it is and the result by the scale: one pass over what is small, none over the weight.

    output            y [t, o] = (x [t, i] payload [o, i]^T) scale [o]
    input gradient    dx [t, i] = (g [t, o] scale [o]) payload [o, i]

A row with a number that is not finite is NaN.

Products of integers (section 2.1's vector-wise quantization): each token's row of x is rounded by a
scale of its own, at each forward, and stored as u8 about a zero point of 128, as CPUs multiply u8
by s8. The sums are whole numbers below 2^31, so they are exact, in any order and over any split.

    token scale       amax / 127, amax the largest |x| of a token                     fp32 [t, 1]
    token payload     x / scale, rounded to nearest, ties to even, + 128: 1 to 255    u8 [t, i]
    output            y [t, o] = ((payload - 128) [t, i] weights [o, i]^T) scale [o] scale [t]
"""

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int8, UInt8
from torch import Tensor

LARGEST = 127
ZERO_POINT = 128
"""The u8 value that represents 0."""
SMALLEST_SCALE = 2.0**-126
"""The smallest normal number of fp32, so that what is divided by it is finite."""


def quantise(
    weight: Float[Tensor, "*experts out in"], amax: Float[Tensor, "*experts out"] | None = None
) -> tuple[Int8[Tensor, "*experts out in"], Float[Tensor, "*experts out"]]:
    """Return a weight as (int8 payload, fp32 scale of each output), payload times scale being
    within half a scale of the weight; a row that is not finite has a NaN scale. `amax`: the largest
    magnitude of each whole row, where `weight` has a part of its inputs; None: taken from `weight`.
    """
    wide = weight.detach().to(torch.promote_types(weight.dtype, torch.float32))
    amax = wide.abs().amax(-1) if amax is None else amax.to(wide.dtype)
    scale = torch.where(amax > 0, amax / LARGEST, 1.0).clamp(min=SMALLEST_SCALE).float()
    # NaN in, NaN out: a broken weight is not hidden by rounding
    scale = torch.where(amax.isfinite(), scale, torch.nan)
    # -128 is not used, so that the range is symmetric
    steps = (wide / scale.unsqueeze(-1).to(wide.dtype)).round_().clamp_(-LARGEST, LARGEST)
    return steps.nan_to_num_(0.0).to(torch.int8), scale


def token_scales(x: Float[Tensor, "tokens in"]) -> Float[Tensor, "tokens 1"]:
    """Return the scale of each token of x, its largest magnitude / 127, in fp32: NaN or infinite
    where x is.
    """
    return x.float().abs().amax(-1, keepdim=True).div_(LARGEST).clamp_(min=SMALLEST_SCALE)


def quantise_tokens(
    x: Float[Tensor, "tokens in"], scale: Float[Tensor, "tokens 1"]
) -> UInt8[Tensor, "tokens in"]:
    """Return x / scale, rounded to whole numbers, plus 128, as u8: the payload of x by the scale of
    each token.
    """
    # torch converts fp32 to s8 by vectors and to u8 one by one; s8 ^ 0x80 is s8 + 128 as u8
    steps = (x.float() / scale).round_().to(torch.int8)
    return steps.bitwise_xor_(-ZERO_POINT).view(torch.uint8)


def dequantise(
    payload: Int8[Tensor, "*experts out in"],
    scale: Float[Tensor, "*experts out"],
    dtype: torch.dtype = torch.float32,
) -> Float[Tensor, "*experts out in"]:
    """Return payload times scale, computed in fp32 (fp64 for fp64), in `dtype`."""
    wide = torch.promote_types(dtype, torch.float32)
    return (payload.to(wide) * scale.unsqueeze(-1).to(wide)).to(dtype)


def output(
    x: Float[Tensor, "tokens in"], payload: Int8[Tensor, "out in"], scale: Float[Tensor, " out"]
) -> Float[Tensor, "tokens out"]:
    """Return x W^T in x's dtype, W being the dequantised 8-bit payload: the product with the
    payload, times the scale of each output. A payload is exact in x's dtype, as bf16 has eight bits
    of mantissa.
    """
    return (F.linear(x, payload.to(x.dtype)) * scale).to(x.dtype)


def input_gradient(
    g: Float[Tensor, "tokens out"], payload: Int8[Tensor, "out in"], scale: Float[Tensor, " out"]
) -> Float[Tensor, "tokens in"]:
    """Return the input gradient g W in g's dtype, W being the dequantised 8-bit payload: g times
    the scale of each output, times the payload.
    """
    return (g * scale).to(g.dtype) @ payload.to(g.dtype)
