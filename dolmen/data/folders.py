"""What of a folder or a glob is read: files of a known suffix and text without one; not what hides,
and not what dolmen has written itself, a run or a cache, which a second run would learn by heart.
Links to folders below the one that is named are not followed: they may lead round in a circle, or
to what is read already. Links to files are.
"""

import glob
import os
from collections import Counter
from pathlib import Path

from dolmen.data.readers import form, looks_like_text
from dolmen.files.indexed import BIN, IDX, is_indexed

# top-level keys of the config.yaml that a run writes
RUN_KEYS = {"name", "model", "layout", "data", "optimizer", "train", "checkpoint", "log"}

LINKS = "links to folders"  # which would have to be named themselves


class Found:
    """The files of one entry, and what was left out of them."""

    def __init__(self, entry: str, files: list[Path] | None = None):
        self.entry, self.files, self.seen = entry, files or [], 0
        self.skipped: Counter[str] = Counter()
        self.folders: dict[Path, str] = {}

    def walk(self, root: Path, cache: Path | None) -> None:
        """Everything below `root`."""
        for where, folders, files in os.walk(root):
            here = Path(where)
            inside = [name for name in folders if not name.startswith(".")]
            self.skipped["hidden folders and files"] += len(folders) - len(inside)
            real = [name for name in inside if not (here / name).is_symlink()]
            self.skipped[LINKS] += len(inside) - len(real)
            folders[:] = [name for name in real if not self.left_out(here / name, cache)]
            if here == root and self.left_out(root, cache):
                folders.clear()
                continue
            for name in files:
                self.add(here / name)

    def match(self, pattern: Path, cache: Path | None) -> None:
        """Every file that the glob names, less those behind a link or in a folder of ours below its
        fixed part.
        """
        fixed = next(p for p in pattern.parents if not glob.has_magic(str(p)))
        links: set[Path] = set()
        for name in glob.glob(str(pattern), recursive=True):
            file = Path(name)
            inside = [p for p in file.parents if p != fixed and p.is_relative_to(fixed)]
            if behind := [p for p in inside if p.is_symlink()]:
                links.add(behind[-1])
            elif file.is_file() and not any(self.left_out(folder, cache) for folder in inside):
                self.add(file)
        self.skipped[LINKS] += len(links)

    def add(self, file: Path) -> None:
        self.seen += 1
        if file.name.startswith("."):
            self.skipped["hidden folders and files"] += 1
        elif not file.is_file():
            self.skipped["broken links and what is no file"] += 1
        elif is_indexed(file):
            self.files.append(file.absolute())
        elif file.suffix == IDX and is_indexed(file.with_suffix(BIN)):
            self.seen -= 1  # it is read with its .bin
        elif (kind := form(file)) is None:
            self.skipped[f"{file.suffix} files"] += 1
        elif kind == "" and not looks_like_text(file):
            self.skipped["files without a suffix that are no text"] += 1
        else:
            self.files.append(file.absolute())

    def left_out(self, folder: Path, cache: Path | None) -> bool:
        """Whether `folder` is one that dolmen has written, and remembers it."""
        if folder not in self.folders:
            self.folders[folder] = ours(folder, cache)
        return bool(self.folders[folder])

    def notes(self) -> list[str]:
        """What was left out, a line each."""
        found = [f"{folder} ({why})" for folder, why in sorted(self.folders.items()) if why]
        told = found[:4] + ([f"{len(found) - 4} more such folders"] if len(found) > 4 else [])
        kinds = [f"{count:,} {kind}" for kind, count in self.skipped.most_common(6) if count]
        return [*told, *([f"{', '.join(kinds)} in {self.entry}"] if kinds else [])]


def ours(folder: Path, cache: Path | None) -> str:
    """What dolmen has written `folder` as, empty if it has not."""
    if cache is not None and cache.exists() and folder.exists() and folder.samefile(cache):
        return "the token cache"
    if (folder / "tokens.bin").exists() and (folder / "index.json").exists():
        return "tokens of dolmen"
    config = folder / "config.yaml"
    if not config.is_file():
        return ""
    with open(config, "rb") as file:
        lines = file.read(1 << 16).splitlines()
    keys = {line.split(b":")[0].decode(errors="replace") for line in lines if b":" in line}
    return "a run of dolmen" if keys >= RUN_KEYS else ""
