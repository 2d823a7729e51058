"""Training and held-out tokens as streams: ranges of the memory-mapped tokens, read as if they lay
one after the other.

tokens on disk   |doc 0|doc 1|doc 2|doc 3|doc 4|        held out: 2
training stream  |doc 0|doc 1|doc 3|doc 4|              two ranges: 0-1, 3-4
held-out stream  |doc 2|                                one range
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from dolmen.data.corpus import Corpus
from dolmen.data.split import held_out


class TokenStream:
    """Ranges of memory-mapped tokens, read as one circular stream. `len` is its number of
    tokens.
    """

    def __init__(
        self, memory: Sequence[np.ndarray], which: np.ndarray, starts: np.ndarray, stops: np.ndarray
    ):
        """Range r is `memory[which[r]][starts[r]:stops[r]]`."""
        self.memory = memory
        self.which = which
        self.starts = starts
        self.ends = np.cumsum(stops - starts)

    @classmethod
    def of(cls, tokens: np.ndarray, starts: np.ndarray, stops: np.ndarray) -> "TokenStream":
        return cls([tokens], np.zeros(len(starts), np.int64), np.asarray(starts), np.asarray(stops))

    @classmethod
    def join(cls, streams: Sequence["TokenStream"]) -> "TokenStream":
        lengths = [np.diff(stream.ends, prepend=0) for stream in streams]
        memory = [tokens for stream in streams for tokens in stream.memory]
        first = np.cumsum([0] + [len(stream.memory) for stream in streams])
        return cls(
            memory,
            np.concatenate([s.which + f for s, f in zip(streams, first, strict=False)]),
            np.concatenate([s.starts for s in streams]),
            np.concatenate([s.starts + n for s, n in zip(streams, lengths, strict=True)]),
        )

    def __len__(self) -> int:
        return int(self.ends[-1]) if len(self.ends) else 0

    def read(self, start: int, count: int) -> np.ndarray:
        """`count` tokens from position `start`, int64; after the last token comes the first."""
        parts = [self.memory[which][begin:end] for which, begin, end in self.places(start, count)]
        return np.concatenate(parts, dtype=np.int64, casting="unsafe")

    def places(self, start: int, count: int) -> list[tuple[int, int, int]]:
        """What `read` reads, as (which memory, first token, token after the last)."""
        out, left, position = [], count, start % len(self)
        run = int(np.searchsorted(self.ends, position, side="right"))
        while left:
            begin = int(self.starts[run]) + position - (int(self.ends[run - 1]) if run else 0)
            take = min(left, int(self.ends[run]) - position)
            out.append((int(self.which[run]), begin, begin + take))
            left, position, run = left - take, position + take, run + 1
            if run == len(self.ends):
                run = position = 0
        return out


@dataclass(frozen=True)
class HeldOut:
    """What validation reads. `size`: bytes of text of whole documents; `tails`: ends of documents,
    bytes unknown.
    """

    stream: TokenStream
    documents: int
    size: int
    files: tuple[Path, ...]
    tails: tuple[TokenStream, ...]
    note: str


def split(corpus: Corpus, fraction: float) -> tuple[TokenStream, HeldOut | None]:
    """(training stream, held-out documents or None if `fraction` is 0). If no document is small
    enough to be held out whole, the last `fraction` of the tokens of the longest one is held out
    instead.
    """
    if not 0 <= fraction <= 0.5:
        raise ValueError(f"--data.validation-fraction is {fraction}: use 0 (no validation) to 0.5")
    held = held_out(corpus.documents["hash"], corpus.documents["bytes"], fraction)
    if held.any() or not fraction:
        return documents_stream(corpus, ~held), (
            everything(corpus, held, ", chosen by a hash of their text") if fraction else None
        )
    longest = int(np.argmax(np.diff(corpus.offsets)))
    stop = int(corpus.offsets[longest + 1])
    cut = stop - max(2, round(fraction * len(corpus.doc(longest))))
    tail = TokenStream.of(corpus.tokens, [cut], [stop])
    training = TokenStream.of(
        corpus.tokens, np.array([0, stop]), np.array([cut, corpus.token_count])
    )
    name = corpus.file(longest) or corpus.name
    note = (
        f"the last {stop - cut:,} tokens ({fraction:.1%}) of {name}, as no document is small "
        "enough to be held out whole"
    )
    return training, HeldOut(tail, 1, 0, (), (tail,), note)


def everything(corpus: Corpus, mask: np.ndarray, how: str = "") -> HeldOut:
    """The documents in `mask` as held-out ones; `how` says why. `files` is empty unless each is a
    whole file.
    """
    stream, chosen = documents_stream(corpus, mask), np.flatnonzero(mask)
    files = tuple(file for index in chosen if (file := corpus.file(index)) is not None)
    note = (
        f"{len(chosen):,} of {len(mask):,} documents of {corpus.name}, {len(stream):,} tokens{how}"
    )
    return HeldOut(
        stream,
        len(chosen),
        int(corpus.documents["bytes"][mask].sum()),
        files if len(files) == len(chosen) else (),
        (),
        note,
    )


def documents_stream(corpus: Corpus, mask: np.ndarray) -> TokenStream:
    """The documents in `mask`; neighbours become one range, so a stream without 3 % of them has 3 %
    as many ranges.
    """
    edges = np.flatnonzero(np.diff(mask.astype(np.int8), prepend=0, append=0))
    return TokenStream.of(corpus.tokens, corpus.offsets[edges[::2]], corpus.offsets[edges[1::2]])
