"""Output file of `dolmen generate --output`: a line per row, in order, each whole or not at all.

    out.jsonl           rows 0, 1, 2, ..., as soon as all before them are finished
    out.jsonl.journal   the options; then the rows that finished before their turn

A finished row is written to one of the two at once, so a killed process loses none, and --resume
reads both and generates the other rows alone. The journal is created before the output, and deleted
after the last row.
"""

import hashlib
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from dolmen.core.messages import Failed, brief, plural
from dolmen.files import gate, write
from dolmen.files.gate import Kind, Refused
from dolmen.files.kinds import JOURNAL_HEAD, JOURNAL_LINE, JOURNAL_ROW
from dolmen.files.write import LONGEST, Lines
from dolmen.serving.prompt_file import OUTPUT_FIELDS, PromptRow, json_line

FORMAT = 1
OUTPUT_ROW = Kind(dict[str, Any], size=JOURNAL_ROW.size, depth=JOURNAL_ROW.depth, constants=True)


def journal_path(output: Path) -> Path:
    """Return the path of the journal that exists while an output is unfinished."""
    return output.with_name(f"{output.name}.journal")


def digest(file: Path) -> str:
    """Return a hash of all bytes of a file, in hex (blake2b, 128 bits)."""
    hasher = hashlib.blake2b(digest_size=16)
    with gate.open_file(file) as stream:
        # 1 MiB at a time: inputs may be larger than memory
        for block in iter(lambda: stream.read(1 << 20), b""):
            hasher.update(block)
    return hasher.hexdigest()


def check_output(
    output: Path,
    rows: int | None,
    resume: bool,
    options: Mapping[str, Any],
    input_digest: str,
) -> bool:
    """Return whether rows are left to generate. `rows`: number of rows of the input; None: not
    counted yet.

    `options` are those that decide the completions, as plain values; `input_digest` is that of the
    input. Raises ValueError where the output exists (without `resume`), or was started with another
    input or other options (with it).
    """
    journal, there = journal_path(output), os.path.lexists(output)
    unfinished = os.path.lexists(journal)
    if there and not output.is_file():
        raise ValueError(f"--output {output} exists and is not a file: give another name")
    if not resume:
        if unfinished:
            raise ValueError(
                f"--output {output} is unfinished (see {journal.name} next to it): use --resume, "
                "or delete both"
            )
        write.check_new("--output", output)
    elif unfinished:
        _check_head(journal, there, options, input_digest)
    elif there and rows is not None:
        # without a journal the output is complete, or is not ours
        complete = sum(1 for _ in gate.read_json_lines(output, OUTPUT_ROW))
        if complete != rows:
            raise ValueError(
                f"--resume: {output} has {plural(complete, 'row')} of {rows:,}, but {journal.name} "
                "with its options is missing: give another --output"
            )
        return False
    return True


def _check_head(journal: Path, there: bool, options: Mapping[str, Any], input_digest: str) -> None:
    """Raise ValueError where the journal is damaged, or was started with another input or other
    options. `there`: the output exists.
    """
    with gate.open_file(journal) as stream:
        line = stream.readline(JOURNAL_HEAD.size)
    if not (there or line.endswith(b"\n")):  # killed as it began
        return
    if not line.endswith(b"\n"):
        raise ValueError(f"--resume: {journal} is damaged: delete it and the output, or repair it")
    head = gate.parse_json(line, f"{journal}, line 1", JOURNAL_HEAD)
    if head["input"] != input_digest:
        raise ValueError(
            f"--resume: the rows of --input differ from those that {journal} was started with: "
            "give those, or another --output"
        )
    before = head["options"]
    for name in sorted({*before, *options}):
        if before.get(name) != options.get(name):
            raise ValueError(
                f"--resume: {name} was {brief(before.get(name))} when {journal} was started, but "
                f"is {brief(options.get(name))}: use the same, or give another --output"
            )


def check_finished(output: Path, rows: Iterable[PromptRow]) -> None:
    """Raise ValueError for the first line of the output that does not belong to its row, one line
    per row.

    Lines behind an incomplete one are not read: they will be cut off.
    """
    remaining = iter(rows)
    with gate.open_file(output) as stream:
        for number, line in enumerate(iter(lambda: stream.readline(LONGEST), b""), 1):
            if not line.strip():
                continue
            if not line.endswith(b"\n") or (fields := _parse_object(line)) is None:
                return
            row = next(remaining, None)
            if row is None or not _belongs_to(fields, row):
                what = "is behind the last row's"
                raise ValueError(
                    f"--resume: {output}, line {number}: it "
                    f"{what if row is None else f'does not belong to {row.where}'}: the output "
                    "was changed after it was written: restore it, or give another --output"
                )


def _belongs_to(fields: Mapping[str, Any], row: PromptRow) -> bool:
    """Return whether an output line (`fields`) belongs to input row `row`: it has all fields of the
    row with the same values, at least one field of a completion, and no others.
    """
    carried = {name: value for name, value in fields.items() if name not in OUTPUT_FIELDS}
    return len(carried) < len(fields) and json_line(carried) == json_line(row.fields)


class OutputFile:
    """The output and its journal, open for writing. `held`: finished rows that wait in the journal
    for rows before them.
    """

    def __init__(self, output: Path, options: Mapping[str, Any], input_digest: str):
        """Open the output and its journal for writing, new or as an earlier run left them; rows of
        the journal that are next in order are moved to the output. `options`, `input_digest`: what
        decides the completions, for the first line of a new journal. Raises ValueError if another
        process writes to them, and OSError.
        """
        self.file = journal_path(output)
        self.held: dict[int, dict[str, Any]] = {}
        try:
            self.journal = Lines(self.file, self._hold)
        except BlockingIOError:
            raise ValueError(f"--output {output} is being written by another process") from None
        # its first line has the options
        resumed = self.journal.count > 0
        if not resumed:
            self.journal.add(
                json_line({"format": FORMAT, "options": dict(options), "input": input_digest})
            )
            # the options must be on disk before the first row, or --resume could not check them
            self.journal.sync()
        self.output = Lines(output, _is_object, new=not resumed)
        # rows before that were released into the output in the earlier run
        self.held = {row: answer for row, answer in self.held.items() if row >= self.output.count}
        self._write_next_held()

    def _hold(self, line: bytes) -> bool:
        """Remember the finished row of a journal line in `held`; return False for a damaged
        line.
        """
        try:
            entry = gate.parse_json(line, self.file, JOURNAL_LINE)
        except Refused:
            return False
        # the first line has none
        if "row" in entry:
            self.held[entry["row"]] = entry["answer"]
        return True

    def has(self, row: int) -> bool:
        """Return whether a row is finished, in the output or the journal."""
        return row < self.output.count or row in self.held

    @property
    def count(self) -> int:
        """Number of finished rows, in the output and the journal."""
        return self.output.count + len(self.held)

    def add(self, row: int, answer: dict[str, Any]) -> None:
        """Write the fields of finished row `row` to the output if it is the next in order (and
        after it those of the journal that follow), else to the journal. Raises Failed if the disk
        does not take it.
        """
        self.held[row] = answer
        try:
            # next in order: written without passing through the journal
            if row == self.output.count:
                self._write_next_held()
            else:
                self.journal.add(json_line({"row": row, "answer": answer}))
        except OSError as error:
            raise Failed(
                f"completions cannot be written next to {self.file} ({error.strerror}): fix that, "
                "and use --resume",
                final=True,
            ) from error

    def _write_next_held(self) -> None:
        """Append to the output all held rows that are next in order, up to the first that is
        missing.
        """
        # `count` rises with each line
        while (answer := self.held.pop(self.output.count, None)) is not None:
            self.output.add(json_line(answer))

    def close(self) -> None:
        """Sync the output and the journal to the disk, and close both."""
        self.output.close()
        self.journal.close()

    def finish(self) -> None:
        """Delete the journal, as all rows are written."""
        self.file.unlink()


def _parse_object(line: bytes) -> dict[str, Any] | None:
    """Parse a line of the output; None if it is not a JSON object."""
    try:
        return gate.parse_json(line, "", OUTPUT_ROW)
    except Refused:
        return None


def _is_object(line: bytes) -> bool:
    """Return whether a line of the output is a JSON object."""
    return _parse_object(line) is not None
