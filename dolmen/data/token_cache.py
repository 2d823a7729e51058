"""Folders of the cache: what was tokenised from files, stored under a hash of what decides it.

    <cache>/corpora/<key>/
        ...             files, as the `Form` lists them
        index.json      what they were made from, counts, size and digest of each, and a digest of
                        itself

The key. `key` hashes the origin, in which each file that is read stands with its path, size,
modification time and change time (`identity_of`). The change time (ctime) moves with every write
and cannot be set, so different text of the same size and modification time is noticed without
reading it again; where a file system does not keep ctime, only the other two are compared. It also
moves with chmod, chown, a new hard link and a restored backup: then the same text is tokenised once
more.

Verification. The process that starts a run compares every byte with the digests (XXH3, 128 bits,
15 GB/s per core, so that reading the file decides), once per host; the others check sizes. A folder
that differs is built again.

Atomicity. A folder appears by one rename, whole or not at all. A builder holds a lock (flock) on
the file MARK in its temporary folder for as long as it lives, so a temporary folder whose MARK
nobody holds was left by a killed process and is removed by the next builder. Where a file system
has no locks nothing is removed, and of several that build at once the first rename wins.
"""

import hashlib
import json
import os
import re
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, NamedTuple

import xxhash

from dolmen.core import filesystem
from dolmen.core.log import say
from dolmen.files.gate import Kind, Refused, read_json
from dolmen.files.remote_file import RemoteFile, TextFile, open_binary

INDEX = "index.json"


class Form(NamedTuple):
    """File format of a kind of cache folder: schema of its index, and names of its other files."""

    kind: Kind
    files: tuple[str, ...]


def find_or_build(
    cache: Path,
    origin: dict[str, Any],
    form: Form,
    build: Callable[[Path], None],
    verify: bool,
    progress: bool,
) -> tuple[Path, dict[str, Any]]:
    """Return (folder, index) of the cache entry for `origin`: an existing one, or else built now by
    build(folder). `verify`: compare each cached byte with its digest, else only sizes; a damaged
    entry is built again. One process builds, others wait. Raises ValueError where the cache cannot
    be written, and whatever `build` raises.
    """
    key = hashlib.blake2b(json.dumps(origin).encode(), digest_size=16).hexdigest()
    folder = cache / "corpora" / key
    try:
        return folder, check_folder(folder, form, origin, verify)
    except Refused as damage:
        # absent or damaged: reported only if there was a folder
        reason = damage
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ValueError(
            f"cannot write the cache folder {cache}: {error}; use --data.cache"
        ) from error
    with filesystem.hold_lock(folder.with_suffix(".lock")):
        try:  # another process may have built it meanwhile
            return folder, check_folder(folder, form, origin, verify)
        except Refused:
            if folder.exists():
                say(f"the cached tokens are damaged and are built again: {reason}", progress)
                remove_folder(folder)
            with building(folder) as part:
                build(part)
            try:
                return folder, check_folder(folder, form, origin, verify=False)
            except Refused as error:
                raise ValueError(
                    f"could not write {folder} ({error}): remove it, or use another --data.cache"
                ) from None


def check_folder(
    folder: Path, form: Form, origin: Mapping[str, Any], verify: bool
) -> dict[str, Any]:
    """Return the index of a cache folder, once the folder is checked to be complete and made from
    `origin`. Raises Refused, naming the file that is missing or damaged.
    """
    index = read_json(folder / INDEX, form.kind)
    if index.pop("digest") != digest_of(index):
        raise Refused(f"{folder / INDEX}: its digest differs")
    if digest_of({name: index.get(name) for name in origin}) != digest_of(origin):
        raise Refused(f"{folder / INDEX}: it belongs to another text or tokenizer")
    for name in form.files:
        file = folder / name
        size = file.stat().st_size if file.is_file() else -1
        if size != index["sizes"].get(name):
            raise Refused(f"{file}: {size} bytes, not {index['sizes'].get(name)}")
        if verify and file_digest(file) != index["digests"].get(name):
            raise Refused(f"{file}: its digest differs")
    # an id beyond the embedding would be an illegal memory access on a GPU
    if index["largest"] >= index["vocabulary"]:
        raise Refused(
            f"{folder}: token {index['largest']} is outside of the vocabulary of "
            f"{index['vocabulary']}"
        )
    return index


def write_index(
    folder: Path, form: Form, index: dict[str, Any], digests: Mapping[str, str] | None = None
) -> None:
    """Write index.json of a cache folder whose files are there: `index`, with their sizes and
    digests, and a digest of itself. `digests` has those already computed.
    """
    known = digests or {}
    index = {
        **index,
        "sizes": {name: (folder / name).stat().st_size for name in form.files},
        "digests": {name: known.get(name) or file_digest(folder / name) for name in form.files},
    }
    (folder / INDEX).write_text(json.dumps({**index, "digest": digest_of(index)}))


def identity_of(file: TextFile) -> list:
    """Return [path, bytes, modification time, change time] of a file, times in ns, by which changed
    content is noticed without reading it. An object at a URL has no change time: a change shows in
    its size, and in its ETag or time (StoredFile), as it is when the run's sources are resolved.
    """
    if isinstance(file, RemoteFile):
        return [file.url, file.stored.size, file.stored.stamp, 0]
    status = file.stat()
    return [str(file), status.st_size, status.st_mtime_ns, status.st_ctime_ns]


def file_digest(file: TextFile) -> str:
    """Return the XXH3 hash (128 bits, hexadecimal) of a file's content."""
    digest = xxhash.xxh3_128()
    with open_binary(file) as content:
        while block := content.read(1 << 22):
            digest.update(block)
    return digest.hexdigest()


def digest_of(index: Mapping[str, Any]) -> str:
    """Return the XXH3 hash of an index (JSON with sorted keys), in hexadecimal."""
    return xxhash.xxh3_128_hexdigest(json.dumps(index, sort_keys=True).encode())


MARK = ".dolmen-is-building"
NAMES = re.compile(r"([0-9a-f]{32}|bpe-[0-9]+-[0-9a-f]{24})\.(lock|[a-z0-9_]{8})")  # of ours alone


@contextmanager
def building(folder: Path) -> Iterator[Path]:
    """Context manager: a new temporary folder that is renamed to `folder` at the block's normal
    end, unless another process made it first; it is deleted otherwise. Leftovers of killed
    processes are removed first.
    """
    sweep(folder.parent)
    # beside it, so that the rename stays in one file system
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
    """Delete temporary folders and lock files in `parent` that killed processes left: those that
    nobody has locked.
    """
    for path in parent.iterdir():
        if not NAMES.fullmatch(path.name) or path.is_symlink():
            continue
        # a folder is locked by its mark, a lock file by itself
        mark = path / MARK if path.is_dir() else path
        with suppress(OSError), open(mark, "r+") as handle:
            # held: its builder is alive
            if not filesystem.lock(handle, wait=False) or not filesystem.names_file(handle, mark):
                continue
            if path.is_dir():
                remove_folder(path)
            elif not mark.stat().st_size:
                mark.unlink()


def remove_folder(folder: Path) -> None:
    """Delete a folder of plain files, its MARK last. The first error, of which a subfolder is one,
    ends it silently, and what is left stays.
    """
    with suppress(OSError):
        # the mark last: what a kill leaves here is swept too
        for file in sorted(folder.iterdir(), key=lambda file: file.name == MARK):
            file.unlink()
        folder.rmdir()
