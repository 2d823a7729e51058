"""What a model keeps of the tokens it has read, so that the next token costs one token and not the
whole text. Texts of any lengths share it, and come and go.

    cache = Cache(model.tree)
    reading = cache.read({7: 120, 9: 1}, device)    text 7 has 120 new tokens, text 9 one
    model(tokens, logits, reading)                  in the order of reading.texts
    cache.fork(7, 8)                                text 8 begins as text 7, whose pages it shares
    cache.end(9)                                    its pages are free for others

A mixer says what is kept by what it hands over: keys and values of its heads, 2 * kv_heads *
head_dim numbers per token and layer in the dtype of the compute, or a latent and a rope key
(kv_rank + rope size). Each tp rank holds its own heads, and what all heads share whole. Of each
layer it lies in one pool of pages (pages.py). All keys are kept, also where a sliding window sees
the last of them alone.

Of a forward, texts with one new token are attended together, page by page (ops/attention/
decode.py), and texts that were and become equally long together, as a batch is without a cache.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Float, Int64
from torch import Tensor

from dolmen.core.device import send
from dolmen.core.log import size
from dolmen.core.messages import counted
from dolmen.model.component import OfPages, OfTexts
from dolmen.model.tree import Span, Tree
from dolmen.ops.attention import Documents
from dolmen.ops.attention.decode import Alone, Pages
from dolmen.ops.positions import of_span
from dolmen.serving.pages import SIZE, PageTable


@dataclass(frozen=True)
class Memory:
    """The most that a cache has held, on this rank."""

    page: int
    """Tokens of a page."""
    in_use: int
    """Pages that texts had."""
    allocated: int
    """Pages of the pool: those, and some that were free."""
    rectangle: int
    """Tokens where each text of a batch takes as much as the longest."""
    bytes_per_token: int
    """Of all layers."""

    def __str__(self) -> str:
        """For a person."""
        held, allocated, rectangle = (
            size(tokens * self.bytes_per_token, "B")
            for tokens in (self.in_use * self.page, self.allocated * self.page, self.rectangle)
        )
        return (
            f"cache, per process: {counted(self.in_use, 'page')} of {self.page} tokens in use at "
            f"most, {held} ({allocated} allocated); with every text as long as the longest: "
            f"{rectangle}"
        )


@dataclass(frozen=True, eq=False)
class Group:
    """Texts that a forward finds equally long, and leaves so."""

    tokens: slice
    """Of the forward's, one text after the other."""
    past: int
    """Tokens of each that were read before."""
    new: int
    pages: Int64[Tensor, "texts pages"]
    """Of each text, in order."""
    documents: Documents | None
    """Their prefixes; None: what is new sees back alone."""


class Pool:
    """What one layer keeps: tensors [pages, kv_heads, page, ...]. What no text has written is 0, or
    was another's: it is finite, and nobody sees it.
    """

    def __init__(self) -> None:
        self.kept: tuple[Tensor, ...] = ()

    def write(
        self,
        new: Sequence[Float[Tensor, "tokens kv_heads _"]],
        at: tuple[Tensor, Tensor],
        size: int,
        total: int,
    ) -> None:
        """`at`: page, and place in it, of each token. The pool has `total` pages from now on."""
        if not self.kept:
            self.kept = tuple(t.new_zeros((0, t.shape[1], size, t.shape[2])) for t in new)
        if len(self.kept[0]) < total:
            self.kept = tuple(_grown(kept, total) for kept in self.kept)
        for kept, tensor in zip(self.kept, new, strict=True):
            kept.transpose(1, 2)[at] = tensor

    def copy(self, page: int, to: int, total: int) -> None:
        """Page `to` becomes as `page`. The pool has `total` pages from now on."""
        if self.kept and len(self.kept[0]) < total:
            self.kept = tuple(_grown(kept, total) for kept in self.kept)
        for kept in self.kept:
            kept[to] = kept[page]

    def read(self, group: Group) -> list[Float[Tensor, "texts length kv_heads _"]]:
        """All that is kept of each text, copied."""
        out = []
        for kept in self.kept:
            whole = kept[group.pages].transpose(2, 3).flatten(1, 2)
            out.append(whole[:, : group.past + group.new])
        return out

    def move(self, before: Int64[Tensor, " pages"]) -> None:
        """The pages that were there become the first, and the only ones."""
        self.kept = tuple(kept.index_select(0, before) for kept in self.kept)


def _grown(kept: Tensor, total: int) -> Tensor:
    new = kept.new_zeros((total, *kept.shape[1:]))
    new[: len(kept)] = kept
    return new


@dataclass(frozen=True, eq=False)
class Reading:
    """One forward: `Cached` of the model."""

    texts: list[int]
    """In the order of the tokens."""
    last: Int64[Tensor, " texts"]
    """Index of each text's last token among those of the forward."""
    positions: Int64[Tensor, "streams 1 tokens"]
    lengths: Int64[Tensor, "1 tokens"] | None
    longest: int
    count: int
    """Tokens; behind them come those that fill up, and are nobody's."""
    at: tuple[Tensor, Tensor]
    singles: int
    """Of the first texts: so many have one new token each."""
    pages: Pages | Alone | None
    """Of these; None where there is none."""
    groups: list[Group]
    """Of the other texts."""
    pools: list[Pool]
    size: int
    total: int

    @property
    def layers(self) -> list["LayerReading"]:
        return [LayerReading(self, pool) for pool in self.pools]


@dataclass(frozen=True, eq=False)
class LayerReading:
    """`LayerCache` of the model."""

    reading: Reading
    pool: Pool

    def attended(
        self,
        q: Float[Tensor, "1 tokens heads size"],
        new: Sequence[Float[Tensor, "1 tokens kv_heads _"]],
        of_pages: OfPages,
        of_texts: OfTexts,
    ) -> Float[Tensor, "tokens heads value_size"]:
        """See `LayerCache`; of tokens that fill up 0."""
        r = self.reading
        rows, own = q[0], [t[0, : r.count] for t in new]
        self.pool.write(own, r.at, r.size, r.total)
        out = []
        if r.pages is not None:
            out.append(of_pages(rows[: r.singles], *self.pool.kept, r.pages))
        for group in r.groups:
            queries = rows[group.tokens].unflatten(0, (-1, group.new))
            if group.past:
                kept = self.pool.read(group)
            else:
                kept = [t[group.tokens].unflatten(0, (-1, group.new)) for t in own]
            out.append(of_texts(queries, *kept, group.documents).flatten(0, 1))
        if len(rows) > r.count:
            out.append(out[0].new_zeros((len(rows) - r.count, *out[0].shape[1:])))
        return out[0] if len(out) == 1 else torch.cat(out)


class Cache:
    """Of the texts of one model, each known by a number of the caller's."""

    def __init__(self, model: Tree, page: int = SIZE):
        self.table, self.streams = PageTable(page), model.streams
        self.by_length = model.by_length
        self.pools = [Pool() for _ in model.blocks]
        self._in_use = self._allocated = self._rectangle = 0

    def read(
        self,
        new: Mapping[int, int],
        device: torch.device,
        multiple: int = 1,
        spans: Mapping[int, Span] | None = None,
        lengths: Mapping[int, int] | None = None,
    ) -> Reading:
        """What a forward needs to know that reads so many new tokens of each text, at least one.
        Tokens are filled up to a `multiple`. `spans`: of texts in which not each token sees back
        alone and stands at its index; of those the prefix is read at once, else ValueError is
        raised. `lengths`: what each text is taken to be long, where that tells how its tokens are
        turned; unset: what is read of it, these with it.
        """
        table, past = self.table, {text: self.table.lengths.get(text, 0) for text in new}
        span = {text: (spans or {}).get(text, Span()) for text in new}
        prefix = {text: own.prefix for text, own in span.items()}
        for text, n in new.items():
            _check_prefix(text, past[text], n, prefix[text])
        moved = table.read(new)
        if moved is not None:
            before = send(torch.tensor(moved, dtype=torch.int64), device)
            for pool in self.pools:
                pool.move(before)
        self._measure()
        singles = [text for text, n in new.items() if n == 1]
        texts, groups = list(singles), []
        for own, group in self._groups(new, past, prefix, len(singles), device):
            texts += own
            groups.append(group)
        end = sum(new.values())
        positions = [past[text] + i for text in texts for i in range(new[text])]
        at = [
            table.pages[text][i // table.size]
            for text in texts
            for i in range(past[text], past[text] + new[text])
        ]
        filled = -end % multiple
        where = torch.tensor(positions + [0] * filled)
        ids = where[None]
        if spans or self.streams > 1:
            of_token = [span[text] for text in texts for _ in range(new[text])]
            _, *said = torch.tensor(of_token + [Span()] * filled).unbind(-1)
            ids = of_span(where, *said)[: self.streams]
        last = torch.tensor([new[text] for text in texts]).cumsum(0) - 1
        return Reading(
            texts=texts,
            last=send(last, device),
            positions=send(ids, device)[:, None],
            lengths=self._lengths(texts, new, lengths or table.lengths, filled, device),
            longest=max(table.lengths[text] for text in texts),
            count=end,
            at=(
                send(torch.tensor(at), device),
                send(where[:end] % table.size, device),
            ),
            singles=len(singles),
            pages=self._pages(singles, device) if singles else None,
            groups=groups,
            pools=self.pools,
            size=table.size,
            total=table.total,
        )

    def _lengths(
        self,
        texts: Sequence[int],
        new: Mapping[int, int],
        lengths: Mapping[int, int],
        filled: int,
        device: torch.device,
    ) -> Int64[Tensor, "1 tokens"] | None:
        """Of the text of each token; None where the model does not ask."""
        if not self.by_length:
            return None
        of_token = [lengths[text] for text in texts for _ in range(new[text])] + [1] * filled
        return send(torch.tensor([of_token]), device)

    def _groups(
        self,
        new: Mapping[int, int],
        past: Mapping[int, int],
        prefix: Mapping[int, int],
        first: int,
        device: torch.device,
    ) -> Iterator[tuple[list[int], Group]]:
        """The texts with several new tokens, those together that were and become equally long.
        Their tokens are in this order, from `first` on.
        """
        alike: dict[tuple[int, int], list[int]] = {}
        for text, n in new.items():
            if n > 1:
                alike.setdefault((past[text], n), []).append(text)
        for (start, n), own in alike.items():
            pages = torch.tensor([self.table.pages[text] for text in own])
            tokens = slice(first, first + n * len(own))
            seen = _prefixes(start, n, [prefix[text] for text in own])
            here = None if seen is None else seen.on(device)
            yield own, Group(tokens, start, n, send(pages, device), here)
            first = tokens.stop

    def fork(self, text: int, other: int) -> None:
        """`other` begins with all that has been read of `text`. The pages that are full are those
        of both; of the last one it has a copy.
        """
        copied = self.table.fork(text, other)
        if copied is not None:
            for pool in self.pools:
                pool.copy(*copied, self.table.total)
        self._measure()

    def end(self, text: int) -> None:
        """Its pages are free, but those that others have."""
        self.table.end(text)

    def _pages(self, texts: list[int], device: torch.device) -> Pages | Alone:
        """Of the query at the last token of each text."""
        if len(texts) == 1:
            return self._alone(texts[0], device)
        table, own, owner, last = self.table, [], [], []
        shared = table.shared(texts)
        for i, text in enumerate(texts):
            pages, end = table.pages[text], table.lengths[text] - 1
            own += pages
            owner += [i] * len(pages)
            last += range(end, end - len(pages) * table.size, -table.size)
        each = max(map(len, shared.values()), default=0)
        numbers = torch.zeros((2, table.total + each * len(shared)), dtype=torch.int64)
        numbers[1] = -1  # no query sees a page that is not its text's
        numbers[:, own] = torch.tensor([owner, last])
        if shared:
            numbers[1, list(shared)] = -1  # these have entries of their own
            self._of_several(texts, shared, numbers[:, table.total :].view(2, -1, each))
        owners, back = send(numbers, device)
        index = send(torch.tensor(list(shared)), device) if shared else None
        return Pages(owners, back[:, None] - torch.arange(table.size, device=device), index)

    def _alone(self, text: int, device: torch.device) -> Alone:
        own, length = self.table.pages[text], self.table.lengths[text]
        first, end = own[0], own[0] + len(own)
        if own == list(range(first, end)):
            return Alone(slice(first, end), length)
        return Alone(send(torch.tensor(own), device), length)

    def _of_several(
        self, texts: list[int], shared: Mapping[int, list[int]], numbers: Int64[Tensor, "2 _ _"]
    ) -> None:
        """Writes the owners of shared pages, and how far back each begins for them, into `numbers`
        [2, shared pages, most owners of one].
        """
        index = {text: i for i, text in enumerate(texts)}
        for i, (page, own) in enumerate(shared.items()):
            first = self.table.pages[own[0]].index(page) * self.table.size
            back = [self.table.lengths[text] - 1 - first for text in own]
            numbers[0, i, : len(own)] = torch.tensor([index[text] for text in own])
            numbers[1, i, : len(own)] = torch.tensor(back)

    def _measure(self) -> None:
        table = self.table
        self._in_use = max(self._in_use, table.in_use)
        self._allocated = max(self._allocated, table.total)
        rectangle = len(table.lengths) * max(table.lengths.values())
        self._rectangle = max(self._rectangle, rectangle)

    @property
    def memory(self) -> Memory:
        """Until now."""
        kept = [t for pool in self.pools for t in pool.kept]
        per_token = sum(t.shape[1] * t.shape[3] * t.itemsize for t in kept)
        return Memory(self.table.size, self._in_use, self._allocated, self._rectangle, per_token)


def _check_prefix(text: int, past: int, new: int, prefix: int) -> None:
    """Raises ValueError where one part of a text's prefix would be read before another."""
    if past < prefix and (past or new < prefix):
        raise ValueError(
            f"text {text} has read {past} tokens and reads {new}, but its first {prefix} see one "
            f"another: read these in one forward"
        )


def _prefixes(past: int, new: int, lengths: list[int]) -> Documents | None:
    """Of texts that read `new` tokens behind `past`; None where all see back alone."""
    if max(lengths) <= past:
        return None
    starts = torch.zeros((len(lengths), new), dtype=torch.int64)
    return Documents.of(starts, starts + torch.tensor(lengths)[:, None])
