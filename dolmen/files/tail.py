"""A file of JSON rows that is read while it grows: what is new each time, through the gate."""

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from dolmen.files import gate


class Tail:
    """The rows of `file`, those that are new at each `read`. A file that was made anew, as a run
    that goes on does with metrics.jsonl, is read from its beginning.
    """

    def __init__(self, file: Path, kind: gate.Kind):
        self.file, self.kind = file, kind
        self.refused = 0
        """Lines that were left out, as they are no rows of this kind."""
        self.first = False
        """Whether the row just read is the first of a file."""
        self._at, self._of = 0, (0, 0)

    def read(self) -> Iterator[Any]:
        """Rows, one in memory at a time, up to the last whole line; none where there is no file.
        Raises Refused where the place is taken by what is no file.
        """
        if not self.file.exists():
            return
        with gate.opened(self.file) as stream:
            found = os.fstat(stream.fileno())
            if (found.st_dev, found.st_ino) != self._of or found.st_size < self._at:
                self._at, self._of, self.refused = 0, (found.st_dev, found.st_ino), 0
                self.first = True
            stream.seek(self._at)
            for line in iter(lambda: stream.readline(self.kind.size + 1), b""):
                if len(line) <= self.kind.size and not line.endswith(b"\n"):
                    return  # it is being written, or was cut short
                self._at += len(line)
                try:
                    row = gate.parse_json(line, self.file, self.kind) if line.strip() else None
                except gate.Refused:
                    self.refused += 1
                else:
                    if row is not None:
                        yield row
                        self.first = False
