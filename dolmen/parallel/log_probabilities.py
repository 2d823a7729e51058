"""The log-probability of each token's label over the vocabulary-parallel weight: what scores text,
and what objectives are made of that weigh tokens by what they turn out to be (DPO, PPO).

The gradient that will arrive is not known in forward, as that of a sum of losses is
(parallel/loss.py). So forward keeps one number per token, the logarithm of the sum of exponentials,
and backward forms the logits of a chunk of tokens once more. [tokens, vocabulary] is never held.

    forward            X [tokens, hidden] = enter(x), logits [tokens, rows] = X W^T + b
                       with a soft cap, logits = cap tanh(logits / cap), slope = 1 - tanh^2
                       p [tokens] = logits[label] - z, z = log(sum of e^logits)
    of the logits      dlogits [tokens, rows] = g (onehot - e^(logits - z)), times slope
    input gradient     dX [tokens, hidden] = dlogits W, then the backward of `enter`
    weight gradient    dW [rows, hidden] = dlogits^T X, db [rows] = sum of dlogits over tokens
"""

import torch
from jaxtyping import Float, Int64
from torch import Tensor
from torch.autograd.function import once_differentiable

from dolmen.core import collectives, ranges
from dolmen.core.function import Context, Function
from dolmen.ops import loss
from dolmen.ops.kernels import Kernels
from dolmen.parallel.loss import Call, combined, logits_and_slope
from dolmen.parallel.tensor import TensorParallel


class _LogProbabilities(Function):
    @staticmethod
    def forward(
        ctx: Context[Call],
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        labels: Tensor,
        call: Call,
    ) -> Tensor:
        entered, wide = call.tp.entered(x), torch.promote_types(x.dtype, torch.float32)
        out = torch.empty(labels.shape, dtype=wide, device=x.device)
        normalizer = torch.empty_like(out)
        for rows in call.chunks(len(labels), len(weight)):
            logits, _ = logits_and_slope(entered[rows], weight, wide, call.soft_cap, bias)
            maximum, _, sums, target = combined(logits, labels[rows], call.first, call.tp.axis)
            out[rows] = torch.where(labels[rows] == loss.IGNORED, 0.0, target - sums.log())
            normalizer[rows] = maximum + sums.log()
        ctx.kept = call
        ctx.save_for_backward(x, weight, bias, labels, normalizer)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Context[Call], g: Tensor) -> tuple[Tensor | None, ...]:
        (x, weight, bias, labels, normalizer), call = ctx.saved_tensors, ctx.kept
        wants_dx, wants_dw, wants_db = ctx.needs_input_grad[:3]
        entered, one = call.tp.entered(x), torch.ones_like(normalizer)
        dx = torch.empty_like(entered) if wants_dx else None
        dw = torch.zeros_like(weight, dtype=normalizer.dtype) if wants_dw else None
        db = torch.zeros_like(weight[:, 0], dtype=normalizer.dtype) if wants_db else None
        for rows in call.chunks(len(labels), len(weight)):
            made = entered[rows], weight, normalizer.dtype, call.soft_cap, bias
            logits, slope = logits_and_slope(*made)
            p = logits.sub_(normalizer[rows, None]).exp_()
            chunk = labels[rows], call.first, x.dtype, slope, -g[rows]
            dlogits = loss.gradient(p, one[rows], *chunk)
            if dx is not None:
                dx[rows] = dlogits @ weight
            if dw is not None:
                dw += dlogits.t() @ entered[rows]
            if db is not None:
                db += dlogits.sum(0)
        if dx is not None:
            dx = call.tp.finish_back(call.tp.start_back(dx))
        return dx, *(None if d is None else d.to(weight.dtype) for d in (dw, db)), None, None


@ranges.marked("loss")
def log_probabilities(
    x: Float[Tensor, "here hidden"],
    weight: Float[Tensor, "rows hidden"],
    labels: Int64[Tensor, " tokens"],
    vocab_size: int,
    tp: TensorParallel,
    at_once: int = Kernels().logits_at_once,
    soft_cap: float | None = None,
    bias: Float[Tensor, " rows"] | None = None,
) -> Float[Tensor, " tokens"]:
    """log softmax(x W^T + b)[label] of each token, fp32 (fp64 for fp64 input), I@tp; 0 for a label
    that is IGNORED. Arguments are those of `linear_cross_entropy`, which is the faster for a sum.
    """
    call = Call(vocab_size, tp, at_once, soft_cap)
    return _LogProbabilities.apply(x, weight, bias, labels, call)


@ranges.marked("loss")
def with_likeliest(
    x: Float[Tensor, "here hidden"],
    weight: Float[Tensor, "rows hidden"],
    labels: Int64[Tensor, " tokens"],
    vocab_size: int,
    tp: TensorParallel,
    at_once: int = Kernels().logits_at_once,
    soft_cap: float | None = None,
    bias: Float[Tensor, " rows"] | None = None,
) -> tuple[Float[Tensor, " tokens"], Int64[Tensor, " tokens"]]:
    """`log_probabilities`, without gradients, and the token whose logit is the largest, the first
    where several are, as torch.argmax has it: I@tp, both of one visit of the logits.
    """
    call = Call(vocab_size, tp, at_once, soft_cap)
    entered, wide = tp.entered(x), torch.promote_types(x.dtype, torch.float32)
    out = torch.empty(labels.shape, dtype=wide, device=x.device)
    likeliest = torch.empty_like(labels)
    for rows in call.chunks(len(labels), len(weight)):
        logits, _ = logits_and_slope(entered[rows], weight, wide, soft_cap, bias)
        own, at = logits.max(-1)
        maximum, _, sums, target = combined(logits, labels[rows], call.first, tp.axis)
        out[rows] = (target - sums.log()).masked_fill(labels[rows] == loss.IGNORED, 0.0)
        # the smallest id of those ranks that have the maximum
        at = torch.where(own == maximum, at + call.first, vocab_size)
        likeliest[rows] = collectives.reduce_scalar(at, tp.axis, "min")
    return out, likeliest
