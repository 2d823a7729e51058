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
1.91. Both keep the same log_sum, so that either's backward may follow the other's forward: where
deterministic algorithms are asked for, backward is FlashAttention-2's, as cuDNN's adds up in any
order.
"""

from typing import Any, NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor
from torch.autograd.function import once_differentiable

from dolmen.core.autograd import Context, TypedFunction
from dolmen.core.torch_private import compute
from dolmen.ops.attention.score_bias import join_sinks, sink_gradient
from dolmen.ops.attention.spec import Run

CAUSAL, ALL = (-1, 0), (-1, -1)


class FlashCall(NamedTuple):
    """Arguments of both operators beside q, k and v. Numbers and tensors alone, one after the other
    what ours below take: `f(*call)`, `Call(*arguments)`.
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
    def of(run: Run | None, bounds: tuple[int, int], scale: float, cudnn: bool) -> "FlashCall":
        """Build the call of the segments of `run`, or of whole tensors, with the keys seen left and
        right of the diagonal.
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
        return bounds == ALL or (bounds == CAUSAL and queries == keys)

    def options(
        self, q: Tensor, k: Tensor
    ) -> tuple[Tensor | None, Tensor | None, int, int, float, bool]:
        """Return the positional arguments of torch's operators: segments, the longest of queries
        and of keys, no dropout, and whether causal.
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
    """-> out, the kernel's log_sum, and its random state."""
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
    """dq, dk, dv of this call's keys, from out and log_sum (as the kernel lays it out) over all
    keys. The kernel reads the random state (two numbers) even though nothing is dropped.
    """
    repeatable = torch.are_deterministic_algorithms_enabled()
    if call.fits_cudnn(q.shape[1], k.shape[1]) and not repeatable:
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
    """out [batch, queries, heads, size] and log_sum [batch, heads, queries] of a call that fits."""
    by_head = (t.transpose(1, 2) for t in (q, k, v))  # cuDNN reads any strides
    causal = call.right == 0
    out, log_sum, *_ = compute.cudnn_forward(
        *by_head, None, True, 0.0, causal, False, scale=call.scale
    )
    return out.transpose(1, 2).contiguous(), log_sum.squeeze(-1)


def _cudnn_backward(
    g: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, log_sum: Tensor, call: FlashCall
) -> tuple[Tensor, Tensor, Tensor]:
    """dq, dk, dv of a call that fits. The operator's random state is not read, as nothing is
    dropped, and it has neither a bias nor segments.
    """
    by_head = (t.transpose(1, 2) for t in (g, q, k, v, out))
    state, causal = log_sum.new_empty(0, dtype=torch.int64), call.right == 0
    rest = (None, None, None, q.shape[1], k.shape[1], 0.0, causal)
    grads = compute.cudnn_backward(
        *by_head, log_sum.contiguous().unsqueeze(-1), state, state, *rest, scale=call.scale
    )
    dq, dk, dv = (d.transpose(1, 2).contiguous() for d in grads)
    return dq, dk, dv


# Under torch.compile each is an opaque operator. Torch's own are tagged as random, and where a part
# of a block is computed again (layout.recompute) their random state would be kept and restored.
# _CALL is a Call, one after the other, as both are declared to take it.
_CALL = "Tensor? queries, Tensor? keys, SymInt longest, SymInt left, SymInt right, "
_CALL += "float scale, bool cudnn"


@torch.library.custom_op(
    "dolmen::flash_forward",
    mutates_args=(),
    schema=f"(Tensor q, Tensor k, Tensor v, {_CALL}) -> (Tensor, Tensor, Tensor)",
)
def opaque_forward(q: Tensor, k: Tensor, v: Tensor, *call: Any) -> tuple[Tensor, Tensor, Tensor]:
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
    return backward(g, q, k, v, out, log_sum, state, FlashCall(*call))


@opaque_forward.register_fake
def _(q: Tensor, k: Tensor, v: Tensor, *call: Any) -> tuple[Tensor, Tensor, Tensor]:
    queries = FlashCall(*call).queries
    shape = (q.shape[1], q.shape[0]) if queries is not None else (len(q), q.shape[2], q.shape[1])
    return torch.empty_like(q), q.new_empty(shape, dtype=torch.float32), no_state(q)


@opaque_backward.register_fake
def _(g: Tensor, q: Tensor, k: Tensor, v: Tensor, *rest: Any) -> tuple[Tensor, Tensor, Tensor]:
    return torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)


def no_state(q: Tensor) -> Tensor:
    """The random state where nothing is dropped: two zeros, as torch.nn.attention.varlen has it."""
    return torch.zeros(2, dtype=torch.uint64, device=q.device)


class Flash(TypedFunction):
    """q, k, v, sinks [heads] or None, and a Call, one after the other. Kept for backward: these,
    out, one number per query and head, and 16 bytes.
    """

    @staticmethod
    def forward(
        ctx: Context[FlashCall], q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, *call: Any
    ) -> Tensor:
        own = FlashCall(*call)
        if torch.compiler.is_compiling():
            out, log_sum, state = opaque_forward(q, k, v, *own)
        else:
            out, log_sum, state = forward(q, k, v, own)
        if sinks is not None:
            out, by_query = join_sinks(out, log_sum.transpose(-1, -2), sinks)
            log_sum = by_query.transpose(-1, -2)
        ctx.save_for_backward(q, k, v, sinks, out, log_sum, state, own.queries, own.keys)
        ctx.kept = own._replace(queries=None, keys=None)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Context[FlashCall], g: Tensor) -> tuple[Tensor | None, ...]:
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
