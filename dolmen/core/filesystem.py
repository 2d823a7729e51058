"""Paths as users write them, and file locks (flock), which the kernel frees when the process that
holds one ends, however it ends.

The holder of a lock may delete its file while it holds it. A process that waited for the lock, or
opened the file just before, checks that the path still names the locked file: otherwise a third
process would lock a new file of this name, and both would continue. (filelock does the same for
lock files of its own, but can lock neither an open file of rows nor the mark of a folder that is
being built.)

Over NFS, Linux turns the lock of a file that is open for writing into one that holds for all hosts.
"""

import errno
import fcntl
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO

NO_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP)  # of a file system without locks


def lock(file: int | IO, wait: bool = True, optional: bool = False) -> bool:
    """Take the exclusive lock of an open file, which is held until the file is closed; return True
    once it is held, and False where another process holds it and `wait` is False. Raises OSError
    where the file system has no locks, unless the lock is `optional`: then it returns True without
    one.
    """
    try:
        fcntl.flock(file, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
    except BlockingIOError:
        return False
    except OSError as error:
        if not optional or error.errno not in NO_LOCKS:
            raise
    return True


def names_file(file: int | IO, path: Path) -> bool:
    """Return True if the open file is the one that `path` names."""
    descriptor = file if isinstance(file, int) else file.fileno()
    try:
        return os.path.samestat(os.fstat(descriptor), os.stat(path))
    except FileNotFoundError:
        return False


def open_locked(path: Path, wait: bool = True, optional: bool = False) -> int | None:
    """Open the file `path`, created if it is missing, and lock it; return its descriptor, or None
    where another process holds the lock and `wait` is False. Raises OSError, for a symbolic link as
    well, and where the file system has no locks, unless the lock is `optional`: then the file is
    open without one.
    """
    while True:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o666)
        try:
            locked = lock(descriptor, wait, optional)
            # the holder may have deleted the file while we waited: then lock the new one
            if locked and names_file(descriptor, path):
                return descriptor
        except BaseException:  # Ctrl-C too: who catches it keeps no open file
            os.close(descriptor)
            raise
        os.close(descriptor)
        if not locked:
            return None


@contextmanager
def hold_lock(path: Path) -> Iterator[None]:
    """Context manager that holds an exclusive lock between processes: on the lock file `path`,
    created at the start and deleted at the end. Waits until it is free; locks nothing on file
    systems without locks.
    """
    descriptor = open_locked(path, optional=True)
    assert descriptor is not None
    try:
        yield
    finally:
        path.unlink(missing_ok=True)  # while it is locked, see open_locked
        os.close(descriptor)


def expand(name: str | Path) -> Path:
    """Return the path with `~` and `~user` expanded; an unknown user's name stays as it is, as in a
    shell (Path.expanduser raises RuntimeError).
    """
    return Path(os.path.expanduser(name))


def is_url(name: str | Path) -> bool:
    """Return True if a name begins with a lower-case scheme and ://, such as s3://bucket/folder,
    which fsspec reads (files/storage.py). A Path is never one, as it joins the two slashes.
    """
    return re.match(r"[a-z][a-z0-9+.-]*://", str(name)) is not None


def may_be_hub_id(name: str) -> bool:
    """Return True if a name has the form of a Hugging Face hub id, `name` or `org/name`. False for
    `org/name` below a local folder that exists: there it is a misspelled path.
    """
    word = r"[A-Za-z0-9][\w.-]*"
    here = "/" in name and Path(name).parent.exists()
    return re.fullmatch(rf"({word}/)?{word}", name) is not None and not here


def is_absent(name: str | Path) -> bool:
    """Return True if a name can only be a local folder (it has not the form of a hub id or a URL),
    and there is no such folder.
    """
    return not (expand(name).is_dir() or may_be_hub_id(str(name)) or is_url(name))
