"""Activation recomputation (1604.06174; selective: 2205.05198): backward runs a part of forward
again instead of keeping what it made. What is run again is the same text, collectives included, on
the same inputs: dropout masks are hashes of the place (ops/dropout.py), so there is no random state
to restore.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch.utils.checkpoint import checkpoint

from dolmen.core import ranges


def again(function: Callable, *args: Any) -> Any:
    """function(*args), of which only the inputs are kept until backward. Without gradients, simply
    the call.
    """
    if not torch.is_grad_enabled():
        return function(*args)
    if torch.compiler.is_compiling():
        return checkpoint(function, *args, use_reentrant=False, preserve_rng_state=False)
    return checkpoint(
        function, *args, use_reentrant=False, preserve_rng_state=False, context_fn=_contexts
    )


def _contexts() -> tuple[AbstractContextManager, AbstractContextManager]:
    """Of the first run and of the one in backward, which a profile tells apart."""
    return nullcontext(), ranges.mark("recompute")
