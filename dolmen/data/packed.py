"""Chats in packed rows, as batches.

    row        a a a a|b b b|. .          two examples, of five tokens and of four, and padding
    labels     - a a a|- b b|- -          of the tokens that are trained; `-` is IGNORED
    starts     0 0 0 0 4 4 4 7 7          of documents: no example sees another
    positions  0 1 2 3 0 1 2 0 1

Rows are packed once. An epoch is a permutation of them, keyed by (seed, epoch); so sample i is
known at once, for any i, and each example is read once per epoch.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import replace
from fractions import Fraction

import numpy as np
import torch

from dolmen.core.rng import seed_of
from dolmen.data.batch import Batch
from dolmen.data.examples import Examples
from dolmen.data.mixture import Part, permute_index
from dolmen.data.packing import pack
from dolmen.data.stream import TokenStream
from dolmen.ops.attention import Documents
from dolmen.ops.loss import IGNORED


def shuffled(number: int, size: int, seed: int) -> int:
    """Which of `size` rows is read as number `number`: in each epoch all, in another order."""
    epoch, within = divmod(number, size)
    return int(permute_index(np.array([within]), size, seed_of(seed, "row", epoch))[0])


class Rows(ABC):
    """Rows of `sequence_length` places, each of some of the examples `chosen`."""

    bytes = None

    def __init__(
        self, examples: Examples, chosen: np.ndarray, sequence_length: int, weighted: bool
    ):
        self.examples, self.chosen = examples, chosen
        self.sequence_length, self.weighted = sequence_length, weighted
        # what else a batch brings of each token that is predicted, by name: of all tokens
        self.numbers: dict[str, np.ndarray] = {}

    @property
    def parts(self) -> Sequence[Part]:
        spans = [self.examples.span(index) for index in sorted(self.chosen.tolist())]
        starts, stops = (
            np.array([one(span) for span in spans], np.int64)
            for one in (lambda s: s.start, lambda s: s.stop)
        )
        stream = TokenStream.of(self.examples.tokens, starts, stops)
        return [Part(self.examples.name, Fraction(1), stream)]

    @property
    def tokens(self) -> int:
        """Those that are trained, or predicted."""
        return int(self.examples.predictions()[self.chosen].sum())

    @abstractmethod
    def epochs(self, samples: int) -> dict[str, float]:
        """How often the examples have been read after `samples` samples."""

    @abstractmethod
    def read(self, first: int, count: int) -> list[list[int]]:
        """The examples of samples first .. first + count - 1."""

    @abstractmethod
    def batches(
        self,
        batch_size: int,
        max_sequences: int | None = None,
        first_row: int = 0,
        rows: int | None = None,
    ) -> Iterator[Batch]:
        """As HeldOutRows.batches."""

    def documents(self, first: int, count: int) -> list[str]:
        name = self.examples.name
        return [f"{name}: examples {', '.join(map(str, row))}" for row in self.read(first, count)]

    def batch(self, rows: list[list[int]]) -> Batch:
        """These rows of examples."""
        shape = len(rows), self.sequence_length
        tokens, labels = np.zeros(shape, np.int64), np.full(shape, IGNORED, np.int64)
        weights, starts = np.zeros(shape, np.float32), np.zeros(shape, np.int64)
        numbers = {name: np.zeros(shape, one.dtype) for name, one in self.numbers.items()}
        examples = self.examples
        for row, indices in enumerate(rows):
            place = 0
            for index in indices:
                span = examples.span(index)
                ids = examples.tokens[span].astype(np.int64)
                trained = examples.trained[span][1:] * examples.weights[index]
                here = slice(place, place + len(ids) - 1)
                tokens[row, here] = ids[:-1]
                labels[row, here] = np.where(trained > 0, ids[1:], IGNORED)
                weights[row, here], starts[row, here] = trained, place
                for name, number in numbers.items():
                    number[row, here] = self.numbers[name][span][1:]
                place = here.stop
            starts[row, place:] = place
        made = Batch(
            torch.from_numpy(tokens),
            torch.from_numpy(labels),
            Documents.of(torch.from_numpy(starts)),
        ).with_positions(1)
        made = replace(made, numbers={n: torch.from_numpy(one) for n, one in numbers.items()})
        return replace(made, weights=torch.from_numpy(weights)) if self.weighted else made


class Packed(Rows):
    """Rows of as many examples as fit, or of one each."""

    def __init__(
        self,
        examples: Examples,
        chosen: np.ndarray,
        sequence_length: int,
        packing: bool,
        weighted: bool,
        seed: int = 0,
    ):
        super().__init__(examples, chosen, sequence_length, weighted)
        self.seed = seed
        # one each, where they are not packed
        room = examples.places()[chosen].tolist() if packing else [sequence_length] * len(chosen)
        self.rows = [chosen[row].tolist() for row in pack(room, sequence_length)]

    def epochs(self, samples: int) -> dict[str, float]:
        return {self.examples.name: samples / len(self.rows)}

    def read(self, first: int, count: int) -> list[list[int]]:
        """The examples of samples first .. first + count - 1."""
        samples = range(first, first + count)
        return [self.rows[shuffled(sample, len(self.rows), self.seed)] for sample in samples]

    def batches(
        self,
        batch_size: int,
        max_sequences: int | None = None,
        first_row: int = 0,
        rows: int | None = None,
    ) -> Iterator[Batch]:
        """As HeldOutRows.batches; the last one is filled up with rows of nothing."""
        size, rows = len(self.rows), rows or batch_size
        chosen = min(size, max_sequences or size)
        picked = [self.rows[index * size // chosen] for index in range(chosen)]
        for first in range(first_row, -(-chosen // batch_size) * batch_size, batch_size):
            made = picked[first : first + rows]
            yield self.batch(made + [[]] * (rows - len(made)))
