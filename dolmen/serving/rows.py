"""Rows to answer, of a file: in a .jsonl each line is an object with `prompt`, `query` (as
Pai-Megatron-Patch calls it) or `messages`; in a .txt each line is a prompt. What else a row has is
carried along to its answer.

    {"id": 7, "prompt": "Once upon a time", "adapter": "fr"}
    {"messages": [{"role": "user", "content": "Which is the highest mountain?"}]}
"""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dolmen.data.chats import ASSISTANT
from dolmen.data.readers import check_row_bytes, form, unpacked
from dolmen.files import gate
from dolmen.files.kinds import PROMPT_ROWS, TEXT_ROW

ANSWER = ("text", "tokens", "finish_reason", "logprobs", "samples")
"""Fields that an answer adds to its row."""


@dataclass(frozen=True)
class Row:
    """One that is to be answered."""

    where: str
    """File and line, for a person."""
    id: int | str
    """What its draws follow from: its own `id`, or else its line."""
    fields: dict[str, Any]
    """All of it: they are carried along."""

    @property
    def prompt(self) -> str | list[dict[str, Any]]:
        """A text, or the messages of a chat."""
        return next(self.fields[name] for name in PROMPT_ROWS if name in self.fields)

    def adapter(self, default: str | None) -> str | None:
        """What it is answered by beside the model; None: the model alone, as a row says by null."""
        return self.fields.get("adapter", default)


@dataclass(frozen=True)
class Line:
    """One that is not blank, as it stands in the file."""

    file: Path
    number: int
    """From 1."""
    content: bytes

    def row(self, max_bytes: int | None = None) -> Row:
        """Raises Refused for a line that is none, and for one of more than `max_bytes`."""
        where = f"{self.file}, line {self.number}"
        check_row_bytes(len(self.content), max_bytes, where, "--max-row-bytes")
        fields = READERS[form(self.file) or ""](self.content, where)
        return Row(where, fields.get("id", self.number), fields)


def check_file(file: Path) -> None:
    """Raises ValueError for a file of no known form, and where it cannot be read."""
    if form(file) not in READERS:
        raise ValueError(
            f"--input {file}: use a .jsonl (rows with `prompt`, `query` or `messages`) or a .txt "
            "(a prompt per line); each may have .gz or .zst behind"
        )
    with gate.opened(file):
        pass


def lines(file: Path) -> Iterator[Line]:
    """Raises ValueError for a file that cannot be unpacked, and for a line that no memory should
    hold.
    """
    with unpacked(file) as stream:
        for number, content in enumerate(iter(lambda: stream.readline(TEXT_ROW.size + 1), b""), 1):
            if len(content) > TEXT_ROW.size:  # the next would be its rest
                raise gate.refuse(f"{file}, line {number}", f"has over {TEXT_ROW.size:,} bytes")
            if content.strip():
                yield Line(file, number, content)


def _of_txt(line: bytes, where: str) -> dict[str, Any]:
    return {"prompt": gate.decoded(line, where).rstrip("\r\n")}


def _of_jsonl(line: bytes, where: str) -> dict[str, Any]:
    fields = gate.parse_json(line, where, TEXT_ROW)
    named = [name for name in PROMPT_ROWS if name in fields]
    if len(named) != 1:
        known = ", ".join(f"`{name}`" for name in PROMPT_ROWS)
        told = " and ".join(f"`{name}`" for name in named) or "none of them"
        raise gate.refuse(where, f"it must have one of {known}, and has {told}")
    gate.checked(fields, where, PROMPT_ROWS[named[0]])
    if taken := [name for name in ANSWER if name in fields]:
        raise gate.refuse(
            where, f"it has a field `{taken[0]}`, where its answer is written: rename that field"
        )
    if "messages" in fields and fields["messages"][-1]["role"] == ASSISTANT:
        raise gate.refuse(
            where, "its last message is the assistant's own: end with the one to be answered"
        )
    try:
        line_of(fields)
    except UnicodeEncodeError:
        raise gate.refuse(where, "it has half a character (a lone surrogate)") from None
    return fields


READERS = {".jsonl": _of_jsonl, ".txt": _of_txt}


# What ends a line for some programs, and is no end of a line of a .jsonl.
ENDS = {ord(end): f"\\u{ord(end):04x}" for end in "\u0085\u2028\u2029"}


def line_of(fields: dict[str, Any]) -> bytes:
    """A row as a line of a .jsonl. Raises UnicodeEncodeError for half a character."""
    return json.dumps(fields, ensure_ascii=False).translate(ENDS).encode() + b"\n"
