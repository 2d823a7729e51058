"""A file of whole lines that is written for hours, and may be ended at any byte by a kill or a
power cut: what is there when it is opened again are the lines that were whole.

A line is one write, so a kill tears the last one alone, which is cut off then. After a power cut
what the last second wrote may be missing, or zeros, and goes too; all before it lasts.
"""

import errno
import fcntl
import os
import time
from collections.abc import Callable
from pathlib import Path

LASTING = 1.0  # seconds between two times that the disk is asked to have all
LONGEST = 1 << 30  # bytes of a line
NO_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP)  # of a file system without them


class Lines:
    """Written at its end alone, through no link, by one process at a time."""

    def __init__(self, file: Path, whole: Callable[[bytes], bool], new: bool = False):
        """The file, made where there is none; all from the first line that is not `whole` on is cut
        off. `new`: there must be none. Raises BlockingIOError where another process holds it, and
        OSError, of a link as well.
        """
        flags = os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW | (os.O_EXCL if new else 0)
        self.descriptor = os.open(file, flags, 0o666)
        try:
            fcntl.flock(self.descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            if error.errno not in NO_LOCKS:
                os.close(self.descriptor)
                raise
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
        """What was written outlives a power cut."""
        os.fsync(self.descriptor)
        self._asked = time.monotonic()

    def close(self) -> None:
        """All of it lasts."""
        self.last()
        os.close(self.descriptor)
