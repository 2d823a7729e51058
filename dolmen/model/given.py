"""What the layers are given of a microbatch beside the residual stream."""

from typing import NamedTuple

import torch
from torch import Tensor

from dolmen.core import host
from dolmen.ops.attention import Documents
from dolmen.ops.dropout import Noise


class Balance(NamedTuple):
    """How the auxiliary losses of one layer of experts enter the gradient, and what is counted."""

    scale: Tensor
    """[]: what the losses of one sequence are multiplied by."""
    tally: Tensor
    """[E + 2] fp64, zeros. Its gradient is what backward counted: the pairs of each expert, and the
    sums of balance and z loss over sequences. A gradient adds up over microbatches by itself, and
    counts none twice that is computed again.
    """


class Where(NamedTuple):
    """What a layer needs to know of its tokens' positions; as in Given."""

    cos: Tensor | None = None
    sin: Tensor | None = None
    steps: Tensor | None = None


class Given(NamedTuple):
    """Of this rank of cp's part of the sequences; `length` tokens of each."""

    batch: int
    """Sequences of the microbatch."""
    cos: Tensor | None = None
    """[batch or 1, length, 1, rope's size / 2], what rope turns each position by, of the layer that
    is given this; None where it turns nothing.
    """
    sin: Tensor | None = None
    steps: Tensor | None = None
    """[batch or 1, length, heads], what products with each key grow by; None: by nothing."""
    documents: Documents | None = None
    """Where the document of each token starts; None: at 0."""
    noise: Noise | None = None
    """What dropout needs, of the layer that is given this; None where there is none."""
    rows: Tensor | None = None
    """[tokens of the residual stream on this rank] int64: their index in the global batch, for
    dropout.
    """
    balance: Balance | None = None
    """Of a layer of experts; None: no gradient is wanted."""

    def of_layer(self, number: int, where: Where, balance: Balance | None) -> "Given":
        """The same for layer `number`, which knows its positions as `where`."""
        here = self._replace(**where._asdict(), balance=balance)
        if self.noise is None:
            return here
        layer = host.number(number, torch.int64, self.noise.key.device)
        return here._replace(noise=self.noise._replace(layer=layer))
