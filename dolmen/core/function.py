"""What an operation is whose backward we write: `torch.autograd.Function`, with types.

    class _Scale(Function):
        @staticmethod
        def forward(ctx: Context[float], x: Tensor, by: float) -> Tensor:
            ctx.kept = by
            return x * by

        @staticmethod
        def backward(ctx: Context[float], g: Tensor) -> tuple[Tensor, None]:
            return g * ctx.kept, None

Tensors that backward needs go through `save_for_backward`, or recomputation and ZeRO would not see
them; all else is one value, `kept`. torch leaves `ctx` without a type, and its `backward` fits no
signature that names its gradients.
"""

from typing import TYPE_CHECKING, Any, Generic, TypeVar

import torch
from torch import Tensor

K = TypeVar("K")


class Context(Generic[K]):
    """torch's own object, of which no instance is made here."""

    if TYPE_CHECKING:
        kept: K
        """What forward leaves for backward, tensors excepted."""
        needs_input_grad: tuple[bool, ...]
        """Of each input of forward, whether a gradient is asked for."""

        @property
        def saved_tensors(self) -> tuple[Tensor, ...]: ...
        def save_for_backward(self, *tensors: Tensor | None) -> None: ...
        def mark_dirty(self, *tensors: Tensor) -> None: ...


class Function(torch.autograd.Function):
    if TYPE_CHECKING:

        @staticmethod
        def forward(ctx: Context[Any], *inputs: Any, **options: Any) -> Any: ...
        @staticmethod
        def backward(ctx: Context[Any], *gradients: Any, **options: Any) -> Any: ...
