"""Cross-entropy over one slice of the vocabulary: the pure pieces of a vocabulary-parallel loss, in
fp32 and in place.

    loss = log(sum_v exp(z_v - m)) - (z_label - m)        gradient of z: softmax(z) - onehot(label)

A slice gives its own maximum, then its own sum of exponentials and its label's logit if it holds
it; whoever holds the slices combines [tokens] numbers, never [tokens, vocabulary].

Logits may be soft-capped first (Gemma 2, 2408.00118), each by itself:

    z = cap tanh(y / cap)        dz / dy = 1 - tanh^2(y / cap)
"""

import torch
from jaxtyping import Float, Int64
from torch import Tensor

IGNORED = -100  # a label that carries no loss, as in PyTorch


def exponentials(
    logits: Float[Tensor, "n size"],
    maximum: Float[Tensor, " n"],
    labels: Int64[Tensor, " n"],
    first: int,
) -> tuple[Float[Tensor, "n size"], Float[Tensor, " n"], Float[Tensor, " n"]]:
    """Return exp(z - m) of one slice of the vocabulary, its sum per token, and z_label - m (zero
    where the label lies outside first .. first + size).

    `logits`, fp32 or wider, are overwritten by the exponentials; `maximum` is over the whole
    vocabulary, and `labels` are ids in it.
    """
    shifted = logits.sub_(maximum[:, None])
    row = labels - first
    mine = (row >= 0) & (row < logits.shape[1])
    target = shifted.gather(1, torch.where(mine, row, 0)[:, None])[:, 0] * mine
    e = shifted.exp_()
    return e, e.sum(-1), target


def soft_cap(logits: Float[Tensor, "*any"], cap: float) -> Float[Tensor, "*any"]:
    """Return cap tanh(logits / cap), which lies within +- cap, with autograd."""
    return (logits / cap).tanh_() * cap


def soft_cap_with_slope(
    logits: Float[Tensor, "n size"], cap: float
) -> tuple[Float[Tensor, "n size"], Float[Tensor, "n size"]]:
    """Return cap tanh(logits / cap) and its derivative, without autograd; `logits` are
    overwritten.
    """
    tanh = logits.div_(cap).tanh_()
    return tanh * cap, tanh.square_().neg_().add_(1)


def gradient(
    e: Float[Tensor, "n size"],
    total: Float[Tensor, " n"],
    labels: Int64[Tensor, " n"],
    first: int,
    dtype: torch.dtype,
    slope: Float[Tensor, "n size"] | None = None,
    weights: Float[Tensor, " n"] | None = None,
) -> Float[Tensor, "n size"]:
    """Return the loss's gradient of one slice's logits, in `dtype`: softmax - onehot for real
    labels, zero for ignored ones, times `weights` if there are any. `e` are the slice's
    exponentials and are overwritten; `total` is their sum over the whole vocabulary; `slope` is the
    soft cap's derivative, or None.
    """
    real = labels != IGNORED
    row = labels - first
    mine = (row >= 0) & (row < e.shape[1])
    index = torch.where(mine, row, 0)[:, None]
    if weights is not None:
        real, mine = real * weights, mine * weights
    p = e.mul_((real / total)[:, None])
    # the label's, one number per row, is put in its place when all others are rounded: compiled,
    # these are then one pass, and nothing as large is kept in fp32
    label = p.gather(1, index) - mine.to(p.dtype)[:, None]
    if slope is not None:
        p, label = p.mul_(slope), label * slope.gather(1, index)
    return p.to(dtype).scatter_(1, index, label.to(dtype))
