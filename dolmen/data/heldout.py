"""Which text is held out for validation: decided by content, once for all sources, so that a
document is held out in every source or in none.

    words    hash of a text without its white space: two documents with the same words are copies,
             whatever their line ends, indentation or last newline. Near duplicates are not found.
    exact    hash of the bytes: where the end of a document is held out, which copies are cut

A document is held out when its words' hash falls below the fraction: one draw for all its copies,
however many there are. So neither seed, tokenizer nor file order moves a document from one side to
the other, nor do additions, with two exceptions, both in sources of few documents:

    a quarter     a document that is drawn is trained on while it is more than a quarter of any
                  source: it is held out once that source has grown, and trained on again once a
                  source is added of which it is more than a quarter
    at least one  where nothing of a source is drawn, the document with the smallest hash stands in,
                  or the end of the longest, until the source is added to: a document that is drawn,
                  has a smaller hash or is longer takes its place
"""

import hashlib
import re
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import xxhash

WHITE_SPACE = b" \t\n\r\v\f"
# What else of Unicode is white space, in UTF-8; and two signs without width, U+200B and the byte
# order mark U+FEFF.
WIDE_SPACE = re.compile(
    rb"\xc2[\x85\xa0]|\xe1\x9a\x80|\xe2\x80[\x80-\x8b\xa8\xa9\xaf]|\xe2\x81\x9f|\xe3\x80\x80"
    rb"|\xef\xbb\xbf"
)


class TextHash:
    """`exact`, `words` (64 bits each, the same on every machine) and `size` in bytes of a document
    that comes in `pieces`.
    """

    def __init__(self):
        self._exact, self._words = hashlib.blake2b(digest_size=8), xxhash.xxh3_64()
        self.size = self.pieces = 0

    def update(self, text: bytes) -> None:
        self._exact.update(text)
        words = text.translate(None, WHITE_SPACE)
        self._words.update(words if words.isascii() else WIDE_SPACE.sub(b"", words))
        self.size, self.pieces = self.size + len(text), self.pieces + 1

    @property
    def exact(self) -> int:
        return int.from_bytes(self._exact.digest(), "little")

    @property
    def words(self) -> int:
        return self._words.intdigest()


@dataclass(frozen=True)
class Choice:
    """What is held out. `whole`: words of the documents that are held out whole, uint64, sorted.
    `cut`: {exact: words} of documents whose end is held out.
    """

    whole: np.ndarray
    cut: dict[int, int]


def choose_held_out(tables: Sequence[np.ndarray], fraction: float) -> Choice:
    """From each source's documents, a table with the fields `bytes`, `hash` and `words`.

    A document with more than a quarter of the bytes of a source, copies counted once, is never held
    out whole, in no source. A source in which chance draws none gives the one of the others whose
    words have the smallest hash; a source that has no others (one document, or a few large ones)
    gives the end of its longest.
    """
    if not fraction:
        return Choice(np.zeros(0, np.uint64), {})
    large = union([large_words(table) for table in tables])
    others = [table[~np.isin(table["words"], large)] for table in tables]
    limit = np.uint64(int(fraction * 2**64))
    chance = union([other["words"][other["words"] < limit] for other in others])
    chosen, ends = [chance], []
    for table, other in zip(tables, others, strict=True):
        if np.isin(other["words"], chance).any():
            continue
        if len(other):
            chosen.append(other["words"][[np.argmin(other["words"])]])
        else:
            longest = table[table["bytes"] == table["bytes"].max()]
            record = longest[np.argmin(longest["hash"])]
            ends.append((int(record["words"]), int(record["hash"])))
    # of copies that differ in white space one is cut: two cuts need not be at the same word
    return Choice(
        union(chosen), {exact: words for words, exact in dict(sorted(ends)[::-1]).items()}
    )


def all_validated(name: str) -> ValueError:
    """What is raised where nothing of the source `name` is left to train on."""
    return ValueError(
        f"all of --data.path {name} is also in --data.validation: give another --data.validation, "
        "or leave it out"
    )


def large_words(table: np.ndarray) -> np.ndarray:
    """Words of the documents with more than a quarter of the bytes, copies counted once, as large
    as the largest of them.
    """
    words, which = np.unique(table["words"], return_inverse=True)
    sizes = np.zeros(len(words), np.int64)
    np.maximum.at(sizes, which, table["bytes"])
    return words[sizes * 4 > sizes.sum()]


def union(parts: Sequence[np.ndarray]) -> np.ndarray:
    """The different values of all, sorted."""
    return np.unique(np.concatenate([*parts, np.zeros(0, np.uint64)]))
