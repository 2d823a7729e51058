"""Activations of the feed-forward layer, by name. `gelu` is the exact erf form, `gelu_tanh` its
tanh approximation.
"""

from functools import partial

import torch.nn.functional as F

ACTIVATIONS = {
    "silu": F.silu,
    "gelu": F.gelu,
    "gelu_tanh": partial(F.gelu, approximate="tanh"),
    "relu": F.relu,
}
