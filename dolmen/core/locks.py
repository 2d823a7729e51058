"""Locks on files (flock), which the kernel frees when the process that holds one ends, however.

The holder of a lock may delete its file while it holds it. Whoever waited for the lock, or opened
the file just before, checks that the path still names the locked file: otherwise a third process
would lock a new file of this name, and both would go on. (filelock does the same for lock files of
its own, but locks neither a file of rows that is written nor the mark of a folder being built.)

Over NFS, Linux makes the lock of a file that is open for writing one of all hosts.
"""

import errno
import fcntl
import os
from pathlib import Path
from typing import IO

NO_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP)  # of a file system without locks


def lock(file: int | IO, wait: bool = True, optional: bool = False) -> bool:
    """Lock an open file until it is closed. Return False where another process holds the lock and
    `wait` is False. Raises OSError where the file system has no locks, unless the lock is
    `optional`: then it returns True without one.
    """
    try:
        fcntl.flock(file, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
    except BlockingIOError:
        return False
    except OSError as error:
        if not optional or error.errno not in NO_LOCKS:
            raise
    return True


def is_at(file: int | IO, path: Path) -> bool:
    """Whether the open file is the one that `path` names."""
    descriptor = file if isinstance(file, int) else file.fileno()
    try:
        return os.path.samestat(os.fstat(descriptor), os.stat(path))
    except FileNotFoundError:
        return False


def open_locked(path: Path, wait: bool = True, optional: bool = False) -> int | None:
    """Open the file `path`, made if there is none, and lock it; return its descriptor, or None
    where another process holds it and `wait` is False. Raises OSError, of a link as well.
    """
    while True:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o666)
        try:
            held = lock(descriptor, wait, optional)
            if held and is_at(descriptor, path):
                return descriptor
        except OSError:
            os.close(descriptor)
            raise
        os.close(descriptor)
        if not held:
            return None
