"""A part of an open file, as a file of its own."""

import io
from typing import BinaryIO, cast


class Window(io.RawIOBase):
    """A readable file that consists of `size` bytes of another open file, from `start`."""

    def __init__(self, file: BinaryIO | io.BufferedIOBase, start: int, size: int):
        self.file = cast(io.BufferedIOBase, file)  # `open` returns both types
        self.start, self.size, self.at = start, size, 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        at = offset + (0, self.at, self.size)[whence]
        if at < 0:
            raise OSError(f"position {at} of {self.size} bytes")
        self.at = at
        return at

    def readinto(self, buffer) -> int:
        self.file.seek(self.start + self.at)
        data = self.file.read(min(len(buffer), max(0, self.size - self.at)))
        buffer[: len(data)] = data
        self.at += len(data)
        return len(data)
