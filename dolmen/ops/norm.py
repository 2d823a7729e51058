"""RMSNorm (Zhang and Sennrich, 1910.07467): x / sqrt(mean(x^2) + eps) * weight, in fp32, cast back
to x's dtype.

The cast comes before the product with the weight, as in Llama; half precision alone can tell.
"""

import torch
from torch import Tensor


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x [..., size], weight [size]; any float dtype, statistics in fp32 (fp64 for fp64 input)."""
    if torch.compiler.is_compiling():
        # the compiler chooses what to keep: a block's forward is 4 % faster
        return _forward(x, weight, eps)[0]
    return _RMSNorm.apply(x, weight, eps)


def _forward(x: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    wide = _wide(x)
    scale = torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    return (wide * scale).to(x.dtype) * weight, scale


def _wide(x: Tensor) -> Tensor:
    return x if x.dtype == torch.float64 else x.float()


class _RMSNorm(torch.autograd.Function):
    """Kept for backward: x and one number per row. Autograd alone would keep x in fp32 and the
    normalised x.
    """

    @staticmethod
    def forward(ctx, x, weight, eps):
        y, scale = _forward(x, weight, eps)
        ctx.save_for_backward(x, weight, scale)
        return y

    @staticmethod
    def backward(ctx, g):
        x, weight, scale = ctx.saved_tensors
        normal, dnormal = _wide(x) * scale, _wide(g * weight)
        dx = (dnormal - normal * (dnormal * normal).mean(-1, keepdim=True)).mul_(scale)
        return dx.to(x.dtype), (g * normal.to(x.dtype)).flatten(0, -2).sum(0), None
