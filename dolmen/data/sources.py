"""From an entry of `--data.path` to documents: what is a file, a folder, a glob or a hub id, and
how each is read.

Parquet and the hub are read through `datasets`. Text and jsonl are not, because `datasets` turns
\\r\\n into \\n and reads a file into one string, and refuses jsonl whose keys differ between lines;
a jsonl line is one `json.loads`.
"""

import glob
import json
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path
from typing import NamedTuple

from dolmen.data.quickstart_corpus import STANDARD_LIBRARY, standard_library_files

# characters that are tokenised at once: 1 GB in one string would need 50 GB, and one core
PIECE = 1 << 18


@dataclass(frozen=True)
class Source:
    """Documents that are mixed as one: `files`, then the rows of the hub's data sets `hubs`."""

    name: str
    weight: Fraction | None
    files: tuple[Path, ...]
    hubs: tuple[str, ...]


class Piece(NamedTuple):
    """A part of a document, in order. `source`: index of its file, or the number of files plus that
    of its hub id.
    """

    text: str
    source: int
    last: bool


def resolve(entries: Sequence[str], option: str = "--data.path") -> tuple[Source, ...]:
    """One source for all entries without weights, or one for each entry with a weight. ValueError
    (FileNotFoundError for a path that does not exist) names `option` and the entry; nothing but
    folders and sizes is read.
    """
    if not entries:
        raise ValueError(f"no data: use {option} with a file, a folder, a glob or a hub id")
    parsed = [parse_weight(entry, option) for entry in entries]
    unweighted = [entry for entry, weight in parsed if weight is None]
    if unweighted and len(unweighted) < len(parsed):
        raise ValueError(
            f"{option}: {len(parsed) - len(unweighted)} of {len(parsed)} entries have a weight, "
            f"{unweighted[0]} has none: give each a weight (0.5:{unweighted[0]}) or none"
        )
    if unweighted:
        return (gather(unweighted, None, option),)
    return tuple(gather([entry], weight, option) for entry, weight in parsed)


def parse_weight(entry: str, option: str) -> tuple[str, Fraction | None]:
    match = re.fullmatch(r"(\d+\.?\d*|\.\d+):(.+)", entry)
    if not match or Path(entry).exists():
        return entry, None
    if not (weight := Fraction(match[1])):
        raise ValueError(f"{option} {entry}: the weight is 0; leave the entry out")
    return match[2], weight


def gather(entries: Sequence[str], weight: Fraction | None, option: str) -> Source:
    files, hubs = [], []
    for entry in entries:
        found = entry_files(entry, option)
        files += found or ()
        hubs += [entry] if found is None else []
    files = list(dict.fromkeys(files))  # two globs may name one file
    if files and not hubs and not any(file.stat().st_size for file in files):
        raise ValueError(f"{option} {', '.join(entries[:3])}: {len(files)} files with 0 bytes")
    name = ", ".join(entries[:3]) + (f" and {len(entries) - 3} more" if len(entries) > 3 else "")
    return Source(name, weight, tuple(files), tuple(hubs))


def entry_files(entry: str, option: str) -> list[Path] | None:
    """The absolute files of `entry`, sorted, or None for a hub id."""
    path = Path(entry).expanduser()
    if entry == STANDARD_LIBRARY and not path.exists():
        return standard_library_files()
    if path.is_file():
        if path.suffix not in READERS:
            raise ValueError(
                f"{option} {entry}: cannot read {path.suffix or 'a file without a suffix'}; "
                f"{SUPPORTED}"
            )
        return [path.absolute()]
    if not path.is_dir() and not glob.has_magic(entry):
        if is_hub_id(entry):
            return None
        raise FileNotFoundError(f"{option} {entry}: no such file or folder")
    if path.is_dir():
        found = [
            file
            for file in path.rglob("*")
            if not any(part.startswith(".") for part in file.relative_to(path).parts)
        ]
    else:
        found = [Path(file) for file in glob.glob(str(path), recursive=True)]
    files = sorted(file.absolute() for file in found if file.suffix in READERS and file.is_file())
    if not files:
        raise FileNotFoundError(
            f"{option} {entry}: {len(found):,} files and folders, none to read; {SUPPORTED}"
        )
    return files


def is_hub_id(entry: str) -> bool:
    """Whether a path that does not exist can be meant for the hub: `name`, `org/name`, either with
    `:config`. A name in a folder that exists, or one with the suffix of a file, is a path that was
    misspelled.
    """
    name = r"[A-Za-z0-9][\w.-]*"
    return (
        re.fullmatch(rf"({name}/)?{name}(:[\w.-]+)?", entry) is not None
        and Path(entry).suffix not in READERS
        and not ("/" in entry and Path(entry).parent.exists())
    )


def pieces(source: Source, text_field: str, option: str = "--data.path") -> Iterator[Piece]:
    """All documents of `source` in order, each cut into pieces; documents without text are left
    out.
    """
    for index, file in enumerate(source.files):
        for document in READERS[file.suffix](file, text_field):
            for text, last in cut(document):
                yield Piece(text, index, last)
    for index, hub in enumerate(source.hubs, len(source.files)):
        for row in hub_rows(hub, text_field, option):
            for text, last in cut([row]):
                yield Piece(text, index, last)


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


def read_text(file: Path, text_field: str) -> Iterator[Iterator[str]]:
    """The whole file as one document, exact to the byte (`newline=""` keeps \\r\\n)."""

    def blocks() -> Iterator[str]:
        with open(file, encoding="utf-8", newline="") as lines:
            try:
                while block := lines.read(4 * PIECE):
                    yield block
            except UnicodeDecodeError as error:
                byte = error.object[error.start]
                raise ValueError(
                    f"{file} is not UTF-8 text: {error.reason}, byte {byte:#04x}"
                ) from error

    yield blocks()


def read_jsonl(file: Path, text_field: str) -> Iterator[list[str]]:
    with open(file, "rb") as lines:
        for number, line in enumerate(lines, 1):
            if not line.strip():
                continue
            try:
                row = json.loads(line)
            except ValueError as error:  # of JSON or of UTF-8
                raise ValueError(f"{file}, line {number}: not JSON: {error}") from error
            if not isinstance(row, dict) or text_field not in row:
                found = (
                    f"keys {', '.join(list(row)[:6])}"
                    if isinstance(row, dict)
                    else f"a {type(row).__name__}"
                )
                raise ValueError(
                    f"{file}, line {number}: no {text_field!r} but {found}: use --data.text-field"
                )
            yield [text_of(row[text_field], text_field, f"{file}, line {number}")]


def read_parquet(file: Path, text_field: str) -> Iterator[list[str]]:
    import datasets
    import pyarrow
    import pyarrow.parquet

    try:
        columns = pyarrow.parquet.read_schema(file).names
    except pyarrow.ArrowInvalid as error:
        raise ValueError(f"{file} is not parquet: {error}") from error
    check_column(text_field, columns, str(file))
    table = datasets.load_dataset(
        "parquet",
        data_files=glob.escape(str(file)),
        split="train",
        streaming=True,
        columns=[text_field],
    )
    for text in column(table, text_field, str(file)):
        yield [text]


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
    yield from column(table.select_columns([text_field]), text_field, name)


def column(table, text_field: str, where: str) -> Iterator[str]:
    """The texts of a data set; by batches, because `datasets` takes 13 times as long row by row."""
    number = 0
    for batch in table.iter(batch_size=512):
        for value in batch[text_field]:
            number += 1
            yield text_of(value, text_field, f"{where}, row {number}")


def check_column(text_field: str, columns: Sequence[str], where: str) -> None:
    if text_field not in columns:
        raise ValueError(
            f"{where}: no {text_field!r} but columns {', '.join(columns[:6])}: use "
            f"--data.text-field"
        )


def text_of(value: object, text_field: str, where: str) -> str:
    """The text, "" for null (which leaves the document out). ValueError if it is no text that UTF-8
    can write.
    """
    if value is not None and not isinstance(value, str):
        raise ValueError(
            f"{where}: {text_field!r} is a {type(value).__name__}, not text: use --data.text-field"
        )
    try:
        (value or "").encode()
    except UnicodeEncodeError as error:
        raise ValueError(f"{where}: {text_field!r} is not UTF-8 text: {error}") from error
    return value or ""


READERS: dict[str, Callable[[Path, str], Iterator[Iterable[str]]]] = {
    ".txt": read_text,
    ".py": read_text,
    ".jsonl": read_jsonl,
    ".parquet": read_parquet,
}
WHOLE_FILE = (".txt", ".py")  # a file is a document
SUPPORTED = f"readable are {', '.join(READERS)}"
