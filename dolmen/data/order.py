"""The order in which samples are read: `mixture.Mixture`, or that of Megatron-LM, so that a
run goes through a corpus as Megatron-LM would (GPTDataset, BlendedDataset and helpers of
megatron/core/datasets, 2026).

    documents    every epoch's, concatenated, shuffled all together             3 0 1 0 2 1 3 2
    their text   cut into samples of sequence_length + 1 tokens, each of which
                 begins with the last token of the one before                  |0    |1    |2    |3
    samples      shuffled                                                       2 0 3 1

The sequences of a .bin are shuffled, whatever its documents are. The number of epochs follows from
the number of samples that the whole run reads; if fewer than 80 % of the last epoch's samples are
needed, its documents and samples are shuffled separately. All random numbers come from one
RandomState(seed), documents first. So a run that is extended to more steps may have another order,
and needs the same number of samples as before to have the same.

In a mixture the next sample comes from the data set that is furthest behind its share, computed in
float64; each data set has its own order, sized for its share of the run's samples plus 0.5 %.

Memory per process: 12 bytes for each sequence and epoch, 4 per sample, and 2 per sample of a
mixture.
"""

import math
from collections.abc import Sequence
from dataclasses import replace
from fractions import Fraction
from typing import NamedTuple, Protocol

import numpy as np
from jaxtyping import Int16, Int64

from dolmen.data import mixture, validation_split
from dolmen.data.config import DataConfig
from dolmen.data.corpus import Corpus
from dolmen.data.mixture import Mixture, Part, normalize_weights
from dolmen.data.sources import DataSource
from dolmen.data.validation_split import Division


class Order(Protocol):
    """Samples of mixed sources in a reproducible order: sample i is known for any i."""

    @property
    def parts(self) -> Sequence[Part]:
        """The sources of the samples, with their token streams."""
        ...

    @property
    def weights(self) -> Sequence[float]:
        """Shares of the parts in the samples, of any sum."""
        ...

    @property
    def sizes(self) -> Sequence[int]:
        """Windows per epoch of each part."""
        ...

    @property
    def sequence_length(self) -> int:
        """Predictions of a sample, which has one token more."""
        ...

    @property
    def name(self) -> str:
        """Name for the header of a run; empty for dolmen's order."""
        ...

    def windows(self, first: int, count: int) -> np.ndarray:
        """Read samples first .. first + count - 1 as int64 [count, sequence_length + 1]."""
        ...

    def documents(self, first: int, count: int) -> list[str]:
        """Return a line for each of the samples first .. first + count - 1 that describes which
        documents it was cut from.
        """
        ...

    def epochs(self, samples: int) -> dict[str, float]:
        """Return, by source name, how many epochs (a fraction) of each are in the first `samples`
        samples.
        """
        ...


def make_order(
    config: DataConfig,
    sources: Sequence[DataSource],
    corpora: Sequence[Corpus],
    divisions: Sequence[Division],
    sequence_length: int,
    seed: int,
    samples: int | None,
) -> Order:
    """Return the order in which training samples are read, dolmen's or Megatron's by config.order.
    `samples`: number that the whole run reads, which Megatron's order needs. Raises ValueError for
    options that Megatron's order does not allow.
    """
    parts = [
        Part(source.name, source.weight or Fraction(1), division.training, corpus.offsets)
        for source, division, corpus in zip(sources, divisions, corpora, strict=True)
    ]
    if config.order == "dolmen":
        return Mixture(parts, sequence_length, seed)
    if samples is None:
        raise ValueError(
            "--data.order megatron depends on the length of the run: give --train.steps or "
            "--train.tokens"
        )
    # all have a weight or none has
    weighted = sources[0].weight is not None
    weights = mixture.normalize_weights([float(part.weight) for part in parts])
    counts: Sequence[int | None] = [samples]
    if weighted:
        counts = shares(weights, samples)
    elif len(parts) > 1:
        # without weights: each data set once
        counts = [None] * len(parts)
    orders = []
    for corpus, count in zip(corpora, counts, strict=True):
        (tokens,), (bounds,) = corpus.memory, corpus.sequences
        # training part of the split
        (first, last), *_ = validation_split.split_of(config.shares, len(bounds) - 1)
        orders.append(Shuffled(tokens, bounds, first, last, sequence_length, count, seed))
    if not weighted and len(parts) > 1:
        weights = [len(order) for order in orders]
        if samples > sum(weights):
            raise ValueError(
                f"--data.order megatron reads {len(parts)} corpora without weights once, "
                f"{sum(weights):,} samples, and the run {samples:,}: give each a weight "
                f"(1:{sources[0].name}), or use a smaller --train.steps"
            )
    return MegatronOrder(parts, orders, weights, samples)


def data_sets(config: DataConfig, sources: Sequence[DataSource]) -> Sequence[DataSource]:
    """Return the sources as the order takes them: for Megatron's, all text of a source is one data
    set and each .bin another. Raises ValueError where several of them share one weight.
    """
    if config.order == "dolmen":
        return sources
    sets = []
    for source in sources:
        parts = [replace(source, indexed=())] if source.text and source.indexed else []
        parts += [source.only(file) for file in source.indexed]
        if source.weight is not None and len(parts) > 1:
            raise ValueError(
                f"--data.path {float(source.weight):g}:{source.name} is {len(parts)} data sets, "
                "but --data.order megatron needs a weight for each: list them one by one"
            )
        sets += parts or [source]
    return sets


APART = 0.80  # of an epoch
SURPLUS = 0.005


class Epochs(NamedTuple):
    """Number of epochs of a data set in Megatron's order."""

    times: int
    last_separate: bool
    """True if the last epoch is shuffled separately."""
    before: int
    """Samples before the last epoch if that is shuffled separately, else all."""
    samples: int
    """Samples of all epochs: at least as many as requested."""


class Shuffled:
    """Samples of one data set in Megatron's order: of its sequences `first` to `last` (exclusive),
    which begin at `bounds` in `tokens`.
    """

    def __init__(
        self,
        tokens: np.ndarray,
        bounds: Int64[np.ndarray, " bounds"],
        first: int,
        last: int,
        sequence_length: int,
        samples: int | None,
        seed: int,
    ):
        """Shuffle for `samples` samples; None: one epoch. Raises ValueError for less than one
        sample of tokens, and for a seed that numpy does not take.
        """
        if not 0 <= seed < 2**32:
            raise ValueError(
                f"train.seed is {seed}: for --data.order megatron it must be 0 to {2**32 - 1}"
            )
        size = int(bounds[last] - bounds[first])
        self.tokens, self.bounds, self.sequence_length = tokens, bounds, sequence_length
        # the last token predicts nothing
        self.per_epoch = (size - 1) // sequence_length
        self.epochs = epochs_of(size, sequence_length, samples)
        state, epochs = np.random.RandomState(seed), self.epochs
        # documents of all epochs but one that is apart, then of that one
        counts = [epochs.times - 1, 1] if epochs.last_separate else [epochs.times]
        parts = [np.tile(np.arange(first, last, dtype=np.int32), count) for count in counts]
        for part in parts:
            state.shuffle(part)
        self.order = np.concatenate(parts)
        # position in the shuffled text where each sequence ends
        self.ends = np.cumsum(bounds[self.order + 1] - bounds[self.order])
        # the same dtypes as in Megatron
        kind = np.uint32 if epochs.samples < 2**32 - 2 else np.int64
        places = [
            np.arange(epochs.before, dtype=kind),
            np.arange(epochs.before, epochs.samples, dtype=kind),
        ]
        for part in places[: len(parts)]:
            state.shuffle(part)
        self.shuffle = np.concatenate(places)

    def __len__(self) -> int:
        """Return the number of samples, over all epochs."""
        return len(self.shuffle)

    def read(self, sample: int) -> Int64[np.ndarray, " window"]:
        """Return the sequence_length + 1 tokens of sample number `sample`, int64; past the last
        sample the first follows.
        """
        parts = [self.tokens[begin:end] for begin, end in self.places(sample)]
        return np.concatenate(parts, dtype=np.int64, casting="unsafe")

    def places(self, sample: int) -> list[tuple[int, int]]:
        """Return the token ranges (begin, end) that sample number `sample` is read from, one per
        document, sequence_length + 1 tokens in all (its last is the next sample's first in document
        order); past the last sample the first follows.
        """
        position = int(self.shuffle[sample % len(self)]) * self.sequence_length
        left, run = self.sequence_length + 1, int(np.searchsorted(self.ends, position, "right"))
        out = []
        while left:
            document, end = int(self.order[run]), int(self.ends[run])
            stop = int(self.bounds[document + 1])
            begin = stop - (end - position)
            take = min(left, stop - begin)
            if take:
                out.append((begin, begin + take))
            left, position, run = left - take, position + take, run + 1
        return out


def epochs_of(tokens: int, sequence_length: int, samples: int | None) -> Epochs:
    """Return how many epochs of `tokens` tokens are needed for `samples` samples (None: one epoch),
    and whether the last is shuffled separately, as it is if less than 80 % of it is needed. Raises
    ValueError for less than one sample of tokens.
    """
    per_epoch = (tokens - 1) // sequence_length
    if per_epoch < 1:
        raise ValueError(
            f"{tokens:,} tokens are fewer than one window of sequence_length + 1 "
            f"({sequence_length + 1:,})"
        )
    count = 1 if samples is None else max(1, -(-(samples * sequence_length + 1) // tokens))
    # samples of all epochs, concatenated
    interval = (count * tokens - 1) // sequence_length
    before = ((count - 1) * tokens - 1) // sequence_length
    requested = interval if samples is None else samples
    # less than 80 % of the last epoch is needed
    last_separate = count > 1 and requested - before < int(APART * per_epoch)
    return Epochs(count, last_separate, before if last_separate else interval, interval)


class MegatronOrder:
    """Megatron's order of samples over several data sets; the interface of `Mixture`. `orders` has
    the shuffled samples of each part.
    """

    def __init__(
        self,
        parts: Sequence[Part],
        orders: Sequence[Shuffled],
        weights: Sequence[float],
        samples: int,
    ):
        """`weights`: shares of the data sets, of any sum. `samples`: number that the run reads;
        behind these the order repeats.
        """
        self.parts, self.orders, self.weights = parts, orders, weights
        self.sequence_length = orders[0].sequence_length
        self.sizes = [order.per_epoch for order in orders]
        self.turns = blend(normalize_weights(weights), samples)
        epochs = [
            f"{count.times}{' with the last one separate' * count.last_separate}"
            for count in (order.epochs for order in orders)
        ]
        self.name = f"Megatron, epochs: {', '.join(epochs)}"

    def epochs(self, samples: int) -> dict[str, float]:
        """Return, by name, how many epochs of each data set (a fraction) are in the first
        `samples` samples.
        """
        taken = self.counts(samples)
        return {
            part.name: n / size for part, n, size in zip(self.parts, taken, self.sizes, strict=True)
        }

    def counts(self, samples: int) -> list[int]:
        """Return how many of the first `samples` samples each data set has."""
        # past the run's samples the turns repeat
        rounds, rest = divmod(samples, len(self.turns))
        full, part = (
            np.bincount(turns, minlength=len(self.parts))
            for turns in (self.turns, self.turns[:rest])
        )
        return (rounds * full + part).tolist()

    def windows(self, first: int, count: int) -> Int64[np.ndarray, "count window"]:
        """Return samples first .. first + count - 1, as int64 [count, sequence_length + 1]."""
        return np.stack([self.orders[which].read(n) for which, n in self.samples(first, count)])

    def documents(self, first: int, count: int) -> list[str]:
        """Return a line for each of the samples first .. first + count - 1 that describes what it
        was cut from: `source: sequences a, b`, counted from 0.
        """
        lines = []
        for which, sample in self.samples(first, count):
            order = self.orders[which]
            starts = [begin for begin, _ in order.places(sample)]
            spans = np.searchsorted(order.bounds, starts, side="right") - 1
            lines.append(f"{self.parts[which].name}: sequences {', '.join(map(str, spans))}")
        return lines

    def samples(self, first: int, count: int) -> list[tuple[int, int]]:
        """Return (data set index, number of its sample) for each of the samples first .. first +
        count - 1.
        """
        taken, out = self.counts(first), []
        for sample in range(first, first + count):
            which = int(self.turns[sample % len(self.turns)])
            out.append((which, taken[which]))
            taken[which] += 1
        return out


def shares(weights: Sequence[float], samples: int) -> list[int]:
    """Return how many samples each data set is shuffled for: its share of `samples` by `weights`,
    which add up to 1, plus 0.5 %, rounded up as Megatron does.
    """
    return [math.ceil(math.ceil(samples * weight) * (1 + SURPLUS)) for weight in weights]


def blend(weights: Sequence[float], samples: int) -> Int16[np.ndarray, " samples"]:
    """Return the data set index of each of `samples` samples: the one furthest behind its share of
    `weights`, which add up to 1; of equals the first.
    """
    if len(weights) == 1:
        return np.zeros(samples, np.int16)
    taken, turns = [0] * len(weights), np.empty(samples, np.int16)
    for sample in range(samples):
        # as in Megatron's helpers.cpp
        passed = max(float(sample), 1.0)
        behind = [weight * passed - n for weight, n in zip(weights, taken, strict=True)]
        turns[sample] = which = behind.index(max(behind))
        taken[which] += 1
    return turns
