"""Writes files without touching those of others: never over an existing output, through a link, or
into a file with a second name.
"""

import errno
import json
import os
import stat
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any, TextIO

from dolmen.core import filesystem
from dolmen.core.filesystem import expand
from dolmen.core.messages import os_error_as_value
from dolmen.files import gate

NEW = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW


def check_new(option: str, name: str | Path, parents: bool = False) -> Path:
    """Return the path of an output file that `option` names. Call it before anything slow. Raises
    ValueError if the file exists (a device such as /dev/null too), if its folder does not (unless
    `parents` are made), or if the folder cannot be written to.
    """
    file = expand(name)
    if os.path.lexists(file):
        raise ValueError(f"{option} {name} exists: give another name, or move it away")
    _check_parent(f"{option} {name}", file, parents)
    return file


def check_new_folder(name: str | Path) -> Path:
    """Return the path of an output folder, which may exist if it is empty; nothing is created.
    Raises ValueError if it has files or is none, or if the nearest existing folder above it is not
    writable.
    """
    folder = expand(name)
    if folder.is_dir():
        # a folder made beforehand is fine, one with files may be somebody's work
        if any(folder.iterdir()):
            raise ValueError(
                f"{name} exists and is not empty: give another folder, or move it away"
            )
    elif os.path.lexists(folder):
        raise ValueError(f"{name} exists and is not a folder: give another name")
    _check_parent(str(name), folder, parents=True)
    return folder


def _check_parent(words: str, target: Path, parents: bool) -> None:
    """Raise ValueError, which begins with `words`, unless the folder of `target` exists (with
    `parents` the nearest that exists) and can be written to.
    """
    above = target.absolute().parents
    parent = next(p for p in above if os.path.lexists(p)) if parents else above[0]
    if not os.path.lexists(parent):
        raise ValueError(
            f"{words}: the folder {parent} does not exist: create it, or give another name"
        )
    if not parent.is_dir():
        raise ValueError(f"{words}: {parent} is not a folder: give another name")
    if not os.access(parent, os.W_OK | os.X_OK):
        raise ValueError(f"{words}: {parent} is not writable: give another name")


def replace(file: Path, content: bytes | str, lasting: bool = True) -> None:
    """Replace the content of a file atomically: a new file NAME.part is written and renamed.
    Existing files and links of these names are unlinked, never written through. `lasting`: fsync,
    so that it survives a power cut. Raises OSError, also for a folder or a device.
    """
    if file.exists() and not file.is_file():
        number = errno.EISDIR if file.is_dir() else errno.EINVAL
        raise OSError(number, os.strerror(number), str(file))
    part = file.with_name(f"{file.name}.part")
    part.unlink(missing_ok=True)  # left by a killed run
    with open(os.open(part, NEW, 0o666), "wb") as stream:
        stream.write(content.encode() if isinstance(content, str) else content)
        stream.flush()
        if lasting:
            os.fsync(stream.fileno())
    # atomic: readers see the old or the new content
    part.rename(file)


def check_json(to: str | None) -> None:
    """Raise ValueError if the file of --json exists already or cannot be made. None, and "-" for
    stdout, are fine.
    """
    if to not in (None, "-"):
        check_new("--json", to)


def save_json(content: object, to: str | None, indent: int = 1) -> None:
    """Write `content` as JSON to the file of --json, or to stdout for "-"; nothing for None. Raises
    ValueError if it cannot be written.
    """
    text = json.dumps(content, indent=indent) + "\n"
    if to == "-":
        print(text, end="")
    elif to is not None:
        with os_error_as_value(f"--json {to}"):
            replace(expand(to), text)


def folder(inside: Path, name: str | Path) -> Path:
    """Create the folder `name` ("a/b") below the folder `inside`, if it is missing, and return its
    path. Raises OSError if it, or one on the way from `inside`, is a link or a file.
    """
    path = inside
    for part in Path(name).parts:
        path = path / part
        with suppress(FileExistsError):
            path.mkdir()
        # lstat: a link to a folder could lead outside
        if not stat.S_ISDIR(path.lstat().st_mode):
            raise NotADirectoryError(
                errno.ENOTDIR, "it is a link or a file, not a folder", str(path)
            )
    return path


def append(file: Path) -> TextIO:
    """Open a file to append lines of text, and return the stream; the file is created if it is
    missing. A file with a second hard link is copied first, so that the other name keeps its
    content. Raises OSError, also for a symbolic link.
    """
    flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW
    descriptor = os.open(file, flags, 0o666)
    # a snapshot made with hard links (cp -l) shares the inode
    if os.fstat(descriptor).st_nlink > 1:
        os.close(descriptor)
        # a new inode, which only this name has
        replace(file, file.read_bytes())
        descriptor = os.open(file, flags, 0o666)
    return open(descriptor, "a", buffering=1, encoding="utf-8")


# Files of rows that are appended to for hours (`Lines`), and read while they grow (`Tail`).
#
# Problem: a kill or a power cut may end such a file at any byte.
#
# Idea: a line is one write, so a kill tears only the last line, which is cut off when the file is
# opened again. After a power cut, what the last SYNC_INTERVAL seconds wrote may be missing, or
# zeros, and is cut off too; everything before it was synced.
#
# `Tail` yields the JSON rows that are new since its last read, compared with a schema.

SYNC_INTERVAL = 1.0  # seconds between two fsyncs; each can take 10 ms and more on a disk
LONGEST = 1 << 30  # bytes of a line


class Lines:
    """A file of lines that one process at a time appends to, not through a link."""

    def __init__(self, file: Path, full: Callable[[bytes], bool], new: bool = False):
        """Open or create the file, lock it, and truncate it before the first line for which
        `full(line)` is False. `count` is the number of lines that are left.

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
