"""Folders that appear by one rename, whole or not at all; what a killed process leaves of one is
swept away by the next.

Who builds holds a lock (flock) on the file MARK in its folder for as long as it lives. A folder
with a MARK that nobody holds is ours and has no owner. Where a file system has no locks nothing is
swept, and of several that build at once the first rename wins.
"""

import os
import re
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from dolmen.core import filesystem

MARK = ".dolmen-is-building"
NAMES = re.compile(r"([0-9a-f]{32}|bpe-\d+-[0-9a-f]{24})\.(lock|[a-z0-9_]{8})")  # of ours alone


@contextmanager
def lock(path: Path) -> Iterator[None]:
    """Within, no other process is in the same; one that waits goes on after the first is done."""
    descriptor = filesystem.open_locked(path, optional=True)
    assert descriptor is not None
    try:
        yield
    finally:
        path.unlink(missing_ok=True)  # while it is locked (core/filesystem.py)
        os.close(descriptor)


@contextmanager
def building(folder: Path) -> Iterator[Path]:
    """A new folder beside `folder` that takes its name when the block ends well, unless another
    was first; nothing is left of it otherwise.
    """
    sweep(folder.parent)
    part = Path(tempfile.mkdtemp(prefix=f"{folder.name}.", dir=folder.parent))
    try:
        # locked before it has the name that others look for
        with open(part / f"{MARK}.new", "w") as handle:
            filesystem.lock(handle, optional=True)
            os.rename(handle.name, part / MARK)
            yield part
            os.unlink(part / MARK)
            with suppress(OSError):  # another process was first
                os.rename(part, folder)
    finally:
        remove_folder(part)


def sweep(parent: Path) -> None:
    """Removes what killed processes have left in `parent`."""
    for path in parent.iterdir():
        if not NAMES.fullmatch(path.name) or path.is_symlink():
            continue
        mark = path / MARK if path.is_dir() else path
        with suppress(OSError), open(mark, "r+") as handle:
            if not filesystem.lock(handle, wait=False) or not filesystem.names_file(handle, mark):
                continue
            if path.is_dir():
                remove_folder(path)
            elif not mark.stat().st_size:
                mark.unlink()


def remove_folder(folder: Path) -> None:
    """A folder of plain files, which ours are; what else is in it stays, and so the folder."""
    with suppress(OSError):
        # the mark last: what a kill leaves here is swept too
        for file in sorted(folder.iterdir(), key=lambda file: file.name == MARK):
            file.unlink()
        folder.rmdir()
