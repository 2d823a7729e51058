"""Activations of the feed-forward layer, by name. `gelu` is the exact erf form, `gelu_tanh` its
tanh approximation.
"""

from functools import partial

import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor

ACTIVATIONS = {
    "silu": F.silu,
    "gelu": F.gelu,
    "gelu_tanh": partial(F.gelu, approximate="tanh"),
    "relu": F.relu,
}


def clamped_swiglu(
    gate: Float[Tensor, "rows size"], up: Float[Tensor, "rows size"], alpha: float, limit: float
) -> Float[Tensor, "rows size"]:
    """With a = min(gate, limit) and b = up between -limit and limit, a sigmoid(alpha a) (b + 1)
    (GPT-OSS, 2508.10925).
    """
    gate = gate.clamp(max=limit)
    return gate * (gate * alpha).sigmoid() * (up.clamp(-limit, limit) + 1)
