"""Reading of files that somebody else may have written, or a disk may have damaged: JSON, JSON
lines, YAML and text.

    bytes, at most `size` -> UTF-8 -> brackets counted -> parsed, strictly -> schema -> plain values

Problem: a parser trusts its input. 100 kB of brackets end Python's json in RecursionError and
libyaml's composer in a segmentation fault, 9 bytes of YAML aliases expand to gigabytes, and a field
of another type fails far from here.

Idea: size and depth are bounded before parsing, and a schema (schema.py) is compared before any
value is used. There are two results: the plain values of a whole document, or Refused, whose single
line begins with the file's name. kinds.py has the schema and the limits of each kind of file.
"""

import json
import os
import re
import stat
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import Any, BinaryIO

from dolmen.files.schema import Mismatch, check_value

MIB = 2**20
# First and last line of a YAML file that dolmen writes: one that lacks the last was cut short.
FIRST, LAST = "# Written by dolmen. If the last line is not ..., the file was cut.\n", "\n...\n"
# A string, to its end or the end of everything: possessive, so that no text takes longer than its
# length (0.15 s for 10 MB of a tokenizer.json).
STRING = re.compile(rb'"(?:[^"\\]++|\\.)*+"?', re.DOTALL)
NOT_BRACKETS = bytes(set(range(256)) - set(b"[]{}"))
STEPS = {ord("["): 1, ord("{"): 1, ord("]"): -1, ord("}"): -1}


class Refused(ValueError):
    """Raised for a file that is missing, damaged, too large, too deep, or not of its kind. The
    message is one line that begins with the file's name.
    """


class RefusedLine(Refused):
    """Raised for one line of a file; those before it were read."""


@dataclass(frozen=True)
class Kind:
    """A kind of file: its schema and its limits."""

    schema: Any
    """Type hint of the values, as schema.py checks it."""
    size: int = 16 * MIB
    """Most bytes of the file; of a row, where a file is read by rows."""
    depth: int = 32
    """Most brackets that are open at once. Python's own parser ends in RecursionError at about a
    thousand, and whatever walks the values later is recursive too.
    """
    constants: bool = False
    """Allow NaN and Infinity, which Python writes and JSON does not know, where nobody reads them.
    """


def refuse(file: Path | str, reason: object) -> Refused:
    """Return Refused for `file`, for the caller to raise: one line of at most 1,000 printable
    characters of `reason`.
    """
    # parsers' messages have newlines, and text of the file
    line = " ".join(str(reason).split())
    line = line if len(line) <= 1000 else f"{line[:997]}..."
    return Refused(f"{file}: {''.join(c if c.isprintable() else ascii(c)[1:-1] for c in line)}")


@contextmanager
def open_file(file: Path | str) -> Iterator[BinaryIO]:
    """Open a file to read bytes. Raises Refused if it is missing or not a regular file, and for any
    OSError within the context, as reading may fail.
    """
    try:
        if not stat.S_ISREG(os.stat(file).st_mode):
            raise refuse(file, "is a folder" if Path(file).is_dir() else "is not a regular file")
        with open(file, "rb") as stream:
            yield stream
    except OSError as error:
        raise refuse(file, f"cannot be read: {error.strerror}") from error


def read_bytes(file: Path | str, size: int) -> bytes:
    """Return the content of a file. Raises Refused if it is missing, no regular file or unreadable,
    or has over `size` bytes.
    """
    with open_file(file) as stream:
        # not just `size`: Python allocates as much as is requested
        data = stream.read(min(os.fstat(stream.fileno()).st_size, size) + 1)
    if len(data) > size:
        raise refuse(file, f"has more than {size:,} bytes, the most that such a file may have")
    return data


def read_text(file: Path | str, size: int) -> str:
    """Return the content of a file as text, without a byte order mark. Raises Refused if it is
    missing or unreadable, has over `size` bytes, or is not UTF-8.
    """
    return decode(read_bytes(file, size), file)


def decode(data: bytes, name: Path | str) -> str:
    """Return bytes decoded from UTF-8, without a byte order mark. Raises Refused, which begins with
    `name`.
    """
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        byte = data[error.start]
        raise refuse(name, f"is not UTF-8 text: byte {byte:#04x} at {error.start}") from error


def read_json(file: Path | str, kind: Kind) -> Any:
    """Read a JSON file within the limits of `kind`, and return its values. Raises Refused."""
    return parse_json(read_bytes(file, kind.size), file, kind)


def parse_json(data: bytes, name: Path | str, kind: Kind) -> Any:
    """Parse JSON bytes, nested no deeper than `kind.depth` (their size is not checked here), check
    `kind`'s schema, and return the values; `name` stands for the text in messages.

    Raises Refused also for a name that is twice in one object, of which `json` would keep the last,
    and for NaN and Infinity unless `kind.constants`.
    """
    if (deep := json_depth(data)) > kind.depth:
        raise refuse(name, f"has {deep:,} brackets open at once, more than {kind.depth}")
    text = decode(data, name)
    constant = None if kind.constants else _no_constant
    try:
        # depth is bounded by now
        value = json.loads(text, object_pairs_hook=_unique_names, parse_constant=constant)
    except ValueError as error:  # of JSON, or of an integer with thousands of digits
        raise refuse(name, f"is not JSON: {error}") from error
    return check_schema(value, name, kind.schema)


def check_schema(value: Any, name: Path | str, schema: Any) -> Any:
    """Return `value` unchanged if the type hint `schema` allows it. Raises Refused, which begins
    with `name`.
    """
    try:
        check_value(value, schema)
    except Mismatch as error:
        raise refuse(name, error) from None
    return value


def check_form(row: Mapping[str, Any], name: Path | str, forms: Mapping[str, Any]) -> str:
    """Return which of the fields `forms` (name -> type hint of a row with it) a row has. Raises
    Refused, which begins with `name`, unless it is exactly one, and for a row that its hint does
    not allow.
    """
    present = [field for field in forms if field in row]
    if len(present) != 1:
        known = ", ".join(f"`{field}`" for field in forms)
        found = " and ".join(f"`{field}`" for field in present) or "none of them"
        raise refuse(name, f"it must have exactly one of {known}, but has {found}")
    check_schema(row, name, forms[present[0]])
    return present[0]


def read_json_lines(file: Path | str, kind: Kind) -> Iterator[tuple[int, Any]]:
    """Yield (number from 1, values) of each line of a JSON lines file that is not blank. Raises
    Refused for a missing or unreadable file, and RefusedLine, which names the line, for one that is
    too long or not as `kind` has it.
    """
    with open_file(file) as stream:
        yield from json_lines(stream, file, kind)


def json_lines(stream: BinaryIO, name: Path | str, kind: Kind) -> Iterator[tuple[int, Any]]:
    """Yield (number from 1, values) of each line of a stream of JSON lines that is not blank, one
    in memory at a time.

    `kind.size` limits one line. Raises RefusedLine, which names the line, for one that is too long,
    not JSON, or not as the schema of `kind` has it.
    """
    for number, line in enumerate(iter(lambda: stream.readline(kind.size + 1), b""), 1):
        if not line.strip():
            continue
        where = f"{name}, line {number}"
        try:
            if len(line) > kind.size:
                raise refuse(where, f"has more than {kind.size:,} bytes")
            row = parse_json(line, where, kind)
        except Refused as error:
            raise RefusedLine(str(error)) from error
        yield number, row


def read_yaml(file: Path | str, kind: Kind) -> Any:
    """Return the values of a YAML file; None for an empty one. Raises Refused.

    A file that `seal_yaml` wrote must have its end: text cut at a line is valid YAML that lacks
    options.
    """
    # PyYAML takes 15 ms to import, and the help of a recipe reads no file
    from dolmen.files import yaml_values

    text = read_text(file, kind.size)
    if (text.startswith(FIRST) or FIRST.startswith(text or "-")) and not text.endswith(LAST):
        raise refuse(file, "is truncated: its last line is not '...', as its first line requires")
    try:
        value = yaml_values.parse_yaml(text, kind.depth)
    except ValueError as error:
        raise refuse(file, f"is not valid YAML: {error}") from error
    return check_schema(value, file, kind.schema)


def seal_yaml(text: str) -> str:
    """Return the text of a YAML file with a first and a last line by which `read_yaml` notices a
    truncated file.
    """
    return f"{FIRST}{text.rstrip()}{LAST}"


def json_depth(data: bytes) -> int:
    """Return the nesting depth of a JSON text, counted without parsing: at least what a parser
    would reach before it stops.
    """
    brackets = STRING.sub(b"", data).translate(None, NOT_BRACKETS)
    return max(accumulate(map(STEPS.__getitem__, brackets)), default=0)


def _unique_names(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Return the pairs of a JSON object as a dict. Raises ValueError for a name that occurs
    twice.
    """
    unique = dict(pairs)
    if len(unique) < len(pairs):
        seen: set[str] = set()
        twice = next(name for name, _ in pairs if name in seen or seen.add(name))
        raise ValueError(f"{ascii(twice)[:80]} is given twice in one object")
    return unique


def _no_constant(word: str) -> None:
    """Raise ValueError for NaN, Infinity and -Infinity."""
    raise ValueError(f"{word} is not a number in JSON")
