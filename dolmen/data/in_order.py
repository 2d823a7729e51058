"""Text that is read once, from its first token to its last: validation during training.

    tokens    a b c . d e .                two documents; `.` is the end-of-text token
    windows   .|a b c    c|. d e    e|. -  of 3 predictions: the token before |, and what it is to
                                           predict; `-` is IGNORED

Each token is predicted exactly once, the ends of documents too, from the tokens before it in its
window; the first of a document from an end of text. A window knows nothing of the one before.
"""

from collections.abc import Iterator, Sequence
from functools import cached_property

import numpy as np

from dolmen.data.batch import Batch
from dolmen.data.cloze import Cloze
from dolmen.data.corpus import added
from dolmen.data.division import ValidationSplit
from dolmen.data.mixture import TokenStream
from dolmen.ops.loss import IGNORED


class InOrder:
    """`parts`, one after the other, in windows of `sequence_length` predictions. `boundary`: the
    token behind which attention does not look; None: it looks at all of its window.
    """

    def __init__(
        self,
        parts: Sequence[ValidationSplit],
        sequence_length: int,
        boundary: int | None,
        cloze: Cloze | None = None,
    ):
        """`cloze`: of a model that fills in masked tokens, which are predicted in place of all."""
        self.parts, self.sequence_length, self.boundary = parts, sequence_length, boundary
        self.cloze = cloze

    @cached_property
    def stream(self) -> TokenStream:
        return TokenStream.join([part.stream for part in self.parts])

    @property
    def tokens(self) -> int:
        """Predictions of a full reading: every token, the ends of documents included."""
        return len(self.stream) if self.parts else 0

    @property
    def bytes(self) -> int | None:
        """Bytes of the text, exactly; None where they are not known."""
        return added([part.size for part in self.parts])

    @property
    def documents(self) -> int:
        return sum(part.documents for part in self.parts)

    @property
    def windows(self) -> int:
        return -(-self.tokens // self.sequence_length)

    def batches(
        self,
        batch_size: int,
        max_sequences: int | None = None,
        first_row: int = 0,
        rows: int | None = None,
    ) -> Iterator[Batch]:
        """All windows in order, `batch_size` at a time, or of each batch the `rows` rows from
        `first_row`. With `max_sequences`, only that many windows, evenly spread. All batches are
        full, the last one filled up with positions that are IGNORED.
        """
        windows, rows = self.windows, rows or batch_size
        chosen = min(windows, max_sequences or windows)
        padded = -(-chosen // batch_size) * batch_size
        for first in range(first_row, padded, batch_size):
            numbers = [
                index * windows // chosen if index < chosen else windows
                for index in range(first, first + rows)
            ]
            yield self._batch(np.stack([self.window(number) for number in numbers]), numbers)

    def _batch(self, made: np.ndarray, numbers: list[int]) -> Batch:
        if self.cloze is None:
            return Batch.of_windows(made, self.boundary)

        def other(row: int) -> np.ndarray:
            return self.window((numbers[row] + self.windows // 2) % self.windows)

        return self.cloze.batch(made, [f"held out {number}" for number in numbers], other)

    def window(self, index: int) -> np.ndarray:
        """int64 [sequence_length + 1], IGNORED behind the last token."""
        length = self.sequence_length
        window, start = np.full(length + 1, IGNORED, np.int64), index * length
        real = min(length, self.tokens - start)
        if real > 0:
            # position -1 is the last: an end of text
            window[: real + 1] = self.stream.read(start - 1, real + 1)
        return window
