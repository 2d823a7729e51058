"""Training and held-out tokens as streams: ranges of the memory-mapped tokens, read as if they lay
one after the other.

tokens on disk   |doc 0|doc 1|doc 2|doc 3|doc 4|        held out: 2
training stream  |doc 0|doc 1|doc 3|doc 4|              two ranges: 0-1, 3-4
held-out stream  |doc 2|                                one range
"""

from collections.abc import Sequence

import numpy as np


class TokenStream:
    """Ranges of memory-mapped tokens, read as one circular stream. `len` is its number of
    tokens.
    """

    def __init__(
        self, memory: Sequence[np.ndarray], which: np.ndarray, starts: np.ndarray, stops: np.ndarray
    ):
        """Range r is `memory[which[r]][starts[r]:stops[r]]`; empty ranges are not allowed."""
        self.memory = memory
        self.which = which
        self.starts = starts
        self.ends = np.cumsum(stops - starts)

    @classmethod
    def of(cls, tokens: np.ndarray, starts: np.ndarray, stops: np.ndarray) -> "TokenStream":
        """Ranges of one array."""
        return cls.over([tokens], starts, stops)

    @classmethod
    def over(
        cls, memory: Sequence[np.ndarray], starts: np.ndarray, stops: np.ndarray
    ) -> "TokenStream":
        """Ranges of several arrays, counted as if each lay behind the one before; no range is of
        two. Neighbours become one range, so a stream without 3 % of the documents has 3 % as many
        ranges.
        """
        bases = np.cumsum([0] + [len(tokens) for tokens in memory])
        starts, stops = np.asarray(starts, np.int64), np.asarray(stops, np.int64)
        starts, stops = starts[stops > starts], stops[stops > starts]
        # a range begins where it is apart from the one before, and ends where the next one is
        apart = (starts[1:] != stops[:-1]) | np.isin(starts[1:], bases[1:])
        starts = starts[np.append(True, apart)[: len(starts)]]
        stops = stops[np.append(apart, True)[-len(stops) :]] if len(stops) else stops
        which = np.searchsorted(bases, starts, side="right") - 1
        return cls(memory, which, starts - bases[which], stops - bases[which])

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
        # `ends` are positions in the stream, so the range of a position is found by bisection; from
        # there on ranges follow one another, past the last the first again
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
