"""Resolves the entries of `--data.path` to files and hub ids.

What of a folder or a glob is read: files of a known suffix and other UTF-8 text; not what hides,
not markup, tables and settings, and not what dolmen has written itself, a run or a cache, which a
second run would learn by heart. Links to folders below the one that is named are not followed: they
may lead round in a circle, or to what is read already. Links to files are.

One entry is a corpus that is on every machine: the source of Python's standard library. A file is a
document and is held out whole, so a model's bits per byte on the held-out files can be compared
with those of `gzip -9` and `xz -9` for the same files.
"""

import fnmatch
import glob
import gzip
import lzma
import os
import re
import sysconfig
from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from pathlib import Path, PurePosixPath

from dolmen.core.filesystem import expand, is_url, may_be_hub_id
from dolmen.core.messages import plural
from dolmen.data.readers import SUPPORTED, form, looks_like_text
from dolmen.files import storage
from dolmen.files.indexed import BIN, IDX, is_indexed
from dolmen.files.remote_file import RemoteFile, TextFile, file_size

STANDARD_LIBRARY = "python-standard-library"  # as an entry of --data.path

NOT_SOURCE = {"test", "tests", "idle_test", "site-packages", "dist-packages", "__pycache__"}
# top-level keys of the config.yaml that a run writes
RUN_KEYS = {"name", "layout", "data", "optimizer", "train", "checkpoint", "log"}

LINKS = "links to folders"  # which would have to be named themselves


class EntryFiles:
    """Files of one --data.path entry, and counts of what was left out."""

    def __init__(self, entry: str, files: Sequence[TextFile] = ()):
        """`entry` is as the user wrote it; `files` are known already, if given."""
        self.entry, self.files, self.seen = entry, [*files], 0
        self.skipped: Counter[str] = Counter()
        self.bytes_read = self.bytes_skipped = 0
        self.folders: dict[Path, str] = {}

    def walk(self, root: Path, cache: Path | None) -> None:
        """Add all files to read below folder `root`; hidden ones, links to folders, and folders
        that dolmen wrote (`cache` too) are counted as left out.
        """
        for where, folders, files in os.walk(root):
            here = Path(where)
            inside = [name for name in folders if not name.startswith(".")]
            self.skipped["hidden folders and files"] += len(folders) - len(inside)
            real = [name for name in inside if not (here / name).is_symlink()]
            self.skipped[LINKS] += len(inside) - len(real)
            # in place: os.walk goes on into what is left of the list
            folders[:] = [name for name in real if not self.left_out(here / name, cache)]
            # the named folder itself may be a run
            if here == root and self.left_out(root, cache):
                folders.clear()
                continue
            for name in files:
                self.add(here / name)

    def match(self, pattern: Path, cache: Path | None) -> None:
        """Add the files that a glob names, except those behind a link to a folder or in a folder
        that dolmen wrote, below the glob's fixed part.
        """
        # the part without wildcards, which the user named
        fixed = next(p for p in pattern.parents if not glob.has_magic(str(p)))
        links: set[Path] = set()
        for name in glob.glob(str(pattern), recursive=True):
            file = Path(name)
            # folders between the fixed part and the file
            inside = [p for p in file.parents if p != fixed and p.is_relative_to(fixed)]
            if behind := [p for p in inside if p.is_symlink()]:
                links.add(behind[-1])
            elif file.is_file() and not any(self.left_out(folder, cache) for folder in inside):
                self.add(file)
        self.skipped[LINKS] += len(links)

    def add(self, file: Path) -> None:
        """Add a file to those that are read, or else count it as skipped, by kind. An .idx of
        Megatron is neither: it is read with its .bin.
        """
        self.seen += 1
        if file.name.startswith("."):
            self.skipped["hidden folders and files"] += 1
        elif not file.is_file():
            self.skipped["broken links and non-files"] += 1
        elif is_indexed(file):
            self.files.append(file.absolute())
        elif file.suffix == IDX and is_indexed(file.with_suffix(BIN)):
            self.seen -= 1  # it is read with its .bin
        elif (kind := form(file)) is None:
            self._skip(file, f"{file.suffix} files")
        elif kind == "" and not looks_like_text(file):
            self._skip(file, f"{file.suffix or 'other'} files that are not UTF-8 text")
        else:
            self.bytes_read += file.stat().st_size
            self.files.append(file.absolute())

    def _skip(self, file: Path, kind: str) -> None:
        """Count a file that is not read, and its bytes, under `kind`, for the notes."""
        self.skipped[kind] += 1
        self.bytes_skipped += file.stat().st_size

    def left_out(self, folder: Path, cache: Path | None) -> bool:
        """Return True if dolmen has written `folder` (a run, tokens, the cache), so that it is not
        read; the reason is remembered for `notes`.
        """
        if folder not in self.folders:
            self.folders[folder] = written_by_dolmen(folder, cache)
        return bool(self.folders[folder])

    def notes(self) -> list[str]:
        """Return lines about what was left out: folders that dolmen wrote, and counts of skipped
        files by kind with their share of the bytes.
        """
        notes = [f"{folder} ({why})" for folder, why in sorted(self.folders.items()) if why]
        folders = notes[:4] + ([f"{len(notes) - 4} more such folders"] if len(notes) > 4 else [])
        kinds = [f"{count:,} {kind}" for kind, count in self.skipped.most_common(6) if count]
        share = self.bytes_skipped / max(1, self.bytes_read + self.bytes_skipped)
        size = f", {share:.1%} of the bytes" if self.bytes_skipped else ""
        return [*folders, *([f"{', '.join(kinds)} in {self.entry}{size}"] if kinds else [])]


def written_by_dolmen(folder: Path, cache: Path | None) -> str:
    """Return what dolmen has written in `folder`, for messages ("a run of dolmen", "tokens of
    dolmen", "the token cache"); "" if it has not.
    """
    if cache is not None and cache.exists() and folder.exists() and folder.samefile(cache):
        return "the token cache"
    if (folder / "tokens.bin").exists() and (folder / "index.json").exists():
        return "tokens of dolmen"
    config = folder / "config.yaml"
    if not config.is_file():
        return ""
    with open(config, "rb") as file:
        # the top-level keys of a run's config stand in its first 64 KiB
        lines = file.read(1 << 16).splitlines()
    # no YAML parser: the file may be anyone's
    keys = {line.split(b":")[0].decode(errors="replace") for line in lines if b":" in line}
    return "a run of dolmen" if keys >= RUN_KEYS else ""


@dataclass(frozen=True)
class DataSource:
    """Documents that are mixed as one source: of `files`, of the hub data sets `hubs`, and of
    Megatron's .bin files `indexed`, which hold tokens.
    """

    name: str
    weight: Fraction | None
    files: tuple[TextFile, ...]
    hubs: tuple[str, ...]
    left_out: tuple[str, ...] = ()
    """Notes on files in folders and globs that are not read, a line each."""
    indexed: tuple[Path, ...] = ()
    option: str = "--data.path"
    """Option that names the source, for messages."""

    @property
    def label(self) -> str:
        """The option and the source's name, with which messages about it begin."""
        return f"{self.option} {self.name}"

    @property
    def paths(self) -> list[Path]:
        """All local files that are read, .idx files included."""
        local = [file for file in self.files if isinstance(file, Path)]
        return [*local, *self.indexed, *(file.with_suffix(IDX) for file in self.indexed)]

    @property
    def text(self) -> bool:
        """True if some of the source is text (files or hub data sets), not only tokens (.bin)."""
        return bool(self.files or self.hubs)

    def only(self, file: Path) -> "DataSource":
        """Return a source with `file`, one of the .bin files of this one, as its only data and its
        name.
        """
        return replace(self, name=str(file), files=(), hubs=(), left_out=(), indexed=(file,))


def resolve_sources(
    entries: Sequence[str], option: str = "--data.path", cache: Path | None = None
) -> tuple[DataSource, ...]:
    """Return one source for all entries without weights, or one per entry with a weight. Folders
    that dolmen has written, and `cache`, are left out. Reads no data but the first bytes of files
    with unknown suffixes. Raises ValueError, or FileNotFoundError for a missing path, naming
    `option` and the entry.
    """
    if not entries:
        raise ValueError(f"no data: use {option} with a file, a folder, a glob or a hub id")
    parsed = [parse_weight(entry, option) for entry in entries]
    unweighted = [entry for entry, weight in parsed if weight is None]
    if unweighted and len(unweighted) < len(parsed):
        raise ValueError(
            f"{option}: {len(parsed) - len(unweighted)} of {len(parsed)} entries have a weight, "
            f"{unweighted[0]} has none: give each a weight (0.5:{unweighted[0]}) or none"
        )
    if unweighted:
        return (gather(unweighted, None, option, cache),)
    return tuple(gather([entry], weight, option, cache) for entry, weight in parsed)


def single_source(sources: Sequence[DataSource]) -> DataSource:
    """Return the one source that all entries of --data.path are without weights. Raises ValueError
    for a mixture with weights, as all of the text is read.
    """
    if sources[0].weight is not None:
        raise ValueError(
            "--data.path: weights are for training mixtures, and all of this text is read: leave "
            "them out"
        )
    return sources[0]


def parse_weight(entry: str, option: str) -> tuple[str, Fraction | None]:
    """Split `0.3:path` into path and 3/10; the weight is None where there is none. Raises
    ValueError for a weight of 0.
    """
    match = re.fullmatch(r"([0-9]+\.?[0-9]*|\.[0-9]+):(.+)", entry)
    # a file may be named "0.5:x"
    if not match or Path(entry).exists():
        return entry, None
    if not (weight := Fraction(match[1])):
        raise ValueError(f"{option} {entry}: the weight is 0; leave the entry out")
    return match[2], weight


def gather(
    entries: Sequence[str], weight: Fraction | None, option: str, cache: Path | None
) -> DataSource:
    """Return the entries as one source: their files, .bin files and hub ids, each file once. Raises
    ValueError or FileNotFoundError for an entry that cannot be read, and where all files are empty.
    """
    files, hubs, left_out = [], [], []
    for entry in entries:
        matched = entry_files(entry, option, cache)
        hubs += [entry] if matched is None else []
        files += matched.files if matched else ()
        left_out += matched.notes() if matched else ()
    files = list(dict.fromkeys(files))  # two globs may name one file
    tokens = tuple(file for file in files if file.suffix == BIN)
    files = [file for file in files if file.suffix != BIN]
    if files and not hubs and not tokens and not any(map(file_size, files)):
        matched = plural(len(files), "file")
        raise ValueError(f"{option} {', '.join(entries[:3])}: {matched} with 0 bytes")
    name = ", ".join(entries[:3]) + (f" and {len(entries) - 3} more" if len(entries) > 3 else "")
    return DataSource(name, weight, tuple(files), tuple(hubs), tuple(left_out), tokens, option)


def entry_files(entry: str, option: str, cache: Path | None) -> EntryFiles | None:
    """Return the absolute files of an entry (file, folder, glob, URL, .bin, or the standard
    library), sorted, with counts of what was left out; None for a hub id. Raises ValueError for a
    file that cannot be read, FileNotFoundError where nothing is there.
    """
    if is_url(entry):
        return stored_files(entry, option)
    path = expand(entry)
    if entry == STANDARD_LIBRARY and not path.exists():
        return EntryFiles(entry, standard_library_files())
    if (data_set := named_indexed(path)) is not None:
        return EntryFiles(entry, [data_set.absolute()])
    if path.is_file():
        if form(path) is None:
            raise ValueError(f"{option} {entry}: cannot read {path.suffix}; {SUPPORTED}")
        if form(path) == "" and not looks_like_text(path):
            raise ValueError(f"{option} {entry} is not UTF-8 text; {SUPPORTED}")
        return EntryFiles(entry, [path.absolute()])
    if not path.is_dir() and not glob.has_magic(entry):
        if is_hub_id(entry):
            return None
        raise FileNotFoundError(f"{option} {entry}: no such file or folder")
    files = EntryFiles(entry)
    if path.is_dir():
        files.walk(path, cache)
    else:
        files.match(path, cache)
    if not files.files:
        notes = "".join(f"; skipped: {note}" for note in files.notes())
        raise FileNotFoundError(
            f"{option} {entry}: {plural(files.seen, 'file')}, none readable{notes}; {SUPPORTED}"
        )
    files.files.sort()
    return files


def stored_files(entry: str, option: str) -> EntryFiles:
    """Return what a URL means: an object, all files of a known suffix in a folder, or those of a
    glob, whose last part alone may be a pattern. Text is read from there; .bin files, which are
    memory-mapped, are downloaded. Raises ValueError where there is nothing to read, and
    StorageError.
    """
    folder, _, last = entry.rstrip("/").rpartition("/")
    is_glob, found = glob.has_magic(last), EntryFiles(entry)
    if glob.has_magic(folder):
        raise ValueError(f"{option} {entry}: only the last part of a URL may be a pattern")
    remote = storage.RemoteFolder(folder)
    if not is_glob and (stored := remote.find(last)) is not None:
        named = {last: stored}
        # tokens, whose lengths are in another file
        index = last.removesuffix(BIN) + IDX
        if last.endswith(BIN) and (lengths := remote.find(index)) is not None:
            named[index] = lengths
        names, file = [*named], RemoteFile(entry, stored)
        if not readable_names(names, names) and (form(file) is None or not looks_like_text(file)):
            raise ValueError(f"{option} {entry} is not UTF-8 text; {SUPPORTED}")
    else:
        folder = folder if is_glob else entry.rstrip("/")
        named = storage.RemoteFolder(folder).files()
        if not named:
            raise ValueError(f"{folder}: there is no such folder, or it is empty")
        meant = fnmatch.filter(named, last) if is_glob else named
        names = readable_names(meant, named)
        found.skipped["hidden files and files of other kinds"] += len(meant) - len(names)
    indexed = [name for name in names if PurePosixPath(name).suffix in (BIN, IDX)]
    for file in storage.pull_files(folder, {*indexed}.intersection, named) if indexed else ():
        found.add(file)
    texts = [name for name in names if name not in indexed]
    found.files += [RemoteFile(f"{folder}/{name}", named[name]) for name in texts]
    if not found.files:
        notes = "".join(f"; skipped: {note}" for note in found.notes())
        raise ValueError(f"{option} {entry}: no readable files{notes}; {SUPPORTED}")
    found.files.sort(key=str)
    return found


def readable_names(meant: Collection[str], names: Collection[str]) -> list[str]:
    """Return the names among `meant` that are read: of a known suffix, not hidden, and in no folder
    that dolmen has uploaded. `names`: all objects, among which marker files show such folders.
    """
    marks = (".dolmen", storage.SUMS)
    written = {PurePosixPath(n).parent for n in names if n.rpartition("/")[2] in marks}
    paths = [path for path in map(PurePosixPath, meant) if not written & {*path.parents}]
    visible = [path for path in paths if not any(part[0] == "." for part in path.parts)]
    return [str(p) for p in visible if form(Path(p)) or p.suffix in (BIN, IDX)]


def named_indexed(path: Path) -> Path | None:
    """Return the .bin that `path` means, by its own name, by its .idx, or by the common prefix that
    Megatron uses; None where there is none.
    """
    if path.suffix == IDX:
        path = path.with_suffix(BIN)
    if not path.exists():
        path = path.with_name(path.name + BIN)
    return path if is_indexed(path) else None


def is_hub_id(entry: str) -> bool:
    """Return True if an entry that is not a path can be a hub id: `name` or `org/name`, maybe with
    `:config`. With a data file's suffix it is a misspelled path.
    """
    known = form(Path(entry)) or Path(entry).suffix in (BIN, IDX)
    return may_be_hub_id(re.sub(r":[\w.-]+$", "", entry)) and not known


def standard_library_files() -> list[Path]:
    """Return the source files of the running Python's standard library, sorted, without its tests
    and without installed packages.
    """
    root = Path(sysconfig.get_path("stdlib"))
    return sorted(
        file
        for file in root.rglob("*.py")
        if file.stat().st_size
        and not any(
            part in NOT_SOURCE or part.startswith("config-")
            for part in file.relative_to(root).parts
        )
    )


def gzip_xz_bits(files: Sequence[Path]) -> tuple[float, float]:
    """Return the bits per byte that `gzip -9` and `xz -9` need for the files, each compressed by
    itself, over all bytes. Raises ValueError where all files are empty.
    """
    texts = [file.read_bytes() for file in files]
    plain = sum(map(len, texts))
    if not plain:
        raise ValueError(f"nothing to compress: {plural(len(files), 'held-out file')} with 0 bytes")
    return (
        8 * sum(len(gzip.compress(text, 9)) for text in texts) / plain,
        8 * sum(len(lzma.compress(text, preset=9)) for text in texts) / plain,
    )
