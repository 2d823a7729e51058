"""RMSNorm (Zhang and Sennrich, 1910.07467): x / sqrt(mean(x^2) + eps) * weight, in fp32, cast back
to x's dtype. LayerNorm for exact numerics; elsewhere it is torch's.

The cast comes before the product with the weight, as in Llama; only half precision shows the
difference. F.rms_norm with the weight casts after it, so torch's fused kernel computes the
normalised x alone. Bytes that one pass over x in bf16 reads and writes, per element, of a GPU:

                 forward                                     backward
    passes       36: to fp32 6, squares 8, mean 4,           90 or so: fifteen passes, in fp32
                 times scale 8, cast 6, times weight 4
    fused        8: the kernel 4, times weight 4             10: of x 6, of the weight 4
"""

from collections.abc import Callable
from typing import Literal

import torch
from jaxtyping import Float
from torch import Tensor

from dolmen.core.autograd import Context, TypedFunction
from dolmen.core.reduction import widen
from dolmen.core.torch_private import compute
from dolmen.ops.kernels import Kernels

SumRows = Callable[[Tensor], Tensor]
"""Sum of rows x [*rows, *shape] -> [*shape], the shape of a weight."""


def rms_norm(
    x: Float[Tensor, "*rows size"],
    weight: Float[Tensor, " size"],
    eps: float,
    kind: Literal["passes", "fused"] = Kernels().norm,
    zero_centred: bool = False,
    sum_rows: SumRows | None = None,
) -> Float[Tensor, "*rows size"]:
    """Return x / rms(x) * weight of each row, with autograd, in any float dtype; statistics in fp32
    (fp64 for fp64 input). `kind`: which kernel, see ops/kernels.py. `zero_centred`: the weight is
    stored less 1, and as in Gemma 1 + weight and its product are fp32, cast after: 1 + 0.003 is no
    number of bf16. `sum_rows`: how the weight's gradient is added; None: torch's sum.
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
    return _RMSNorm.apply(x, weight, eps, zero_centred, sum_rows or _sum_rows)


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
        ctx: Context[tuple[bool, SumRows]],
        x: Tensor,
        weight: Tensor,
        eps: float,
        zero_centred: bool,
        sum_rows: SumRows,
    ) -> Tensor:
        """Return the normalised rows times the weight."""
        y, scale = _forward(x, weight, eps, zero_centred)
        ctx.kept = zero_centred, sum_rows
        ctx.save_for_backward(x, weight, scale)
        return y

    @staticmethod
    def backward(
        ctx: Context[tuple[bool, SumRows]], g: Tensor
    ) -> tuple[Tensor, Tensor | None, None, None, None]:
        """Return the gradients of x and, where needed, of the weight."""
        (x, weight, scale), (zero_centred, sum_rows) = ctx.saved_tensors, ctx.kept
        _, wants_dweight, *_ = ctx.needs_input_grad
        dweight = None
        normal = widen(x) * scale
        if zero_centred:
            wide = widen(g)
            dnormal = wide * (weight.to(wide.dtype) + 1)
            if wants_dweight:
                dweight = sum_rows(wide * normal)
        else:
            dnormal = widen(g * weight)
            if wants_dweight:
                dweight = sum_rows(g * normal.to(x.dtype))
        # dx = (dn - n mean(dn n)) / rms
        dx = (dnormal - normal * (dnormal * normal).mean(-1, keepdim=True)).mul_(scale)
        return dx.to(x.dtype), dweight, None, None, None


def _sum_rows(x: Tensor) -> Tensor:
    """Return the sum of the rows of x [*rows, size]."""
    return x.flatten(0, -2).sum(0)


class _LayerNorm(TypedFunction):
    """Autograd of LayerNorm in elementwise passes, in fp32, rounded once.

    n = (x - mean) / sqrt(variance + eps)        y = n w + b
    dx = (g w - mean(g w) - n mean(g w n)) / sqrt(variance + eps)        dw = sum of g n, db of g
    """

    @staticmethod
    def forward(
        ctx: Context[tuple[float, SumRows]],
        x: Tensor,
        weight: Tensor | None,
        bias: Tensor | None,
        eps: float,
        sum_rows: SumRows,
    ) -> Tensor:
        """Return the normalised rows, times the weight and plus the bias where there are any."""
        ctx.kept = eps, sum_rows
        ctx.save_for_backward(x, weight)
        y, _ = _center_and_scale(x, eps)
        y = y if weight is None else y * weight
        return (y if bias is None else y + bias).to(x.dtype)

    @staticmethod
    def backward(
        ctx: Context[tuple[float, SumRows]], g: Tensor
    ) -> tuple[Tensor, Tensor | None, Tensor | None, None, None]:
        """Return the gradients of x and, where needed, of weight and bias."""
        (x, weight), (eps, sum_rows) = ctx.saved_tensors, ctx.kept
        _, wants_dweight, wants_dbias, *_ = ctx.needs_input_grad
        wide, (normal, scale) = widen(g), _center_and_scale(x, eps)
        dweight = sum_rows(wide * normal) if wants_dweight else None
        dbias = sum_rows(wide) if wants_dbias else None
        dnormal = wide if weight is None else wide * weight
        mean = dnormal.mean(-1, keepdim=True)
        along = normal * (dnormal * normal).mean(-1, keepdim=True)
        return ((dnormal - mean - along) * scale).to(x.dtype), dweight, dbias, None, None


def _center_and_scale(x: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """Return (x - mean) / sqrt(variance + eps) of each row, and 1 / sqrt(variance + eps)."""
    centred = widen(x) - widen(x).mean(-1, keepdim=True)
    scale = torch.rsqrt(centred.square().mean(-1, keepdim=True) + eps)
    return centred.mul_(scale), scale


def layer_norm(
    x: Float[Tensor, "*rows size"],
    weight: Float[Tensor, "*heads size"] | None,
    bias: Float[Tensor, " size"] | None,
    eps: float,
    sum_rows: SumRows,
) -> Float[Tensor, "*rows size"]:
    """Return LayerNorm of each row, times `weight` and plus `bias` where there are any; statistics
    in fp32 (fp64 for fp64 input). `sum_rows`: how gradients of weight and bias are added. Its bits
    depend on no other row; elsewhere torch's is as good, and faster.
    """
    return _LayerNorm.apply(x, weight, bias, eps, sum_rows)


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
