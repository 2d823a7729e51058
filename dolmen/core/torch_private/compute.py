"""Private names of torch in compute: operators, lists of tensors, the compiler, what a CPU can.

Operators are resolved when this is imported, and called by what their schemas say; the schemas are
what the test compares.
"""

from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar

import torch
from torch import Tensor
from torch.autograd import profiler

P = ParamSpec("P")
T = TypeVar("T")

flash_forward = torch.ops.aten._flash_attention_forward
"""FlashAttention 2 by itself. SDPA, which is public, takes windows and documents as a mask, which
no flash kernel has. Called by position up to `return_debug_mask`. 2.11 to 2.13."""

flash_backward = torch.ops.aten._flash_attention_backward
"""Backward of either form, from the log-sum-exp of forward. 2.11 to 2.13."""

cudnn_forward = torch.ops.aten._scaled_dot_product_cudnn_attention
"""cuDNN's attention with its log-sum-exp, which SDPA, which is public, keeps to itself. Called by
position up to `return_debug_mask`. 2.11 to 2.13."""

cudnn_backward = torch.ops.aten._scaled_dot_product_cudnn_attention_backward
"""Backward from out and the log-sum-exp; bias and segments may be None. 2.11 to 2.13."""

rms_norm = torch.ops.aten._fused_rms_norm
"""-> (normal, 1 / root mean square). `F.rms_norm`, which is public, gives the first alone, and its
backward rounds g * weight. 2.11 to 2.13."""

rms_norm_backward = torch.ops.aten._fused_rms_norm_backward
"""2.11 to 2.13. Of a CPU torch has its definition alone."""

softmax_backward = torch.ops.aten._softmax_backward_data
"""Gradient from the softmax, in its dtype. torch has no public name for it. 2.11 to 2.13."""

foreach_add = torch._foreach_add  # pyright: ignore[reportPrivateImportUsage]
"""A kernel for many tensors. torch's optimizers are made of these, and it has no public name for
them. 2.11 to 2.13."""

foreach_add_ = torch._foreach_add_  # pyright: ignore[reportPrivateImportUsage]
"""Add many tensors in place. 2.11 to 2.13."""

foreach_mul_ = torch._foreach_mul_  # pyright: ignore[reportPrivateImportUsage]
"""Multiply in place; by a number, or by a tensor of one. 2.11 to 2.13."""

foreach_norm = torch._foreach_norm  # pyright: ignore[reportPrivateImportUsage]
"""The Euclidean norm of each. 2.11 to 2.13."""


int8_product = torch.ops.aten._weight_int8pack_mm
"""x W^T of bfloat16 x, with each row of W an int8 times its scale; of a CPU. 2.11 to 2.13."""


def prepack_integers(weight: Tensor) -> Tensor:
    """Return an int8 weight [out, in] packed as `multiply_integers` takes it. 2.11 to 2.13."""
    return torch.ops.onednn.qlinear_prepack(weight, None)


def multiply_integers(
    x: Tensor, weight: Tensor, scale: Tensor, zeros: Tensor, zero_point: int
) -> Tensor:
    """Return (x - zero_point) W^T scale in fp32: x uint8 [tokens, in], W packed by
    `prepack_integers`, `scale` fp32 [out], `zeros` int32 [out]. The sums are int32, and are rounded
    to fp32 before the scale. s8 in place of u8 takes a slow loop. What torch.compile makes of
    quantized models, and eager torch nowhere else. 2.11 to 2.13.
    """
    if torch.compiler.is_compiling():
        return torch.ops.dolmen.multiply_integers(x, weight, scale, zeros, zero_point)
    return _multiply_integers(x, weight, scale, zeros, zero_point)


def _multiply_integers(
    x: Tensor, weight: Tensor, scale: Tensor, zeros: Tensor, zero_point: int
) -> Tensor:
    """Return `multiply_integers` by torch's operator (onednn), in fp32: `x` is integers already,
    with zero point `zero_point` and scale 1; `scale` and `zeros` are the weight's.
    """
    return torch.ops.onednn.qlinear_pointwise.default(
        x, 1.0, zero_point, weight, scale, zeros, None, 1.0, 0, torch.float32, "none", [], ""
    )


def has_integer_product() -> bool:
    """Return True if torch has the operators that `prepack_integers` and `multiply_integers` call.
    2.11 to 2.13.
    """
    onednn = torch.ops.onednn
    return (
        can_prepack()
        and hasattr(onednn, "qlinear_pointwise")
        and hasattr(onednn, "qlinear_prepack")
    )


def prepack_weight(weight: Tensor, rows: int) -> Tensor:
    """Return a weight [out, in] packed as oneDNN multiplies it with about `rows` rows: what
    torch.compile does with frozen weights, and eager torch nowhere. 2.11 to 2.13.
    """
    return torch.ops.mkldnn._reorder_linear_weight(weight, rows)


def prepacked_linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Return x W^T + b, `weight` being packed by `prepack_weight`. 2.11 to 2.13."""
    if torch.compiler.is_compiling():
        return torch.ops.dolmen.prepacked_linear(x, weight, bias)
    return _prepacked_linear(x, weight, bias)


def _prepacked_linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """`prepacked_linear` by torch's operator."""
    return torch.ops.mkldnn._linear_pointwise(x, weight, bias, "none", [], "")


# Operators of our own that call torch's two: torch.compile takes packed weights of torch's own
# operators for constants of the graph, and raises an error where they are its inputs.
_library = torch.library.Library("dolmen", "DEF")
_library.define("prepacked_linear(Tensor x, Tensor weight, Tensor? bias) -> Tensor")
_library.define(
    "multiply_integers(Tensor x, Tensor w, Tensor scale, Tensor zeros, int z) -> Tensor"
)
for _key in ("CPU", "MkldnnCPU"):  # packed weights have a dispatch key of their own
    _library.impl("prepacked_linear", _prepacked_linear, _key)
    _library.impl("multiply_integers", _multiply_integers, _key)
# What the compiler sees of a packed weight has the shape of the plain one. Of x the size is asked,
# not the `len`, which would be a constant of the graph.
_library.impl("prepacked_linear", lambda x, w, _: x.new_empty(x.shape[0], w.shape[0]), "Meta")
_library.impl(
    "multiply_integers",
    lambda x, _, scale, *__: x.new_empty(x.shape[0], scale.shape[0], dtype=torch.float32),
    "Meta",
)


def can_prepack() -> bool:
    """Return True if `prepack_weight` works: torch was built with oneDNN. 2.11 to 2.13."""
    return torch.backends.mkldnn.is_available()


def version_of(x: Tensor) -> int:
    """Return how often x has been written in place, the counter by which autograd detects changes
    since a tensor was saved. 2.11 to 2.13.
    """
    return x._version


def is_profiling() -> bool:
    """Return True while a profile records: torch checks this flag before ranges of its own. 2.11 to
    2.13.
    """
    return profiler._is_profiler_enabled


def has_fast_bfloat16() -> bool:
    """Return True if this CPU has instructions that multiply bfloat16 (AVX512-BF16 or AMX):
    `torch.cpu` reports it to the compiler only. 2.11 to 2.13.
    """
    return torch.cpu._is_avx512_bf16_supported() or has_amx()


def has_amx() -> bool:
    """Return True if this CPU has AMX, whose products are of tiles: `torch.cpu` reports it only to
    the compiler. 2.11 to 2.13.
    """
    return torch.cpu._is_amx_tile_supported()


def find_compiler() -> str:
    """Return the C++ compiler that torch.compile takes on a CPU; "" if there is none. 2.11 to
    2.13.
    """
    from torch._inductor import cpp_builder, exc  # here, as it imports the compiler

    try:
        return cpp_builder.get_cpp_compiler()
    except exc.InvalidCxxCompiler:
        return ""


def mark_dynamic(x: Tensor, dim: int) -> None:
    """Mark size `dim` of x as one that may change from batch to batch: torch.compile makes no
    constant of it, and raises no error where it is one after all. `torch.compiler` has no such
    function. 2.11 to 2.13.
    """
    torch._dynamo.maybe_mark_dynamic(x, dim)


def transpose_contiguous(x: Tensor) -> Tensor:
    """Return x^T in contiguous memory, always as a copy that torch.compile keeps: it may leave out
    that of `x.t().contiguous()`. 2.11 to 2.13.
    """
    if not torch.compiler.is_compiling():
        return x.t().contiguous()
    from torch._inductor import inductor_prims  # here, as it imports the compiler

    return inductor_prims.force_stride_order(x.t(), (x.shape[0], 1))


def disable_compile(function: Callable[P, T]) -> Callable[P, T]:
    """Return the function, excluded from torch.compile, as `torch.compiler.disable(function)` does,
    but without importing the compiler before the first call: half a second of every process. For
    functions called where something is compiled. 2.11 to 2.13.
    """
    return torch._disable_dynamo(function)  # pyright: ignore[reportPrivateImportUsage]


class ViewAdamW(torch.optim.AdamW):
    """torch's AdamW whose step reads and writes `view(t)` of each parameter, gradient and state
    tensor, not the tensor itself: nothing public is called between the lists and the kernel. 2.11
    to 2.13.
    """

    @staticmethod
    def view(p: Tensor) -> Tensor:
        """Return the tensor that a step computes with in place of p; a subclass defines it."""
        raise NotImplementedError

    def _init_group(
        self,
        group: dict[str, Any],
        params_with_grad: list[Tensor],
        grads: list[Tensor],
        exp_avgs: list[Tensor],
        exp_avg_sqs: list[Tensor],
        max_exp_avg_sqs: list[Tensor],
        state_steps: list[Tensor],
    ) -> bool:
        """Fill the lists with `view` of each trained parameter, its gradient and its state tensors,
        in place of torch's; return what torch's method does, whether a parameter is complex.
        """
        lists = params_with_grad, grads, exp_avgs, exp_avg_sqs, max_exp_avg_sqs, state_steps
        has_complex = super()._init_group(group, *lists)
        for tensors in lists:
            tensors[:] = map(self.view, tensors)
        return has_complex
