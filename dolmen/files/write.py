"""Writes files without touching those of others: never over an existing output, through a link, or
into a file with a second name.
"""

import errno
import json
import os
import stat
from contextlib import suppress
from pathlib import Path
from typing import TextIO

from dolmen.core.filesystem import expand
from dolmen.core.messages import os_error_as_value

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
    """Return the path of an output folder, which may exist if it is empty. Raises ValueError as
    `check_new`, with the parents of the folder made where they are missing.
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
    """Create the folder `name` ("a/b") below `inside` if needed, and return it. Raises OSError if
    it, or one on the way from `inside`, is a link or a file.
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
    """Open a file to append lines; a file with a second hard link is copied first, so that the
    other name keeps its content. Raises OSError, also for a symbolic link.
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
