"""Streams of training and held-out tokens, and the mixture of sources that samples come from.

Training and held-out tokens as streams: ranges of the memory-mapped tokens, read as if they lay
one after the other.

tokens on disk   |doc 0|doc 1|doc 2|doc 3|doc 4|        held out: 2
training stream  |doc 0|doc 1|doc 3|doc 4|              two ranges: 0-1, 3-4
held-out stream  |doc 2|                                one range

Sample i of the training stream, for any i at once: which source, which of its epochs, which
window of tokens.

Sources take turns by Webster's rule: the next sample goes to the source with the smallest (taken +
1/2) / weight. Of k sources, one with share p of the weight has had p x n samples at every n, up to
(1 - p + p (k - 1)) / 2: half a sample for two sources, where random draws are off by sqrt(p (1 - p)
n). The rule has a closed form in exact integers, so resuming at sample 10^12 costs what starting
costs.

Within a source, an epoch is a permutation of its windows: a Feistel network keyed by (seed, source,
epoch), walked until it lands inside the source (Black and Rogaway, Ciphers with Arbitrary Finite
Domains, 2002), without memory. Each epoch also begins its windows at another token, so no document
is always cut at the same place.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from fractions import Fraction

import numpy as np

from dolmen.core.determinism import seed_of


class TokenStream:
    """Ranges of memory-mapped tokens, read as one circular stream; `len` is its number of
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
    def from_ranges(
        cls, tokens: np.ndarray, starts: np.ndarray, stops: np.ndarray
    ) -> "TokenStream":
        """Return a stream of the ranges starts[i]:stops[i] of one array; adjacent ones are
        merged.
        """
        return cls.from_arrays([tokens], starts, stops)

    @classmethod
    def from_arrays(
        cls, memory: Sequence[np.ndarray], starts: np.ndarray, stops: np.ndarray
    ) -> "TokenStream":
        """Return a stream of ranges of several arrays, with positions counted over their
        concatenation; no range may span two arrays. Adjacent ranges are merged, so a stream that
        leaves out 3 % of the documents has about 3 % as many ranges.
        """
        bases = np.cumsum([0] + [len(tokens) for tokens in memory])
        starts, stops = np.asarray(starts, np.int64), np.asarray(stops, np.int64)
        # empty ranges have no position in the stream
        starts, stops = starts[stops > starts], stops[stops > starts]
        # a range begins where it is apart from the one before, and ends where the next one is
        gaps = (starts[1:] != stops[:-1]) | np.isin(starts[1:], bases[1:])
        starts = starts[np.append(True, gaps)[: len(starts)]]
        stops = stops[np.append(gaps, True)[-len(stops) :]] if len(stops) else stops
        which = np.searchsorted(bases, starts, side="right") - 1
        return cls(memory, which, starts - bases[which], stops - bases[which])

    @classmethod
    def join(cls, streams: Sequence["TokenStream"]) -> "TokenStream":
        """Return one stream with the tokens of all streams, one after the other."""
        lengths = [np.diff(stream.ends, prepend=0) for stream in streams]
        memory = [tokens for stream in streams for tokens in stream.memory]
        # index of each stream's first array in the joined list
        first = np.cumsum([0] + [len(stream.memory) for stream in streams])
        return cls(
            memory,
            np.concatenate([s.which + f for s, f in zip(streams, first, strict=False)]),
            np.concatenate([s.starts for s in streams]),
            np.concatenate([s.starts + n for s, n in zip(streams, lengths, strict=True)]),
        )

    def __len__(self) -> int:
        """Return the number of tokens of the stream."""
        return int(self.ends[-1]) if len(self.ends) else 0

    def read(self, start: int, count: int) -> np.ndarray:
        """Return `count` tokens from position `start` of the stream, int64; after the last token
        comes the first again.
        """
        # views of the memory map: only these pages are read
        parts = [self.memory[which][begin:end] for which, begin, end in self.places(start, count)]
        return np.concatenate(parts, dtype=np.int64, casting="unsafe")

    def places(self, start: int, count: int) -> list[tuple[int, int, int]]:
        """Return where the `count` tokens from position `start` lie, as ranges (index in `memory`,
        first token, end); after the last token comes the first again.
        """
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


@dataclass(frozen=True)
class Part:
    """One source of the mixture."""

    name: str
    weight: Fraction
    stream: TokenStream
    offsets: np.ndarray | None = None
    """Beginning of each document, and the end of the last; None where documents are not looked
    up.
    """


class Mixture:
    """Samples of several sources in dolmen's order: windows of sequence_length + 1 tokens. A
    window's last token is the next one's first, so that each token is predicted once per epoch,
    except for a remainder of fewer than sequence_length, which differs by epoch. Raises ValueError
    for a source shorter than a window.
    """

    name = ""

    def __init__(self, parts: Sequence[Part], sequence_length: int, seed: int):
        """`parts`: the sources with their weights and token streams. Raises ValueError for a source
        shorter than one window of sequence_length + 1 tokens.
        """
        for part in parts:
            if len(part.stream) < sequence_length + 1:
                raise ValueError(
                    f"{part.name} has {len(part.stream):,} tokens to train on, fewer than one "
                    f"window of sequence_length + 1 ({sequence_length + 1:,}): use "
                    f"--train.sequence-length {max(len(part.stream) - 1, 1)} or less, or more data "
                    "(--data.path)"
                )
        # integers: floats would lose turns after 2^53 samples
        scale = math.lcm(*(part.weight.denominator for part in parts))
        self.parts, self.sequence_length, self.seed = parts, sequence_length, seed
        self.weights = [int(part.weight * scale) for part in parts]
        self.sizes = [len(part.stream) // sequence_length for part in parts]

    def epochs(self, samples: int) -> dict[str, float]:
        """Return, by source name, how many epochs of each source (samples read from it / its
        samples) are in the first `samples` samples of the mixture.
        """
        taken = counts(self.weights, samples)
        return {
            part.name: n / size for part, n, size in zip(self.parts, taken, self.sizes, strict=True)
        }

    def windows(self, first: int, count: int) -> np.ndarray:
        """Return samples first .. first + count - 1, as int64 [count, sequence_length + 1]."""
        out = np.empty((count, self.sequence_length + 1), np.int64)
        for row, source, start in self.places(first, count):
            out[row] = self.parts[source].stream.read(start, self.sequence_length + 1)
        return out

    def documents(self, first: int, count: int) -> list[str]:
        """Return a line for each of the samples first .. first + count - 1 that describes what it
        was cut from: `source: documents a..b`, counted from 0.
        """
        lines = [""] * count
        for row, source, start in self.places(first, count):
            part = self.parts[source]
            if part.offsets is None:
                # after the last token of the stream comes the first
                lines[row] = f"{part.name}: tokens from {start % len(part.stream)}"
                continue
            spans = []
            for _, begin, end in part.stream.places(start, self.sequence_length + 1):
                # first and last document that this range touches
                low, high = (
                    int(np.searchsorted(part.offsets, at, side="right")) - 1
                    for at in (begin, end - 1)
                )
                spans.append(f"{low}..{high}" if high > low else f"{low}")
            lines[row] = f"{part.name}: documents {', '.join(spans)}"
        return lines

    def places(self, first: int, count: int) -> Iterator[tuple[int, int, int]]:
        """Yield (row, source, first token in its stream) for samples first .. first + count - 1,
        grouped by source.
        """
        # A source's samples are numbered by themselves: its i-th is window i mod size of epoch
        # i // size. So it is enough to know how many each source has had before `first`.
        order = np.array(turns(self.weights, first, count), np.int64)
        for source, taken in enumerate(counts(self.weights, first)):
            rows = np.flatnonzero(order == source)
            # epoch of each sample, and its place in it
            epochs, within = np.divmod(taken + np.arange(len(rows)), self.sizes[source])
            for epoch in np.unique(epochs):
                chosen = epochs == epoch
                for row, start in zip(
                    rows[chosen], self.starts(source, int(epoch), within[chosen]), strict=True
                ):
                    yield int(row), source, int(start)

    def starts(self, source: int, epoch: int, within: np.ndarray) -> np.ndarray:
        """Return the stream positions at which the windows of an epoch of a source start, for
        positions `within` that epoch: its permutation of windows and its shift are applied.
        """
        key = seed_of(self.seed, "window", source, epoch)
        # another first token per epoch: no text is always cut at the same place
        shift = seed_of(self.seed, "shift", source, epoch) % len(self.parts[source].stream)
        return shift + self.sequence_length * permute_index(within, self.sizes[source], key)


def counts(weights: Sequence[int], samples: int) -> list[int]:
    """Return how many of the first `samples` samples each source has, by Webster's rule in closed
    form.

    After "time" t, Webster's rule has given each source round(t w / W), in all between t - k/2 and
    t + k/2 for k sources. So start at t = samples - k/2 and give the few that are missing one by
    one.
    """
    # 2 t, to stay in integers
    total, doubled = sum(weights), max(0, 2 * samples - len(weights))
    taken = [(weight * doubled + total) // (2 * total) for weight in weights]
    for source in take(weights, taken, samples - sum(taken)):
        taken[source] += 1
    return taken


def turns(weights: Sequence[int], first: int, count: int) -> list[int]:
    """Return the source index of each of the samples first .. first + count - 1."""
    return take(weights, counts(weights, first), count)


def take(weights: Sequence[int], taken: Sequence[int], count: int) -> list[int]:
    """Return the sources of the next `count` samples by Webster's rule, where each source has had
    `taken` samples; ties go to the earlier source.
    """
    taken, common, order = list(taken), math.lcm(*weights), []
    # (2 n + 1) / weight, without division: compared as (2 n + 1) x common / weight
    shares = [common // weight for weight in weights]
    for _ in range(count):
        source = min(range(len(taken)), key=lambda j: (2 * taken[j] + 1) * shares[j])
        taken[source] += 1
        order.append(source)
    return order


def permute_index(index: np.ndarray, size: int, key: int) -> np.ndarray:
    """Map each `index` (int64) by the pseudorandom permutation of 0 .. size - 1 that `key` selects,
    without memory for it.
    """
    # A network of 2 x half bits permutes at most 4 x size values. What lands outside is sent on
    # until it is inside: that follows the one cycle it lies on, so no two meet, and takes fewer
    # than 4 turns on average.
    # bits of each half: 4^half >= size
    half = max(1, (max(size - 1, 1).bit_length() + 1) // 2)
    out = feistel(np.asarray(index, np.uint64), half, key)
    while (outside := out >= size).any():
        out[outside] = feistel(out[outside], half, key)
    return out.astype(np.int64)


def feistel(value: np.ndarray, half: int, key: int, rounds: int = 6) -> np.ndarray:
    """Permute integers of 2 x `half` bits (uint64) by a Feistel network of `rounds` rounds, keyed
    with `key`.
    """
    mask, shift = np.uint64((1 << half) - 1), np.uint64(half)
    left, right = value >> shift, value & mask
    for round in range(rounds):
        # each round is invertible whatever its function: so is the whole
        left, right = right, left ^ (scramble(right ^ np.uint64(seed_of(key, round))) & mask)
    return (left << shift) | right


def scramble(value: np.ndarray) -> np.ndarray:
    """Mix the bits of uint64 values: the finaliser of splitmix64 (Steele, Lea and Flood, 2014)."""
    value = (value ^ (value >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    value = (value ^ (value >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return value ^ (value >> np.uint64(31))


def normalize_weights(weights: Sequence[float]) -> list[float]:
    """Return the weights divided by their sum, in float64 as numpy rounds it (Megatron does so)."""
    shares = np.array(weights, np.float64)
    return (shares / np.sum(shares)).tolist()
