"""Cuts the documents of a source into pieces and tokenises them in as many threads as there are
cores.
"""

import hashlib
import re
from array import array
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple, cast

import numpy as np
import xxhash

from dolmen.data import tokenizer as tokenizers
from dolmen.data.readers import (
    BATCH,
    PIECE,
    ROW_READERS,
    Batches,
    Located,
    check_column,
    column_texts,
    form,
    is_whole_file,
    read_documents,
    small_rows,
    table_rows,
)
from dolmen.data.sources import DataSource

if TYPE_CHECKING:
    from datasets import Dataset

WHITE_SPACE = b" \t\n\r\v\f"


# What else of Unicode is white space, in UTF-8; and two signs without width, U+200B and the byte
# order mark U+FEFF.
WIDE_SPACE = re.compile(
    rb"\xc2[\x85\xa0]|\xe1\x9a\x80|\xe2\x80[\x80-\x8b\xa8\xa9\xaf]|\xe2\x81\x9f|\xe3\x80\x80"
    rb"|\xef\xbb\xbf"
)


class TextHash:
    """Incremental hashes of a document: `exact` of its bytes, `words` of its text without white
    space (64 bits each, equal on every machine), and its `size` in bytes.
    """

    def __init__(self):
        """Begin with an empty text."""
        self._exact, self._words = hashlib.blake2b(digest_size=8), xxhash.xxh3_64()
        self.size = self.pieces = 0

    def update(self, text: bytes) -> None:
        """Add the next piece of the text, UTF-8."""
        self._exact.update(text)
        words = text.translate(None, WHITE_SPACE)
        self._words.update(words if words.isascii() else WIDE_SPACE.sub(b"", words))
        self.size, self.pieces = self.size + len(text), self.pieces + 1

    @property
    def exact(self) -> int:
        """Hash of the bytes so far, 64 bits."""
        return int.from_bytes(self._exact.digest(), "little")

    @property
    def words(self) -> int:
        """Hash of the text without white space: equal for copies that differ in white space
        only.
        """
        return self._words.intdigest()


class Piece(NamedTuple):
    """A part of a document's text. `source`: index of its file, or number of files + index of its
    hub id; `last`: it ends the document.
    """

    text: str
    source: int
    last: bool


def pieces(source: DataSource, text_field: str) -> Iterator[Piece]:
    """Yield all documents of a source in order, each cut into pieces. Empty documents are left
    out.
    """
    for index, file in enumerate(source.files):
        for document in read_documents(file, text_field):
            for text, last in cut(document):
                yield Piece(text, index, last)
    # numbered behind the files
    for index, hub in enumerate(source.hubs, len(source.files)):
        for row in hub_rows(hub, text_field, source.option):
            for text, last in cut([row]):
                yield Piece(text, index, last)


def rows(source: DataSource, max_bytes: int | None = None) -> Iterator[Located]:
    """Yield all rows of a source in order, as (row, where). Raises ValueError for files that have
    no rows, and for a row of more than `max_bytes`.
    """
    for file in source.files:
        reader = ROW_READERS.get(form(file) or "")
        if reader is None:
            raise ValueError(
                f"{source.option} {file}: chats must be rows of {', '.join(ROW_READERS)} files or "
                "of the hub: give those, or train on text (--data.rows text)"
            )
        yield from reader(file, max_bytes)
    for hub in source.hubs:
        where = f"{source.option} {hub}"
        yield from table_rows(hub_batches(load_hub(hub, source.option)), where, max_bytes)


def first_lines(source: DataSource, text_field: str, max_bytes: int | None) -> Iterator[Located]:
    """Yield prompts: all rows of a source in order, and for each text document a row with its first
    line that is not blank as `prompt`. Raises ValueError.
    """
    for file in source.files:
        if form(file) in ROW_READERS:
            yield from rows(replace(source, files=(file,), hubs=()), max_bytes)
            continue
        for document in read_documents(file, text_field):
            line = next((line for line in "".join(document).splitlines() if line.strip()), None)
            if line is not None:
                yield from small_rows(iter([({"prompt": line}, str(file))]), max_bytes)
    yield from rows(replace(source, files=()), max_bytes)


def cut(blocks: Iterable[str], piece: int = PIECE) -> Iterator[tuple[str, bool]]:
    """Cut a document, whose text comes in `blocks`, into pieces of at most `piece` characters;
    yield (text, whether it is the last piece).
    """
    rest = ""
    for block in blocks:
        # what is left of the blocks before
        rest, start = rest + block, 0
        while len(rest) - start > piece:
            # pieces are at least half full
            end = find_cut(rest, start + piece // 2, start + piece)
            yield rest[start:end], False
            start = end
        rest = rest[start:]
    if rest:
        yield rest, True


def find_cut(text: str, low: int, high: int) -> int:
    """Return where to cut a text in (low, high]: before the last line that is not indented, where
    byte-level tokenizers begin a word anyway, so that no token changes; else before a line, else
    before a space, else at `high`, which must be less than len(text).
    """
    at = high
    while (at := text.rfind("\n", low, at)) >= 0:
        if not text[at + 1].isspace():
            return at + 1
    if (at := text.rfind("\n", low, high)) >= 0:
        return at + 1
    at = text.rfind(" ", low + 1, high)
    return at if at >= 0 else high


def load_hub(name: str, option: str):
    """Load the split `train` of a hub id (`name` or `name:config`) through `datasets`. Raises
    ValueError naming the option.
    """
    import datasets

    identity, _, config = name.partition(":")
    try:
        return datasets.load_dataset(identity, config or None, split="train")
    except (OSError, ValueError, RuntimeError) as error:
        raise ValueError(
            f"{option} {name}: no such file or folder, and not available from the hub: {error}"
        ) from error


def hub_rows(name: str, text_field: str, option: str) -> Iterator[str]:
    """Yield the text of each row of a hub data set, from column `text_field`. Raises Refused where
    the column is missing.
    """
    table = load_hub(name, option)
    check_column(text_field, table.column_names, f"{option} {name}")
    yield from column_texts(hub_batches(table.select_columns([text_field])), text_field, name)


def hub_batches(table: "Dataset") -> Batches:
    """Return the rows of a data set in batches: row by row `datasets` takes 13 times as long."""
    # datasets types a batch as whatever a row may be made into; without a format it is columns
    return cast(Batches, table.iter(batch_size=BATCH))


DOCUMENT = np.dtype([("bytes", "<i8"), ("hash", "<u8"), ("words", "<u8"), ("file", "<i4")])
SEAM = np.dtype([("document", "<i8"), ("tokens", "<i8"), ("bytes", "<i8")])


class Written(NamedTuple):
    """Result of `write_tokens`: each document's end [documents], DOCUMENT [documents], SEAM
    [pieces], the largest token and the digest of tokens.bin.
    """

    ends: np.ndarray
    documents: np.ndarray
    seams: np.ndarray
    largest: int
    digest: str


def write_tokens(
    source: DataSource,
    tokenizer: tokenizers.PreTrainedTokenizer,
    origin: dict,
    folder: Path,
    workers: int,
    reach: Callable[[int], None],
) -> Written:
    """Tokenise a source with `workers` threads and write tokens.bin into `folder`; return the ends,
    sizes and hashes of its documents, the seams of those cut into pieces, the largest token and a
    digest of the file. `origin` is the cache's description: files with sizes, text_field,
    end_of_text (written behind every document), dtype. `reach(bytes read)` reports progress.
    """
    ends, documents, seams = array("q"), Column(DOCUMENT), Column(SEAM)
    # bytes of the files before each
    before = np.cumsum([0] + [size for _, size, *_ in origin["files"]])
    # written behind every document
    mark = np.array([origin["end_of_text"]], origin["dtype"])
    # tokens written, and those before this document; bytes read of the file `current`, for the bar
    position = start = read = current = largest = 0
    text, digest = TextHash(), xxhash.xxh3_128()
    with open(folder / "tokens.bin", "wb") as out:
        for piece, ids in encode_pieces(
            pieces(source, origin["text_field"]), tokenizers.encoder(tokenizer), workers
        ):
            # hashed on the way: the text is read once
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
            # documents of one piece need no seam
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
        # the end of text is a token too: ids are checked against the vocabulary
        max(largest, int(mark[0])),
        digest.hexdigest(),
    )


class Column:
    """Growing array of records of `dtype`, without a Python object for each."""

    def __init__(self, dtype: np.dtype):
        """`dtype`: structured type of a record."""
        self.dtype, self.bytes = dtype, bytearray()

    def append(self, record: tuple[int, ...]) -> None:
        """Append one record."""
        self.bytes += np.array(record, self.dtype).tobytes()

    def array(self) -> np.ndarray:
        """Return all records as one array."""
        return np.frombuffer(self.bytes, self.dtype)


def encode_pieces(
    parts: Iterable[Piece], encode: Callable[[str], np.ndarray], workers: int
) -> Iterator[tuple[Piece, np.ndarray]]:
    """Tokenise pieces in `workers` threads; yield (piece, its ids) in order, with at most 2 x
    `workers` + 1 groups in memory.

    Threads and not processes: the tokenizer releases the interpreter's lock (12.1 MB on 2 cores:
    2.8 s with one, 1.5 s with two), and there is nothing to fork beside CUDA or gloo and no main
    module to import again.
    """
    with ThreadPoolExecutor(workers) as pool:
        waiting: deque = deque()
        for group in group_pieces(parts):
            waiting.append(
                (group, pool.submit(lambda group: [encode(piece.text) for piece in group], group))
            )
            # bounds memory; results come in order
            if len(waiting) > 2 * workers:
                group, ids = waiting.popleft()
                yield from zip(group, ids.result(), strict=True)
        for group, ids in waiting:
            yield from zip(group, ids.result(), strict=True)


def group_pieces(parts: Iterable[Piece]) -> Iterator[list[Piece]]:
    """Yield the pieces in lists of about PIECE (262,144) characters, so that a short document is
    not a task of its own.
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
