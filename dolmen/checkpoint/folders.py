"""What a folder of checkpoints looks like, and the renames that make a save all or nothing.

    checkpoints/
      step-00000100/              whole: it got this name after every rank's part and state.json
                                  were on disk
        state.json                everything that is not a tensor
        .metadata                 DCP: which file holds which part of which tensor
        __0_0.distcp ...          the tensors, one file a rank
      step-00000200.partial/      being written, being deleted, or left by a killed run: never read
      step-00000100.replaced/     the old one, for the moment in which a new save of the same step
                                  takes its name
      step-00000200.damaged/      could not be read by a restart that nobody watched: never read
                                  again, for people to look at

Whoever is killed between any two lines of this file leaves the newest whole checkpoint readable:
tests/checkpoint kills at every one of them.
"""

import json
import os
import re
import shutil
from pathlib import Path

STATE = "state.json"
METADATA = ".metadata"
PARTIAL = ".partial"
REPLACED = ".replaced"
DAMAGED = ".damaged"


def name(step: int) -> str:
    """Name of the whole checkpoint of `step`."""
    return f"step-{step:08d}"


def whole(folder: Path) -> dict[int, Path]:
    """Step -> folder of every whole checkpoint, oldest first; empty where `folder` does
    not exist.
    """
    found = {}
    for path in sorted(folder.glob("step-*")):  # `step-1` comes before `step-1.replaced`, and wins
        match = re.fullmatch(rf"step-(\d{{8,}})(\{REPLACED})?", path.name)
        if match and (path / STATE).is_file():
            found.setdefault(int(match[1]), path)
    return dict(sorted(found.items()))


def newest_told(folder: Path) -> str:
    """Which checkpoint a run can go on from, as the beginning of a sentence."""
    steps = whole(folder)
    return (
        f"The newest whole checkpoint is of step {max(steps)}" if steps else "Nothing is saved yet"
    )


def sync(path: Path) -> None:
    """Make a file's bytes, or a folder's names, outlive a power cut."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def clear(folder: Path) -> None:
    """Delete every unfinished save: there is one writer, so none is in progress."""
    for path in folder.glob(f"step-*{PARTIAL}"):
        shutil.rmtree(path)


def commit(partial: Path) -> None:
    """Give the finished save its name, in the place of an older save of the same step."""
    final = partial.with_suffix("")
    sync(partial)
    if final.exists():
        replaced = final.with_suffix(REPLACED)
        if replaced.exists():
            shutil.rmtree(replaced)  # by a killed run, after `final` was whole
        final.rename(replaced)
    partial.rename(final)
    sync(final.parent)


def prune(folder: Path, keep: int, saved: int) -> None:
    """Delete all but the `keep` newest (0: none of them) and the one just saved, and those that
    were replaced.
    """
    kept = whole(folder)
    old = [path for step, path in list(kept.items())[:-keep] if step != saved] if keep else []
    old += [path for path in folder.glob(f"step-*{REPLACED}") if path not in kept.values()]
    for path in old:
        partial = path.with_name(path.name + PARTIAL)  # first it stops being whole, then it goes
        path.rename(partial)
        shutil.rmtree(partial)


def put_aside(path: Path, aside: Path) -> None:
    """Rename a damaged checkpoint, in the place of one put aside before it."""
    if aside.exists():
        shutil.rmtree(aside)
    path.rename(aside)


def read_state(path: Path) -> dict:
    """The state.json of one checkpoint. Raises ValueError where it is missing or damaged."""
    try:
        found = json.loads((path / STATE).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ValueError(f"{path / STATE} is missing or damaged: {error}") from error
    if not isinstance(found, dict):
        raise ValueError(f"{path / STATE} is damaged: it holds no fields")
    return found
