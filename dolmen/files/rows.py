"""Files of rows: appended to for hours, and read while they grow.

A file of whole lines that is written for hours, and may be ended at any byte by a kill or a
power cut: what is there when it is opened again are the lines that were whole.

A line is one write, so a kill tears the last one alone, which is cut off then. After a power cut
what the last second wrote may be missing, or zeros, and goes too; all before it lasts.

A file of JSON rows that is read while it grows: what is new each time, through the gate.
"""

import errno
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from dolmen.core import filesystem
from dolmen.files import gate

LASTING = 1.0  # seconds between two times that the disk is asked to have all
LONGEST = 1 << 30  # bytes of a line


class Lines:
    """Written at its end alone, through no link, by one process at a time."""

    def __init__(self, file: Path, whole: Callable[[bytes], bool], new: bool = False):
        """The file, made where there is none; all from the first line that is not `whole` on is cut
        off. `new`: there must be none. Raises BlockingIOError where another process holds it, and
        OSError, of a link as well.
        """
        flags = os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW | (os.O_EXCL if new else 0)
        self.descriptor = os.open(file, flags, 0o666)
        if not filesystem.lock(self.descriptor, wait=False, optional=True):
            os.close(self.descriptor)
            raise BlockingIOError(errno.EWOULDBLOCK, os.strerror(errno.EWOULDBLOCK), str(file))
        self.count, end = 0, 0
        with open(self.descriptor, "rb", closefd=False) as stream:
            for line in iter(lambda: stream.readline(LONGEST), b""):
                if not (line.endswith(b"\n") and whole(line)):
                    break
                self.count, end = self.count + 1, end + len(line)
        os.ftruncate(self.descriptor, end)
        self._asked = time.monotonic()

    def add(self, line: bytes) -> None:
        """Write a line, its end included. Raises OSError, as of a disk that is full."""
        left = memoryview(line)
        while left:
            left = left[os.write(self.descriptor, left) :]
        self.count += 1
        if time.monotonic() - self._asked > LASTING:
            self.last()

    def last(self) -> None:
        """Make what was written survive a power cut."""
        os.fsync(self.descriptor)
        self._asked = time.monotonic()

    def close(self) -> None:
        """All of it lasts."""
        self.last()
        os.close(self.descriptor)


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
