"""Folders in object storage, named by URLs that fsspec knows (s3://bucket/folder): listing,
reading, downloads into a local copy, uploads.

Problem. A request over a network fails now and then, an upload may end in the middle, a download
may have other bytes than were stored, and objects can neither be appended to nor renamed. All other
code reads local files: memory-mapped, locked, renamed.

Idea. All other code keeps reading local files: a copy at a path that the URL decides.

    s3://bucket/model  ->  ~/.cache/dolmen/storage/s3/bucket/model     (`pull_folder`, `pull_file`)

What is transferred is checked. Every request is repeated with growing pauses until it succeeds or
PATIENCE seconds have passed. A block of a download must have its length, an upload is looked up
afterwards. A folder that dolmen uploads has a file of checksums of our own, `.dolmen-sums`: first
it says that the folder is unfinished, and after all other files were uploaded it lists them.
Downloads are compared with it, and repeated where they differ. A folder without it was written by
others: of its files only the sizes are compared. Checkpoints have their seal instead
(checkpoint/remote.py).

A local copy is reused while the object has the size and the ETag, or without one the time, that the
copy was made with, as for all text that is tokenised (data/token_cache.py). A copy keeps an ETag as
its time. What no object stands for any more is deleted from the copy.

Names of objects may be hostile: one that would lie outside of the copy raises StorageError.
"""

import hashlib
import json
import os
import random
import tempfile
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any, NoReturn, TypeVar

import xxhash

from dolmen.core import filesystem
from dolmen.core.filesystem import expand, is_url
from dolmen.core.log import say
from dolmen.core.messages import megabytes, plural
from dolmen.files import gate, kinds, write

T = TypeVar("T")

COPIES, RUNS = "~/.cache/dolmen/storage", "~/.cache/dolmen/runs"
SUMS = ".dolmen-sums"
PARTIAL = ".partial"
"""Ends the name of a folder that is being written or downloaded, and is never read."""
LOCAL_SCHEMES = ("file", "local")
UNFINISHED = b'{"unfinished": true}'
BLOCK = 16 * 2**20  # bytes of one request of a download
THREADS = 8  # requests of a download at once
PATIENCE = 600.0
"""Seconds for which a request is repeated: storage that is gone for longer ends a save."""
FIRST_PATIENCE = 20.0
"""The same for listings, which come first: where mistakes in names and credentials show."""
FIRST_PAUSE, LONGEST_PAUSE = 0.5, 60.0  # seconds
DEEPEST = 100  # folders in an object's name
DOWNLOADS = 3  # of a file whose content is not what it was, before it counts as damaged


class StorageError(OSError):
    """Storage at a URL cannot be used: missing, not permitted, or not answering for too long."""


@dataclass(frozen=True)
class StoredFile:
    """Size in bytes of an object, and a time in ns by which copies of it are known: that of the
    last change, or where the storage has ETags a number that follows from this one.
    """

    size: int
    stamp: int


class RemoteFolder:
    """The objects below a URL. Names are relative, with `/`. Every method raises StorageError where
    the storage fails for PATIENCE seconds, `files` and `find` after FIRST_PATIENCE.
    """

    def __init__(self, url: str):
        """Open the file system of the URL. Raises ValueError where fsspec does not know its scheme,
        or needs a package that is not installed, and for a file URL with a relative path.
        """
        # 60 ms to import, and few runs need it
        from fsspec.core import url_to_fs

        self.url = url.rstrip("/")
        # of a local file system the folders must be made, and a rename is atomic
        scheme, _, path = url.partition("://")
        self._is_local = scheme in LOCAL_SCHEMES
        if self._is_local and not path.startswith("/"):  # its copy would be that of any folder
            raise ValueError(f"{url}: write the whole path of a local folder, {scheme}:///...")
        try:
            self._system, root = url_to_fs(url, **({"auto_mkdir": True} if self._is_local else {}))
        except ImportError as error:
            raise ValueError(f"{url}: {error}: pip install 'dolmen[s3]' for s3://") from None
        except ValueError as error:
            raise ValueError(f"{url}: {error}") from None
        self._root = root.rstrip("/")

    def files(self) -> dict[str, StoredFile]:
        """Return name -> size and time of all objects below the URL; empty if there are none.
        Raises StorageError for a name that is no relative path, and without a size.
        """

        def find() -> dict[str, Any]:
            """List without what fsspec remembers of an earlier listing."""
            self._system.invalidate_cache()
            return self._system.find(self._root, detail=True)

        listing = self._repeat("cannot be listed", find, FIRST_PATIENCE)
        files = {}
        for path, info in sorted(listing.items()):
            name = path.removeprefix(self._root + "/")
            # the URL itself is an object, or an empty one that stands for a folder
            if path == self._root or info["type"] != "file" or name.endswith("/"):
                continue
            _check_name(self.url, name)
            if info["size"] is None:  # http: lists links, and 0 bytes would be downloaded
                raise StorageError(f"{self.url} does not state how large {name} is: give a file")
            files[name] = StoredFile(int(info["size"]), _stamp(info))
        return files

    def find(self, name: str) -> StoredFile | None:
        """Return size and time of one object; None if there is none of this name. Raises
        StorageError for a page of HTML that has not its suffix, as servers have for folders.
        """

        def look_up() -> dict[str, Any] | None:
            """Return what the file system knows of the object, or None without it; the folder,
            which may be large, is not listed.
            """
            self._system.invalidate_cache()
            try:
                return self._system.info(self._path(name))
            except FileNotFoundError:
                return None

        info = self._repeat(f"{name} cannot be looked up", look_up, FIRST_PATIENCE)
        if info is None or info["type"] != "file":
            return None
        if info.get("mimetype") == "text/html" and not name.endswith((".html", ".htm")):
            raise StorageError(f"{self.url}/{name} is a page of HTML: give the URL of a file")
        return StoredFile(int(info["size"] or 0), _stamp(info))

    def read(self, name: str, stored: StoredFile, most: int) -> bytes:
        """Return the bytes of a small object, which `stored` describes. Raises StorageError, and
        Refused for over `most` bytes.
        """
        if stored.size > most:
            raise gate.refuse(f"{self.url}/{name}", f"has more than {most:,} bytes")
        return self.read_block(name, 0, stored.size)

    def write(self, name: str, content: bytes) -> None:
        """Write `content` as object `name` (small), read it back, and write again until the content
        is right. Raises StorageError after PATIENCE (600 s).
        """

        def attempt() -> None:
            """Write the object and read it back. Raises OSError if the content differs."""
            with self._atomic_path(name) as path:
                self._system.pipe_file(path, content)
            if (stored := self._system.cat_file(self._path(name))) != content:
                raise OSError(f"{len(stored):,} bytes were stored that are not the ones sent")

        self._repeat(f"{name} cannot be written", attempt)

    def upload(self, file: Path, name: str) -> None:
        """Upload a local file as object `name`, and check that its stored size is that of the file;
        else, and after other errors that may pass, try again. Raises StorageError.
        """

        def attempt() -> None:
            """Upload the file, in parts as fsspec decides. Raises OSError if the stored size
            differs.
            """
            size = file.stat().st_size  # each time: that of another file would never be stored
            with self._atomic_path(name) as path:
                self._system.put_file(str(file), path)
            self._system.invalidate_cache()
            if (stored := self._system.info(self._path(name))["size"]) != size:
                raise OSError(f"{stored:,} of {size:,} bytes were stored")

        self._repeat(f"{name} cannot be uploaded", attempt)

    def delete(self, name: str) -> None:
        """Delete an object, if it is there."""

        def remove() -> None:
            """Delete the object; a repeated request may find it gone."""
            with suppress(FileNotFoundError):
                self._system.rm_file(self._path(name))

        self._repeat(f"{name} cannot be deleted", remove)

    def download(
        self,
        name: str,
        stored: StoredFile,
        file: Path,
        check: Callable[[Path], None] | None = None,
    ) -> None:
        """Download an object to the path `file` in blocks, atomically, unless a file of this size
        and time is there. `check(path)` raises ValueError for wrong content: then it is downloaded
        again, and the error raised after DOWNLOADS (3) times. Processes that want the same file
        wait for each other.
        """
        with lock_file(file):
            if is_copy(file, stored):
                return
            part = file.with_name(f"{file.name}.part")
            for attempt in range(DOWNLOADS):
                part.unlink(missing_ok=True)  # left by a killed process
                self._fill(name, stored, part)
                try:
                    if check is not None:
                        check(part)
                    break
                except ValueError as error:
                    if attempt == DOWNLOADS - 1:
                        part.unlink()
                        raise
                    say(f"WARNING: {error}; it is downloaded again")
            os.utime(part, ns=(stored.stamp, stored.stamp))
            part.rename(file)

    def _fill(self, name: str, stored: StoredFile, part: Path) -> None:
        """Download an object into the new file `part`, THREADS (8) blocks at once."""
        with (
            open(os.open(part, write.NEW, 0o666), "wb") as file,
            ThreadPoolExecutor(THREADS) as pool,
        ):

            def copy(start: int) -> None:
                """Copy one block to its place in the file."""
                data = self.read_block(name, start, min(start + BLOCK, stored.size))
                os.pwrite(file.fileno(), data, start)

            try:
                for _ in pool.map(copy, range(0, stored.size, BLOCK)):
                    pass
                os.fsync(file.fileno())
            except OSError as error:
                if error.errno is None:  # of the storage, whose error names the URL
                    raise
                raise OSError(error.errno, error.strerror, str(part)) from None

    def read_block(self, name: str, start: int, stop: int) -> bytes:
        """Return the bytes start:stop of an object; a request that fails or returns fewer is
        repeated. Raises StorageError, and Refused for an object that has become smaller.
        """

        def get() -> bytes:
            """Read them in one request. Raises OSError where the answer has another length, and
            Refused where the object has fewer bytes.
            """
            if stop == start:
                return b""  # a range of no bytes is an error in S3
            try:
                # by name: s3fs has another order
                data = self._system.cat_file(self._path(name), start=start, end=stop)
                if len(data) != stop - start:
                    raise OSError(f"{len(data):,} of {stop - start:,} bytes arrived")
                return data
            except Exception:
                size = None
                with suppress(Exception):  # storage that is gone
                    self._system.invalidate_cache()
                    size = self._system.info(self._path(name))["size"]
                if size is not None and size < stop:
                    raise gate.refuse(
                        f"{self.url}/{name}", "has become smaller while it was read; start again"
                    ) from None
                raise

        return self._repeat(f"{name} cannot be read", get)

    def _path(self, name: str) -> str:
        """Return the path of an object within its file system, as fsspec takes it."""
        return f"{self._root}/{name}"

    @contextmanager
    def _atomic_path(self, name: str) -> Iterator[str]:
        """Context manager: yield the path to write an object to so that it appears whole. In a
        store this is its own path; on a local file system it is NAME.part, which is renamed at the
        end.
        """
        path = self._path(name)
        if not self._is_local:
            yield path
            return
        yield f"{path}.part"
        os.replace(f"{path}.part", path)

    def _repeat(self, failure: str, work: Callable[[], T], patience: float | None = None) -> T:
        """Return `work()`, called again after each error that may pass, with growing pauses, until
        `patience` seconds (default: 600) have passed. Raises StorageError, which names `failure`;
        Refused where `work` does, and where the content differs DOWNLOADS (3) times from the
        checksum that the storage has of it.
        """
        end = time.monotonic() + (PATIENCE if patience is None else patience)
        pause, mismatches = FIRST_PAUSE, 0
        while True:
            try:
                return work()
            except (FileNotFoundError, PermissionError, IsADirectoryError) as error:
                self._fail(failure, error)
            except gate.Refused:
                raise
            except Exception as error:  # each file system has its own types
                mismatches += type(error).__name__ == "FlexibleChecksumError"  # of botocore
                if mismatches == DOWNLOADS:
                    raise gate.refuse(self.url, f"{failure}: {error}") from error
                if time.monotonic() + pause > end:
                    self._fail(failure, error)
                reason = f"{type(error).__name__}: {error}"
                say(f"WARNING: {self.url}: {failure} ({reason[:300]}); again in {pause:.1f} s")
            # ranks that failed together do not come back together
            time.sleep(pause * random.uniform(0.5, 1))
            pause = min(2 * pause, LONGEST_PAUSE)

    def _fail(self, failure: str, error: Exception) -> NoReturn:
        """Raise StorageError, which names the URL, `failure` and the last error of a request."""
        raise StorageError(f"{self.url}: {failure} ({type(error).__name__}: {error})") from error


def _check_name(url: str, name: str) -> None:
    """Raise StorageError unless the object's name is a relative path that stays in its folder, not
    so deep that walking through the copy would exceed Python's recursion limit.
    """
    parts = name.split("/")
    if "\0" in name or len(parts) > DEEPEST or any(part in ("", ".", "..") for part in parts):
        raise StorageError(
            f"{url}: the object {name[:200]!r} has a name that no local file can have"
        )


def _stamp(info: Mapping[str, Any]) -> int:
    """Return the time by which copies of an object are known, in ns: whole seconds that follow from
    its ETag, where `info` of its file system has one; else the time of its last change; without one
    whole seconds that follow from Last-Modified, or 0.
    """
    # times in S3 are of seconds, and objects of this URL at two endpoints may have the same
    if tag := info.get("ETag") or info.get("etag"):
        return _tag_time(tag)
    for key in ("LastModified", "last_modified", "updated", "mtime", "created"):
        value = info.get(key)
        if isinstance(value, str):  # gs
            value = datetime.fromisoformat(value)
        if isinstance(value, datetime):
            value = value.timestamp()
        if isinstance(value, (int, float)):
            return int(value * 1e6) * 1000  # a float has no nanoseconds
    return _tag_time(info["Last-Modified"]) if info.get("Last-Modified") else 0


def _tag_time(tag: str) -> int:
    """Return a time in ns that stands for a tag, of a whole second (some file systems have no
    others) before 2038.
    """
    return (int(hashlib.blake2b(tag.encode(), digest_size=4).hexdigest(), 16) >> 1) * 10**9


@contextmanager
def lock_file(file: Path) -> Iterator[None]:
    """Context manager: a lock between processes of this host on the making of `file`, whose folder
    is created. Does nothing on file systems without locks.
    """
    file.parent.mkdir(parents=True, exist_ok=True)
    with filesystem.hold_lock(file.with_name(f"{file.name}.lock")):
        yield


def is_copy(file: Path, stored: StoredFile) -> bool:
    """Return True if `file` is a regular file with the size and the time of the object."""
    if file.is_symlink() or not file.is_file():
        return False
    status = file.stat()
    return (status.st_size, status.st_mtime_ns) == (stored.size, stored.stamp)


def local_copy(url: str, inside: str | None = None) -> Path:
    """Return the path of the local copy of a URL, <inside>/<scheme>/<path> (default of `inside`:
    ~/.cache/dolmen/storage); nothing is downloaded. Raises ValueError for an empty part, `.` or
    `..`, and where the copy or a folder between it and `inside` is a link.
    """
    scheme, _, path = url.partition("://")
    parts = path.strip("/").split("/")
    if any(part in ("", ".", "..") for part in parts):
        raise ValueError(f"{url}: write the URL of a folder or file without empty parts and '..'")
    copies = expand(inside or COPIES).absolute()
    target = copies.joinpath(scheme, *parts)
    # a copy loses the files that no object stands for: behind a link they are a user's
    for path in (target, *target.parents[: len(parts)]):
        if path.is_symlink():
            raise ValueError(f"{path} is a link, and would be the local copy of {url}: move it")
    return target


def check_lasting(url: str, remedy: str) -> None:
    """Raise ValueError, which ends in `remedy` (such as "another --out"), for a URL of the memory
    of this process: what is written there ends with it.
    """
    if url.startswith("memory://"):
        raise ValueError(
            f"{url} is in the memory of one process and ends with it: give {remedy}, such as "
            "file:///shared/run"
        )


def working_folder(url: str) -> Path:
    """Return the path of the local folder in which a run works whose own folder is a URL. Raises
    ValueError for a URL with an empty part or `..`, and for a path behind a link.
    """
    return local_copy(url, RUNS)


def working_url(folder: Path, inside: str | None = None) -> str | None:
    """Return the URL whose working folder `folder` is; None for a folder that is not in
    ~/.cache/dolmen/runs. `inside`: another folder, of local copies of URLs.
    """
    runs = expand(inside or RUNS).absolute()
    if not folder.absolute().is_relative_to(runs):
        return None
    scheme, _, path = folder.absolute().relative_to(runs).as_posix().partition("/")
    # a local path begins with a slash
    return f"{scheme}://{'/' if scheme in LOCAL_SCHEMES else ''}{path}" if path else None


def pull_file(url: str) -> Path | None:
    """Return the local copy of the object at a URL, downloaded if need be; None where the URL is no
    object. Raises StorageError, and ValueError for a URL that cannot be used.
    """
    target = local_copy(url)
    above, _, name = url.rstrip("/").rpartition("/")
    remote = RemoteFolder(above)
    if (stored := remote.find(name)) is None:
        return None
    remote.download(name, stored, target)
    return target


def pull_folder(url: str) -> Path:
    """Download the folder at a URL, as far as its local copy lacks files, and return the copy.
    Raises ValueError if there is no such folder, it is unfinished or damaged; and StorageError.
    """
    pull_files(url)
    return local_copy(url)


def pull_files(
    url: str,
    select: Callable[[Collection[str]], Collection[str]] = lambda names: names,
    known: Mapping[str, StoredFile] | None = None,
) -> list[Path]:
    """Return the local copies of files of the folder at a URL: of all, or of those that
    `select(names)` returns. The folder is listed, and files that it has no more are deleted from
    the copy, unless its files, or some, are `known`. Raises ValueError where there is no such
    folder, where it is unfinished, and where files differ from its checksums; and StorageError.
    """
    target, remote = local_copy(url), RemoteFolder(url)
    files = remote.files() if known is None else known
    if not files:
        raise ValueError(f"{url}: there is no such folder, or it is empty")
    names, sums = sorted(select(list(files))), read_sums(remote, files)
    if missing := [name for name in names if not is_copy(target / name, files[name])]:
        size = sum(files[name].size for name in missing)
        say(f"downloading {url}: {plural(len(missing), 'file')}, {megabytes(size)} -> {target}")
    # first: a folder may have got the name of such a file, or a file that of a folder
    if known is None:
        _delete_others(target, files)
    for name in names:
        create_parents(target, name)
        remote.download(name, files[name], target / name, sums_check(url, name, sums.get(name)))
    return [target / name for name in names]


def create_parents(folder: Path, name: str) -> None:
    """Create `folder` and, through no link, the folders in it that the file `name` needs. Raises
    OSError.
    """
    folder.mkdir(parents=True, exist_ok=True)
    write.folder(folder, Path(name).parent)


def _delete_others(target: Path, files: Collection[str]) -> None:
    """Delete the files of a local copy that no object stands for: a model that is now stored in
    other files would be read from the old ones. Files that another process is downloading stay, and
    so do locks: a lock without its file holds nobody back.
    """
    for where, folders, names in os.walk(target):
        folders[:] = [name for name in folders if not name.endswith(PARTIAL)]
        for name in names:
            file = Path(where, name)
            relative = str(file.relative_to(target))
            if relative.removesuffix(".part") not in files and not name.endswith(".lock"):
                file.unlink(missing_ok=True)
    for folder in filter(Path.is_dir, (target / name for name in files)):
        # a file that was a folder of others, which have left their locks
        for where, _, names in os.walk(folder, topdown=False):
            for name in names:
                if name.endswith(".lock"):
                    Path(where, name).unlink(missing_ok=True)
            with suppress(OSError):  # something else is there
                os.rmdir(where)


def pull(name: str | Path) -> str | Path:
    """Return the path of the local copy of a folder, downloaded as far as it is missing, for a URL;
    any other name is returned unchanged. Raises ValueError or StorageError.
    """
    return pull_folder(str(name)) if is_url(name) else name


def file_sum(file: Path) -> str:
    """Return the XXH3 hash (128 bits, hexadecimal) of a file's content."""
    with open(file, "rb") as content:
        return hashlib.file_digest(content, xxhash.xxh3_128).hexdigest()


def read_sums(remote: RemoteFolder, files: Mapping[str, StoredFile]) -> dict[str, str]:
    """Return the checksums of the files of a remote folder and of its subfolders, by name; empty
    without any. Raises Refused for a folder that was not uploaded to the end, or a file of
    checksums that is damaged.
    """
    sums: dict[str, str] = {}
    for listing in (name for name in files if name.split("/")[-1] == SUMS):
        checksums = _read_listing(remote, listing, files[listing])
        sums |= {listing.removesuffix(SUMS) + name: digest for name, digest in checksums.items()}
    if lost := [name for name in sums if name not in files]:
        raise gate.refuse(remote.url, f"lacks {len(lost)} of the files in {SUMS}, e.g. {lost[:3]}")
    return sums


def _read_listing(remote: RemoteFolder, listing: str, stored: StoredFile) -> dict[str, str]:
    """Return the checksums in one file of checksums (name -> checksum), which is read again where
    it is damaged. Raises Refused for an unfinished folder, or after DOWNLOADS (3) reads.
    """
    for _ in range(DOWNLOADS - 1):
        with suppress(gate.Refused):
            return parse_sums(remote.read(listing, stored, kinds.SUMS.size), remote.url)
    return parse_sums(remote.read(listing, stored, kinds.SUMS.size), f"{remote.url}/{listing}")


def parse_sums(content: bytes, where: str) -> dict[str, str]:
    """Return the checksums (name -> checksum) in the content of a file of checksums. Raises Refused
    where it marks an unfinished folder, or is damaged.
    """
    if content == UNFINISHED:
        raise gate.refuse(where, "says that the folder was not uploaded to the end")
    sums = gate.parse_json(content, where, kinds.SUMS)
    if sums["digest"] != digest_sums(sums["files"]):
        raise gate.refuse(where, "is damaged: its own digest is wrong")
    return sums["files"]


def digest_sums(sums: Mapping[str, str]) -> str:
    """Return a digest (XXH3) of the checksums of a folder, by which damage to them shows."""
    return xxhash.xxh3_128_hexdigest(json.dumps(sums, sort_keys=True).encode())


def sums_check(url: str, name: str, digest: str | None) -> Callable[[Path], None]:
    """Return a check of a downloaded file, which raises Refused unless the file has the checksum
    `digest`; None: it checks nothing.
    """

    def check(file: Path) -> None:
        """Raise Refused if the file has another checksum."""
        if digest is not None and file_sum(file) != digest:
            raise gate.refuse(
                f"{url}/{name}",
                f"is not what was uploaded, by its checksum in {SUMS} (delete that, if you have "
                "changed the file)",
            )

    return check


def push_folder(folder: Path, url: str) -> None:
    """Upload all files of a folder to the URL, and after them their checksums. Until then the
    folder at the URL is marked as unfinished. Raises StorageError.
    """
    remote = RemoteFolder(url)
    paths = (str(f.relative_to(folder)) for f in folder.rglob("*") if f.is_file())
    names = sorted(name for name in paths if name != SUMS)
    remote.write(SUMS, UNFINISHED)
    sums = {}
    for name in names:
        sums[name] = file_sum(folder / name)
        remote.upload(folder / name, name)
    remote.write(SUMS, json.dumps({"files": sums, "digest": digest_sums(sums)}).encode())


@contextmanager
def output_folder(name: str | Path) -> Iterator[Path]:
    """Context manager: the folder to write for an output `name`: itself, or for a URL a new
    temporary folder, which is uploaded at the block's normal end. Raises ValueError where the URL
    holds objects or is of the memory of this process, and StorageError.
    """
    if not is_url(name):
        yield Path(name)
        return
    url = str(name)
    check_lasting(url, "another URL")
    if files := RemoteFolder(url).files():
        raise ValueError(f"{url} holds {plural(len(files), 'object')}: give another URL")
    copies = expand(COPIES)  # where there is room for models
    copies.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=copies) as folder:
        target = Path(folder, local_copy(url).name)
        yield target
        push_folder(target, url)
