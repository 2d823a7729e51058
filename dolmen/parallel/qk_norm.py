"""RMSNorm of queries and keys over the width of all heads, which tp has split (OLMo 2, 2501.00656).

A rank has its heads, and the mean is over those of all: of each token one number for the queries
and one for the keys crosses tp, both at once, and in backward as many.

    forward            s = sum over heads and their numbers of x^2, summed over tp
                       r = 1 / sqrt(s / width + eps)         n = x r         y = n w
    input gradient     m = sum of (g w) n, summed over tp    dx = r (g w - n m / width)
    weight gradient    dw = sum over tokens of g n
"""

from collections.abc import Sequence
from functools import partial

import torch
from jaxtyping import Float
from torch import Tensor

from dolmen.core import collectives
from dolmen.core.autograd import Context, TypedFunction
from dolmen.core.reduction import widen
from dolmen.ops import invariant
from dolmen.parallel import exact
from dolmen.parallel.tensor import TensorParallel


class _OverWidth(TypedFunction):
    """Autograd of `rms_norm_over_width`. Kept for backward: queries, keys, and one number per token
    of each.
    """

    @staticmethod
    def forward(
        ctx: Context[TensorParallel],
        q: Tensor,
        k: Tensor,
        of_q: Tensor,
        of_k: Tensor,
        eps: float,
        tp: TensorParallel,
    ) -> tuple[Tensor, Tensor]:
        """Return q and k, each normalised over the heads of all tp ranks and times its weight,
        `of_q` or `of_k`.
        """
        wide = [widen(x) for x in (q, k)]
        # one all-reduce of [2, batch, length] numbers serves queries and keys
        means = _means([x.square() for x in wide], tp)
        scales = [torch.rsqrt(mean + eps) for mean in means]
        ctx.kept = tp
        ctx.save_for_backward(q, k, of_q, of_k, *scales)
        normal = [(x * scale).to(q.dtype) for x, scale in zip(wide, scales, strict=True)]
        return normal[0] * of_q.view(q.shape[2:]), normal[1] * of_k.view(k.shape[2:])

    @staticmethod
    def backward(ctx: Context[TensorParallel], *grads: Tensor) -> tuple[Tensor | None, ...]:
        """Return the gradients of q, k and both weights, and None for eps and tp."""
        q, k, of_q, of_k, *scales = ctx.saved_tensors
        weights = of_q.view(q.shape[2:]), of_k.view(k.shape[2:])
        normal = [widen(x) * scale for x, scale in zip((q, k), scales, strict=True)]
        dnormal = [widen(g * w) for g, w in zip(grads, weights, strict=True)]
        means = _means([d * n for d, n in zip(dnormal, normal, strict=True)], ctx.kept)
        dx = [
            # dx = r (g w - n m / width), where `mean` is m / width
            ((d - n * mean) * scale).to(q.dtype)
            for d, n, mean, scale in zip(dnormal, normal, means, scales, strict=True)
        ]
        leaves = ctx.kept.exact
        sum_tokens = _sum_tokens if leaves is None else partial(exact.sum_sequences, exact=leaves)
        dw = [
            # flat here: autograd would round a view's fp32 gradient to the weight's dtype
            sum_tokens(g * n.to(g.dtype)).flatten() if wants else None
            for g, n, wants in zip(grads, normal, ctx.needs_input_grad[2:4], strict=True)
        ]
        return dx[0], dx[1], dw[0], dw[1], None, None


def _sum_tokens(
    x: Float[Tensor, "batch length heads size"],
) -> Float[Tensor, "heads size"]:
    """Return the sum over tokens."""
    return x.sum((0, 1))


def _means(
    parts: Sequence[Float[Tensor, "batch length _ size"]], tp: TensorParallel
) -> tuple[Float[Tensor, "batch length 1 1"], ...]:
    """Return, for each tensor of squares or products, its mean per token over the heads of all tp
    ranks; one all-reduce for all tensors. With exact numerics heads are added by a tree.
    """
    # sums of rows, which are leaves: of all heads of a rank, or of some of them
    leaves = 1 if tp.exact is None else tp.exact.tp // tp.axis.size
    rows = [x.flatten(2).unflatten(2, (leaves, -1)).sum(-1) for x in parts]
    sums = invariant.add_pairs(torch.stack(rows), 3)[..., None, None]
    # under grouped-query attention keys have fewer heads, so another width
    widths = [x.shape[2] * x.shape[3] * tp.axis.size for x in parts]
    return tuple(
        total / width for total, width in zip(collectives.sum_(sums, tp.axis), widths, strict=True)
    )


def rms_norm_over_width(
    q: Float[Tensor, "batch length heads size"],
    k: Float[Tensor, "batch length kv_heads size"],
    of_q: Float[Tensor, " heads*size"],
    of_k: Float[Tensor, " kv_heads*size"],
    eps: float,
    tp: TensorParallel,
) -> tuple[Float[Tensor, "batch length heads size"], Float[Tensor, "batch length kv_heads size"]]:
    """Return q / rms(q) times its weight `of_q`, and the same of k, with autograd: the mean square
    of a token is taken over the heads of all tp ranks. q, k and the weights are this rank's heads,
    and no head is on two ranks. Statistics are fp32 or wider; the cast to q's dtype comes before
    the product with the weight, as in ops/norm.py. Collective over the axis.
    """
    return _OverWidth.apply(q, k, of_q, of_k, eps, tp)
