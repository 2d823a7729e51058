"""Layout of a folder of checkpoints, and the renames that make a save all or nothing.

    checkpoints/
      step-00000100/              whole: it got this name after all that is in it was on disk
        __0_0.distcp ...          the tensors, one file per rank
        .metadata                 DCP: which file holds which part of which tensor
        state.json                everything that is not a tensor
        seal                      what each of these files must be; written last (seal.py)
      step-00000200.partial/      being written, being deleted, or left by a killed run: never read
      step-00000100.replaced/     the old one, for the moment in which a new save of the same step
                                  takes its name
      step-00000200.damaged/      could not be read by a restart that nobody watched: for people to
      step-00000200.damaged-2/    look at, never read again, and deleted by --overwrite alone
      step-00000100.kept/         files of somebody else's that lay in a checkpoint that was deleted

Whoever is killed between any two lines of this file leaves the newest complete checkpoint readable:
tests/checkpoint kills at every one of them. Nothing is deleted but files that a save writes, by
name; no link is followed.
"""

import os
import re
from contextlib import suppress
from itertools import count
from pathlib import Path

from dolmen.files.gate import Refused
from dolmen.files.storage import PARTIAL

STATE = "state.json"
METADATA = ".metadata"
SEAL = "seal"
REPLACED = ".replaced"
DAMAGED = ".damaged"
KEPT = ".kept"
FILE = re.compile(r"(state\.json|\.metadata(\.tmp)?|seal|__[0-9]+_[0-9]+\.distcp)(\.part|\.lock)?")
"""Files that a save writes, and a download (remote.py)."""
FOLDER = re.compile(r"step-[0-9]{8,}(\.replaced)?(\.partial)?|step-[0-9]{8,}\.damaged(-[0-9]+)?")
"""Folders that saves and restarts make."""
WHOLE = re.compile(r"step-([0-9]{8,})(\.replaced)?")
UNFINISHED = re.compile(r"step-[0-9]{8,}(\.replaced)?\.partial")


class Damaged(Refused):
    """A checkpoint is not what was saved. The message names the file."""


def name(step: int) -> str:
    """Return the folder name of the complete checkpoint of `step`: step-00000100 for 100."""
    return f"step-{step:08d}"


def is_whole(path: Path) -> bool:
    """Return whether `path` is a folder, or a symbolic link, with the name of a complete checkpoint
    (step-N, or step-N.replaced). Its content is not looked at: with that name and a file missing it
    is damaged, not unfinished.
    """
    return WHOLE.fullmatch(path.name) is not None and (path.is_dir() or path.is_symlink())


def list_checkpoints(folder: Path) -> dict[int, Path]:
    """Return step -> folder of every complete checkpoint in `folder` (by name, see `is_whole`),
    lowest step first; {} where `folder` does not exist.
    """
    checkpoints = {}
    for path in sorted(folder.glob("step-*")):  # `step-1` comes before `step-1.replaced`, and wins
        match = WHOLE.fullmatch(path.name)
        # a folder or a link to one
        if match and is_whole(path):
            checkpoints.setdefault(int(match[1]), path)
    return dict(sorted(checkpoints.items()))


def describe_newest(folder: Path) -> str:
    """Return a sentence without full stop on which checkpoint in `folder` a run can resume from:
    that of the highest step, or that nothing is saved yet.
    """
    steps = list_checkpoints(folder)
    return (
        f"The newest complete checkpoint is that of step {max(steps)}"
        if steps
        else "Nothing is saved yet"
    )


def sync(path: Path) -> None:
    """Flush a file's bytes, or a folder's names, to disk (fsync)."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def clear_unfinished(folder: Path) -> None:
    """Delete every unfinished save (step-N.partial) in `folder`; the caller is its only writer, so
    no other save is in progress.
    """
    for path in folder.glob(f"step-*{PARTIAL}"):
        if UNFINISHED.fullmatch(path.name) and path.is_dir():
            remove_checkpoint(path)


def clear_own_files(folder: Path, rank: int) -> None:
    """Delete the files of tensors that `rank` wrote in unfinished saves (step-N.partial) in
    `folder`, and the folders of these saves that are empty then.
    """
    for path in folder.glob(f"step-*{PARTIAL}"):
        for file in path.glob(f"__{rank}_*.distcp"):
            file.unlink(missing_ok=True)
        with suppress(OSError):  # other ranks have files there
            path.rmdir()


def commit(partial: Path) -> None:
    """Rename the folder of a finished save, step-N.partial, to its final name step-N; an older save
    of the same step becomes step-N.replaced. Names are flushed to disk (fsync). A kill between any
    two renames leaves one of the two saves complete.
    """
    final = partial.with_suffix("")
    # names of the files in it, before its own name changes
    sync(partial)
    if final.exists():
        replaced = final.with_suffix(REPLACED)
        if replaced.exists():
            remove_checkpoint(replaced)  # by a killed run, after `final` was whole
        final.rename(replaced)
    partial.rename(final)
    sync(final.parent)


def prune(folder: Path, keep: int, saved: int) -> None:
    """Delete old checkpoints in `folder`: all but the `keep` of the highest steps (0: delete none)
    and that of the step just `saved`. Leftovers of replaced ones (step-N.replaced) go in any case.
    """
    checkpoints = list_checkpoints(folder)
    old = (
        [path for step, path in list(checkpoints.items())[:-keep] if step != saved] if keep else []
    )
    old += [path for path in folder.glob(f"step-*{REPLACED}") if path not in checkpoints.values()]
    for path in old:
        if FOLDER.fullmatch(path.name):
            partial = path.with_name(path.name + PARTIAL)  # first it stops being whole, then it
            path.rename(partial)  # goes
            remove_checkpoint(partial)


def remove_checkpoint(path: Path) -> None:
    """Delete the files of a checkpoint's folder that a save writes, by name, and the folder. If it
    has any other file, the folder stays, renamed to step-N.kept, which is never read. Of a symbolic
    link only the link is deleted.
    """
    if path.is_symlink():
        return path.unlink()
    for child in path.iterdir():
        if FILE.fullmatch(child.name) and (child.is_symlink() or child.is_file()):
            child.unlink()
    if any(path.iterdir()):
        path.rename(free(path.with_name(path.name.split(".")[0] + KEPT)))
    else:
        path.rmdir()


def put_aside(path: Path) -> Path:
    """Rename the folder of a damaged checkpoint to step-N.damaged, or step-N.damaged-2 and so on if
    that exists, names that are never read; return the new path.
    """
    aside = free(path.with_name(path.name.split(".")[0] + DAMAGED))
    path.rename(aside)
    return aside


def free(path: Path) -> Path:
    """Return `path` if nothing with that name exists, else the first of path-2, path-3, ... that
    does not exist. The number goes before a file suffix (log-2.txt) but after .damaged and .kept.
    """
    suffix = path.suffix if path.suffix not in (DAMAGED, KEPT) else ""
    stem = path.name.removesuffix(suffix)
    names = (path.with_name(f"{stem}-{n}{suffix}" if n > 1 else path.name) for n in count(1))
    return next(p for p in names if not os.path.lexists(p))
