"""Context parallelism: each rank of `cp` holds a part of every sequence, and attention alone sees
the rest.

A sequence is cut into 2 x size chunks, and rank r holds chunks r and 2 size - 1 - r ("zigzag", of
which the first is cheap under a causal mask and the second dear), so that all ranks have exactly as
many (query, key) pairs:

    chunk    0  1  2  3  4  5  6  7
    rank     0  1  2  3  3  2  1  0

With size 4 each rank's queries see 9 pairs of chunks, where a plain split into quarters gives 3, 7,
11 and 15.

ring (2310.01889): keys and values travel once around the ring. While the next part comes, the
present one is attended to; the pieces are merged by their log-sum-exp. Nothing longer than length /
size is ever held. In backward they travel again, and their gradients, in fp32, with them.

gather (Llama 3, 2407.21783): one all-gather of keys and values, one reduce-scatter of their
gradients; these O(length).
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from dolmen.core import collectives, transfers
from dolmen.core.mesh import Axis
from dolmen.ops import attention as ops
from dolmen.ops.attention import Attend, Attention, Documents, dropped


@dataclass(frozen=True)
class ContextParallel:
    """Sequences split over `axis`, here dim 1: S(1, zigzag). On an axis of size 1 everything is
    whole and nothing is sent.
    """

    axis: Axis
    kind: Literal["ring", "gather"] = "ring"
    kernel: Literal["blocks", "flash"] = "blocks"
    """What attends: see ops/kernels.py."""

    @property
    def backend(self) -> Attention:
        return ops.BACKENDS[self.kernel]

    def chunks(self, rank: int) -> tuple[int, int]:
        """The chunks, of 2 x size, that a rank holds, in their order."""
        return rank, 2 * self.axis.size - 1 - rank

    def indices(self, length: int, device: torch.device) -> Tensor:
        """[length / size] int64: where this rank's tokens are in the sequence."""
        return self.split(torch.arange(length, device=device), 0)

    def split(self, x: Tensor, dim: int) -> Tensor:
        """This rank's part of what all ranks hold whole (tokens, labels, starts); no autograd.
        Raises ValueError where 2 x size does not divide the dim.
        """
        if self.axis.size == 1:
            return x
        if x.shape[dim] % (2 * self.axis.size):
            raise ValueError(
                f"a sequence of {x.shape[dim]} tokens is not divisible by 2 x layout.cp "
                f"({2 * self.axis.size}): use another --train.sequence-length or --layout.cp"
            )
        n = x.shape[dim] // (2 * self.axis.size)
        return torch.cat(
            [x.narrow(dim, chunk * n, n) for chunk in self.chunks(self.axis.rank)], dim
        )

    def documents(self, starts: Tensor, host: Tensor | None = None) -> Documents:
        """This rank's part of the documents that begin at starts [batch, length], which are the
        same on all ranks; `host`: the same numbers on the host. Without it the host waits for them.
        """
        host, here = starts if host is None else host, self.split(starts, 1)
        if self.kernel == "blocks":
            return Documents(here, here if host is starts else self.split(host, 1))
        chunks = (0,) if self.axis.size == 1 else self.chunks(self.axis.rank)
        length, begins = here.shape[1] // len(chunks), ops.begins(host)
        back = self.axis.size == 1 or self.kind == "gather"
        runs = (ops.run(begins, i * length, length, starts.device, back) for i in chunks)
        return Documents(here, here, tuple(runs))

    def attention(self, q: Tensor, k: Tensor, v: Tensor, attend: Attend) -> Tensor:
        """Attention of this rank's queries to the keys of all ranks: see ops/attention/spec.py.

        q [batch, length / size, heads, head_dim], k and v with kv_heads, S(1, zigzag) -> like q.
        `attend` is of this rank's heads and documents. With dropout keys and values are gathered,
        whatever `kind` says.
        """
        if attend.dropout is not None:
            k, v = self.gather_keys(k, v)
            return dropped.attention(q, k, v, attend, self.indices(k.shape[1], k.device))
        if self.axis.size == 1:
            return self.backend.attention(q, k, v, attend)
        if self.kind == "ring":
            return _ring(q, k, v, self, attend)
        k, v = self.gather_keys(k, v)
        n, out = q.shape[1] // 2, []
        for i, chunk in enumerate(self.chunks(self.axis.rank)):
            # a chunk's queries are the last of the keys before its end
            mine, stop = (slice(i * n, (i + 1) * n), (chunk + 1) * n)
            here = q[:, mine], k[:, :stop], v[:, :stop]
            out.append(self.backend.attention(*here, attend.part(mine, i)))
        return torch.cat(out, 1)

    def gather_keys(self, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """k, v [batch, length / size, ...] S(1, zigzag) -> [batch, length, ...] R, in the order of
        the sequence; one collective.
        """
        if self.axis.size == 1:
            return k, v
        both = collectives.all_gather(torch.cat((k, v), 3), 1, self.axis)
        k, v = both.split((k.shape[3], v.shape[3]), 3)
        return self._in_order(k), self._in_order(v)

    def _in_order(self, x: Tensor) -> Tensor:
        """[batch, length, ...] in the order of ranks -> in that of the sequence."""
        first, second = x.unflatten(1, (self.axis.size, 2, -1)).unbind(2)
        return torch.cat((first, second.flip(1)), 1).flatten(1, 2)

    def visible(
        self, source: int, n: int, window: int | None
    ) -> Iterator[tuple[slice, slice, int, int]]:
        """The pairs of a chunk of this rank's queries and one of `source`'s keys, each of n tokens,
        in which a query sees a key: where they are on their ranks, and the indices of their first
        tokens. A chunk's own keys come first, and all its queries see one.
        """
        for i, query in enumerate(self.chunks(self.axis.rank)):
            for j, key in reversed(list(enumerate(self.chunks(source)))):
                if key <= query and (window is None or (key + 1) * n > query * n - window + 1):
                    yield slice(i * n, (i + 1) * n), slice(j * n, (j + 1) * n), query * n, key * n


def merge(
    out: Tensor, log_sum: Tensor, more: Tensor, more_log_sum: Tensor
) -> tuple[Tensor, Tensor]:
    """Attention to two disjoint sets of keys from attention to each; out [..., size], log_sum
    [...], the first of which is finite.
    """
    total = torch.logaddexp(log_sum, more_log_sum)
    return out * (log_sum - total).exp()[..., None] + more * (more_log_sum - total).exp()[
        ..., None
    ], total


def _packed(k: Tensor, v: Tensor) -> Tensor:
    """Both as one message, one after the other."""
    return torch.cat((k.flatten(), v.flatten()))


def _unpacked(kv: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """Views of what `_packed` made of two like k and v, or of what lies like it."""
    keys, values = kv.split((k.numel(), v.numel()))
    return keys.view(k.shape), values.view(v.shape)


def _of_chunk(attend: Attend, mine: slice) -> Attend:
    """Of the chunk of this rank's queries that lies at `mine`."""
    return attend.part(mine, mine.start // (mine.stop - mine.start))


def _forward(
    q: Tensor, k: Tensor, v: Tensor, context: ContextParallel, attend: Attend
) -> tuple[Tensor, Tensor]:
    """-> out like q, its heads of v's size, log_sum [batch, queries, heads] in fp32 or wider."""
    axis, kv = context.axis, _packed(k, v)
    log_sum = torch.full_like(
        q[..., 0], -torch.inf, dtype=torch.promote_types(q.dtype, torch.float32)
    )
    out = q.new_zeros((*q.shape[:3], v.shape[3]), dtype=log_sum.dtype)
    for hop in range(axis.size):
        keys, values = _unpacked(kv, k, v)
        following = transfers.start_rotate([kv], axis) if hop + 1 < axis.size else None
        for mine, theirs, q_start, k_start in context.visible(
            (axis.rank - hop) % axis.size, q.shape[1] // 2, attend.window
        ):
            here = q[:, mine], keys[:, theirs], values[:, theirs]
            piece = context.backend.partial(*here, q_start, k_start, _of_chunk(attend, mine))
            out[:, mine], log_sum[:, mine] = (
                piece if q_start == k_start else merge(out[:, mine], log_sum[:, mine], *piece)
            )
        if following is not None:
            (kv,) = following.wait()
    return out.to(q.dtype), log_sum


def _backward(
    g: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    log_sum: Tensor,
    context: ContextParallel,
    attend: Attend,
) -> tuple[Tensor, Tensor, Tensor]:
    """dq, dk, dv. Gradients follow the keys they belong to, one message behind, and are home after
    `size` hops.
    """
    axis, kv, travelling = context.axis, _packed(k, v), None
    dq = torch.zeros_like(q, dtype=log_sum.dtype)
    for hop in range(axis.size):
        following = transfers.start_rotate([kv], axis) if hop + 1 < axis.size else None
        dkv = torch.zeros_like(kv, dtype=log_sum.dtype)
        keys, values, dk, dv = *_unpacked(kv, k, v), *_unpacked(dkv, k, v)
        for mine, theirs, q_start, k_start in context.visible(
            (axis.rank - hop) % axis.size, q.shape[1] // 2, attend.window
        ):
            pieces = context.backend.partial_backward(
                g[:, mine],
                q[:, mine],
                keys[:, theirs],
                values[:, theirs],
                out[:, mine],
                log_sum[:, mine],
                q_start,
                k_start,
                _of_chunk(attend, mine),
            )
            for total, piece in zip(
                (dq[:, mine], dk[:, theirs], dv[:, theirs]), pieces, strict=True
            ):
                total += piece
        if travelling is not None:
            dkv += travelling.wait()[0]
        travelling = transfers.start_rotate([dkv], axis)
        if following is not None:
            (kv,) = following.wait()
    dk, dv = _unpacked(travelling.wait()[0], k, v)
    return dq.to(q.dtype), dk.to(k.dtype), dv.to(v.dtype)


class _Ring(torch.autograd.Function):
    """Kept for backward: this rank's q, k, v and out, and one number per query and head."""

    @staticmethod
    def forward(ctx, q, k, v, context, attend):
        out, log_sum = _forward(q, k, v, context, attend)
        ctx.options = context, attend
        ctx.save_for_backward(q, k, v, out, log_sum)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx, g):
        return *_backward(g, *ctx.saved_tensors, *ctx.options), None, None


@torch.compiler.disable
def _ring(q, k, v, context, attend):
    """Point-to-point messages do not trace: under torch.compile the graph breaks here."""
    return _Ring.apply(q, k, v, context, attend)
