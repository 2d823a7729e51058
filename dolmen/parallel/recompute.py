"""Activation recomputation (1604.06174; selective: 2205.05198): backward runs a part of forward
again instead of keeping what it made. What is run again is the same text, collectives included, on
the same inputs: dropout masks are hashes of the place (ops/dropout.py), so there is no random state
to restore.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch.utils.checkpoint import checkpoint


def again(function: Callable, *args: Any) -> Any:
    """function(*args), of which only the inputs are kept until backward. Without gradients, simply
    the call.
    """
    if not torch.is_grad_enabled():
        return function(*args)
    return checkpoint(function, *args, use_reentrant=False, preserve_rng_state=False)
