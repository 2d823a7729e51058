"""The documents of a source, each cut into the pieces in which it is tokenised."""

from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import NamedTuple

from dolmen.data.readers import (
    PIECE,
    ROW_READERS,
    Located,
    check_column,
    column_texts,
    form,
    read_documents,
    table_rows,
)
from dolmen.data.sources import Source


class Piece(NamedTuple):
    """A part of a document, in order. `source`: index of its file, or the number of files plus that
    of its hub id.
    """

    text: str
    source: int
    last: bool


def pieces(source: Source, text_field: str, option: str = "--data.path") -> Iterator[Piece]:
    """All documents of `source` in order, each cut into pieces; documents without text are left
    out.
    """
    for index, file in enumerate(source.files):
        for document in read_documents(file, text_field):
            for text, last in cut(document):
                yield Piece(text, index, last)
    for index, hub in enumerate(source.hubs, len(source.files)):
        for row in hub_rows(hub, text_field, option):
            for text, last in cut([row]):
                yield Piece(text, index, last)


def rows(source: Source, option: str = "--data.path") -> Iterator[Located]:
    """All rows of `source` in order, each with where it stands. Raises ValueError for files that
    have none.
    """
    for file in source.files:
        reader = ROW_READERS.get(form(file) or "")
        if reader is None:
            raise ValueError(
                f"{option} {file}: chats are rows, of {', '.join(ROW_READERS)} files or of the "
                "hub: give those, or train on text (--data.rows text)"
            )
        yield from reader(file)
    for hub in source.hubs:
        yield from table_rows(load_hub(hub, option), f"{option} {hub}")


def first_lines(source: Source, text_field: str, option: str = "--data.path") -> Iterator[Located]:
    """All rows of `source` in order, and of each of its texts the first line that has something,
    as the row of a `prompt`. Raises ValueError.
    """
    for file in source.files:
        if form(file) in ROW_READERS:
            yield from rows(replace(source, files=(file,), hubs=()), option)
            continue
        for document in read_documents(file, text_field):
            line = next((line for line in "".join(document).splitlines() if line.strip()), None)
            if line is not None:
                yield {"prompt": line}, str(file)
    yield from rows(replace(source, files=()), option)


def cut(blocks: Iterable[str], piece: int = PIECE) -> Iterator[tuple[str, bool]]:
    """(text, whether it is the last) pieces of at most `piece` characters, whatever the blocks of
    the document are.
    """
    rest = ""
    for block in blocks:
        rest, start = rest + block, 0
        while len(rest) - start > piece:
            end = seam(rest, start + piece // 2, start + piece)
            yield rest[start:end], False
            start = end
        rest = rest[start:]
    if rest:
        yield rest, True


def seam(text: str, low: int, high: int) -> int:
    """Where to cut in (low, high]: at the last line that is not indented, where byte-level
    tokenizers begin a word anyway, so that no token changes; else at a line, else before a space,
    else at `high`.
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
    """The split `train` of a hub id, in the cache of `datasets`; ValueError names the option."""
    import datasets

    identity, _, config = name.partition(":")
    try:
        return datasets.load_dataset(identity, config or None, split="train")
    except (OSError, ValueError, RuntimeError) as error:
        raise ValueError(
            f"{option} {name}: no such file or folder, and the hub gave no data set: {error}"
        ) from error


def hub_rows(name: str, text_field: str, option: str) -> Iterator[str]:
    table = load_hub(name, option)
    check_column(text_field, table.column_names, f"{option} {name}")
    yield from column_texts(table.select_columns([text_field]), text_field, name)
