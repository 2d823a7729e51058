"""The vocabulary split over tp by rows (1909.08053, section 3): the embedding, and logits read.

    vocabulary 10, tp 4:    rows 0-2 | 3-5 | 6-8 | 9      as torch.chunk cuts, nothing is padded

The head is one function with its loss: parallel/loss.py.
"""

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int64
from torch import Tensor

from dolmen.core import transfers
from dolmen.core.mesh import Axis
from dolmen.parallel.tensor import TensorParallel


def _rows(vocab_size: int, axis: Axis) -> int:
    """Rows of each rank but the last ones."""
    return -(-vocab_size // axis.size)


def vocabulary_range(vocab_size: int, axis: Axis) -> tuple[int, int]:
    """(first row, number of rows) of this rank's part of the vocabulary; the last ranks may hold
    fewer, or none.
    """
    rows = _rows(vocab_size, axis)
    first = min(axis.rank * rows, vocab_size)
    return first, min(rows, vocab_size - first)


def embed(
    tokens: Int64[Tensor, " tokens"],
    weight: Float[Tensor, "rows hidden"],
    vocab_size: int,
    tp: TensorParallel,
) -> Float[Tensor, "here hidden"]:
    """Rows of the vocabulary-parallel embedding, of all tokens, or of this rank's part of them
    (S(0)). weight is S(0)@tp: each rank looks up its own rows, zero elsewhere, and `leave` sums.
    """
    if tp.axis.size == 1:
        return F.embedding(tokens, weight)
    first, size = vocabulary_range(vocab_size, tp.axis)
    row = tokens - first
    mine = (row >= 0) & (row < size)
    return tp.leave(F.embedding(torch.where(mine, row, 0), weight) * mine[:, None].to(weight.dtype))


def gather_vocabulary(
    logits: Float[Tensor, "*tokens rows"], vocab_size: int, axis: Axis
) -> Float[Tensor, "*tokens {vocab_size}"]:
    """Logits of this rank's rows of the vocabulary, S(-1)@tp -> of all, on every rank. No autograd:
    for reading and sampling.
    """
    if axis.size == 1:
        return logits
    missing = _rows(vocab_size, axis) - logits.shape[-1]  # an all-gather takes equal parts
    padded = F.pad(logits.detach(), (0, missing)).movedim(-1, 0)
    whole = transfers.wait(transfers.start_all_gather(padded, axis), axis)
    return whole.movedim(0, -1)[..., :vocab_size]
