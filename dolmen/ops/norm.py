"""RMSNorm (Zhang and Sennrich, 1910.07467): x / sqrt(mean(x^2) + eps) * weight, in fp32, cast back
to x's dtype.

The cast comes before the product with the weight, as in Llama; only half precision shows the
difference. F.rms_norm with the weight casts after it, so torch's fused kernel computes the
normalised x alone. Bytes that one pass over x in bf16 reads and writes, per element, of a GPU:

                 forward                                     backward
    passes       36: to fp32 6, squares 8, mean 4,           90 or so: fifteen passes, in fp32
                 times scale 8, cast 6, times weight 4
    fused        8: the kernel 4, times weight 4             10: of x 6, of the weight 4
"""

from typing import Literal

import torch
from jaxtyping import Float
from torch import Tensor

from dolmen.core.autograd import Context, TypedFunction
from dolmen.core.reduction import widen
from dolmen.core.torch_private import compute
from dolmen.ops.invariant import sum_tokens
from dolmen.ops.kernels import Kernels


def rms_norm(
    x: Float[Tensor, "*rows size"],
    weight: Float[Tensor, " size"],
    eps: float,
    kind: Literal["passes", "fused"] = Kernels().norm,
    zero_centred: bool = False,
    leaf: int | None = None,
) -> Float[Tensor, "*rows size"]:
    """Return x / rms(x) * weight of each row, with autograd, in any float dtype; statistics in fp32
    (fp64 for fp64 input). `kind`: which kernel, see ops/kernels.py. `zero_centred`: the weight is
    stored less 1, and as in Gemma 1 + weight and its product are fp32, cast after: 1 + 0.003 is no
    number of bf16. `leaf`: add the weight's gradient in the fixed order of a tree over leaves of so
    many rows (ops/invariant.py).
    """
    if torch.compiler.is_compiling():
        # the compiler chooses what to keep: a block's forward is 4 % faster
        return _forward(x, weight, eps, zero_centred)[0]
    if kind == "passes" and not torch.is_grad_enabled():
        # nothing is kept: the same bits, 10 us of the host less
        return _forward(x, weight, eps, zero_centred)[0]
    # torch's kernel takes one dtype
    if kind == "fused" and x.dtype == weight.dtype and not zero_centred:
        return _FusedRMSNorm.apply(x, weight, eps)
    return _RMSNorm.apply(x, weight, eps, zero_centred, leaf)


def _forward(x: Tensor, weight: Tensor, eps: float, zero_centred: bool) -> tuple[Tensor, Tensor]:
    """Return the normalised rows times the weight, in x's dtype, and 1 / rms of each row."""
    wide = widen(x)
    scale = torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    if zero_centred:
        return (wide * scale * (weight.to(wide.dtype) + 1)).to(x.dtype), scale
    return (wide * scale).to(x.dtype) * weight, scale


class _RMSNorm(TypedFunction):
    """Autograd of RMSNorm in elementwise passes. Kept for backward: x and one number per row.
    Autograd alone would keep x in fp32 and the normalised x.
    """

    @staticmethod
    def forward(
        ctx: Context[tuple[bool, int | None]],
        x: Tensor,
        weight: Tensor,
        eps: float,
        zero_centred: bool,
        leaf: int | None,
    ) -> Tensor:
        """Return the normalised rows times the weight."""
        y, scale = _forward(x, weight, eps, zero_centred)
        ctx.kept = zero_centred, leaf
        ctx.save_for_backward(x, weight, scale)
        return y

    @staticmethod
    def backward(
        ctx: Context[tuple[bool, int | None]], g: Tensor
    ) -> tuple[Tensor, Tensor | None, None, None, None]:
        """Return the gradients of x and, where needed, of the weight."""
        (x, weight, scale), (zero_centred, leaf) = ctx.saved_tensors, ctx.kept
        _, wants_dweight, *_ = ctx.needs_input_grad
        dweight = None
        normal = widen(x) * scale
        if zero_centred:
            wide = widen(g)
            dnormal = wide * (weight.to(wide.dtype) + 1)
            if wants_dweight:
                dweight = _sum_rows(wide * normal, leaf)
        else:
            dnormal = widen(g * weight)
            if wants_dweight:
                dweight = _sum_rows(g * normal.to(x.dtype), leaf)
        # dx = (dn - n mean(dn n)) / rms
        dx = (dnormal - normal * (dnormal * normal).mean(-1, keepdim=True)).mul_(scale)
        return dx.to(x.dtype), dweight, None, None, None


def _sum_rows(x: Tensor, leaf: int | None) -> Tensor:
    """Return the sum of the rows of x [*rows, size]; with `leaf` in the fixed order of a tree over
    leaves of so many rows.
    """
    rows = x.flatten(0, -2)
    return rows.sum(0) if leaf is None else sum_tokens(rows, leaf)


class _FusedRMSNorm(TypedFunction):
    """Autograd of RMSNorm by torch's kernels. Kept for backward: x and one number per row. Forward
    rounds as Llama does; backward rounds its results alone, and not g * weight in between.
    """

    @staticmethod
    def forward(ctx: Context[None], x: Tensor, weight: Tensor, eps: float) -> Tensor:
        """Return the normalised rows times the weight."""
        normal, scale = compute.rms_norm(x, weight.shape, None, eps)
        ctx.save_for_backward(x, weight, scale)
        return normal * weight

    @staticmethod
    def backward(ctx: Context[None], g: Tensor) -> tuple[Tensor, Tensor | None, None]:
        """Return the gradients of x and, where needed, of the weight."""
        x, weight, scale = ctx.saved_tensors
        _, wants_dweight, _ = ctx.needs_input_grad
        dx, dweight = compute.rms_norm_backward(
            g, x, weight.shape, scale, weight, [True, wants_dweight]
        )
        return dx, dweight, None
