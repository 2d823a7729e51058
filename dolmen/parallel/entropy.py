"""The log-probability of each token's label, and the entropy of the distribution that it is of,
over the vocabulary-parallel weight: what a policy is trained by that is paid for staying undecided.

As parallel/log_probabilities.py, which is the faster where nobody asks for the entropy: logits of a
chunk of tokens are formed in forward and once more in backward. Beside its formulas

    forward            l = log p [tokens, rows] = logits - z
                       H [tokens] = -(sum of p l) = log(sum of e) - (sum of e log e) / (sum of e),
                       e = e^(logits - maximum)
    of the logits      dlogits += -h p (l + H), times slope, where h is the gradient of H
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


class _WithEntropy(Function):
    @staticmethod
    def forward(
        ctx: Context[Call],
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        labels: Tensor,
        call: Call,
    ) -> tuple[Tensor, Tensor]:
        entered, wide = call.tp.entered(x), torch.promote_types(x.dtype, torch.float32)
        out = torch.empty(labels.shape, dtype=wide, device=x.device)
        normalizer, entropy = torch.empty_like(out), torch.empty_like(out)
        for rows in call.chunks(len(labels), len(weight)):
            logits, _ = logits_and_slope(entered[rows], weight, wide, call.soft_cap, bias)
            maximum, e, sums, target = combined(logits, labels[rows], call.first, call.tp.axis)
            surprise = collectives.reduce_scalar(torch.special.entr(e).sum(-1), call.tp.axis)
            ignored = labels[rows] == loss.IGNORED
            out[rows] = (target - sums.log()).masked_fill(ignored, 0.0)
            entropy[rows] = sums.log() + surprise / sums
            normalizer[rows] = maximum + sums.log()
        ctx.kept = call
        ctx.save_for_backward(x, weight, bias, labels, normalizer, entropy)
        return out, entropy.masked_fill(labels == loss.IGNORED, 0.0)

    @staticmethod
    @once_differentiable
    def backward(ctx: Context[Call], g: Tensor, h: Tensor) -> tuple[Tensor | None, ...]:
        (x, weight, bias, labels, normalizer, entropy), call = ctx.saved_tensors, ctx.kept
        wants_dx, wants_dw, wants_db = ctx.needs_input_grad[:3]
        entered, one = call.tp.entered(x), torch.ones_like(normalizer)
        h = h.masked_fill(labels == loss.IGNORED, 0.0)
        dx = torch.empty_like(entered) if wants_dx else None
        dw = torch.zeros_like(weight, dtype=normalizer.dtype) if wants_dw else None
        db = torch.zeros_like(weight[:, 0], dtype=normalizer.dtype) if wants_db else None
        for rows in call.chunks(len(labels), len(weight)):
            made = entered[rows], weight, normalizer.dtype, call.soft_cap, bias
            logits, slope = logits_and_slope(*made)
            own = logits.sub_(normalizer[rows, None])
            p = own.exp()
            decided = own.add_(entropy[rows, None]).mul_(p).mul_(-h[rows, None])
            if slope is not None:
                decided *= slope
            chunk = labels[rows], call.first, x.dtype, slope, -g[rows]
            dlogits = loss.gradient(p, one[rows], *chunk).add_(decided)
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
def with_entropy(
    x: Float[Tensor, "here hidden"],
    weight: Float[Tensor, "rows hidden"],
    labels: Int64[Tensor, " tokens"],
    vocab_size: int,
    tp: TensorParallel,
    at_once: int = Kernels().logits_at_once,
    soft_cap: float | None = None,
    bias: Float[Tensor, " rows"] | None = None,
) -> tuple[Float[Tensor, " tokens"], Float[Tensor, " tokens"]]:
    """`log_probabilities`, and the entropy in nats of softmax(x W^T + b), both with gradients,
    I@tp, and 0 where the label is IGNORED. Arguments are those of `linear_cross_entropy`.
    """
    call = Call(vocab_size, tp, at_once, soft_cap)
    return _WithEntropy.apply(x, weight, bias, labels, call)
