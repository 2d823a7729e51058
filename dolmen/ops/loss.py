"""Cross-entropy over one slice of the vocabulary: the pure pieces of a vocabulary-parallel loss, in
fp32 and in place.

    loss = log(sum_v exp(z_v - m)) - (z_label - m)        gradient of z: softmax(z) - onehot(label)

A slice gives its own maximum, then its own sum of exponentials and its label's logit if it holds
it; whoever holds the slices combines [tokens] numbers, never [tokens, vocabulary].

Logits may be soft-capped first (Gemma 2, 2408.00118), each by itself:

    z = cap tanh(y / cap)        dz / dy = 1 - tanh^2(y / cap)
"""

import torch
from torch import Tensor

IGNORED = -100  # a label that carries no loss, as in PyTorch


def exponentials(
    logits: Tensor, maximum: Tensor, labels: Tensor, first: int
) -> tuple[Tensor, Tensor, Tensor]:
    """exp(z - m) [n, size], its sum [n], and z_label - m [n] (zero where the label lies outside
    first .. first + size).

    logits [n, size] fp32, which become the exponentials, maximum [n] over the whole vocabulary,
    labels [n] in the whole vocabulary.
    """
    shifted = logits.sub_(maximum[:, None])
    row = labels - first
    mine = (row >= 0) & (row < logits.shape[1])
    target = shifted.gather(1, torch.where(mine, row, 0)[:, None])[:, 0] * mine
    e = shifted.exp_()
    return e, e.sum(-1), target


def capped(logits: Tensor, cap: float) -> Tensor:
    """cap tanh(logits / cap), of any shape, with autograd."""
    return (logits / cap).tanh_() * cap


def capped_with_slope(logits: Tensor, cap: float) -> tuple[Tensor, Tensor]:
    """The same, and its derivative; `logits` are overwritten."""
    tanh = logits.div_(cap).tanh_()
    return tanh * cap, tanh.square_().neg_().add_(1)


def gradient(
    e: Tensor,
    total: Tensor,
    labels: Tensor,
    first: int,
    dtype: torch.dtype,
    slope: Tensor | None = None,
) -> Tensor:
    """softmax - onehot for real labels, zero for ignored ones; [n, size] in `dtype`. `total` [n] is
    over the whole vocabulary, `slope` [n, size] what multiplies it, of soft-capped logits. `e` is
    overwritten.
    """
    real = labels != IGNORED
    row = labels - first
    mine = (row >= 0) & (row < e.shape[1])
    p = e.mul_((real / total)[:, None])
    index = torch.where(mine, row, 0)[:, None]
    p = p.scatter_add_(1, index, -mine.to(p.dtype)[:, None])
    return (p if slope is None else p.mul_(slope)).to(dtype)
