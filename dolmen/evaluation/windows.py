"""The documents of a corpus as rows of tokens: each whole, or in windows where it is longer.

    document    a b c d e f g      windows of 4, by themselves      windows of 4, by steps of 2
                                   a[b c d] e[f g]                  a[b c d]  c d[e f]  e f[g]

In brackets: what is counted. By themselves the first token of each window is foretold by nothing,
and is not counted; by steps of `stride` every token is but the first of the document, and each sees
window - stride tokens or more. No special tokens are added, and none sees another document.
"""

from dataclasses import dataclass

import numpy as np

from dolmen.data.corpus import Corpus
from dolmen.evaluation.rows import Rows


@dataclass(frozen=True, eq=False)
class Windows:
    """Those of a corpus."""

    rows: Rows
    documents: int
    bytes: int | None
    """Of all text, exactly; None where tokens alone are known."""
    window: int
    stride: int

    @property
    def tokens(self) -> int:
        """Tokens that are counted."""
        return self.rows.counted

    @property
    def words(self) -> str:
        """How documents are read."""
        if self.stride == self.window:
            return f"documents whole up to {self.window:,} tokens, the first of each is not counted"
        return (
            f"documents in windows of {self.window:,} tokens by steps of {self.stride:,}, the "
            "first token of a document is not counted"
        )


def windows(corpus: Corpus, end_of_text: int, window: int, stride: int) -> Windows:
    """Of at most `window` tokens, the next `stride` behind the one before; the ends of text that
    close documents are left out. Raises ValueError where no token is counted.
    """
    starts = corpus.offsets[:-1]
    lengths = np.diff(corpus.offsets) - (corpus.last_tokens == end_of_text)
    over = np.maximum(lengths - window, 0)
    counts = 1 + -(-over // stride)
    of = np.repeat(np.arange(len(lengths)), counts)  # document of each window
    index = np.arange(len(of)) - np.repeat(np.cumsum(counts) - counts, counts)  # and its own
    begin = index * stride
    stop = np.minimum(begin + window, lengths[of])
    first = np.where(index == 0, 1, np.maximum(begin - stride + window, begin + 1))
    kept = stop > first
    if not kept.any():
        raise ValueError(
            f"--data.path {corpus.name}: no document has two tokens, and the first of each is not "
            "counted: give longer documents"
        )
    begin, stop, first, base = begin[kept], stop[kept], first[kept], starts[of[kept]]
    stream = corpus.stream(starts, corpus.offsets[1:])

    def read(row: int) -> np.ndarray:
        return stream.read(int(base[row] + begin[row]), int(stop[row] - begin[row]))

    rows = Rows(stop - begin, first - begin, read)
    size = None if corpus.byte_count is None else int(corpus.documents["bytes"].sum())
    return Windows(rows, corpus.document_count, size, window, stride)
