"""Text in object storage, read there in blocks without a local copy: it is read once, from its
beginning to its end, and tokenised on the way.

    RemoteFile     an object at a URL, with what readers of text use of a Path
    RemoteStream   its bytes, seekable (parquet begins at its end); blocks are requested ahead of
                   the reader, THREADS of them at most, so that 128 MiB are in memory

Whatever a request returns has been checked for its length and repeated after errors (storage.py).
An object that is replaced while it is read would be text of two versions: it is looked up again
when the reader is done.
"""

import io
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import BinaryIO, cast

from dolmen.files.storage import BLOCK, THREADS, RemoteFolder, StoredFile


@dataclass(frozen=True, order=True)
class RemoteFile:
    """An object at a URL, with its size and time."""

    url: str
    stored: StoredFile = field(compare=False)

    @property
    def name(self) -> str:
        """Last part of the URL, as it stands: a query is not cut off, and %-escapes are not
        decoded.
        """
        return PurePosixPath(self.url).name

    @property
    def stem(self) -> str:
        """The name without its suffix."""
        return PurePosixPath(self.url).stem

    @property
    def suffix(self) -> str:
        """Suffix of the name, with its dot."""
        return PurePosixPath(self.url).suffix

    def __str__(self) -> str:
        """The URL."""
        return self.url

    @contextmanager
    def open(self) -> Iterator[BinaryIO]:
        """Context manager: a buffered stream of the object's bytes. Raises StorageError, also while
        it is read, and ValueError at the end where the object has changed meanwhile.
        """
        above, _, name = self.url.rpartition("/")
        remote = RemoteFolder(above)
        with io.BufferedReader(RemoteStream(remote, name, self.stored.size), 1 << 20) as stream:
            yield cast(BinaryIO, stream)
        if remote.find(name) != self.stored:
            raise ValueError(f"{self.url} changed while it was read; start again")


class RemoteStream(io.RawIOBase):
    """Raw stream of the object `name`, of `size` bytes, in a folder."""

    def __init__(self, remote: RemoteFolder, name: str, size: int):
        """Read the object `name` of the folder `remote` from its beginning; nothing is requested
        before the first read.
        """
        self._remote, self._name, self._size = remote, name, size
        self._position = 0
        self._blocks: dict[int, Future[bytes]] = {}  # by their number in the object
        self._last = -2  # number of the block that was read last
        self._pool = ThreadPoolExecutor(THREADS)

    def readable(self) -> bool:
        """True, as io requires."""
        return True

    def seekable(self) -> bool:
        """True, as io requires."""
        return True

    def tell(self) -> int:
        """Return the position in bytes."""
        return self._position

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        """Move to a position, and return it."""
        base = {io.SEEK_SET: 0, io.SEEK_CUR: self._position, io.SEEK_END: self._size}[whence]
        self._position = max(0, base + offset)
        return self._position

    def readinto(self, buffer) -> int:
        """Read at most len(buffer) bytes at the current position into `buffer`, fewer where a block
        of the object ends; advance the position and return their number, 0 at the end. Raises
        StorageError.
        """
        if self._position >= self._size:
            return 0
        number, offset = divmod(self._position, BLOCK)
        data = self._block(number)[offset : offset + len(buffer)]
        buffer[: len(data)] = data
        self._position += len(data)
        return len(data)

    def _block(self, number: int) -> bytes:
        """Return a block. Where it follows the one before, those after it are requested too."""
        if number != self._last:
            ahead = THREADS if self._last == number - 1 else 1
            wanted = range(number, min(number + ahead, -(-self._size // BLOCK)))
            self._blocks = {n: self._blocks.get(n) or self._request(n) for n in wanted}
            self._last = number
        return self._blocks[number].result()

    def _request(self, number: int) -> Future[bytes]:
        """Request a block."""
        start = number * BLOCK
        stop = min(start + BLOCK, self._size)
        return self._pool.submit(self._remote.read_block, self._name, start, stop)

    def close(self) -> None:
        """Forget what was requested."""
        self._pool.shutdown(wait=False, cancel_futures=True)
        self._blocks.clear()
        super().close()


TextFile = Path | RemoteFile


@contextmanager
def open_binary(file: TextFile) -> Iterator[BinaryIO]:
    """Context manager: a seekable stream of a file's bytes, local or at a URL. Raises OSError for a
    local file; for a remote one StorageError, and ValueError at the end where it has changed
    meanwhile.
    """
    with open(file, "rb") if isinstance(file, Path) else file.open() as stream:
        yield stream


def file_size(file: TextFile) -> int:
    """Size of a file in bytes."""
    return file.stat().st_size if isinstance(file, Path) else file.stored.size
