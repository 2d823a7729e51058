"""Log-probability of each token's label over the vocabulary-parallel weight, and on request the
entropy of the distribution: what scores text, and what preference and policy losses are built on.

The upstream gradient is not known in forward, as it is for a sum of losses
(parallel/vocabulary.py). So forward keeps one number per token, the log of the sum of exponentials
(two with the entropy), and backward recomputes the logits one chunk of tokens at a time.
[tokens, vocabulary] is never held.

    forward            X [tokens, hidden] = enter(x), logits [tokens, rows] = X W^T + b
                       with a soft cap, logits = cap tanh(logits / cap), slope = 1 - tanh^2
                       l = log p [tokens, rows] = logits - z, z = log(sum of e^logits)
                       out [tokens] = l[label]
                       H [tokens] = -(sum of p l) = log(sum of e) - (sum of e log e) / (sum of e),
                       e = e^(logits - maximum)
    of the logits      dlogits [tokens, rows] = g (onehot - p) - h p (l + H), times slope,
                       where g is the gradient of out and h that of H
    input gradient     dX [tokens, hidden] = dlogits W, then the backward of `enter`
    weight gradient    dW [rows, hidden] = dlogits^T X, db [rows] = sum of dlogits over tokens
"""

import torch
from jaxtyping import Float, Int64
from torch import Tensor
from torch.autograd.function import once_differentiable

from dolmen.core import collectives, profiling
from dolmen.core.autograd import Context, TypedFunction
from dolmen.ops import loss
from dolmen.ops.kernels import Kernels
from dolmen.parallel.inference_linear import PrepackedProduct
from dolmen.parallel.tensor import TensorParallel
from dolmen.parallel.vocabulary import (
    HeadLeafGradients,
    LogitsCall,
    combine_vocabulary,
    logits_and_slope,
)


class _LogProbabilities(TypedFunction):
    """Autograd of log-probabilities and entropy; logits are recomputed in backward,
    chunk by chunk.
    """

    @staticmethod
    def forward(
        ctx: Context[LogitsCall],
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        labels: Tensor,
        call: LogitsCall,
        with_entropy: bool,
    ) -> tuple[Tensor, Tensor | None]:
        """Return log p[label] of each token and, `with_entropy`, the entropy of its distribution,
        else None; both are 0 where the label is IGNORED.
        """
        entered, wide = call.tp.gather_input(x), torch.promote_types(x.dtype, torch.float32)
        out = torch.empty(labels.shape, dtype=wide, device=x.device)
        normalizer = torch.empty_like(out)
        entropy = torch.empty_like(out) if with_entropy else None
        product, block = call.product(weight), call.block
        for rows in call.chunks(len(labels), len(weight)):
            logits, _ = logits_and_slope(entered[rows], weight, wide, call.soft_cap, bias, product)
            # two all-reduces over tp of one and two numbers per token
            maximum, e, sums, target = combine_vocabulary(
                logits, labels[rows], call.first, call.tp.axis, block
            )
            out[rows] = (target - sums.log()).masked_fill(labels[rows] == loss.IGNORED, 0.0)
            normalizer[rows] = maximum + sums.log()
            if entropy is not None:
                # entr(e) = -e log e, 0 at e = 0 where the formula has 0 times infinity
                e_log_e = collectives.reduce_scalar(torch.special.entr(e).sum(-1), call.tp.axis)
                entropy[rows] = sums.log() + e_log_e / sums
        ctx.kept = call
        ctx.save_for_backward(x, weight, bias, labels, normalizer, entropy)
        if entropy is not None:
            entropy = entropy.masked_fill(labels == loss.IGNORED, 0.0)
        return out, entropy

    @staticmethod
    @once_differentiable
    def backward(
        ctx: Context[LogitsCall], g: Tensor, h: Tensor | None
    ) -> tuple[Tensor | None, ...]:
        """Return gradients of x, weight and bias from g (of log p) and h (of the entropy)."""
        (x, weight, bias, labels, normalizer, entropy), call = ctx.saved_tensors, ctx.kept
        wants_dx, wants_dw, wants_db = ctx.needs_input_grad[:3]
        entered, unit = call.tp.gather_input(x), torch.ones_like(normalizer)
        exact, product, block = call.tp.exact, call.product(weight), call.block
        if entropy is not None and h is not None:
            h = h.masked_fill(labels == loss.IGNORED, 0.0)
        dtype = x.dtype if exact is None else normalizer.dtype
        dx = torch.empty_like(entered, dtype=dtype) if wants_dx else None
        dw = torch.zeros_like(weight, dtype=normalizer.dtype) if wants_dw and not exact else None
        db = (
            torch.zeros_like(weight[:, 0], dtype=normalizer.dtype)
            if wants_db and not exact
            else None
        )
        chunks, gradients = call.chunks(len(labels), len(weight)), None
        if exact is not None and block is not None:
            gradients = HeadLeafGradients(len(chunks), weight, exact, block)
        for i, rows in enumerate(chunks):
            logits, slope = logits_and_slope(
                entered[rows], weight, normalizer.dtype, call.soft_cap, bias, product
            )
            # l, in the logits' memory
            log_p = logits.sub_(normalizer[rows, None])
            if entropy is None or h is None:
                p, of_entropy = log_p.exp_(), None
            else:
                p = log_p.exp()
                # -h p (l + H), in place
                of_entropy = log_p.add_(entropy[rows, None]).mul_(p).mul_(-h[rows, None])
                if slope is not None:
                    of_entropy *= slope
            # `loss.gradient` gives (p - onehot) weight, hence the minus
            chunk = labels[rows], call.first, x.dtype, slope, -g[rows]
            dlogits = loss.gradient(p, unit[rows], *chunk)
            if of_entropy is not None:
                dlogits.add_(of_entropy)
            if gradients is not None:
                if dx is not None:
                    dx[rows] = gradients.input_gradient(dlogits)
                dw = gradients.weight_gradient(i, dlogits, entered[rows]) if wants_dw else None
                db = gradients.bias_gradient(i, dlogits) if wants_db else None
                continue
            if dx is not None:
                dx[rows] = dlogits @ weight
            if dw is not None:
                dw += dlogits.t() @ entered[rows]
            if db is not None:
                db += dlogits.sum(0)
        if dx is not None:
            # no weight gradient is left to hide this reduction behind
            dx = call.tp.finish_back(call.tp.start_back(dx))
        if exact is None:
            dw, db = (None if d is None else d.to(weight.dtype) for d in (dw, db))
        return dx, dw, db, None, None, None


@profiling.record_function_range("loss")
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
    """Return log softmax(x W^T + b)[label] of each token, with autograd, fp32 (fp64 for fp64
    input), the same on every rank of tp; 0 for a label that is IGNORED (-100). `weight` and `bias`
    are this rank's rows of the vocabulary. Arguments are those of `linear_cross_entropy`, which is
    faster for a sum.
    """
    call = LogitsCall(vocab_size, tp, at_once, soft_cap)
    return _LogProbabilities.apply(x, weight, bias, labels, call, False)[0]


@profiling.record_function_range("loss")
def log_probabilities_and_entropy(
    x: Float[Tensor, "here hidden"],
    weight: Float[Tensor, "rows hidden"],
    labels: Int64[Tensor, " tokens"],
    vocab_size: int,
    tp: TensorParallel,
    at_once: int = Kernels().logits_at_once,
    soft_cap: float | None = None,
    bias: Float[Tensor, " rows"] | None = None,
) -> tuple[Float[Tensor, " tokens"], Float[Tensor, " tokens"]]:
    """Return `log_probabilities` and the entropy in nats of softmax(x W^T + b) of each token, both
    with autograd, the same on every rank of tp, and 0 where the label is IGNORED (-100).
    """
    call = LogitsCall(vocab_size, tp, at_once, soft_cap)
    return _LogProbabilities.apply(x, weight, bias, labels, call, True)


@profiling.record_function_range("loss")
def log_probabilities_and_argmax(
    x: Float[Tensor, "here hidden"],
    weight: Float[Tensor, "rows hidden"],
    labels: Int64[Tensor, " tokens"],
    vocab_size: int,
    tp: TensorParallel,
    at_once: int = Kernels().logits_at_once,
    soft_cap: float | None = None,
    bias: Float[Tensor, " rows"] | None = None,
    product: PrepackedProduct | None = None,
) -> tuple[Float[Tensor, " tokens"], Int64[Tensor, " tokens"]]:
    """Return `log_probabilities`, without gradients, and the token with the largest logit (the
    first of several equal ones, as torch.argmax), the same on every rank of tp, from one pass over
    the logits. `product` multiplies in place of `weight`, which may then be on meta.
    """
    call = LogitsCall(vocab_size, tp, at_once, soft_cap)
    entered, wide = tp.gather_input(x), torch.promote_types(x.dtype, torch.float32)
    out = torch.empty(labels.shape, dtype=wide, device=x.device)
    argmax = torch.empty_like(labels)
    for rows in call.chunks(len(labels), len(weight)):
        logits, _ = logits_and_slope(entered[rows], weight, wide, soft_cap, bias, product)
        # before `combine_vocabulary`, which overwrites the logits
        local_maximum, at = logits.max(-1)
        maximum, _, sums, target = combine_vocabulary(logits, labels[rows], call.first, tp.axis)
        out[rows] = (target - sums.log()).masked_fill(labels[rows] == loss.IGNORED, 0.0)
        # of the ranks that hold the maximum, the smallest token id
        at = torch.where(local_maximum == maximum, at + call.first, vocab_size)
        argmax[rows] = collectives.reduce_scalar(at, tp.axis, "min")
    return out, argmax
