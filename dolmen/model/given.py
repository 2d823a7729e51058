"""What the layers are given of a microbatch beside the residual stream."""

from typing import NamedTuple

from torch import Tensor

from dolmen.ops.dropout import Noise


class Given(NamedTuple):
    """Of this rank of cp's part of the sequences; `length` tokens of each."""

    batch: int
    """Sequences of the microbatch."""
    cos: Tensor | None
    """[batch or 1, length, head_dim / 2], rope of each position; None where positions are learned.
    """
    sin: Tensor | None
    starts: Tensor | None = None
    """[batch, length] int64: where in the sequence the document of each token starts; None: at 0.
    """
    noise: Noise | None = None
    """What dropout needs; None where there is none."""
    rows: Tensor | None = None
    """[tokens of the residual stream on this rank] int64: their index in the global batch, for
    dropout.
    """
    balance: Tensor | None = None
    """[] fp32: what a sequence's auxiliary loss is multiplied by on its way into the gradient;
    None: no gradient is wanted.
    """
