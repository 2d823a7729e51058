"""Torch's FlashAttention operators, as flash.py calls them:

    _flash_attention_forward     dense   q [batch, queries, heads, size], k and v with their heads
                                         log_sum [batch, heads, queries]
                                 varlen  q [tokens of all segments, heads, size], where segments
                                         begin and how long the longest is; log_sum [heads, tokens]
    _flash_attention_backward    of either

Both take heads of one size for q, k and v, what to scale by, and a window of (left, right) keys
around the diagonal, -1 for no bound. The diagonal of a rectangle ends at its last query and last
key, so keys before a chunk's queries are just more keys.
"""

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from dolmen.ops.attention.spec import Run

CAUSAL, ALL = (-1, 0), (-1, -1)


def segments(run: Run | None) -> tuple[Tensor | None, Tensor | None, int]:
    """Where the segments of queries and of keys begin, and their longest; of whole tensors none."""
    return (None, None, 0) if run is None else (run.queries, run.keys, run.longest.shape[0])


def _options(
    q: Tensor,
    k: Tensor,
    queries: Tensor | None,
    keys: Tensor | None,
    longest: int,
    bounds: tuple[int, int],
) -> tuple:
    """What both operators take in this order: segments, the longest of queries and of keys, no
    dropout, and whether causal.
    """
    most = (longest, longest) if queries is not None else (q.shape[1], k.shape[1])
    return queries, keys, *most, 0.0, bounds == CAUSAL


def forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    queries: Tensor | None,
    keys: Tensor | None,
    longest: int,
    left: int,
    right: int,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """-> out like q, the kernel's log_sum, and its random state."""
    out, log_sum, state, _, _ = torch.ops.aten._flash_attention_forward(
        q,
        k,
        v,
        *_options(q, k, queries, keys, longest, (left, right)),
        False,
        scale=scale,
        window_size_left=left,
        window_size_right=right,
    )
    return out, log_sum, state


def backward(
    g: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    log_sum: Tensor,
    state: Tensor,
    queries: Tensor | None,
    keys: Tensor | None,
    longest: int,
    left: int,
    right: int,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """dq, dk, dv of this call's keys, from out and log_sum (as the kernel lays it out) over all
    keys. The kernel reads the random state (two numbers) even though nothing is dropped.
    """
    return torch.ops.aten._flash_attention_backward(
        g,
        q,
        k,
        v,
        out,
        log_sum.contiguous(),
        *_options(q, k, queries, keys, longest, (left, right)),
        state,
        state.new_empty(0),
        scale=scale,
        window_size_left=left,
        window_size_right=right,
    )


# Under torch.compile each is an opaque operator. Torch's own are tagged as random, and where a part
# of a block is computed again (layout.recompute) their random state would be kept and restored.
opaque_forward = torch.library.custom_op("dolmen::flash_forward", forward, mutates_args=())
opaque_backward = torch.library.custom_op("dolmen::flash_backward", backward, mutates_args=())


@opaque_forward.register_fake
def _(q, k, v, queries, keys, longest, left, right, scale):
    shape = (q.shape[1], q.shape[0]) if queries is not None else (len(q), q.shape[2], q.shape[1])
    return torch.empty_like(q), q.new_empty(shape, dtype=torch.float32), no_state(q)


@opaque_backward.register_fake
def _(g, q, k, v, out, log_sum, state, queries, keys, longest, left, right, scale):
    return torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)


def no_state(q: Tensor) -> Tensor:
    """The random state where nothing is dropped: two zeros, as torch.nn.attention.varlen has it."""
    return torch.zeros(2, dtype=torch.uint64, device=q.device)


class Flash(torch.autograd.Function):
    """Kept for backward: q, k, v, out, one number per query and head, and 16 bytes."""

    @staticmethod
    def forward(ctx, q, k, v, queries, keys, longest, left, right, scale):
        call = opaque_forward if torch.compiler.is_compiling() else forward
        out, log_sum, state = call(q, k, v, queries, keys, longest, left, right, scale)
        ctx.save_for_backward(q, k, v, out, log_sum, state, queries, keys)
        ctx.options = longest, left, right, scale
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx, g):
        call = opaque_backward if torch.compiler.is_compiling() else backward
        return *call(g, *ctx.saved_tensors, *ctx.options), *(None,) * 6
