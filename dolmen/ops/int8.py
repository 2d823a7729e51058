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
"""

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int8
from torch import Tensor

LARGEST = 127
SMALLEST_SCALE = 2.0**-126
"""The smallest normal number of fp32, so that what is divided by it is finite."""


def quantise(
    weight: Float[Tensor, "*experts out in"],
) -> tuple[Int8[Tensor, "*experts out in"], Float[Tensor, "*experts out"]]:
    """Return a weight as (payload in int8, scale of each output in fp32); a row that is not finite
    has a NaN scale.
    """
    wide = weight.detach().to(torch.promote_types(weight.dtype, torch.float32))
    amax = wide.abs().amax(-1)
    scale = torch.where(amax > 0, amax / LARGEST, 1.0).clamp(min=SMALLEST_SCALE).float()
    # NaN in, NaN out: a broken weight is not hidden by rounding
    scale = torch.where(amax.isfinite(), scale, torch.nan)
    # -128 is not used, so that the range is symmetric
    steps = (wide / scale.unsqueeze(-1).to(wide.dtype)).round_().clamp_(-LARGEST, LARGEST)
    return steps.nan_to_num_(0.0).to(torch.int8), scale


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
    """Return x W^T in x's dtype, W being the dequantised payload; the scales multiply the result. A
    payload is exact in x's dtype, as bf16 has eight bits of mantissa.
    """
    return (F.linear(x, payload.to(x.dtype)) * scale).to(x.dtype)


def input_gradient(
    g: Float[Tensor, "tokens out"], payload: Int8[Tensor, "out in"], scale: Float[Tensor, " out"]
) -> Float[Tensor, "tokens in"]:
    """Return the input gradient g W in g's dtype, W being the dequantised payload; the scales
    multiply g.
    """
    return (g * scale).to(g.dtype) @ payload.to(g.dtype)
