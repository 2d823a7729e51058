"""Pairs of answers to one prompt as batches: rows 2 i and 2 i + 1 are the chosen one and the
rejected one, each with its prompt before it, whose tokens have no label.
"""

from collections.abc import Iterator

import numpy as np

from dolmen.core.words import counted
from dolmen.data.batch import Batch
from dolmen.data.examples import Examples
from dolmen.data.packed import Rows, shuffled


class Pairs(Rows):
    """Sequences of the pairs `chosen`, two of each; an example is one of the two."""

    def __init__(self, examples: Examples, chosen: np.ndarray, sequence_length: int, seed: int = 0):
        both = np.stack((2 * chosen, 2 * chosen + 1), 1).reshape(-1)
        super().__init__(examples, both, sequence_length, False)
        self.pairs, self.seed = chosen, seed

    def epochs(self, samples: int) -> dict[str, float]:
        return {self.examples.name: samples / (2 * len(self.pairs))}

    def read(self, first: int, count: int) -> list[list[int]]:
        """The examples of sequences first .. first + count - 1, one in each."""
        found = []
        for sequence in range(first, first + count):
            pair = self.pairs[shuffled(sequence // 2, len(self.pairs), self.seed)]
            found.append([2 * int(pair) + sequence % 2])
        return found

    def batches(
        self,
        batch_size: int,
        max_sequences: int | None = None,
        first_row: int = 0,
        rows: int | None = None,
    ) -> Iterator[Batch]:
        """Whole batches of pairs in order, and none of a last one that is not full; where there are
        fewer pairs than fill one, they are read again.
        """
        size, rows = 2 * len(self.pairs), rows or batch_size
        wanted = min(size, max_sequences or size) // batch_size
        for first in range(first_row, max(1, wanted) * batch_size, batch_size):
            numbers = [int(self.chosen[at % size]) for at in range(first, first + rows)]
            yield self.batch([[number] for number in numbers])


def useful(examples: Examples) -> np.ndarray:
    """Of each pair, whether it says anything: two answers that differ, with a token each."""
    said = (examples.predictions() > 0).reshape(-1, 2).all(1)
    return said & (examples.hashes[0::2] != examples.hashes[1::2])


def told(mixture: Pairs, validation: Pairs) -> list[str]:
    """What is trained on, for the header of a run."""
    examples, count = mixture.examples, len(mixture.examples) // 2
    lines = [
        f"{examples.name}: {counted(len(mixture.pairs), 'pair')} of answers to train on of "
        f"{count:,}, {mixture.tokens:,} tokens of answers"
    ]
    if equal := int((examples.hashes[0::2] == examples.hashes[1::2]).sum()):
        lines.append(f"left out: {counted(equal, 'pair')} whose answers are equal")
    return lines + (
        [f"validation: {counted(len(validation.pairs), 'pair')}"]
        if len(validation.pairs)
        else ["validation: none (--data.validation-fraction is 0)"]
    )
