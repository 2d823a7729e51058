"""RMSNorm (Zhang and Sennrich, 1910.07467): x / sqrt(mean(x^2) + eps) * weight, in fp32, cast back to x's dtype.

The cast comes before the product with the weight, as in Llama; half precision alone can tell.
"""

import torch
from torch import Tensor


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x [..., size], weight [size]; any float dtype, statistics in fp32 (fp64 for fp64 input)."""
    wide = x if x.dtype == torch.float64 else x.float()
    return (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)).to(x.dtype) * weight
