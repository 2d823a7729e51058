"""Where the end of a long document is cut off for validation: a token that begins a character, and
the exact number of bytes from there on.

A document of one source alone may be the whole corpus. One that was tokenised in many pieces is
cut between two of them, whose bytes the cache knows; of a shorter one the piece with the cut is
read and tokenised again, which tells where in the text a token begins.
"""

from collections.abc import Iterator
from itertools import islice
from typing import NamedTuple

import numpy as np

from dolmen.data.corpus import Corpus
from dolmen.data.sources import Source
from dolmen.data.tokenise import pieces
from dolmen.data.tokenizer import PreTrainedTokenizer

PIECES = 8  # held-out pieces from which on a cut between two pieces misses the fraction by < 7 %


class Ending(NamedTuple):
    """`token`: the first held-out token, counted in the document; `bytes` of text from there."""

    token: int
    bytes: int


def ending(
    corpus: Corpus,
    source: Source,
    index: int,
    fraction: float,
    tokenizer: PreTrainedTokenizer,
    text_field: str,
) -> Ending:
    """Where to hold out the last `fraction` of the tokens of document `index` of `source`, at least
    one token and the end of text; at any token where nobody can know its bytes. Raises ValueError
    if the text is not what was tokenised.
    """
    length = int(corpus.offsets[index + 1] - corpus.offsets[index])
    size = int(corpus.documents["bytes"][index])
    target = max(0, length - max(2, round(fraction * length)))
    if corpus.byte_count is None:
        return Ending(target, 0)
    ends = seams(corpus, index, length, size)
    # Text was tokenised in pieces, so between two of them nothing has to be read to know that a
    # token ends where the text is cut. Where the pieces are too few, the one that has the target is
    # read and tokenised once more, and cut between two tokens that share no character.
    if len(ends) * fraction >= PIECES:
        inner = ends[:-1]
        token, byte = inner[np.argmin(np.abs(inner[:, 0] - target))]
        return Ending(int(token), size - int(byte))
    number = min(int(np.searchsorted(ends[:, 0], target, side="right")), len(ends) - 1)
    begin, byte = map(int, ends[number - 1] if number else (0, 0))
    text = next(islice(document(source, index, text_field), number, None), "")
    places = cuts(tokenizer, text, target - begin)
    if len(places) != ends[number, 0] - begin or len(text.encode()) != ends[number, 1] - byte:
        raise ValueError(f"{source.name}: the text changed after it was tokenised; start again")
    clean = [at for at, place in enumerate(places) if place is not None]
    if not clean:
        raise ValueError(
            f"{source.name}: nothing can be held out of its longest document, as the tokenizer "
            "does not tell where in the text a token begins: use --data.validation, or "
            "--data.validation-fraction 0"
        )
    at = min(clean, key=lambda at: (abs(at - (target - begin)), -at))
    return Ending(begin + at, size - byte - len(text[: places[at]].encode()))


def seams(corpus: Corpus, index: int, length: int, size: int) -> np.ndarray:
    """int64 [pieces, 2]: tokens and bytes of the document up to the end of each piece."""
    own = corpus.seams[corpus.seams["document"] == index]
    if not len(own):
        return np.array([[length - 1, size]])
    return np.stack([own["tokens"], own["bytes"]], 1)


def document(source: Source, index: int, text_field: str) -> Iterator[str]:
    """The pieces of document `index`."""
    number = 0
    for piece in pieces(source, text_field):
        if number == index:
            yield piece.text
        number += piece.last
        if number > index:
            return


def cuts(tokenizer: PreTrainedTokenizer, text: str, near: int) -> list[int | None]:
    """Per token of `text`, the number of characters before it; None where the token before it ends
    inside a character, and, for a tokenizer without offsets, far from token `near`.
    """
    if not tokenizer.is_fast:
        return slow_cuts(tokenizer, text, near)
    backend = tokenizer.backend_tokenizer
    backend.no_truncation()
    backend.no_padding()
    places, reached = [], 0
    for start, stop in backend.encode(text, add_special_tokens=False).offsets:
        # not `start`: some tokenizers leave a word's space out of its offsets
        places.append(reached if start >= reached else None)
        reached = max(reached, stop)
    return places


def slow_cuts(
    tokenizer: PreTrainedTokenizer, text: str, near: int, reach: int = 8
) -> list[int | None]:
    """A cut is clean where what is before it and what is behind decode to the whole text."""
    ids = tokenizer.encode(text, add_special_tokens=False)
    places: list[int | None] = [None] * len(ids)
    for at in range(max(0, near - reach), min(len(ids), near + reach)):
        before, behind = (
            tokenizer.decode(part, clean_up_tokenization_spaces=False)
            for part in (ids[:at], ids[at:])
        )
        if before + behind == text:
            places[at] = len(before)
    return places
