"""Reads files of documents, compressed or not.

Files as they are, and .gz and .zst ones as what is packed in them: streamed, to their very end,
and within bounds, as a few bytes can hold a disk full of zeros.

How a file becomes documents, by its suffix. Each reader gives, per document, its text in blocks,
so that no file is in memory at once but a .json one.

Parquet is read by pyarrow, in batches of rows. `datasets` is not used: it turns \\r\\n into \\n,
reads a file of text into one string, and refuses rows whose keys differ.
"""

import gzip
import io
import json
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO

import zstandard

from dolmen.files.gate import MIB, Kind, Refused, parse_json, refuse
from dolmen.files.kinds import TEXT_ROW
from dolmen.files.remote_file import TextFile, file_size, open_binary
from dolmen.files.storage import StorageError

PACKED = (".gz", ".zst")
# Text packs to a third or a tenth; the most repetitive logs to a hundredth.
MOST_TIMES = 256
ALWAYS = 1 << 24  # bytes that any file may unpack to
BATCH = 512  # rows of a table at once
BLOCK = 512  # packed bytes at once: zstd makes at most 128 KiB of 4 bytes


@contextmanager
def open_decompressed(file: TextFile) -> Iterator[BinaryIO]:
    """Context manager: open the file as a binary stream, decompressed if it is .gz or .zst. Raises
    ValueError, naming the file, for one that is damaged, truncated or unpacks to far too much.
    """
    suffix = file.suffix.lower()
    with open_binary(file) as packed:
        if suffix not in PACKED:
            yield packed
            return
        inner = gzip.GzipFile(fileobj=packed) if suffix == ".gz" else Zstandard(packed)
        # 128 KiB: the largest block of zstd
        with io.BufferedReader(Unpacked(file, inner), 1 << 17) as stream:
            yield stream


class Unpacked(io.RawIOBase):
    """Raw stream of a file's decompressed bytes (`inner`) that bounds their number."""

    def __init__(self, file: TextFile, inner: "gzip.GzipFile | Zstandard"):
        """`file`: path of the packed file. `inner`: stream of its decompressed bytes."""
        self.file, self.inner, self.count = file, inner, 0
        self.size = file_size(file)
        self.most = max(ALWAYS, MOST_TIMES * self.size)

    def readable(self) -> bool:
        """True, as io requires."""
        return True

    def readinto(self, buffer) -> int:
        """Read into `buffer`; return the number of bytes. Raises ValueError where the file is
        damaged, or unpacks to more than text would.
        """
        try:
            data = self.inner.read(len(buffer))
        except StorageError:
            raise
        except (EOFError, OSError, zlib.error, zstandard.ZstdError) as error:
            raise ValueError(f"{self.file} cannot be decompressed: {error}") from error
        self.count += len(data)
        # a decompression bomb
        if self.count > self.most:
            raise ValueError(
                f"{self.file}: {self.size:,} bytes decompress to more than {self.most:,}, which "
                "is implausible for text: decompress it yourself and give --data.path the result"
            )
        buffer[: len(data)] = data
        return len(data)


class Zstandard(io.RawIOBase):
    """Decompressed bytes of all frames of a zstd file. The reader of `zstandard` itself ends
    without an error where a file is truncated.
    """

    def __init__(self, packed: BinaryIO):
        """`packed`: the compressed stream."""
        self.packed, self.ready, self.rest = packed, b"", b""
        self.frame = None

    def read(self, size: int = -1) -> bytes:
        """Read at most `size` bytes (below 0: those of one decompressed block); b"" at the end.
        Raises EOFError for a truncated file, ZstdError for a damaged one.
        """
        while not self.ready:
            block = self.rest or self.packed.read(BLOCK)
            if not block:
                if self.frame is not None:
                    raise EOFError("the file ends before its last frame does")
                return b""
            # one decompressor per frame: they cannot be reused
            self.frame = self.frame or zstandard.ZstdDecompressor().decompressobj()
            self.ready, self.rest = self.frame.decompress(block), b""
            if self.frame.eof:
                self.rest, self.frame = self.frame.unused_data, None
        end = len(self.ready) if size < 0 else size
        data, self.ready = self.ready[:end], self.ready[end:]
        return data


# characters that are tokenised at once: 1 GB in one string would need 50 GB, and one core
PIECE = 1 << 18
LEAVE_OUT = "or leave the file out: move it, or name the others with a glob (notes/*.md)"
ROWS = Kind(dict[str, Any] | list[dict[str, Any]], size=1024 * MIB, depth=64, constants=True)
Located = tuple[dict[str, Any], str]
"""A row, and its file and number for error messages."""


def form(file: TextFile) -> str | None:
    """Return the suffix that decides how to read `file`, without that of compression; "" for a file
    that is read if it is UTF-8 text, None if it is not read.
    """
    packed = file.suffix.lower() in PACKED
    name = Path(file.stem) if packed else file
    suffix = name.suffix.lower()
    if packed and suffix == ".parquet":
        return None  # it has its own compression, and is read by parts
    if suffix in READERS:
        return suffix
    return None if suffix in OTHER_FORMATS else ""


def is_whole_file(file: TextFile) -> bool:
    """Return True if the file is one uncompressed text document, so that the document is the file's
    bytes.
    """
    return form(file) in TEXT and file.suffix.lower() not in PACKED


def looks_like_text(file: TextFile) -> bool:
    """Return True if the first 4,096 bytes of the file, decompressed, are UTF-8 text without zero
    bytes.
    """
    try:
        with open_decompressed(file) as stream:
            head = stream.read(4096)
    except StorageError:
        raise
    except (ValueError, OSError):
        return False
    try:
        head.decode()
    except UnicodeDecodeError as error:
        return error.start > len(head) - 4 and len(head) == 4096  # cut inside a character
    return b"\0" not in head


def read_documents(file: TextFile, text_field: str) -> Iterator[Iterable[str]]:
    """Yield the documents of a file, by its suffix, each as blocks of text; rows have their text in
    `text_field`. Raises ValueError naming the file and row.
    """
    return READERS[form(file) or ""](file, text_field)


def text_documents(file: TextFile, text_field: str) -> Iterator[Iterator[str]]:
    r"""Yield the whole file as one document, exact to the byte (`newline=""` keeps \r\n). Raises
    ValueError where it is not UTF-8.
    """

    def blocks() -> Iterator[str]:
        """Yield blocks of up to 4 PIECE (262,144) characters."""
        with (
            open_decompressed(file) as stream,
            io.TextIOWrapper(stream, "utf-8", newline="") as lines,
        ):
            try:
                while block := lines.read(4 * PIECE):
                    yield block
            except UnicodeDecodeError as error:
                byte = error.object[error.start]
                raise ValueError(
                    f"{file} is not UTF-8 text: {error.reason}, byte {byte:#04x}"
                ) from error

    yield blocks()


def jsonl_documents(file: TextFile, text_field: str) -> Iterator[list[str]]:
    """Yield the text of each row of a .jsonl, its field `text_field`, as a document of one
    block.
    """
    for row, where in jsonl_rows(file):
        yield [row_text(row, text_field, where)]


def jsonl_rows(file: TextFile, max_bytes: int | None = None) -> Iterator[Located]:
    """Yield each line that is not blank as (row, where). Raises ValueError for a line of more than
    `max_bytes`, before it is parsed.
    """
    with open_decompressed(file) as stream:
        for number, line in enumerate(lines_of(stream, file, max_bytes), 1):
            if line.strip():
                where = f"{file}, line {number}"
                yield parse_json(line, where, TEXT_ROW), where


def lines_of(stream: BinaryIO, file: TextFile, max_bytes: int | None = None) -> Iterator[bytes]:
    """Yield the lines of a stream, with their line ends. Raises ValueError, which names `file` and
    the line's number, for a line over `max_bytes`, or over what any row may have.
    """
    most = min(TEXT_ROW.size, max_bytes or TEXT_ROW.size)
    for number, line in enumerate(iter(lambda: stream.readline(most + 1), b""), 1):
        check_row_bytes(len(line), max_bytes, f"{file}, line {number}")
        if len(line) > TEXT_ROW.size:
            raise ValueError(
                f"{file}, line {number}: more than {TEXT_ROW.size:,} bytes, the most that a row "
                "may have: a long text can be a .txt file"
            )
        yield line


def check_row_bytes(
    size: int, max_bytes: int | None, where: str, option: str = "--data.max-row-bytes"
) -> None:
    """Raise Refused for a row of more than `max_bytes`, naming `where` and the option: it is
    rendered and tokenised as one text, which takes 3 s and 160 MB of memory per MB.
    """
    if max_bytes is not None and size > max_bytes:
        raise refuse(
            where,
            f"has more than {max_bytes:,} bytes: shorten it, or set a larger {option}",
        )


def small_rows(rows: Iterator[Located], max_bytes: int | None) -> Iterator[Located]:
    """Yield `rows`; raise Refused for one that would have more than `max_bytes` as a line of a
    .jsonl.
    """
    for row, where in rows:
        if max_bytes is not None:
            # the size that the same row would have in a .jsonl
            line = json.dumps(row, ensure_ascii=False, default=str)
            check_row_bytes(len(line.encode(errors="surrogatepass")), max_bytes, where)
        yield row, where


def json_documents(file: TextFile, text_field: str) -> Iterator[list[str]]:
    """Yield the text of each row of a .json, its field `text_field`, as a document of one block."""
    for row, where in json_rows(file):
        yield [row_text(row, text_field, where)]


def json_rows(file: TextFile, max_bytes: int | None = None) -> Iterator[Located]:
    """Yield the rows of a .json file, a list or a single row, as (row, where). Raises ValueError
    for a file that is too large, and Refused for malformed JSON.
    """
    with open_decompressed(file) as stream:
        # one byte more than allowed distinguishes "too large" from "exactly full"
        data = stream.read(ROWS.size + 1)
    if len(data) > ROWS.size:
        raise ValueError(
            f"{file}: more than {ROWS.size:,} bytes, the most that a .json file may have: write "
            "its rows as .jsonl"
        )
    content = parse_json(data, str(file), ROWS)
    rows = content if isinstance(content, list) else [content]
    located = ((row, f"{file}, row {number}") for number, row in enumerate(rows, 1))
    yield from small_rows(located, max_bytes)


def parquet_documents(file: TextFile, text_field: str) -> Iterator[list[str]]:
    """Yield the text of each row of a .parquet, its column `text_field`, as a document of one
    block. Raises Refused where the file is damaged or lacks the column.
    """
    with parquet(file, [text_field]) as batches:
        for text in column_texts(batches, text_field, str(file)):
            yield [text]


def parquet_rows(file: TextFile, max_bytes: int | None = None) -> Iterator[Located]:
    """Yield the rows of a .parquet file as (row, where). Raises Refused where it is damaged."""
    with parquet(file, None) as batches:
        yield from table_rows(batches, str(file), max_bytes)


Batches = Iterable[dict[str, list]]
"""Rows of a table in batches: the values of each column."""


@contextmanager
def parquet(file: TextFile, column_names: list[str] | None) -> Iterator[Batches]:
    """Context manager: the rows of a file's columns `column_names` (None: all). Errors while
    reading become Refused.
    """
    import pyarrow
    import pyarrow.parquet

    with open_binary(file) as stream:
        try:
            # the schema alone: no rows yet
            table = pyarrow.parquet.ParquetFile(stream)
        except StorageError:
            raise
        except (pyarrow.ArrowException, OSError) as error:
            raise refuse(str(file), f"is not parquet: {error}") from error
        for name in column_names or ():
            check_column(name, table.schema_arrow.names, str(file))
        try:
            yield (batch.to_pydict() for batch in table.iter_batches(BATCH, columns=column_names))
        except (Refused, StorageError):
            raise
        except Exception as error:  # of pyarrow, which has a dozen types
            raise refuse(str(file), f"is damaged parquet: {error}") from error


def table_rows(batches: Batches, where: str, max_bytes: int | None = None) -> Iterator[Located]:
    """Yield the rows of a table as (row, where)."""
    rows = (
        dict(zip(batch, values, strict=True))
        for batch in batches
        for values in zip(*batch.values(), strict=True)
    )
    located = ((row, f"{where}, row {number}") for number, row in enumerate(rows, 1))
    yield from small_rows(located, max_bytes)


def column_texts(batches: Batches, text_field: str, where: str) -> Iterator[str]:
    """Yield the texts of one column of a table. Raises Refused for a value that is not text."""
    number = 0
    for batch in batches:
        for value in batch[text_field]:
            number += 1
            yield text_of(value, text_field, f"{where}, row {number}")


def check_column(text_field: str, columns: Sequence[str], where: str) -> None:
    """Raise Refused, listing the columns, unless `text_field` is one of them."""
    if text_field not in columns:
        raise refuse(where, f"no {text_field!r} but columns {field_hint(columns)}")


def row_text(row: dict[str, Any], text_field: str, where: str) -> str:
    """Return the text in a row's field `text_field`. Raises ValueError, saying what to do, if it
    has no such field or it is not text.
    """
    if text_field not in row:
        problem = f"no {text_field!r} but keys {field_hint(list(row))}"
        raise refuse(where, f"{problem}; {LEAVE_OUT}")
    return text_of(row[text_field], text_field, where)


def field_hint(names: Sequence[str]) -> str:
    """Return the first field names of a row for an error message, with a hint on how to read such
    rows.
    """
    keys = ", ".join(str(name)[:40] for name in names[:6])
    # a chat data set read as text is the usual mistake
    if chat := [name for name in ("messages", "conversations", "conversation") if name in names]:
        return f"{keys}: {chat_hint(chat[0])}"
    if "instruction" in names and "output" in names:
        return (
            f"{keys}: these are instruction data, but --data.rows is text: dolmen train sft, or "
            "--data.rows chats, trains on the responses; --data.text-field output trains on them "
            "as plain text"
        )
    return f"{keys}: use --data.text-field"


def chat_hint(name: str) -> str:
    """Return the hint of an error message for rows of text whose field `name` holds chats."""
    return (
        f"{name!r} has chats, but --data.rows is text: dolmen train sft, or --data.rows chats, "
        "trains on the assistant's turns; to train on all as text, render each into one field "
        "with tokenizer.apply_chat_template(row, tokenize=False), and name it with "
        "--data.text-field"
    )


def text_of(value: object, text_field: str, where: str) -> str:
    """Return a field's value as text, "" for null, which leaves the document out. Raises ValueError
    where it is not text, or cannot be written as UTF-8.
    """
    if isinstance(value, list) and value and isinstance(value[0], dict):
        raise refuse(where, chat_hint(text_field))
    if value is not None and not isinstance(value, str):
        raise refuse(
            where,
            f"{text_field!r} is a {type(value).__name__}, not text: use --data.text-field with a "
            "field that holds text",
        )
    try:
        (value or "").encode()
    except UnicodeEncodeError as error:
        raise refuse(where, f"{text_field!r} is not UTF-8 text: {error}") from error
    return value or ""


OTHER_FORMATS = frozenset(
    ".html .htm .xhtml .xml .svg .css .csv .tsv .yaml .yml .toml .ini .cfg .lock .ipynb .rtf .bin "
    ".idx .pt .pth .safetensors .npy .parquet".split()
)
"""Suffixes of markup, tables, settings and tensors: no plain text, also where it is UTF-8."""
TEXT = (".txt", ".md", ".py", "")  # a file is a document
READERS: dict[str, Callable[[TextFile, str], Iterator[Iterable[str]]]] = {
    **dict.fromkeys(TEXT, text_documents),
    ".jsonl": jsonl_documents,
    ".json": json_documents,
    ".parquet": parquet_documents,
}
# files that hold rows, which may be more than text
ROW_READERS: dict[str, Callable[[TextFile, int | None], Iterator[Located]]] = {
    ".jsonl": jsonl_rows,
    ".json": json_rows,
    ".parquet": parquet_rows,
}
SUPPORTED = (
    f"supported are {', '.join(filter(None, READERS))}, other UTF-8 text, each but .parquet also "
    f"compressed as {' or '.join(PACKED)}, and Megatron's .bin with its .idx in the same folder"
)
