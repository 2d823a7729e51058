"""The attention of a layer (`Attend`), its backends' interface, and which keys a query sees: its
own and earlier tokens, of its window and of its document, and of a prefix all.
"""

import math
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Literal, NamedTuple, Protocol

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int64
from torch import Tensor

from dolmen.core.device import to_device
from dolmen.core.torch_private import compute
from dolmen.ops.elementwise import Dropout


def seen(
    rows: Int64[Tensor, " queries"],
    columns: Int64[Tensor, " keys"],
    window: int | None,
    starts: Int64[Tensor, "batch queries"] | None = None,
    reach: Int64[Tensor, "batch queries"] | None = None,
) -> Bool[Tensor, "queries keys"] | Bool[Tensor, "batch queries keys"]:
    """Return the mask (True: seen) of the keys that each query may attend to, by sequence if starts
    or reach are given.

    rows, columns: indices in the sequence. A window counts the query itself. starts: index of the
    first token of the query's document; reach: of the first behind that document's prefix. So key j
    is seen iff max(starts, row - window + 1) <= j < max(row + 1, reach).
    """
    rows = rows[:, None]
    out = columns <= rows
    # a prefix is seen by all of its document, ahead of the query too
    if reach is not None:
        out = out | (columns < reach[..., None])
    if window is not None:
        out = out & (columns > rows - window)
    return out if starts is None else out & (columns >= starts[..., None])


def visible(
    queries: int, keys: int, window: int | None, device: torch.device
) -> Bool[Tensor, "queries keys"]:
    """Return the mask (True: seen) of the keys that each query may attend to where all is one
    document and the last query is at the last key: its own and earlier ones, within `window` (None:
    all).
    """
    rows = torch.arange(keys - queries, keys, device=device)
    return seen(rows, torch.arange(keys, device=device), window)


@dataclass(frozen=True, eq=False)
class Run:
    """The documents of consecutive tokens of every sequence, in the host's numbers, and as flash's
    variable-length form takes them: the piece of each document in the run is a segment.
    """

    first: int
    """Index in the sequence of the run's first token."""
    length: int
    """Number of the run's tokens in every sequence."""
    begins: tuple[tuple[int, ...], ...]
    """Start of each document per whole sequence, ascending, the first at 0."""
    kept: Tensor | None
    """[keys of all segments] int64, on the device: of the keys [batch * stop] of all sequences to
    the run's end, those from where the first query's document begins. None: these are all.
    """
    queries: Tensor
    """[segments + 1] int32, on the device: where each segment begins among the concatenated queries
    of all sequences, and where the last ends (cu_seqlens_q of FlashAttention).
    """
    keys: Tensor
    """Segment boundaries among the keys, as `queries` (cu_seqlens_k)."""
    longest: Tensor
    """[queries or keys of the longest segment, or up to 127 more, 0]: a number as a shape, which
    torch.compile takes for one that changes.
    """

    def rectangle(self, sequence: int, k_start: int, keys: int) -> tuple[int, int]:
        """Return (queries, key): which of the keys of an earlier run, [k_start, k_start + keys) of
        the sequence numbered `sequence`, this run's queries see. Only the document that spans both
        runs is visible across them: its queries are the first `queries` of this run, its keys are
        those from `key` on, counted from k_start. (0, 0) where no document spans both.
        """
        # ascending starts, the first at 0
        starts = self.begins[sequence]
        at = sum(begin <= self.first for begin in starts)  # documents up to that of the first query
        # the first query's document starts after these keys: nothing is seen
        if starts[at - 1] >= k_start + keys:
            return 0, 0
        # where the document of the first query ends; of the last document the run's end
        end = starts[at] if at < len(starts) else self.first + self.length
        return min(self.length, end - self.first), max(0, starts[at - 1] - k_start)


@dataclass(frozen=True, eq=False)
class Documents:
    """The batch's attention structure: where the documents of its sequences begin, and how far
    their prefixes reach.
    """

    starts: Tensor
    """[batch, length] int64: index in the whole sequence of the first token of each token's
    document; it never falls from a token to the next.
    """
    host_starts: Tensor
    """Copy of `starts` on the host, which reads it without waiting for the device."""
    runs: tuple[Run, ...] = ()
    """One `Run` per run of consecutive tokens; empty for kernels that need none."""
    reach: Tensor | None = None
    """[batch, length] int64: index of the first token behind the prefix of each token's document,
    before which all of that document is seen; the document's start where it has none. It never
    falls either. None: no document has a prefix.
    """
    host_reach: Tensor | None = None
    """Copy of `reach` on the host."""

    @staticmethod
    def from_starts(starts: Tensor, reach: Tensor | None = None) -> "Documents":
        """Return documents with these starts and reach, tensors that the host can read, as both the
        device's and the host's, and without runs.
        """
        return Documents(starts, starts, (), reach, reach)

    def map_tensors(self, change: Callable[[Tensor], Tensor]) -> "Documents":
        """Return documents with `change` applied to each tensor of tokens [batch, length] (starts
        and reach, on device and host); runs stay.
        """
        starts, host_starts = change(self.starts), change(self.host_starts)
        reach, host_reach = (
            None if t is None else change(t) for t in (self.reach, self.host_reach)
        )
        return Documents(starts, host_starts, self.runs, reach, host_reach)

    def to_device(self, device: torch.device) -> "Documents":
        """Return documents whose starts and reach are copied from the host to `device`,
        asynchronously; the host's copies stay.
        """
        # the host's copies stay: kernels size their blocks by them
        reach = None if self.reach is None else to_device(self.reach, device)
        return replace(self, starts=to_device(self.starts, device), reach=reach)

    def part(self, tokens: slice, run: int = 0) -> "Documents":
        """Return the documents of a slice of the tokens, with the run numbered `run` as the only
        one.
        """
        return replace(self.map_tensors(lambda t: t[:, tokens]), runs=self.runs[run : run + 1])

    @property
    def both_ways(self) -> "Documents":
        """The same documents for bidirectional attention: the prefix of each is the whole document,
        so all its tokens see one another.
        """
        ends = document_ends(self.host_starts)
        return replace(self, reach=to_device(ends, self.starts.device), host_reach=ends)

    @property
    def causal(self) -> "Documents":
        """The same documents for causal attention: without prefixes."""
        return self if self.reach is None else replace(self, reach=None, host_reach=None)

    @property
    def furthest(self) -> int:
        """Index behind the furthest prefix in the batch: no token sees a key there or later except
        its own and earlier ones. 0 without prefixes; sys.maxsize where tensors are fake and have no
        values.
        """
        if self.host_reach is None:
            return 0
        # a fake tensor has no values: as if all were seen
        if type(self.host_reach) is not Tensor:
            return sys.maxsize
        return max(row[-1] for row in self.host_reach[:, -1:].tolist())


def document_ends(
    starts: Int64[Tensor, "sequences length"],
) -> Int64[Tensor, "sequences length"]:
    """Return, per token, the index of the first token behind its document, from `starts`, per token
    the index of the first token of its document.
    """
    ends = torch.full_like(starts, starts.shape[1])
    # a document's last token determines its end; a minimum from the right spreads it
    ends[:, :-1] = torch.where(starts[:, 1:] > starts[:, :-1], starts[:, 1:], ends[:, :-1])
    return ends.flip(1).cummin(1).values.flip(1)


def begins(starts: Int64[Tensor, "batch length"]) -> tuple[tuple[int, ...], ...]:
    """Return the start index of each document, per sequence in ascending order, from per-token
    starts on the host.
    """
    return tuple(tuple(sorted(set(row))) for row in starts.tolist())


def run(
    starts: tuple[tuple[int, ...], ...],
    first: int,
    length: int,
    device: torch.device,
    back: bool = True,
) -> Run:
    """Return the `Run` of tokens [first, first + length) of every sequence, its tensors on
    `device`. `starts`: document starts per sequence. `back`: keys start where the first token's
    document does, and are picked from all keys from 0 on; else the run's own tokens are its keys.
    """
    queries, keys, visible, stop = [], [], [], first + length
    for row_starts in starts:
        inner = [begin for begin in row_starts if first < begin < stop]
        lengths = [b - a for a, b in zip([first, *inner], [*inner, stop], strict=True)]
        # keys of the first query's document that lie before the run
        before = first - max(begin for begin in row_starts if begin <= first) if back else 0
        queries += lengths
        keys += [lengths[0] + before, *lengths[1:]]
        # each sequence has `stop` keys in the flattened [batch * stop]
        visible.append((first - before + len(visible) * stop, (len(visible) + 1) * stop))
    bounds = torch.tensor([queries, keys], dtype=torch.int32).cumsum(1, dtype=torch.int32)
    bounds = to_device(F.pad(bounds, (1, 0)), device)
    # rounded up to 128, so that fewer lengths differ
    longest = torch.empty((-(-max(keys) // 128) * 128, 0), device=device)
    picked = None
    if back and first > 0:
        picked = torch.cat([torch.arange(*part, device=device) for part in visible])
    out = Run(first, length, starts, picked, bounds[0], bounds[1], longest)
    for size in (out.queries, out.keys, out.longest, *([] if picked is None else [picked])):
        # from the first batch on, lest each size that changes be a compilation of every block
        compute.mark_dynamic(size, 0)
    return out


class Attend(NamedTuple):
    """The attention that a layer computes: mask, scale and score bias. A layer is built with what
    never changes; each microbatch adds its own by `with_documents`.

    A named tuple, which torch.compile makes, changes and hands on like any other.
    """

    window: int | None = None
    """Tokens up to itself that a query sees; None: all."""
    scale: float | None = None
    """Factor of the query-key products; None: 1 / sqrt(their size)."""
    soft_cap: float | None = None
    """Scores become soft_cap * tanh(score / soft_cap) (Gemma 2, 2408.00118); None: they stay."""
    slopes: tuple[float, ...] | None = None
    """ALiBi (2108.12409): the score of query i and key j, capped or not, grows by slope * (j - i).
    One for every head of the model (score_bias.py); None: no ALiBi.
    """
    first_head: int = 0
    """Index in the model of the first head of these queries."""
    documents: Documents | None = None
    """Documents of this microbatch's queries, in indices of the keys. None: all is one."""
    dropout: Dropout | None = None
    """Dropout of this microbatch's probabilities, or None."""
    mask: Literal["causal", "prefix"] = "causal"
    """prefix (1910.10683, section 3.2): the tokens of a document's prefix are seen by all of the
    document's. causal: none has one here, whatever a microbatch has.
    """
    sinks: Tensor | None = None
    """Attention sink logits (score_bias.py): [heads of these queries], or [batch, queries, heads];
    None: none.
    """

    def with_documents(
        self, documents: Documents | None, dropout: Dropout | None = None
    ) -> "Attend":
        """Return this layer's attention with a microbatch's documents and dropout in place of its
        own; prefixes are left out where the mask is causal.
        """
        # a causal layer ignores prefixes that the batch may have for other layers
        if documents is not None and self.mask == "causal":
            documents = documents.causal
        return self._replace(documents=documents, dropout=dropout)

    def part(self, tokens: slice, run: int) -> "Attend":
        """Return the attention of a slice of the queries, with the run numbered `run` as that of
        its documents.
        """
        documents, sinks = self.documents, self.sinks
        if documents is not None:
            documents = documents.part(tokens, run)
        if sinks is not None and sinks.ndim == 3:
            sinks = sinks[:, tokens]
        return self._replace(documents=documents, sinks=sinks)

    def sequence(self, index: int) -> "Attend":
        """Return the attention of sequence `index` of the batch by itself; with `documents` None
        where the whole sequence is one document.
        """
        if self.documents is None:
            return self
        one = self.documents.map_tensors(lambda t: t[index : index + 1])
        sinks = self.sinks
        if sinks is not None and sinks.ndim == 3:
            sinks = sinks[index : index + 1]
        return self._replace(documents=one if one.host_starts.any() else None, sinks=sinks)

    @property
    def plain(self) -> bool:
        """True if scores are products times a number (no soft cap, no ALiBi), as every kernel
        computes them.
        """
        return self.soft_cap is None and self.slopes is None

    def scale_of(self, size: int) -> float:
        """Return the factor of query-key products for heads of `size`: the layer's own, else 1 /
        sqrt(size).
        """
        return 1 / math.sqrt(size) if self.scale is None else self.scale

    def fix_scale(self, size: int) -> "Attend":
        """Return this attention with its scale as a number, that of heads of `size`, so that
        padding or extending queries and keys later does not change it.
        """
        return self._replace(scale=self.scale_of(size))

    def slopes_of(self, heads: int) -> tuple[float, ...] | None:
        """Return the ALiBi slopes of these `heads` query heads (from `first_head` on), or None."""
        if self.slopes is None:
            return None
        return self.slopes[self.first_head : self.first_head + heads]

    @property
    def starts(self) -> Tensor | None:
        """[batch, queries]: index of the first token of each query's document; None without
        documents.
        """
        return None if self.documents is None else self.documents.starts

    @property
    def reach(self) -> Tensor | None:
        """[batch, queries]: index behind the prefix of each query's document; None where no
        document has a prefix.
        """
        return None if self.documents is None else self.documents.reach

    @property
    def furthest(self) -> int:
        """Index behind the furthest prefix in the batch (`Documents.furthest`); 0 without
        documents.
        """
        return 0 if self.documents is None else self.documents.furthest


class Place(NamedTuple):
    """Positions of a run of queries and a run of keys: q_start, q_start + 1, ... and k_start, ...
    of the sequence.
    """

    q_start: int
    k_start: int
    attend: Attend
    """Attention of these queries."""


Queries = Float[Tensor, "batch queries heads size"]
Keys = Float[Tensor, "batch keys kv_heads size"]
"""kv_heads divides heads: so many queries share each head of keys and values."""
Values = Float[Tensor, "batch keys kv_heads value_size"]
Attended = Float[Tensor, "batch queries heads value_size"]
LogSum = Float[Tensor, "batch queries heads"]
"""The log of the sum of the exponentials of a query's scores."""


class AttentionBackend(Protocol):
    """Interface of an attention backend, without dropout; `dolmen.ops.attention.BACKENDS` has them
    by their names in Kernels.
    """

    @staticmethod
    def attention(q: Queries, k: Keys, v: Values, attend: Attend, later: int = 0) -> Attended:
        """Return softmax(scores) v over the keys each query may see, with autograd, where

            score = scale q k^T                        then, with a soft cap,
            score = soft_cap tanh(score / soft_cap)    then, with slopes,
            score = score + slope (j - i)              of the query at i and the key at j,

        and with sinks one more score, whose value is 0.

        Queries are the last of the keys but `later`, which only prefixes let them see. So a cache
        is simply more keys, and so is what comes before a chunk of a sequence. The softmax is fp32
        or wider.
        """
        ...

    @staticmethod
    def partial(q: Queries, k: Keys, v: Values, at: Place) -> tuple[Attended, LogSum]:
        """Return (out, log_sum) of attention from consecutive queries to consecutive keys, whose
        places in the sequence are `at`, as if there were no other keys; results for several such
        runs of keys are merged by their log_sum.

        The two runs are the same tokens or disjoint; keys lie behind the queries only where a
        prefix is seen. out is fp32 or wider (flash: in q's dtype), log_sum fp32 or wider. A query
        that sees none of the keys has out 0 and log_sum -inf. No autograd: `partial_backward` is
        its gradient.
        """
        ...

    @staticmethod
    def partial_backward(
        g: Attended, q: Queries, k: Keys, v: Values, full: tuple[Attended, LogSum], at: Place
    ) -> tuple[Queries, Keys, Values]:
        """Return what these consecutive keys, at `at` in the sequence, add to (dq, dk, dv), the
        last two in fp32 or wider.

        g is the output's gradient and `full` is (out, log_sum), all of attention to all keys: a
        block of probabilities is exp(scores - log_sum), and needs nothing of the other blocks but
        these.
        """
        ...
