"""In which order samples are read: what every order does, and the one that is asked for."""

from collections.abc import Sequence
from fractions import Fraction
from typing import Protocol

import numpy as np

from dolmen.data import megatron
from dolmen.data.config import DataConfig
from dolmen.data.corpus import Corpus
from dolmen.data.division import Division
from dolmen.data.mixture import Mixture, Part
from dolmen.data.sources import Source


class Order(Protocol):
    """Sample i, for any i, of sources that are mixed."""

    @property
    def parts(self) -> Sequence[Part]: ...
    @property
    def weights(self) -> Sequence[float]: ...
    @property
    def sizes(self) -> Sequence[int]:
        """Windows of an epoch of each part."""
        ...

    @property
    def sequence_length(self) -> int: ...
    @property
    def name(self) -> str:
        """What a run is told of it; empty for ours."""
        ...

    def windows(self, first: int, count: int) -> np.ndarray:
        """Samples first .. first + count - 1 as int64 [count, sequence_length + 1]."""
        ...

    def documents(self, first: int, count: int) -> list[str]:
        """What these samples were cut from, a line each."""
        ...

    def epochs(self, samples: int) -> dict[str, float]:
        """How often each source has been read after `samples` samples."""
        ...


def make_order(
    config: DataConfig,
    sources: Sequence[Source],
    corpora: Sequence[Corpus],
    divisions: Sequence[Division],
    sequence_length: int,
    seed: int,
    samples: int | None,
) -> Order:
    """The order of `config`, of what is to be trained on. `samples`: how many the whole run will
    read. Raises ValueError for what Megatron's order cannot have.
    """
    parts = [
        Part(source.name, source.weight or Fraction(1), division.training, corpus.offsets)
        for source, division, corpus in zip(sources, divisions, corpora, strict=True)
    ]
    if config.order == "dolmen":
        return Mixture(parts, sequence_length, seed)
    if samples is None:
        raise ValueError(
            "--data.order megatron depends on how many samples the run reads: give --train.steps "
            "or --train.tokens"
        )
    weighted = sources[0].weight is not None
    weights = megatron.normal([float(part.weight) for part in parts])
    wanted: Sequence[int | None] = [samples]
    if weighted:
        wanted = megatron.shares(weights, samples)
    elif len(parts) > 1:
        wanted = [None] * len(parts)
    orders = []
    for corpus, count in zip(corpora, wanted, strict=True):
        (tokens,), (bounds,) = corpus.memory, corpus.sequences
        (first, last), *_ = megatron.split_of(config.shares, len(bounds) - 1)
        orders.append(megatron.Shuffled(tokens, bounds, first, last, sequence_length, count, seed))
    if not weighted and len(parts) > 1:
        weights = [len(order) for order in orders]
        if samples > sum(weights):
            raise ValueError(
                f"--data.order megatron reads {len(parts)} corpora without weights once, "
                f"{sum(weights):,} samples, and the run {samples:,}: give each a weight "
                f"(1:{sources[0].name}), or use a smaller --train.steps"
            )
    return megatron.MegatronOrder(parts, orders, weights, samples)


def data_sets(config: DataConfig, sources: Sequence[Source]) -> Sequence[Source]:
    """The sources as the order takes them: Megatron's has the text of one and each .bin by itself.
    Raises ValueError where several of these have one weight.
    """
    if config.order == "dolmen":
        return sources
    found = []
    for source in sources:
        parts = [source.only_text()] if source.text and source.indexed else []
        parts += [source.only(file) for file in source.indexed]
        if source.weight is not None and len(parts) > 1:
            raise ValueError(
                f"--data.path {float(source.weight):g}:{source.name} is {len(parts)} data sets, "
                "and --data.order megatron has a weight for each: give them one by one"
            )
        found += parts or [source]
    return found
