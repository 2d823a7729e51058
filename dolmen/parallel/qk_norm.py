"""RMSNorm of queries and keys over the width of all heads, which tp has split (OLMo 2, 2501.00656).

A rank has its heads, and the mean is over those of all: of each token one number for the queries
and one for the keys crosses tp, both at once, and in backward as many.

    forward            s = sum over heads and their numbers of x^2, summed over tp
                       r = 1 / sqrt(s / width + eps)         n = x r         y = n w
    input gradient     m = sum of (g w) n, summed over tp    dx = r (g w - n m / width)
    weight gradient    dw = sum over tokens of g n
"""

from collections.abc import Sequence

import torch
from jaxtyping import Float
from torch import Tensor

from dolmen.core import collectives
from dolmen.core.autograd import Context, TypedFunction
from dolmen.core.mesh import Axis
from dolmen.core.reduction import widen


class _OverWidth(TypedFunction):
    """Autograd of `rms_norm_over_width`. Kept for backward: queries, keys, and one number per token
    of each.
    """

    @staticmethod
    def forward(
        ctx: Context[Axis], q: Tensor, k: Tensor, of_q: Tensor, of_k: Tensor, eps: float, axis: Axis
    ) -> tuple[Tensor, Tensor]:
        """Return q and k, each normalised over the heads of all tp ranks and times its weight,
        `of_q` or `of_k`.
        """
        wide = [widen(x) for x in (q, k)]
        # one all-reduce of [2, batch, length] numbers serves queries and keys
        means = _means([x.square() for x in wide], axis)
        scales = [torch.rsqrt(mean + eps) for mean in means]
        ctx.kept = axis
        ctx.save_for_backward(q, k, of_q, of_k, *scales)
        normal = [(x * scale).to(q.dtype) for x, scale in zip(wide, scales, strict=True)]
        return normal[0] * of_q, normal[1] * of_k

    @staticmethod
    def backward(ctx: Context[Axis], *grads: Tensor) -> tuple[Tensor | None, ...]:
        """Return the gradients of q, k and both weights, and None for eps and axis."""
        q, k, of_q, of_k, *scales = ctx.saved_tensors
        normal = [widen(x) * scale for x, scale in zip((q, k), scales, strict=True)]
        dnormal = [widen(g * w) for g, w in zip(grads, (of_q, of_k), strict=True)]
        means = _means([d * n for d, n in zip(dnormal, normal, strict=True)], ctx.kept)
        dx = [
            # dx = r (g w - n m / width), where `mean` is m / width
            ((d - n * mean) * scale).to(q.dtype)
            for d, n, mean, scale in zip(dnormal, normal, means, scales, strict=True)
        ]
        dw = [
            (g * n.to(g.dtype)).sum((0, 1)) if wants else None
            for g, n, wants in zip(grads, normal, ctx.needs_input_grad[2:4], strict=True)
        ]
        return dx[0], dx[1], dw[0], dw[1], None, None


def _means(
    parts: Sequence[Float[Tensor, "batch length _ size"]], axis: Axis
) -> tuple[Float[Tensor, "batch length 1 1"], ...]:
    """Return, for each tensor of squares or products, its mean per token over the heads of all
    ranks of the axis; one all-reduce for all tensors.
    """
    sums = torch.stack([x.sum((2, 3), keepdim=True) for x in parts])
    # under grouped-query attention keys have fewer heads, so another width
    widths = [x.shape[2] * x.shape[3] * axis.size for x in parts]
    return tuple(
        total / width for total, width in zip(collectives.sum_(sums, axis), widths, strict=True)
    )


def rms_norm_over_width(
    q: Float[Tensor, "batch length heads size"],
    k: Float[Tensor, "batch length kv_heads size"],
    of_q: Float[Tensor, " heads*size"],
    of_k: Float[Tensor, " kv_heads*size"],
    eps: float,
    axis: Axis,
) -> tuple[Float[Tensor, "batch length heads size"], Float[Tensor, "batch length kv_heads size"]]:
    """Return q / rms(q) times its weight `of_q`, and the same of k, with autograd: the mean square
    of a token is taken over the heads of all tp ranks. q, k and the weights are this rank's heads,
    and no head is on two ranks. Statistics are fp32 or wider; the cast to q's dtype comes before
    the product with the weight, as in ops/norm.py. Collective over the axis.
    """
    weights = (of_q.view(q.shape[2:]), of_k.view(k.shape[2:]))
    return _OverWidth.apply(q, k, *weights, eps, axis)
