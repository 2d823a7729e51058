"""`torch.autograd.Function` with types, and activation recomputation.

    class _Scale(TypedFunction):
        @staticmethod
        def forward(ctx: Context[float], x: Tensor, factor: float) -> Tensor:
            ctx.kept = factor
            return x * factor

        @staticmethod
        def backward(ctx: Context[float], g: Tensor) -> tuple[Tensor, None]:
            return g * ctx.kept, None

Tensors that backward needs go through `save_for_backward`, or recomputation and ZeRO would not see
them; everything else is one value, `kept`. torch leaves `ctx` without a type, and its `backward`
fits no signature that names its gradients.

Activation recomputation (1604.06174; selective: 2205.05198) runs a part of forward again in
backward instead of keeping its activations: the same code, collectives included, on the same
inputs. Dropout masks are hashes of the element's position (ops/elementwise.py), so there is no
random state to restore.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any, Generic, TypeVar

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from dolmen.core import profiling

K = TypeVar("K")


class Context(Generic[K]):
    """Type of torch's `ctx` object; never instantiated here."""

    if TYPE_CHECKING:
        kept: K
        """What forward leaves for backward, tensors excepted."""
        needs_input_grad: tuple[bool, ...]
        """Of each input of forward, whether it needs a gradient."""

        @property
        def saved_tensors(self) -> tuple[Tensor, ...]:
            """Type of torch's property: the tensors that forward gave to `save_for_backward`."""
            ...

        def save_for_backward(self, *tensors: Tensor | None) -> None:
            """Type of torch's method: keep tensors (or None) until backward."""

        def mark_dirty(self, *tensors: Tensor) -> None:
            """Type of torch's method: state that forward has written to these inputs."""


class TypedFunction(torch.autograd.Function):
    """`torch.autograd.Function` whose forward and backward have types."""

    if TYPE_CHECKING:

        @staticmethod
        def forward(ctx: Context[Any], *inputs: Any, **options: Any) -> Any:
            """Type of the forward that a subclass defines; never run."""
            ...

        @staticmethod
        def backward(ctx: Context[Any], *gradients: Any, **options: Any) -> Any:
            """Type of the backward that a subclass defines; never run."""
            ...


def recompute(function: Callable, *args: Any) -> Any:
    """Return function(*args) with activation recomputation: only the inputs are kept, and backward
    calls `function` again, collectives included. Random state is not restored for that call. Where
    gradients are disabled it is a plain call.
    """
    if not torch.is_grad_enabled():
        return function(*args)
    # dynamo traces no context functions: no mark in the profile then
    if torch.compiler.is_compiling():
        # random state is not saved: nothing here consumes any
        return checkpoint(function, *args, use_reentrant=False, preserve_rng_state=False)
    return checkpoint(
        function, *args, use_reentrant=False, preserve_rng_state=False, context_fn=_contexts
    )


def _contexts() -> tuple[AbstractContextManager, AbstractContextManager]:
    """Return the two context managers that torch's checkpoint asks for: an empty one for forward,
    and for the repeated forward in backward one that marks it as `recompute` in a profile.
    """
    return nullcontext(), profiling.record_range("recompute")
