"""What delayed scaling (parallel/product.py) knows of each weight, beside the weights of a source:
by the names of weights, whatever the format.
"""

from collections.abc import Iterable, Mapping
from typing import NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor


class Scaling(NamedTuple):
    """Of one weight, or of each expert's: inputs, weight, gradients of outputs, as
    parallel/product.py orders them.
    """

    history: Float[Tensor, "steps *experts 3"]
    scale: Float[Tensor, "*experts 3"]


Scales = Mapping[str, Scaling]
"""By the names of weights; those that have none are not there."""


def joined(parts: Iterable[Scaling]) -> Scaling:
    """Of one product that is several here (q, k and v with the same input): the largest numbers,
    and the scales that the largest numbers have.
    """
    parts = list(parts)
    history = torch.stack([part.history for part in parts]).amax(0)
    return Scaling(history, torch.stack([part.scale for part in parts]).amin(0))
