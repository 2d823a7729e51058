"""The one gate for files that somebody else may have written, or a disk have damaged: what is read
is bounded in size and depth before it is parsed, and compared with a schema before it is used.

    bytes, at most `size` -> UTF-8 -> brackets counted -> parsed, strictly -> schema -> plain values

There are two ends: the plain values of a whole document, or Refused, whose one line begins with the
file's name. `kinds.py` says what each kind of file may hold.
"""

import json
import os
import re
import stat
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dolmen.files import yaml_values
from dolmen.files.schema import Mismatch, Schema, check

MIB = 2**20
# A string, to its end or the end of everything: possessive, so that no text takes longer than its
# length (0.15 s for 10 MB of a tokenizer.json).
STRING = re.compile(rb'"(?:[^"\\]++|\\.)*+"?', re.DOTALL)
NOT_BRACKETS = bytes(set(range(256)) - set(b"[]{}"))
STEPS = {ord("["): 1, ord("{"): 1, ord("]"): -1, ord("}"): -1}


class Refused(ValueError):
    """A file is not read: it is missing, damaged, too large, too deep, or not what its kind may
    hold. One line, which begins with the file's name.
    """


@dataclass(frozen=True)
class Kind:
    """A kind of file: what it may hold, and how much."""

    schema: Schema
    size: int = 16 * MIB
    """Most bytes of the file; of a row, where a file is read by rows."""
    depth: int = 32
    """Most brackets that are open at once. Python's own parser ends in RecursionError at about a
    thousand, and whatever walks the values later is recursive too.
    """
    constants: bool = False
    """Whether NaN and Infinity, which Python writes and JSON does not know, may stand where nobody
    reads them.
    """


def refuse(file: Path | str, reason: object) -> Refused:
    """Refused of `file`, in one short line that does nothing to a terminal; to be raised."""
    line = " ".join(str(reason).split())
    line = line if len(line) <= 1000 else f"{line[:997]}..."
    return Refused(f"{file}: {''.join(c if c.isprintable() else ascii(c)[1:-1] for c in line)}")


def read_bytes(file: Path | str, size: int) -> bytes:
    """The whole file. Raises Refused where it is missing, no regular file, or larger than
    `size` bytes.
    """
    try:
        if not stat.S_ISREG(os.stat(file).st_mode):
            raise refuse(file, "is a folder" if Path(file).is_dir() else "is no regular file")
        with open(file, "rb") as stream:
            data = stream.read(size + 1)
    except OSError as error:
        raise refuse(file, f"cannot be read: {error.strerror}") from error
    if len(data) > size:
        raise refuse(file, f"has more than {size:,} bytes, the most that such a file may have")
    return data


def read_text(file: Path | str, size: int) -> str:
    """The whole file as UTF-8, a byte order mark left out. Raises Refused as `read_bytes`
    does, and where it is not UTF-8.
    """
    return decoded(read_bytes(file, size), file)


def decoded(data: bytes, name: Path | str) -> str:
    """UTF-8 as text, a byte order mark left out. Raises Refused."""
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        byte = data[error.start]
        raise refuse(name, f"is not UTF-8 text: byte {byte:#04x} at {error.start}") from error


def read_json(file: Path | str, kind: Kind) -> Any:
    """The values of a JSON file. Raises Refused."""
    return parse_json(read_bytes(file, kind.size), file, kind)


def parse_json(data: bytes, name: Path | str, kind: Kind) -> Any:
    """The values of a JSON text; `name` stands for it in messages. Refused are also names given
    twice in one object, of which `json` keeps the last, and NaN and Infinity.
    """
    if (deep := json_depth(data)) > kind.depth:
        raise refuse(name, f"has {deep:,} brackets open at once, more than {kind.depth}")
    text = decoded(data, name)
    constant = None if kind.constants else _no_constant
    try:
        value = json.loads(text, object_pairs_hook=_unique, parse_constant=constant)
    except ValueError as error:  # of JSON, or of an integer with thousands of digits
        raise refuse(name, f"is not JSON: {error}") from error
    return checked(value, name, kind.schema)


def checked(value: Any, name: Path | str, schema: Schema) -> Any:
    """`value`, if `schema` allows it. Raises Refused."""
    try:
        check(value, schema)
    except Mismatch as error:
        raise refuse(name, error) from None
    return value


def read_json_lines(file: Path | str, kind: Kind) -> Iterator[tuple[int, Any]]:
    """(number from 1, values) of every line that is not blank, one in memory at a time. Raises
    Refused naming the line; `kind.size` is of one line.
    """
    if not Path(file).is_file():
        read_bytes(file, 0)  # says why
        raise refuse(file, "cannot be read")
    with open(file, "rb") as stream:
        for number, line in enumerate(iter(lambda: stream.readline(kind.size + 1), b""), 1):
            where = f"{file}, line {number}"
            if len(line) > kind.size:
                raise refuse(where, f"has more than {kind.size:,} bytes")
            if line.strip():
                yield number, parse_json(line, where, kind)


def read_yaml(file: Path | str, kind: Kind) -> Any:
    """The values of a YAML file, None of an empty one. Raises Refused."""
    text = read_text(file, kind.size)
    try:
        value = yaml_values.parse(text, kind.depth)
    except ValueError as error:
        raise refuse(file, f"is not a YAML file that dolmen reads: {error}") from error
    return checked(value, file, kind.schema)


def json_depth(data: bytes) -> int:
    """Most brackets that are open at once in a JSON text, counted without parsing: at least as many
    as a parser would open before it stops.
    """
    depth = most = 0
    for byte in STRING.sub(b"", data).translate(None, NOT_BRACKETS):
        depth += STEPS[byte]
        most = max(most, depth)
    return most


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        seen: set[str] = set()
        twice = next(name for name, _ in pairs if name in seen or seen.add(name))
        raise ValueError(f"{ascii(twice)[:80]} is given twice in one object")
    return found


def _no_constant(word: str) -> None:
    raise ValueError(f"{word} is no number of JSON")
