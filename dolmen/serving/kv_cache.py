"""Paged KV cache: keys and values of the tokens that a model has read, so that the next token costs
one token and not the whole sequence. Sequences of any lengths share it, and come and go.

    cache = KVCache(model.spec)
    batch = cache.append({7: 120, 9: 1}, device)    sequence 7 has 120 new tokens, 9 has one
    model(tokens, logits, batch)                    tokens in the order of batch.sequences
    cache.fork(7, 8)                                8 begins as 7, and shares its full pages
    cache.remove(9)                                 its pages are free for others

Problem: a forward mixes sequences that decode (one new token each, long past) with prompts that are
prefilled (many new tokens, whole or in chunks). Padding all to one rectangle would multiply mostly
zeros.

Idea: the tokens of a forward are one flat row, and only attention distinguishes sequences. A layer
keeps one pool of pages (block_table.py), writes the new keys and values to their pages, and attends
in two ways:

    tokens    | a | b b | c |  d d d d   e e e e  |  f f f f f f  | 0 0 |
              '-- decode ---'------ group --------'---- group ----'- padding to a multiple of tp
    decode    the last token of each sequence, and drafts behind it (speculative decoding), over all
              pages of the pool at once (ops/attention/decode.py); as many queries for each sequence
              as the most drafts need, of which those of shorter ones are repeated and dropped
    group     sequences with as many past and as many new tokens, as a batch without a cache: their
              pages are gathered to a rectangle [sequences, past + new]

Invariants:
- decode sequences come first, then the groups; `order` of a forward is theirs, not the caller's;
- token i of a sequence lies in its page i // page_size, at place i % page_size;
- what no sequence has written is 0 or another's: it is finite, and masked;
- all keys are kept, also where a sliding window sees the last of them alone.

A mixer decides what is kept by what it hands over: keys and values of its heads (2 * kv_heads *
head_dim numbers per token and layer in the dtype of the compute), or a latent and a rope key
(kv_rank + rope size). Each tp rank holds its own heads, and whole what all heads share.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import torch
from jaxtyping import Float, Int64
from torch import Tensor

from dolmen.core.device import to_device
from dolmen.core.log import size
from dolmen.core.messages import plural
from dolmen.core.torch_private import compute
from dolmen.model.component import PagedAttention, SequenceAttention
from dolmen.model.spec import ModelSpec, PositionSpan
from dolmen.ops.attention import Documents
from dolmen.ops.attention.decode import Alone, Pages
from dolmen.ops.rope import span_positions
from dolmen.serving.block_table import PAGE_SIZE, BlockTable


@dataclass(frozen=True)
class CacheUsage:
    """The most that a cache has held, on this rank."""

    page: int
    """Tokens per page."""
    in_use: int
    """Pages of sequences."""
    allocated: int
    """Pages of the pool, free ones included."""
    rectangle: int
    """Tokens of a rectangle in which each sequence is as long as the longest."""
    bytes_per_token: int
    """Bytes per token of all layers."""

    def __str__(self) -> str:
        """Format for the log: pages in use, their bytes, those allocated, and those of a
        rectangle.
        """
        in_use, allocated, rectangle = (
            size(tokens * self.bytes_per_token, "B")
            for tokens in (self.in_use * self.page, self.allocated * self.page, self.rectangle)
        )
        return (
            f"KV cache, per process: at most {plural(self.in_use, 'page')} of {self.page} tokens "
            f"in use, {in_use} ({allocated} allocated); padded to the longest sequence: {rectangle}"
        )


@dataclass(frozen=True, eq=False)
class PrefillGroup:
    """Sequences with the same past and new length, batched into one attention call."""

    sequences: list[int]
    """Sequence numbers, as the caller of `KVCache.append` gave them."""
    tokens: slice
    """Their tokens among those of the forward, one sequence after the other."""
    past: int
    """Tokens of each sequence that are in the cache already."""
    new: int
    """New tokens of each sequence."""
    pages: Int64[Tensor, "sequences pages"]
    """Pages of each sequence, which hold past and new tokens."""
    documents: Documents | None
    """Prefixes whose tokens see one another; None: attention is causal."""


class KVPool:
    """Pages of one layer: tensors [pages, kv_heads, page_size, ...], such as keys and values."""

    def __init__(self) -> None:
        """The pool begins without tensors: the first `write` allocates them."""
        self.kept: tuple[Tensor, ...] = ()

    def write(
        self,
        new: Sequence[Float[Tensor, "tokens kv_heads _"]],
        slots: tuple[Tensor, Tensor],
        page_size: int,
        total: int,
    ) -> None:
        """Write new keys and values to their `slots` (page of each token, and place in it), after
        growing the pool to `total` pages. The first call allocates the pool, in the dtype of `new`.
        """
        if not self.kept:
            # heads and sizes are known only from the first keys and values of a mixer
            self.kept = tuple(t.new_zeros((0, t.shape[1], page_size, t.shape[2])) for t in new)
        self.grow(total)
        for layer_pool, tensor in zip(self.kept, new, strict=True):
            # [pages, page_size, kv_heads, size] as a view, indexed by (page, place): one scatter
            layer_pool.transpose(1, 2)[slots] = tensor

    def copy(self, page: int, to: int, total: int) -> None:
        """Copy the contents of a page onto page `to`, after growing the pool to `total` pages."""
        self.grow(total)
        for layer_pool in self.kept:
            layer_pool[to] = layer_pool[page]

    def gather(self, group: PrefillGroup) -> list[Float[Tensor, "sequences length kv_heads _"]]:
        """Copy the past and new tokens of a group from their pages into a rectangle per pool tensor
        (such as keys, values).
        """
        out = []
        for layer_pool in self.kept:
            # [sequences, pages, kv_heads, page_size, size] -> [sequences, pages * page_size,
            # kv_heads, size]
            full = layer_pool[group.pages].transpose(2, 3).flatten(1, 2)
            out.append(full[:, : group.past + group.new])
        return out

    def compact(self, before: Int64[Tensor, " pages"]) -> None:
        """Drop all pages but those numbered `before`, which become pages 0, 1, 2, ... in this
        order.
        """
        self.kept = tuple(layer_pool.index_select(0, before) for layer_pool in self.kept)

    def grow(self, total: int) -> None:
        """Grow each tensor of the pool to `total` pages if it has fewer; new pages are 0."""
        if self.kept and len(self.kept[0]) < total:
            self.kept = tuple(_grow_tensor(layer_pool, total) for layer_pool in self.kept)


def _grow_tensor(layer_pool: Tensor, total: int) -> Tensor:
    """Return a copy with `total` pages; those behind the old ones are 0."""
    new = layer_pool.new_zeros((total, *layer_pool.shape[1:]))
    new[: len(layer_pool)] = layer_pool
    return new


@dataclass(frozen=True, eq=False)
class CacheBatch:
    """The sequences of one forward, and where their tokens go in the cache. Implements `Cached` of
    the model.
    """

    sequences: list[int]
    """Sequences in the order of the forward's tokens."""
    positions: Int64[Tensor, "streams 1 tokens"]
    """Position of each token, per position stream; 0 for padding."""
    lengths: Int64[Tensor, "1 tokens"] | None
    """Length that rope scaling takes each token's sequence to have; None: the model does not use
    it.
    """
    longest: int
    """Length of the longest sequence, new tokens included."""
    num_tokens: int
    """Tokens of sequences; behind them comes padding."""
    slots: tuple[Tensor, Tensor]
    """Page of each token, and its place in the page."""
    decodes: int
    """Tokens of the decode sequences; they come first."""
    spread: tuple[Tensor, Tensor] | None
    """Index of the token of each query, as many for every decode sequence; and index of the query
    of each token. None: all of them have as many tokens.
    """
    pages: Pages | Alone | None
    """Pages that the decode sequences attend to; None without such sequences."""
    groups: list[PrefillGroup]
    pools: list[KVPool]
    """Pool of each layer."""
    page_size: int
    total: int
    """Pages of each pool."""
    compile: bool
    """True if compiled blocks compute forwards that only decode."""

    @cached_property
    def layers(self) -> list["LayerBatch"] | list["DecodeLayer"]:
        """The batch with the pool of each layer of the model, in order."""
        # nothing to prefill, no padding, as many tokens of each sequence, and pools that are there
        only = self.decodes == self.num_tokens == self.positions.shape[2] and self.spread is None
        pages = self.pages if only and any(pool.kept for pool in self.pools) else None
        if pages is None:
            return [LayerBatch(self, pool) for pool in self.pools]
        return [DecodeLayer(pool.kept, self.slots, pages) for pool in self.pools]

    @property
    def is_compiled(self) -> bool:
        """True if compiled blocks compute this forward: compilation is on, and it has exactly one
        new token of each sequence, without prefill or padding.
        """
        one = isinstance(self.pages, Pages) and self.pages.width == 1
        return self.compile and one and isinstance(self.layers[0], DecodeLayer)


class DecodeLayer(NamedTuple):
    """A forward that only decodes, as many tokens of each sequence, in one layer. In tensors alone,
    so that torch.compile makes one graph for all layers and steps. Implements `LayerCache` of the
    model.
    """

    kept: tuple[Tensor, ...]
    """Pool of the layer."""
    slots: tuple[Tensor, Tensor]
    """See `CacheBatch`."""
    pages: Pages | Alone

    def attend(
        self,
        q: Float[Tensor, "1 tokens heads size"],
        new: Sequence[Float[Tensor, "1 tokens kv_heads _"]],
        attend_paged: PagedAttention,
        attend_sequences: SequenceAttention,
    ) -> Float[Tensor, "tokens heads value_size"]:
        """Write the new keys and values to the pool, then attend to the pages."""
        for layer_pool, tensor in zip(self.kept, new, strict=True):
            layer_pool.transpose(1, 2)[self.slots] = tensor[0]
        return attend_paged(q[0], *self.kept, self.pages)


@dataclass(frozen=True, eq=False)
class LayerBatch:
    """A forward in one layer. Implements `LayerCache` of the model."""

    batch: CacheBatch
    pool: KVPool

    def attend(
        self,
        q: Float[Tensor, "1 tokens heads size"],
        new: Sequence[Float[Tensor, "1 tokens kv_heads _"]],
        attend_paged: PagedAttention,
        attend_sequences: SequenceAttention,
    ) -> Float[Tensor, "tokens heads value_size"]:
        """Write the new keys and values to the layer's pool, then attend: by `attend_paged` for the
        decode sequences, by `attend_sequences` for each prefill group. Returns the outputs in the
        order of the forward's tokens; those of padding are 0.
        """
        batch = self.batch
        queries, new_tokens = q[0], [t[0, : batch.num_tokens] for t in new]
        self.pool.write(new_tokens, batch.slots, batch.page_size, batch.total)
        out = []
        if batch.pages is not None:
            # decode: as many queries each against all pages of the pool, others masked
            decodes = queries[: batch.decodes]
            if batch.spread is None:
                out.append(attend_paged(decodes, *self.pool.kept, batch.pages))
            else:
                rows = decodes.index_select(0, batch.spread[0])
                y = attend_paged(rows, *self.pool.kept, batch.pages)
                out.append(y.index_select(0, batch.spread[1]))
        for group in batch.groups:
            rows = queries[group.tokens].unflatten(0, (-1, group.new))
            if group.past:
                cached = self.pool.gather(group)
            else:  # nothing is cached: the new keys and values are all there is
                cached = [t[group.tokens].unflatten(0, (-1, group.new)) for t in new_tokens]
            out.append(attend_sequences(rows, *cached, group.documents).flatten(0, 1))
        # padding exists for sequence parallelism only, which needs a multiple of tp tokens
        if len(queries) > batch.num_tokens:
            out.append(out[0].new_zeros((len(queries) - batch.num_tokens, *out[0].shape[1:])))
        return out[0] if len(out) == 1 else torch.cat(out)


class KVCache:
    """The paged KV cache of one model (this rank's layers and heads). The caller numbers the
    sequences.
    """

    def __init__(
        self,
        model: ModelSpec,
        page_size: int = PAGE_SIZE,
        compile: bool = False,
        decodes: bool = True,
    ):
        """Create an empty cache for the layers of `model`; memory is allocated with the first
        tokens. `page_size`: tokens per page. `compile`: compile decode steps, of which one with a
        single sequence is then computed as one with several, whose shapes no length changes.
        `decodes`: attend to pages in place where a sequence has one new token; else gather those of
        all sequences.
        """
        self.decodes = decodes
        self.table, self.streams, self.compile = BlockTable(page_size), model.streams, compile
        self.by_length = model.by_length
        # all layers have a pool; those of other stages stay empty
        self.pools = [KVPool() for _ in model.blocks]
        self._in_use = self._allocated = self._rectangle = 0

    def append(
        self,
        new: Mapping[int, int],
        device: torch.device,
        multiple: int = 1,
        spans: Mapping[int, PositionSpan] | None = None,
        lengths: Mapping[int, int] | None = None,
        width: int = 1,
    ) -> CacheBatch:
        """Reserve pages for new tokens (sequence -> their number, at least 1), and return the batch
        that describes their forward.

        Tokens are padded to a `multiple`. `spans`: sequences with a bidirectional prefix or
        positions of their own. `lengths`: the length that rope scaling takes a sequence to have;
        unset: its tokens so far, these included. `width`: a sequence with cached tokens and at most
        so many new ones is a decode sequence; so is any with one new token. Raises ValueError where
        a bidirectional prefix would be split over several forwards.
        """
        table = self.table
        past = {sequence: table.lengths.get(sequence, 0) for sequence in new}
        span = {sequence: (spans or {}).get(sequence, PositionSpan()) for sequence in new}
        for sequence, count in new.items():
            # before anything is reserved, so that an error leaves the cache as it was
            _check_prefix(sequence, past[sequence], count, span[sequence].prefix)
        self._reserve(new, device)

        decodes = {
            s: n for s, n in new.items() if self.decodes and (n == 1 or n <= width and past[s])
        }
        prompts = {s: n for s, n in new.items() if s not in decodes}
        groups = self._prefill_groups(prompts, past, span, sum(decodes.values()), device)
        order = [*decodes] + [sequence for group in groups for sequence in group.sequences]
        # one entry per token of the forward: its sequence, and its index in that
        owner = [sequence for sequence in order for _ in range(new[sequence])]
        index = [past[sequence] + i for sequence in order for i in range(new[sequence])]
        pages = [table.pages[s][i // table.page_size] for s, i in zip(owner, index, strict=True)]
        padding = -len(index) % multiple

        # built on the host and copied once: cheaper than many small operations on a GPU
        places = torch.tensor(index) % table.page_size
        positions = torch.tensor(index + [0] * padding)[None]
        if spans or self.streams > 1:
            token_spans = [span[sequence] for sequence in owner] + [PositionSpan()] * padding
            _, *columns = torch.tensor(token_spans).unbind(-1)
            positions = span_positions(positions[0], *columns)[: self.streams]
        token_lengths = None
        if self.by_length:
            known = lengths or table.lengths
            token_lengths = torch.tensor([[known[s] for s in owner] + [1] * padding])
        slots = to_device(torch.tensor(pages), device), to_device(places, device)
        decode_pages = self._decode_pages(decodes, device) if decodes else None
        if self.compile and isinstance(decode_pages, Pages):
            pools = [t for pool in self.pools for t in pool.kept]
            shared = [] if decode_pages.shared is None else [decode_pages.shared]
            for changing in (*slots, decode_pages.owner, decode_pages.back, *shared, *pools):
                compute.mark_dynamic(changing, 0)
        return CacheBatch(
            sequences=order,
            positions=to_device(positions, device)[:, None],
            lengths=None if token_lengths is None else to_device(token_lengths, device),
            longest=max(table.lengths[sequence] for sequence in order),
            num_tokens=len(index),
            slots=slots,
            decodes=sum(decodes.values()),
            spread=_spread(list(decodes.values()), device),
            pages=decode_pages,
            groups=groups,
            pools=self.pools,
            page_size=table.page_size,
            total=table.total,
            compile=self.compile,
        )

    def fork(self, parent: int, child: int) -> None:
        """Start sequence `child` with all tokens of `parent`: full pages are shared, the last one
        is copied in each layer.
        """
        copied = self.table.fork(parent, child)
        if copied is not None:
            for pool in self.pools:
                pool.copy(*copied, self.table.total)
        self._record_usage()

    def truncate(self, sequence: int, length: int) -> None:
        """Forget the tokens of a sequence behind its first `length`, and free their pages. What was
        written there stays until it is overwritten, and is masked.
        """
        self.table.truncate(sequence, length)

    def remove(self, sequence: int) -> None:
        """Forget a sequence and free its pages, except those that other sequences share."""
        self.table.remove(sequence)

    @property
    def usage(self) -> CacheUsage:
        """Maxima so far of the pages in use, the pages allocated, and the tokens of an equivalent
        padded rectangle; and the bytes per token.
        """
        tensors = [t for pool in self.pools for t in pool.kept]
        # kv_heads * size numbers per token, pool tensor and layer
        per_token = sum(t.shape[1] * t.shape[3] * t.itemsize for t in tensors)
        return CacheUsage(
            self.table.page_size, self._in_use, self._allocated, self._rectangle, per_token
        )

    def _reserve(self, new: Mapping[int, int], device: torch.device) -> None:
        """Give each sequence pages for its new tokens. If the block table compacts, move the pages
        of all layers accordingly.
        """
        moved = self.table.append(new)
        if moved is not None:
            before = to_device(torch.tensor(moved, dtype=torch.int64), device)
            for pool in self.pools:
                pool.compact(before)
        for pool in self.pools:
            pool.grow(self.table.total)
        self._record_usage()

    def _prefill_groups(
        self,
        new: Mapping[int, int],
        past: Mapping[int, int],
        span: Mapping[int, PositionSpan],
        first: int,
        device: torch.device,
    ) -> list[PrefillGroup]:
        """Return the prefill sequences in groups with the same past and the same number of new
        tokens. Their tokens come after the `first` ones of the forward, those of the decode
        sequences.
        """
        by_length: dict[tuple[int, int], list[int]] = {}
        for sequence, count in new.items():
            by_length.setdefault((past[sequence], count), []).append(sequence)
        groups = []
        for (start, count), sequences in by_length.items():
            pages = torch.tensor([self.table.pages[sequence] for sequence in sequences])
            tokens = slice(first, first + count * len(sequences))
            prefixes = _prefixes(start, count, [span[sequence].prefix for sequence in sequences])
            documents = None if prefixes is None else prefixes.to_device(device)
            groups.append(
                PrefillGroup(sequences, tokens, start, count, to_device(pages, device), documents)
            )
            first = tokens.stop
        return groups

    def _decode_pages(self, new: Mapping[int, int], device: torch.device) -> Pages | Alone:
        """Return the pages that the queries of each decode sequence, its last tokens (`new`:
        sequence -> their number), attend to.

        One entry per page of the pool: which sequence owns it, and how many tokens back from its
        last token the page begins (-1: nobody sees it). A shared page has one more entry per owner.
        """
        sequences, width = list(new), max(new.values())
        if len(sequences) == 1 and not self.compile:
            return self._single_decode(sequences[0], width, device)
        table, page_list, owner, back = self.table, [], [], []
        shared = table.shared_pages(sequences)
        for i, sequence in enumerate(sequences):
            pages, end = table.pages[sequence], table.lengths[sequence] - 1
            page_list += pages
            owner += [i] * len(pages)
            # distance from the last token to the first token of page j: end - j * page_size
            back += range(end, end - len(pages) * table.page_size, -table.page_size)
        most = max(map(len, shared.values()), default=0)
        entries = torch.zeros((2, table.total + most * len(shared)), dtype=torch.int64)
        entries[1] = -1  # pages of other sequences are masked
        # a page of two owners is written twice here, and corrected below
        entries[:, page_list] = torch.tensor([owner, back])
        if shared:
            entries[1, list(shared)] = -1  # these have entries of their own
            self._fill_shared(sequences, shared, entries[:, table.total :].view(2, -1, most))
        owners, starts = to_device(entries, device)
        index = to_device(torch.tensor(list(shared)), device) if shared else None
        places = torch.arange(table.page_size, device=device)
        # token p of a page lies p fewer tokens back; negative: behind the query, masked
        return Pages(owners, starts[:, None] - places, index, width)

    def _single_decode(self, sequence: int, width: int, device: torch.device) -> Alone:
        """Return the pages of the only sequence that decodes, as a slice if they are consecutive
        (no copy), else as indices.
        """
        pages, length = self.table.pages[sequence], self.table.lengths[sequence]
        first, end = pages[0], pages[0] + len(pages)
        if pages == list(range(first, end)):
            return Alone(slice(first, end), length, width)
        return Alone(to_device(torch.tensor(pages), device), length, width)

    def _fill_shared(
        self,
        sequences: list[int],
        shared: Mapping[int, list[int]],
        entries: Int64[Tensor, "2 _ _"],
    ) -> None:
        """Fill `entries` [2, shared pages, most owners of a page] in place, for `shared`, the
        sequences that own each page: [0] gets the owners, as indices into `sequences`; [1] how many
        tokens before the owner's last token, its query, the page begins. The rest of a row with
        fewer owners is left as it is.
        """
        query = {sequence: i for i, sequence in enumerate(sequences)}
        for i, (page, users) in enumerate(shared.items()):
            # a shared page has the same index in all its owners, as it comes from one prompt
            first = self.table.pages[users[0]].index(page) * self.table.page_size
            back = [self.table.lengths[sequence] - 1 - first for sequence in users]
            entries[0, i, : len(users)] = torch.tensor([query[sequence] for sequence in users])
            entries[1, i, : len(users)] = torch.tensor(back)

    def _record_usage(self) -> None:
        """Raise the recorded maxima of pages in use, pages allocated and rectangle tokens
        (sequences times the longest: what a cache without pages would hold) to the current numbers.
        Needs a sequence.
        """
        table = self.table
        self._in_use = max(self._in_use, table.in_use)
        self._allocated = max(self._allocated, table.total)
        # what a cache without pages would have held
        rectangle = len(table.lengths) * max(table.lengths.values())
        self._rectangle = max(self._rectangle, rectangle)


def _spread(counts: list[int], device: torch.device) -> tuple[Tensor, Tensor] | None:
    """Return the index of each query's token, and of each token's query, that give all decode
    sequences the same number of queries; None if all have the same number of tokens (`counts`)
    anyway. A sequence with fewer tokens than the most repeats its first token in front of its
    tokens.
    """
    if not counts or min(counts) == max(counts):
        return None
    width, tokens, queries, first = max(counts), [], [], 0
    for i, count in enumerate(counts):
        tokens += [first] * (width - count) + list(range(first, first + count))
        queries += range((i + 1) * width - count, (i + 1) * width)
        first += count
    return to_device(torch.tensor(tokens), device), to_device(torch.tensor(queries), device)


def _check_prefix(sequence: int, past: int, new: int, prefix: int) -> None:
    """Raise ValueError if a sequence with `past` cached and `new` new tokens would read its
    bidirectional prefix (its first `prefix` tokens) in several forwards.
    """
    if past < prefix and (past or new < prefix):
        raise ValueError(
            f"sequence {sequence} has read {past} tokens and reads {new}, but its first {prefix} "
            "are a bidirectional prefix: read these in one forward"
        )


def _prefixes(past: int, new: int, lengths: list[int]) -> Documents | None:
    """Return the bidirectional prefixes (`lengths`, one per sequence) as documents for the
    attention of `new` tokens behind `past`; None if every prefix lies in the past, so that
    attention is causal.
    """
    if max(lengths) <= past:
        return None
    starts = torch.zeros((len(lengths), new), dtype=torch.int64)
    return Documents.from_starts(starts, starts + torch.tensor(lengths)[:, None])
