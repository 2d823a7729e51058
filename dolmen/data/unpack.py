"""Files as they are, and .gz and .zst ones as what is packed in them: streamed, to their very end,
and within bounds, as a few bytes can hold a disk full of zeros.
"""

import gzip
import io
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

import zstandard

PACKED = (".gz", ".zst")
# Text packs to a third or a tenth; the most repetitive logs to a hundredth.
MOST_TIMES = 256
ALWAYS = 1 << 24  # bytes that any file may unpack to
BLOCK = 512  # packed bytes at once: zstd makes at most 128 KiB of 4 bytes


@contextmanager
def unpacked(file: Path) -> Iterator[BinaryIO]:
    """The bytes of `file`, unpacked. ValueError names a file that is damaged, cut short or unpacks
    to far too much.
    """
    suffix = file.suffix.lower()
    with open(file, "rb") as packed:
        if suffix not in PACKED:
            yield packed
            return
        inner = gzip.GzipFile(fileobj=packed) if suffix == ".gz" else Zstandard(packed)
        with io.BufferedReader(Unpacked(file, inner), 1 << 17) as stream:
            yield stream


class Unpacked(io.RawIOBase):
    """`inner`, the unpacked bytes of `file`, counted."""

    def __init__(self, file: Path, inner: "gzip.GzipFile | Zstandard"):
        self.file, self.inner, self.count = file, inner, 0
        self.size = file.stat().st_size
        self.most = max(ALWAYS, MOST_TIMES * self.size)

    def readable(self) -> bool:
        return True

    def readinto(self, buffer) -> int:
        """Raises ValueError where the file is damaged, or unpacks to more than a text would."""
        try:
            data = self.inner.read(len(buffer))
        except (EOFError, OSError, zlib.error, zstandard.ZstdError) as error:
            raise ValueError(f"{self.file} cannot be unpacked: {error}") from error
        self.count += len(data)
        if self.count > self.most:
            raise ValueError(
                f"{self.file}: {self.size:,} bytes unpack to more than {self.most:,}, which no "
                f"text does: unpack it yourself if it is meant, and give --data.path the result"
            )
        buffer[: len(data)] = data
        return len(data)


class Zstandard(io.RawIOBase):
    """All frames of a zstd file, one after the other. `zstandard`'s own reader ends in
    silence where a file is cut short.
    """

    def __init__(self, packed: BinaryIO):
        self.packed, self.ready, self.rest = packed, b"", b""
        self.frame = None

    def read(self, size: int = -1) -> bytes:
        """At most `size` bytes; b"" at the end. Raises EOFError, ZstdError."""
        while not self.ready:
            block = self.rest or self.packed.read(BLOCK)
            if not block:
                if self.frame is not None:
                    raise EOFError("the file ends before its last frame does")
                return b""
            self.frame = self.frame or zstandard.ZstdDecompressor().decompressobj()
            self.ready, self.rest = self.frame.decompress(block), b""
            if self.frame.eof:
                self.rest, self.frame = self.frame.unused_data, None
        data, self.ready = self.ready[:size], self.ready[size:]
        return data
