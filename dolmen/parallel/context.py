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

Where a prefix is seen both ways, queries see keys behind them too, and the first ranks have the
more pairs.

Exact numerics (parallel/exact.py) cut sequences for the largest cp, --train.exact.cp, whatever cp
is: rank r holds several neighbouring pairs of chunks, each pair in the order in which a rank of the
largest cp has it. So the order of all tokens is the same at every cp, and sums over them have the
same leaves. With a limit of 4:

    pairs    0 7 | 1 6 | 2 5 | 3 4
    cp 4     0     1     2     3
    cp 2     0     0     1     1
    cp 1     0     0     0     0

Attention is computed for one chunk of queries at a time. Keys are gathered, and their gradients
added by a tree: of the two chunks of a pair, of a rank's pairs, of ranks. A ring would add them in
the order of arrival.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from jaxtyping import Float, Int64, Shaped
from torch import Tensor
from torch.autograd.function import once_differentiable

from dolmen.core import collectives, transfers
from dolmen.core.autograd import Context, TypedFunction
from dolmen.core.mesh import Axis
from dolmen.core.reduction import widen
from dolmen.core.torch_private import compute
from dolmen.ops import attention as ops
from dolmen.ops import invariant
from dolmen.ops.attention import Attend, AttentionBackend, Documents, dropout
from dolmen.ops.attention.score_bias import join_sinks, sink_gradient
from dolmen.ops.attention.spec import Attended, Keys, LogSum, Place, Queries, Values
from dolmen.ops.attention_support import AttentionName


@dataclass(frozen=True)
class ContextParallel:
    """Sequences split over `axis` in zigzag chunks, dim 1: S(1, zigzag). On an axis of size 1 every
    method keeps the whole sequence, reordered where `limit` is more, and sends nothing.
    """

    axis: Axis
    kind: Literal["ring", "gather"] = "ring"
    kernel: AttentionName = "blocks"
    """Attention backend: see ops/kernels.py."""
    limit: int = 1
    """Largest cp of all runs with the same bits (exact numerics), which the size of `axis` divides.
    """

    @property
    def pairs(self) -> int:
        """Pairs of chunks that a sequence is cut into: one for each rank, or for each of the
        largest cp with exact numerics.
        """
        return max(self.limit, self.axis.size)

    @property
    def multiple(self) -> int:
        """Number of chunks of a sequence, which must divide its length; 1 if it is not cut."""
        return 1 if self.pairs == 1 else 2 * self.pairs

    @property
    def backend(self) -> AttentionBackend:
        """The attention backend that `kernel` names, an entry of BACKENDS."""
        return ops.BACKENDS[self.kernel]

    def chunks(self, rank: int) -> tuple[int, ...]:
        """Return the indices of the chunks, of 2 x pairs that a sequence is cut into, that a rank
        holds, in their order: p and 2 pairs - 1 - p for each of its pairs (zigzag).
        """
        here = self.pairs // self.axis.size
        mine = range(rank * here, (rank + 1) * here)
        return tuple(chunk for pair in mine for chunk in (pair, 2 * self.pairs - 1 - pair))

    def indices(self, length: int, device: torch.device) -> Int64[Tensor, " here"]:
        """Return the indices, in a sequence of `length` tokens, of this rank's length / size
        tokens, in the order in which it holds them.
        """
        return self.split(torch.arange(length, device=device), 0)

    def split(self, x: Shaped[Tensor, "*whole"], dim: int) -> Shaped[Tensor, "*here"]:
        """Return this rank's tokens, its zigzag chunks, along `dim` of a tensor that all ranks
        hold whole (tokens, labels, starts); no autograd. x itself if sequences are not cut. Raises
        ValueError where 2 x pairs does not divide the dim.
        """
        if self.pairs == 1:
            return x
        if x.shape[dim] % self.multiple:
            option = "layout.cp" if self.limit == 1 else "train.exact.cp"
            raise ValueError(
                f"a sequence of {x.shape[dim]} tokens is not divisible by 2 x {option} "
                f"({self.multiple}): use another --train.sequence-length or --{option}"
            )
        n = x.shape[dim] // self.multiple
        return torch.cat(
            [x.narrow(dim, chunk * n, n) for chunk in self.chunks(self.axis.rank)], dim
        )

    def documents(self, full: Documents) -> Documents:
        """Return the documents `full` of whole sequences for this rank's tokens, with the runs that
        all kernels but blocks need, one per chunk; without runs for the kernel `blocks`.
        """
        here = full.map_tensors(lambda t: self.split(t, 1))
        if self.kernel == "blocks":
            return here
        chunks = (0,) if self.axis.size == 1 else self.chunks(self.axis.rank)
        length, starts = here.starts.shape[1] // len(chunks), ops.begins(full.host_starts)
        back = self.axis.size == 1 or self.kind == "gather"
        runs = (ops.run(starts, i * length, length, here.starts.device, back) for i in chunks)
        return replace(here, runs=tuple(runs))

    def attention(self, q: Queries, k: Keys, v: Values, attend: Attend) -> Attended:
        """Return the attention of this rank's queries to the keys of all ranks, with autograd:
        softmax(scores) v as ops/attention/spec.py defines it. Collective over the axis.

        q, k, v are of length / size tokens, S(1, zigzag), and so is the result. `attend` is of this
        rank's heads and documents. With dropout keys and values are gathered, whatever `kind` is.
        """
        if self.limit > 1:
            return self._attend_by_pairs(q, k, v, attend)
        if attend.dropout is not None:
            k, v = self.gather_keys(k, v)
            return dropout.attention(q, k, v, attend, self.indices(k.shape[1], k.device))
        if self.axis.size == 1:
            return self.backend.attention(q, k, v, attend)
        if self.kind == "ring":
            # torch has no type for what its decorator makes of a function
            return _ring(q, k, v, attend.sinks, self, attend)  # pyright: ignore[reportCallIssue]
        k, v = self.gather_keys(k, v)
        n, out = q.shape[1] // 2, []
        for i, chunk in enumerate(self.chunks(self.axis.rank)):
            # a chunk's queries are the last of the keys before its end; of prefixes it is given all
            # keys, as how far they reach is no constant of a compiled block
            mine, end = slice(i * n, (i + 1) * n), (chunk + 1) * n
            stop = end if attend.reach is None else k.shape[1]
            here = q[:, mine], k[:, :stop], v[:, :stop]
            out.append(self.backend.attention(*here, attend.part(mine, i), stop - end))
        return torch.cat(out, 1)

    def _attend_by_pairs(self, q: Queries, k: Keys, v: Values, attend: Attend) -> Attended:
        """Return what `attention` does with exact numerics: one chunk of queries at a time, to the
        keys before its end. Gradients of keys and values are summed in fp32 and rounded once.
        """
        k, v = self.gather_keys(widen(k), widen(v))
        chunks, rows = self.chunks(self.axis.rank), self.indices(k.shape[1], k.device)
        keys, values = (invariant.copies(t, len(chunks) // 2) for t in (k, v))
        n, out = q.shape[1] // len(chunks), []
        for i, chunk in enumerate(chunks):
            mine, end = slice(i * n, (i + 1) * n), (chunk + 1) * n
            k, v = (t[i // 2][:, :end].to(q.dtype) for t in (keys, values))
            part = attend.part(mine, i)
            if part.dropout is not None:
                out.append(dropout.attention(q[:, mine], k, v, part, rows[mine]))
                continue
            # documents are those of one sequence (model/attention.py); a chunk in its first
            # document has none, as on a rank that has no other chunk
            out.append(self.backend.attention(q[:, mine], k, v, part.sequence(0)))
        return torch.cat(out, 1)

    def gather_keys(
        self,
        k: Float[Tensor, "batch here kv_heads size"],
        v: Float[Tensor, "batch here kv_heads value_size"],
    ) -> tuple[
        Float[Tensor, "batch length kv_heads size"],
        Float[Tensor, "batch length kv_heads value_size"],
    ]:
        """Return the keys and values of all ranks, in the order of the sequence (S(1, zigzag) ->
        R): one all-gather, with autograd. k and v themselves if sequences are not cut.
        """
        if self.pairs == 1:
            return k, v
        both = collectives.all_gather(torch.cat((k, v), 3), 1, self.axis)
        k, v = both.split((k.shape[3], v.shape[3]), 3)
        return self._reorder(k), self._reorder(v)

    def _reorder(self, x: Tensor) -> Tensor:
        """Return x, gathered rank by rank along dim 1, with dim 1 in the order of the sequence."""
        first, second = x.unflatten(1, (self.pairs, 2, -1)).unbind(2)
        return torch.cat((first, second.flip(1)), 1).flatten(1, 2)

    def visible(self, source: int, n: int, attend: Attend) -> Iterator[tuple[slice, slice, Place]]:
        """Yield the pairs of a chunk of this rank's queries and a chunk of `source`'s keys (n
        tokens each) in which some query sees some key: both slices within their ranks, and their
        place in the sequence. A query chunk's own keys come first, so that each query has seen one.
        """
        theirs = list(enumerate(self.chunks(source)))[::-1]
        for i, query in enumerate(self.chunks(self.axis.rank)):
            mine = slice(i * n, (i + 1) * n)
            here = attend.part(mine, i)
            first = 0 if attend.window is None else query * n - attend.window + 1
            stop = max((query + 1) * n, here.furthest)
            for j, key in sorted(theirs, key=lambda chunk: chunk[1] != query):
                if key * n < stop and (key + 1) * n > first:
                    yield mine, slice(j * n, (j + 1) * n), Place(query * n, key * n, here)


def merge(
    out: Float[Tensor, "*tokens size"],
    log_sum: Float[Tensor, "*tokens"],
    more: Float[Tensor, "*tokens size"],
    more_log_sum: Float[Tensor, "*tokens"],
) -> tuple[Float[Tensor, "*tokens size"], Float[Tensor, "*tokens"]]:
    """Return the output and log-sum-exp of attention over two disjoint sets of keys together, each
    given by its output and log-sum-exp; the first log_sum must be finite.
    """
    total = torch.logaddexp(log_sum, more_log_sum)
    first, second = (log_sum - total).exp(), (more_log_sum - total).exp()
    return out * first[..., None] + more * second[..., None], total


def _pack(k: Tensor, v: Tensor) -> Tensor:
    """Return keys and values as one flat tensor, to be sent as one message."""
    return torch.cat((k.flatten(), v.flatten()))


def _unpack(kv: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """Return the keys and values in a message of `_pack` as views, shaped like k and v."""
    keys, values = kv.split((k.numel(), v.numel()))
    return keys.view(k.shape), values.view(v.shape)


# Keys and values on their way around a ring of four; gradients are one hop behind the keys that
# they belong to, and are home after as many hops as there are ranks:
#
#     rank                0        1        2        3
#     hop 0   attends     kv 0     kv 1     kv 2     kv 3      while kv goes to the next rank
#     hop 1               kv 3     kv 0     kv 1     kv 2        and so does dkv of hop 0
#     hop 2               kv 2     kv 3     kv 0     kv 1        and of hops 0 and 1, added up
#     hop 3               kv 1     kv 2     kv 3     kv 0      kv is not sent on; dkv goes home


def _rotate_keys(k: Tensor, v: Tensor, axis: Axis) -> Iterator[tuple[int, Tensor, Tensor]]:
    """Yield (source rank, its keys, its values) for each rank of the ring, this rank's own first,
    then the ranks behind it. While the caller uses one part the next is under way, and is waited
    for when the caller asks for it.
    """
    kv = _pack(k, v)
    for hop in range(axis.size):
        following = transfers.start_rotate([kv], axis) if hop + 1 < axis.size else None
        yield (axis.rank - hop) % axis.size, *_unpack(kv, k, v)
        if following is not None:
            (kv,) = following.wait()


def _forward(
    q: Queries, k: Keys, v: Values, context: ContextParallel, attend: Attend
) -> tuple[Attended, LogSum]:
    """Return out and log_sum of ring attention of this rank's queries to the keys of all ranks, in
    fp32 or wider, without sinks and autograd. Collective over the axis.
    """
    wide = torch.promote_types(q.dtype, torch.float32)
    log_sum = torch.full_like(q[..., 0], -torch.inf, dtype=wide)
    out = q.new_zeros((*q.shape[:3], v.shape[3]), dtype=wide)
    for source, keys, values in _rotate_keys(k, v, context.axis):
        for mine, theirs, at in context.visible(source, q.shape[1] // 2, attend):
            piece = context.backend.partial(q[:, mine], keys[:, theirs], values[:, theirs], at)
            if at.q_start != at.k_start:
                piece = merge(out[:, mine], log_sum[:, mine], *piece)
            out[:, mine], log_sum[:, mine] = piece
    return out, log_sum


def _backward(
    g: Attended,
    q: Queries,
    k: Keys,
    v: Values,
    full: tuple[Attended, LogSum],
    context: ContextParallel,
    attend: Attend,
) -> tuple[Queries, Keys, Values]:
    """Return dq, dk, dv of ring attention, this rank's, from the output's gradient g; `full` is
    (out, log_sum) over all keys, sinks included. Collective over the axis.
    """
    (out, log_sum), travelling = full, None
    dq = torch.zeros_like(q, dtype=log_sum.dtype)
    for source, keys, values in _rotate_keys(k, v, context.axis):
        dkv = torch.zeros(k.numel() + v.numel(), dtype=log_sum.dtype, device=k.device)
        dk, dv = _unpack(dkv, k, v)
        for mine, theirs, at in context.visible(source, q.shape[1] // 2, attend):
            pieces = context.backend.partial_backward(
                g[:, mine],
                q[:, mine],
                keys[:, theirs],
                values[:, theirs],
                (out[:, mine], log_sum[:, mine]),
                at,
            )
            totals = dq[:, mine], dk[:, theirs], dv[:, theirs]
            for total, piece in zip(totals, pieces, strict=True):
                total += piece
        if travelling is not None:
            dkv += travelling.wait()[0]
        travelling = transfers.start_rotate([dkv], context.axis)
    assert travelling is not None, "an axis has a rank"
    dk, dv = _unpack(travelling.wait()[0], k, v)
    return dq.to(q.dtype), dk.to(k.dtype), dv.to(v.dtype)


class _Ring(TypedFunction):
    """Autograd of ring attention. Kept for backward: this rank's q, k, v and out, and one number
    per query and head.
    """

    @staticmethod
    def forward(
        ctx: Context[tuple[ContextParallel, Attend]],
        q: Tensor,
        k: Tensor,
        v: Tensor,
        sinks: Tensor | None,
        context: ContextParallel,
        attend: Attend,
    ) -> Tensor:
        """Return the output of ring attention, sinks included, in q's dtype."""
        out, log_sum = _forward(q, k, v, context, attend)
        if sinks is not None:
            out, log_sum = join_sinks(out, log_sum, sinks)
        out = out.to(q.dtype)
        ctx.kept = context, attend._replace(sinks=None)
        ctx.save_for_backward(q, k, v, sinks, out, log_sum)
        return out

    @staticmethod
    @once_differentiable
    def backward(
        ctx: Context[tuple[ContextParallel, Attend]], g: Tensor
    ) -> tuple[Tensor | None, ...]:
        """Return the gradients of q, k, v and the sinks."""
        q, k, v, sinks, out, log_sum = ctx.saved_tensors
        grads = _backward(g, q, k, v, (out, log_sum), *ctx.kept)
        dsinks = None if sinks is None else sink_gradient(g, out, log_sum, sinks)
        return *grads, dsinks, None, None


def _ring(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    sinks: Tensor | None,
    context: ContextParallel,
    attend: Attend,
) -> Tensor:
    """Return the output of ring attention of this rank's q, k and v, with autograd; under
    torch.compile the graph breaks here, as point-to-point messages do not trace.
    """
    apply = _untraced if torch.compiler.is_compiling() else _apply
    return apply(q, k, v, sinks, context, attend)


def _apply(*arguments: Any) -> Tensor:
    """Return `_Ring.apply(*arguments)`: a function, as `disable_compile` cannot wrap a method."""
    return _Ring.apply(*arguments)


_untraced = compute.disable_compile(_apply)
