"""Torch's operators of fused attention, as flash.py calls them. FlashAttention-2:

    _flash_attention_forward     dense   q [batch, queries, heads, size], k and v with their heads
                                         log_sum [batch, heads, queries]
                                 varlen  q [tokens of all segments, heads, size], where segments
                                         begin and how long the longest is; log_sum [heads, tokens]
    _flash_attention_backward    of either

Both take heads of one size for q, k and v, what to scale by, and a window of (left, right) keys
around the diagonal, -1 for no bound. The diagonal of a rectangle ends at its last query and last
key, so keys before a chunk's queries are just more keys.

cuDNN's operators take whole tensors without a window, causal only where there are as many queries
as keys, and heads of up to 128. Where a `Call` admits them and fits, they compute it: forward and
backward of 32 heads and 4,096 tokens in bf16 take 1.07 ms on an H200, where FlashAttention-2 takes
1.91. Both keep the same log_sum, so that either's backward may follow the other's forward.

FlashAttention-3 has no operators of its own: torch registers it in place of FlashAttention-2's, for
the whole process (`activate_attention`). It keeps the same log_sum too.
"""

import importlib.util
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import attention

from dolmen.core.autograd import Context, TypedFunction
from dolmen.core.torch_private import compute
from dolmen.ops.attention.score_bias import join_sinks, sink_gradient
from dolmen.ops.attention.spec import Run
from dolmen.ops.attention_support import AttentionName, AttentionOption

CAUSAL, ALL = (-1, 0), (-1, -1)
FLASH3 = "FA3"
"""torch's name of FlashAttention-3."""


def activate_attention(backend: AttentionOption) -> None:
    """Prepare this process for an attention backend: for flash3, register FlashAttention-3 in place
    of FlashAttention-2 in torch's operators, for all models of the process; nothing for any other.
    Raises ValueError where torch cannot, as its module is missing.
    """
    if backend != "flash3" or attention.current_flash_attention_impl() == FLASH3:
        return
    try:
        attention.activate_flash_attention_impl(FLASH3)
    except (ImportError, RuntimeError) as error:
        raise ValueError(
            f"train.attention {backend}: torch cannot activate FlashAttention-3 ({error}): install "
            "a build of it that has the module flash_attn_interface, or use --train.attention auto"
        ) from None


def is_installed(backend: AttentionName) -> bool:
    """Return whether the Python module that the backend needs is found: flash3 needs one."""
    return backend != "flash3" or importlib.util.find_spec("flash_attn_interface") is not None


@contextmanager
def attention_activated(backend: AttentionName) -> Iterator[None]:
    """Context manager: `activate_attention`, undone at the end. Raises as it does."""
    before = attention.current_flash_attention_impl()
    activate_attention(backend)
    try:
        yield
    finally:
        if attention.current_flash_attention_impl() != before:
            attention.restore_flash_attention_impl()


class FlashCall(NamedTuple):
    """Arguments of both operators after q, k and v. Holds only numbers and tensors, so that it
    unpacks into the arguments of the opaque operators below: `f(*call)`, `FlashCall(*arguments)`.
    """

    queries: Tensor | None
    """[segments + 1] int32: where the segments of queries begin; of whole tensors None."""
    keys: Tensor | None
    longest: int
    """Queries or keys of the longest segment, or more; of whole tensors 0."""
    left: int
    right: int
    scale: float
    cudnn: bool
    """True if cuDNN's operators may compute it."""

    @staticmethod
    def from_run(
        run: Run | None, bounds: tuple[int, int], scale: float, cudnn: bool
    ) -> "FlashCall":
        """Return the call for the segments (documents) of `run`, or for whole tensors where it is
        None. `bounds`: keys seen left and right of the diagonal, -1 for all; `cudnn`: admit cuDNN's
        operators.
        """
        if run is None:
            return FlashCall(None, None, 0, *bounds, scale, cudnn)
        return FlashCall(run.queries, run.keys, run.longest.shape[0], *bounds, scale, cudnn)

    def fits_cudnn(self, queries: int, keys: int) -> bool:
        """Return True if cuDNN's operators are admitted and can compute this call of so many
        queries and keys. Single tokens are left to FlashAttention-2: cuDNN refuses some lengths of
        one.
        """
        if not self.cudnn or self.queries is not None or min(queries, keys) < 2:
            return False
        bounds = (self.left, self.right)
        # cuDNN's causal mask is anchored at the first key, ours at the last: equal if square
        return bounds == ALL or (bounds == CAUSAL and queries == keys)

    def options(
        self, q: Tensor, k: Tensor
    ) -> tuple[Tensor | None, Tensor | None, int, int, float, bool]:
        """Return the positional arguments of torch's FlashAttention operators behind q, k and v:
        segment starts of queries and of keys, the longest of each, no dropout, and whether causal.
        """
        causal = (self.left, self.right) == CAUSAL
        if self.queries is None:
            return None, None, q.shape[1], k.shape[1], 0.0, causal
        return self.queries, self.keys, self.longest, self.longest, 0.0, causal


def forward(
    q: Float[Tensor, "*queries heads size"],
    k: Float[Tensor, "*keys kv_heads size"],
    v: Float[Tensor, "*keys kv_heads size"],
    call: FlashCall,
) -> tuple[Float[Tensor, "*queries heads size"], Float[Tensor, "..."], Tensor]:
    """Return the attention output, log_sum as the kernel lays it out ([batch, heads, queries], of
    segments [heads, tokens]), and the kernel's random state (unused: nothing is dropped); by cuDNN
    where the call fits, else by FlashAttention-2. No autograd.
    """
    # both keep the natural log of the sum, so either backward can follow
    if call.fits_cudnn(q.shape[1], k.shape[1]):
        out, log_sum = _cudnn_forward(q, k, v, call)
        return out, log_sum, no_state(q)
    out, log_sum, state, _, _ = compute.flash_forward(
        q,
        k,
        v,
        *call.options(q, k),
        False,
        scale=call.scale,
        window_size_left=call.left,
        window_size_right=call.right,
    )
    return out, log_sum, state


def backward(
    g: Float[Tensor, "*queries heads size"],
    q: Float[Tensor, "*queries heads size"],
    k: Float[Tensor, "*keys kv_heads size"],
    v: Float[Tensor, "*keys kv_heads size"],
    out: Float[Tensor, "*queries heads size"],
    log_sum: Float[Tensor, "..."],
    state: Tensor,
    call: FlashCall,
) -> tuple[
    Float[Tensor, "*queries heads size"],
    Float[Tensor, "*keys kv_heads size"],
    Float[Tensor, "*keys kv_heads size"],
]:
    """Return dq, dk, dv for these keys, from the output's gradient g, and the output and log_sum
    (as the kernel lays it out) of attention over all keys; by cuDNN where the call fits, else by
    FlashAttention. The kernel reads the random state (two numbers) even though nothing is dropped.
    """
    if call.fits_cudnn(q.shape[1], k.shape[1]):
        return _cudnn_backward(g, q, k, v, out, log_sum, call)
    return compute.flash_backward(
        g,
        q,
        k,
        v,
        out,
        log_sum.contiguous(),
        *call.options(q, k),
        state,
        state.new_empty(0),
        scale=call.scale,
        window_size_left=call.left,
        window_size_right=call.right,
    )


def _cudnn_forward(q: Tensor, k: Tensor, v: Tensor, call: FlashCall) -> tuple[Tensor, Tensor]:
    """Return out [batch, queries, heads, size] and log_sum [batch, heads, queries] by cuDNN; the
    call must fit (`fits_cudnn`).
    """
    by_head = (t.transpose(1, 2) for t in (q, k, v))  # cuDNN reads any strides
    causal = call.right == 0
    out, log_sum, *_ = compute.cudnn_forward(
        *by_head, None, True, 0.0, causal, False, scale=call.scale
    )
    return out.transpose(1, 2).contiguous(), log_sum.squeeze(-1)


def _cudnn_backward(
    g: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, log_sum: Tensor, call: FlashCall
) -> tuple[Tensor, Tensor, Tensor]:
    """Return dq, dk, dv by cuDNN; the call must fit. The operator's random state is not read, as
    nothing is dropped, and it has neither a bias nor segments.
    """
    by_head = (t.transpose(1, 2) for t in (g, q, k, v, out))
    state, causal = log_sum.new_empty(0, dtype=torch.int64), call.right == 0
    rest = (None, None, None, q.shape[1], k.shape[1], 0.0, causal)
    # the state is empty: without dropout it is not read
    grads = compute.cudnn_backward(
        *by_head, log_sum.contiguous().unsqueeze(-1), state, state, *rest, scale=call.scale
    )
    dq, dk, dv = (d.transpose(1, 2).contiguous() for d in grads)
    return dq, dk, dv


# Under torch.compile each is an opaque operator. Torch's own are tagged as random, and where a part
# of a block is computed again (layout.recompute) their random state would be kept and restored.
# _CALL is a FlashCall, one after the other, as both are declared to take it.
_CALL = "Tensor? queries, Tensor? keys, SymInt longest, SymInt left, SymInt right, "
_CALL += "float scale, bool cudnn"


@torch.library.custom_op(
    "dolmen::flash_forward",
    mutates_args=(),
    schema=f"(Tensor q, Tensor k, Tensor v, {_CALL}) -> (Tensor, Tensor, Tensor)",
)
def opaque_forward(q: Tensor, k: Tensor, v: Tensor, *call: Any) -> tuple[Tensor, Tensor, Tensor]:
    """Run `forward` as one operator that torch.compile does not look into; `call` is an unpacked
    FlashCall.
    """
    return forward(q, k, v, FlashCall(*call))


@torch.library.custom_op(
    "dolmen::flash_backward",
    mutates_args=(),
    schema="(Tensor g, Tensor q, Tensor k, Tensor v, Tensor out, Tensor log_sum, Tensor state, "
    f"{_CALL}) -> (Tensor, Tensor, Tensor)",
)
def opaque_backward(
    g: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    log_sum: Tensor,
    state: Tensor,
    *call: Any,
) -> tuple[Tensor, Tensor, Tensor]:
    """Run `backward` as one operator that torch.compile does not look into; `call` is an unpacked
    FlashCall.
    """
    return backward(g, q, k, v, out, log_sum, state, FlashCall(*call))


@opaque_forward.register_fake
def _(q: Tensor, k: Tensor, v: Tensor, *call: Any) -> tuple[Tensor, Tensor, Tensor]:
    """Return what `opaque_forward` does as empty tensors of the right shapes and dtypes, for
    torch.compile: out, log_sum (fp32) and the random state without dropout.
    """
    queries = FlashCall(*call).queries
    # log_sum's layout: [heads, tokens] of segments, else [batch, heads, queries]
    shape = (q.shape[1], q.shape[0]) if queries is not None else (len(q), q.shape[2], q.shape[1])
    return torch.empty_like(q), q.new_empty(shape, dtype=torch.float32), no_state(q)


@opaque_backward.register_fake
def _(g: Tensor, q: Tensor, k: Tensor, v: Tensor, *rest: Any) -> tuple[Tensor, Tensor, Tensor]:
    """Return what `opaque_backward` does, dq, dk and dv, as empty tensors of the right shapes, for
    torch.compile.
    """
    return torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)


def no_state(q: Tensor) -> Tensor:
    """Return the kernel's random state where nothing is dropped: two zeros, as
    torch.nn.attention.varlen has it.
    """
    return torch.zeros(2, dtype=torch.uint64, device=q.device)


class Flash(TypedFunction):
    """Autograd of fused attention: q, k, v, sinks [heads] or None, and an unpacked FlashCall. Kept
    for backward: these, out, one number per query and head, and 16 bytes.
    """

    @staticmethod
    def forward(
        ctx: Context[FlashCall], q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, *call: Any
    ) -> Tensor:
        """Return the attention output, sinks included."""
        flash_call = FlashCall(*call)
        if torch.compiler.is_compiling():
            out, log_sum, state = opaque_forward(q, k, v, *flash_call)
        else:
            out, log_sum, state = forward(q, k, v, flash_call)
        if sinks is not None:
            # a sink only rescales: the kernel runs without it, and log_sum then includes it
            out, by_query = join_sinks(out, log_sum.transpose(-1, -2), sinks)
            log_sum = by_query.transpose(-1, -2)
        ctx.save_for_backward(
            q, k, v, sinks, out, log_sum, state, flash_call.queries, flash_call.keys
        )
        ctx.kept = flash_call._replace(queries=None, keys=None)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Context[FlashCall], g: Tensor) -> tuple[Tensor | None, ...]:
        """Return the gradients of q, k, v and the sinks, and None for the numbers of the
        FlashCall.
        """
        q, k, v, sinks, out, log_sum, state, queries, keys = ctx.saved_tensors
        call = ctx.kept._replace(queries=queries, keys=keys)
        if torch.compiler.is_compiling():
            grads = opaque_backward(g, q, k, v, out, log_sum, state, *call)
        else:
            grads = backward(g, q, k, v, out, log_sum, state, call)
        dsinks = None
        if sinks is not None and ctx.needs_input_grad[3]:
            dsinks = sink_gradient(g, out, log_sum.transpose(-1, -2), sinks)
        return *grads, dsinks, *[None] * len(call)
