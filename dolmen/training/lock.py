"""One run at a time in a folder: a file in it that a process holds while it trains."""

import errno
import fcntl
import os
import time
from pathlib import Path

from dolmen.training import folder

NO_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP)  # what a file system without them says


def take(out: Path, patience: float = 0) -> int | None:
    """Hold the run's folder until `free`, or until the process ends; None where the file system has
    no locks. Raises Unusable if another run still holds it after `patience` seconds (the process
    that a restart replaces may be dying), or if it cannot be held.

    A file is locked, and not the folder: over NFS, Linux makes a lock of a file that is open for
    writing one of all hosts, and a lock of a folder one of this host.
    """
    end = time.monotonic() + patience
    try:
        out.mkdir(parents=True, exist_ok=True)
        while (descriptor := _held(out / folder.LOCK)) is None:
            if time.monotonic() > end:
                raise folder.Unusable(
                    f"{out} is in use by another run: wait for it, or give another --out"
                )
            time.sleep(0.1)
    except OSError as error:
        if error.errno in NO_LOCKS:
            return None
        raise folder.Unusable(
            f"{out / folder.LOCK} cannot be locked ({error.strerror}): mend it, or give another "
            "--out"
        ) from None
    return descriptor


def _held(file: Path) -> int | None:
    """A descriptor that holds `file`, made if there is none; None if somebody else holds it. Raises
    OSError.
    """
    descriptor = os.open(file, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o666)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        # who held it may have deleted it since it was opened: then it is not the folder's lock
        if os.path.samestat(os.fstat(descriptor), os.stat(file)):
            return descriptor
    except (BlockingIOError, FileNotFoundError):
        pass
    except OSError:
        os.close(descriptor)
        raise
    os.close(descriptor)
    return None


def free(out: Path, descriptor: int | None) -> None:
    """Let go of what `take` gave, and leave no file behind."""
    if descriptor is not None:
        if os.fstat(descriptor).st_size == 0:  # one of ours
            (out / folder.LOCK).unlink(missing_ok=True)
        os.close(descriptor)
