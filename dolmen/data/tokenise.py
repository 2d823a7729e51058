"""From the documents of a source to tokens on disk, in as many threads as there are cores."""

from array import array
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

import numpy as np
import xxhash

from dolmen.data import tokenizer as tokenizers
from dolmen.data.documents import Piece, pieces
from dolmen.data.heldout import TextHash
from dolmen.data.readers import PIECE, is_whole_file
from dolmen.data.sources import Source

DOCUMENT = np.dtype([("bytes", "<i8"), ("hash", "<u8"), ("words", "<u8"), ("file", "<i4")])
SEAM = np.dtype([("document", "<i8"), ("tokens", "<i8"), ("bytes", "<i8")])


class Written(NamedTuple):
    """What `write_tokens` has written: each document's end [documents], DOCUMENT [documents], SEAM
    [pieces], the largest token and the digest of tokens.bin.
    """

    ends: np.ndarray
    documents: np.ndarray
    seams: np.ndarray
    largest: int
    digest: str


def write_tokens(
    source: Source,
    tokenizer: tokenizers.PreTrainedTokenizer,
    origin: dict,
    folder: Path,
    workers: int,
    reach: Callable[[int], None],
    option: str,
) -> Written:
    """Writes tokens.bin. `reach` is told how much has been read."""
    ends, documents, seams = array("q"), Column(DOCUMENT), Column(SEAM)
    before = np.cumsum([0] + [size for _, size, *_ in origin["files"]])
    mark = np.array([origin["end_of_text"]], origin["dtype"])
    # tokens written, and those before this document; bytes read of the file `current`, for the bar
    position = start = read = current = largest = 0
    text, digest = TextHash(), xxhash.xxh3_128()
    with open(folder / "tokens.bin", "wb") as out:
        for piece, ids in encoded(
            pieces(source, origin["text_field"], option), tokenizers.encoder(tokenizer), workers
        ):
            text.update(added := piece.text.encode())
            out.write(ids.data)
            digest.update(ids.data)
            largest = max(largest, int(ids.max(initial=0)))
            position += len(ids)
            read, current = (read if piece.source == current else 0) + len(added), piece.source
            reach(
                int(min(before[current] + read, before[current + 1]))
                if current < len(source.files)
                else text.size
            )
            if not piece.last or text.pieces > 1:
                seams.append((len(ends), position - start, text.size))
            if not piece.last:
                continue
            out.write(mark.data)
            digest.update(mark.data)
            position += 1
            is_file = current < len(source.files) and is_whole_file(source.files[current])
            documents.append((text.size, text.exact, text.words, current if is_file else -1))
            ends.append(position)
            text, start = TextHash(), position
    return Written(
        np.frombuffer(ends, np.int64),
        documents.array(),
        seams.array(),
        max(largest, int(mark[0])),
        digest.hexdigest(),
    )


class Column:
    """Records of `dtype`, appended one by one without an object for each."""

    def __init__(self, dtype: np.dtype):
        self.dtype, self.bytes = dtype, bytearray()

    def append(self, record: tuple[int, ...]) -> None:
        self.bytes += np.array(record, self.dtype).tobytes()

    def array(self) -> np.ndarray:
        return np.frombuffer(self.bytes, self.dtype)


def encoded(
    parts: Iterable[Piece], encode: Callable[[str], np.ndarray], workers: int
) -> Iterator[tuple[Piece, np.ndarray]]:
    """(piece, its ids) in order; at most 2 x `workers` + 1 groups are in memory at a time.

    Threads and not processes: the tokenizer releases the interpreter's lock (12.1 MB on 2 cores:
    2.8 s with one, 1.5 s with two), and there is nothing to fork beside CUDA or gloo and no main
    module to import again.
    """
    with ThreadPoolExecutor(workers) as pool:
        waiting: deque = deque()
        for group in grouped(parts):
            waiting.append(
                (group, pool.submit(lambda group: [encode(piece.text) for piece in group], group))
            )
            if len(waiting) > 2 * workers:
                group, ids = waiting.popleft()
                yield from zip(group, ids.result(), strict=True)
        for group, ids in waiting:
            yield from zip(group, ids.result(), strict=True)


def grouped(parts: Iterable[Piece]) -> Iterator[list[Piece]]:
    """Pieces in lists of about PIECE characters, so that a short document is not a task of
    its own.
    """
    group, characters = [], 0
    for piece in parts:
        group.append(piece)
        characters += len(piece.text)
        if characters >= PIECE:
            yield group
            group, characters = [], 0
    if group:
        yield group
