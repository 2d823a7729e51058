"""What the layers are given of a microbatch beside the residual stream."""

from collections.abc import Callable
from typing import NamedTuple

import torch
from jaxtyping import Float, Float64, Int64
from torch import Tensor

from dolmen.core import host
from dolmen.model.replay import Routes
from dolmen.ops.attention import Documents
from dolmen.ops.dropout import Noise


class Balance(NamedTuple):
    """How the auxiliary losses of one layer of experts enter the gradient, and what is counted."""

    scale: Float[Tensor, ""]
    """What the losses of one sequence are multiplied by."""
    tally: Float64[Tensor, " experts+2"]
    """Zeros. Its gradient is what backward counted: the pairs of each expert, and the
    sums of balance and z loss over sequences. A gradient adds up over microbatches by itself, and
    counts none twice that is computed again.
    """


class Where(NamedTuple):
    """What a layer needs to know of its tokens' positions, those of each sequence or of all (batch
    1).
    """

    cos: Float[Tensor, "batch length 1 half"] | None = None
    """What rope turns each position by, of half its size; None where it turns nothing."""
    sin: Float[Tensor, "batch length 1 half"] | None = None
    steps: Float[Tensor, "batch length heads"] | None = None
    """What products with each key grow by; None: by nothing."""
    growth: Float[Tensor, "batch length 1 1"] | None = None
    """What queries are multiplied by; None: by nothing."""


class Given(NamedTuple):
    """Of this rank of cp's part of the sequences; `length` tokens of each."""

    batch: int
    """Sequences of the microbatch."""
    cos: Float[Tensor, "batch length 1 half"] | None = None
    """As in Where, of the layer that is given this."""
    sin: Float[Tensor, "batch length 1 half"] | None = None
    steps: Float[Tensor, "batch length heads"] | None = None
    growth: Float[Tensor, "batch length 1 1"] | None = None
    documents: Documents | None = None
    """Of this rank's tokens; None: each sequence is one, without a prefix."""
    noise: Noise | None = None
    """What dropout needs, of the layer that is given this; None where there is none."""
    rows: Int64[Tensor, " here"] | None = None
    """Of each token of the residual stream on this rank, its index in the global batch: for
    dropout.
    """
    balance: Balance | None = None
    """Of a layer of experts; None: no gradient is wanted."""
    chosen: Int64[Tensor, "n k"] | None = None
    """Of a layer of experts, those that each token goes to; None: its router says."""
    told: Callable[[Tensor], None] | None = None
    """Of a layer of experts: is told which each token goes to."""

    def of_layer(
        self, number: int, where: Where, balance: Balance | None, routes: Routes | None = None
    ) -> "Given":
        """The same for layer `number`, which knows its positions as `where`."""
        here = self._replace(**where._asdict(), balance=balance)
        if routes is not None:
            here = here._replace(chosen=routes.chosen.get(number), told=routes.listener(number))
        if self.noise is None:
            return here
        layer = host.number(number, torch.int64, self.noise.key.device)
        return here._replace(noise=self.noise._replace(layer=layer))
