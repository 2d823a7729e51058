"""Answers as they are written: a line per row, in the rows' order, each whole or not at all.

    out.jsonl           rows 0, 1, 2, ..., as soon as all before them are there
    out.jsonl.journal   what was asked; then the rows that were ready before their turn

A row that is ready is in one of the two at once, so a process that is killed loses none, and who
goes on reads both and answers the others alone. The journal is made before the output, and goes
when the last row is there.
"""

import hashlib
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from dolmen.core.messages import Failed, counted, shown
from dolmen.files import gate, write
from dolmen.files.gate import Kind, Refused
from dolmen.files.kinds import JOURNAL_HEAD, JOURNAL_LINE, JOURNAL_ROW
from dolmen.files.rows import LONGEST, Lines
from dolmen.files.schema import Object
from dolmen.serving.rows import ANSWER as ADDED
from dolmen.serving.rows import Row, line_of

FORMAT = 1
ANSWER = Kind(Object(), size=JOURNAL_ROW.size, depth=JOURNAL_ROW.depth, constants=True)


def journal_of(output: Path) -> Path:
    """What lies beside an output that is not finished."""
    return output.with_name(f"{output.name}.journal")


def digest(file: Path) -> str:
    """Of all bytes of a file."""
    found = hashlib.blake2b(digest_size=16)
    with gate.opened(file) as stream:
        for block in iter(lambda: stream.read(1 << 20), b""):
            found.update(block)
    return found.hexdigest()


def check(
    output: Path, rows: int | None, resume: bool, asked: Mapping[str, Any], read: str
) -> bool:
    """Whether answers to so many `rows` (None: not known yet) can be written, before work begins;
    False where all are there already. `asked` are the options that decide them, as plain values,
    `read` is the digest of the input. Raises ValueError where they are not to be written there.
    """
    journal, there = journal_of(output), os.path.lexists(output)
    unfinished = os.path.lexists(journal)
    if there and not output.is_file():
        raise ValueError(f"--output {output} exists and is no file: give another name")
    if not resume:
        if unfinished:
            raise ValueError(
                f"--output {output} was begun and is not finished ({journal.name} is beside it): "
                "use --resume, or delete both"
            )
        write.check_new("--output", output)
    elif unfinished:
        _check_head(journal, there, asked, read)
    elif there and rows is not None:
        found = sum(1 for _ in gate.read_json_lines(output, ANSWER))
        if found != rows:
            raise ValueError(
                f"--resume: {output} has {counted(found, 'row')} of {rows:,}, and no "
                f"{journal.name} beside it says what was asked: give another --output"
            )
        return False
    return True


def _check_head(journal: Path, there: bool, asked: Mapping[str, Any], read: str) -> None:
    """Raises ValueError where other answers were begun than are asked for now."""
    with gate.opened(journal) as stream:
        line = stream.readline(JOURNAL_HEAD.size)
    if not (there or line.endswith(b"\n")):  # killed as it began
        return
    if not line.endswith(b"\n"):
        raise ValueError(f"--resume: {journal} is damaged: delete it and the output, or mend it")
    head = gate.parse_json(line, f"{journal}, line 1", JOURNAL_HEAD)
    if head["input"] != read:
        raise ValueError(
            f"--resume: the rows of --input are others than {journal} was begun with: give those, "
            "or another --output"
        )
    before = head["asked"]
    for name in sorted({*before, *asked}):
        if before.get(name) != asked.get(name):
            raise ValueError(
                f"--resume: {name} was {shown(before.get(name))} when {journal} was begun, and is "
                f"{shown(asked.get(name))}: say the same, or give another --output"
            )


def check_rows(output: Path, rows: Iterable[Row]) -> None:
    """Raises ValueError for the first line that is no answer to the row in its place, of the `rows`
    that are to be answered. Lines behind one that is torn are not read: they will be cut off.
    """
    wanted = iter(rows)
    with gate.opened(output) as stream:
        for number, line in enumerate(iter(lambda: stream.readline(LONGEST), b""), 1):
            if not line.strip():
                continue
            if not line.endswith(b"\n") or (found := _object(line)) is None:
                return
            row = next(wanted, None)
            if row is None or not _answers(found, row):
                what = "stands behind the last row's answer"
                raise ValueError(
                    f"--resume: {output}, line {number}: it "
                    f"{what if row is None else f'is no answer to {row.where}'}: the output was "
                    "changed after it was written: put it back as it was, or give another --output"
                )


def _answers(found: Mapping[str, Any], row: Row) -> bool:
    """Whether a line has all of a row as it is carried along, and an answer."""
    carried = {name: value for name, value in found.items() if name not in ADDED}
    return len(carried) < len(found) and line_of(carried) == line_of(row.fields)


class Answers:
    """An output that is open, and its journal."""

    def __init__(self, output: Path, asked: Mapping[str, Any], read: str):
        """As `check` has allowed. Raises ValueError where another process writes it; OSError."""
        self.file = journal_of(output)
        self.held: dict[int, dict[str, Any]] = {}
        try:
            self.journal = Lines(self.file, self._hold)
        except BlockingIOError:
            raise ValueError(f"--output {output} is being written by another process") from None
        begun = self.journal.count > 0
        if not begun:
            self.journal.add(line_of({"format": FORMAT, "asked": dict(asked), "input": read}))
            self.journal.last()
        self.output = Lines(output, _is_object, new=not begun)
        self.held = {row: answer for row, answer in self.held.items() if row >= self.output.count}
        self._release()

    def _hold(self, line: bytes) -> bool:
        """Whether a line of the journal is whole; the answer in it is held."""
        try:
            found = gate.parse_json(line, self.file, JOURNAL_LINE)
        except Refused:
            return False
        if "row" in found:
            self.held[found["row"]] = found["answer"]
        return True

    def has(self, row: int) -> bool:
        """Whether it is answered."""
        return row < self.output.count or row in self.held

    @property
    def count(self) -> int:
        """Rows that are answered."""
        return self.output.count + len(self.held)

    def add(self, row: int, answer: dict[str, Any]) -> None:
        """It is written where it is the next, else kept in the journal until it is. Raises Failed
        where the disk does not take it.
        """
        self.held[row] = answer
        try:
            if row == self.output.count:
                self._release()
            else:
                self.journal.add(line_of({"row": row, "answer": answer}))
        except OSError as error:
            raise Failed(
                f"answers cannot be written beside {self.file} ({error.strerror}): mend that, and "
                "go on with --resume",
                final=True,
            ) from error

    def _release(self) -> None:
        while (answer := self.held.pop(self.output.count, None)) is not None:
            self.output.add(line_of(answer))

    def close(self) -> None:
        """All of it lasts, whether or not the last row is there."""
        self.output.close()
        self.journal.close()

    def finish(self) -> None:
        """The last row is there, and lasts."""
        self.file.unlink()


def _object(line: bytes) -> dict[str, Any] | None:
    try:
        return gate.parse_json(line, "", ANSWER)
    except Refused:
        return None


def _is_object(line: bytes) -> bool:
    return _object(line) is not None
