"""Files of rows that are appended to for hours (`Lines`), and read while they grow (`Tail`).

Problem: a kill or a power cut may end such a file at any byte.

Idea: a line is one write, so a kill tears only the last line, which is cut off when the file is
opened again. After a power cut, what the last SYNC_INTERVAL seconds wrote may be missing, or zeros,
and is cut off too; everything before it was synced.

`Tail` yields the JSON rows that are new since its last read, compared with a schema.
"""

import errno
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from dolmen.core import filesystem
from dolmen.files import gate

SYNC_INTERVAL = 1.0  # seconds between two fsyncs; each can take 10 ms and more on a disk
LONGEST = 1 << 30  # bytes of a line


class Lines:
    """A file of lines that one process at a time appends to, not through a link."""

    def __init__(self, file: Path, full: Callable[[bytes], bool], new: bool = False):
        """Open or create the file, lock it, and truncate it before the first line for which
        `whole(line)` is False. `count` is the number of lines that are left.

        `new`: it must not exist. Raises BlockingIOError if another process holds it, and OSError,
        also for a link.
        """
        flags = os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW | (os.O_EXCL if new else 0)
        self.descriptor = os.open(file, flags, 0o666)
        if not filesystem.lock(self.descriptor, wait=False, optional=True):
            os.close(self.descriptor)
            raise BlockingIOError(errno.EWOULDBLOCK, os.strerror(errno.EWOULDBLOCK), str(file))
        self.count, end = 0, 0
        with open(self.descriptor, "rb", closefd=False) as stream:
            for line in iter(lambda: stream.readline(LONGEST), b""):
                # the first torn line ends the file: nothing behind it was synced
                if not (line.endswith(b"\n") and full(line)):
                    break
                self.count, end = self.count + 1, end + len(line)
        os.ftruncate(self.descriptor, end)
        self._synced = time.monotonic()

    def add(self, line: bytes) -> None:
        """Append a line, which includes its newline. Raises OSError, for example on a full disk."""
        left = memoryview(line)
        while left:
            left = left[os.write(self.descriptor, left) :]
        self.count += 1
        if time.monotonic() - self._synced > SYNC_INTERVAL:
            self.sync()

    def sync(self) -> None:
        """Make what was written survive a power cut (fsync)."""
        os.fsync(self.descriptor)
        self._synced = time.monotonic()

    def close(self) -> None:
        """Sync and close the file."""
        self.sync()
        os.close(self.descriptor)


class Tail:
    """Reads the rows that were appended to a file since the last `read`. A file that was replaced,
    as a resumed run does with metrics.jsonl, is read from its beginning.
    """

    def __init__(self, file: Path, kind: gate.Kind):
        """`kind`: schema and limits of a row."""
        self.file, self.kind = file, kind
        self.refused = 0
        """Number of lines that were skipped because they are not rows of this kind."""
        self.first = False
        """True if the row just read is the first of a file."""
        self._at, self._inode = 0, (0, 0)

    def read(self) -> Iterator[Any]:
        """Yield new rows, one in memory at a time, up to the last complete line; none if the file
        is missing. Raises Refused for a path that is not a file.
        """
        if not self.file.exists():
            return
        with gate.open_file(self.file) as stream:
            stat = os.fstat(stream.fileno())
            if (stat.st_dev, stat.st_ino) != self._inode or stat.st_size < self._at:
                self._at, self._inode, self.refused = 0, (stat.st_dev, stat.st_ino), 0
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
