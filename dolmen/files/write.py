"""Files that are written so that nothing of somebody else's is: through no link, and into no file
that has another name too.
"""

import errno
import os
import stat
from contextlib import suppress
from pathlib import Path
from typing import TextIO

NEW = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW


def replace(file: Path, content: bytes | str, lasting: bool = True) -> None:
    """Give the file this content, whole or not at all: it is written beside it, under its name with
    `.part`, and renamed. What has these names is taken away, and not written to. `lasting`: it
    outlives a power cut. Raises OSError, for a folder and for a device too, which are no files.
    """
    if file.exists() and not file.is_file():
        number = errno.EISDIR if file.is_dir() else errno.EINVAL
        raise OSError(number, os.strerror(number), str(file))
    part = file.with_name(f"{file.name}.part")
    part.unlink(missing_ok=True)  # of a killed run
    with open(os.open(part, NEW, 0o666), "wb") as stream:
        stream.write(content.encode() if isinstance(content, str) else content)
        stream.flush()
        if lasting:
            os.fsync(stream.fileno())
    part.rename(file)


def folder(inside: Path, name: str | Path) -> Path:
    """The folder `name` ("a/b") below `inside`, made where there is none. Raises OSError where it,
    or one on the way from `inside`, is a link or a file.
    """
    made = inside
    for part in Path(name).parts:
        made = made / part
        with suppress(FileExistsError):
            made.mkdir()
        if not stat.S_ISDIR(made.lstat().st_mode):
            raise NotADirectoryError(errno.ENOTDIR, "it is a link or a file, no folder", str(made))
    return made


def append(file: Path) -> TextIO:
    """The file, opened to write lines at its end; one with another name too is made anew. Raises
    OSError, of a link as well.
    """
    flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW
    descriptor = os.open(file, flags, 0o666)
    if os.fstat(descriptor).st_nlink > 1:
        os.close(descriptor)
        replace(file, file.read_bytes())
        descriptor = os.open(file, flags, 0o666)
    return open(descriptor, "a", buffering=1, encoding="utf-8")
