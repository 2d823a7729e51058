"""A part of an open file, as a file of its own."""

import io
from typing import BinaryIO, cast


class Window(io.RawIOBase):
    """A readable file that consists of `size` bytes of another open file, from `start`."""

    def __init__(self, file: BinaryIO | io.BufferedIOBase, start: int, size: int):
        """`start`, `size`: bytes of `file`, which stays open as long as the window is used."""
        self.file = cast(io.BufferedIOBase, file)  # `open` returns both types
        self.start, self.size, self.at = start, size, 0

    def readable(self) -> bool:
        """True: it can be read."""
        return True

    def seekable(self) -> bool:
        """True: it can seek."""
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        """Move to a position within the window and return it. Raises OSError for a negative one."""
        at = offset + (0, self.at, self.size)[whence]
        if at < 0:
            raise OSError(f"position {at} of {self.size} bytes")
        self.at = at
        return at

    def readinto(self, buffer) -> int:
        """Read into a buffer, at most to the end of the window; return the number of bytes. Moves
        the underlying file.
        """
        self.file.seek(self.start + self.at)
        data = self.file.read(min(len(buffer), max(0, self.size - self.at)))
        buffer[: len(data)] = data
        self.at += len(data)
        return len(data)
