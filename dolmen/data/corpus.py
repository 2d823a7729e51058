"""Documents as tokens on disk: built once, memory-mapped, reused until something they depend on
changes.

    <cache>/corpora/<key>/
        tokens.bin      every document's tokens and its end-of-text token, little-endian uint16, or
                        uint32 if the tokenizer has more than 65,536 tokens
        offsets.npy     int64 [documents + 1]: document i is tokens[offsets[i]:offsets[i + 1]]
        documents.npy   per document: bytes of text, hash of its text, hash of its text without
                        white space, index of its file (-1: a row of a data set)
        seams.npy       per piece of a document that was tokenised in several: index of the
                        document, tokens and bytes of the document up to the end of the piece
        index.json      what it was built from, the counts, and the size of each file above

`key` hashes what decides the tokens: each file's path, size and time of modification, the text
field, the tokenizer, the end-of-text id, FORMAT. A folder appears by one rename, so it is whole or
absent; one whose sizes differ from its index is built again. Processes that ask at once wait for
the first (flock); where a file system has no locks, each builds and the first rename wins.
"""

import fcntl
import hashlib
import json
import os
import shutil
import tempfile
import time
from array import array
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path

import numpy as np

from dolmen.data import tokenizer as tokenizers
from dolmen.data.documents import Piece, load_hub, pieces
from dolmen.data.heldout import TextHash
from dolmen.data.progress import bar, say
from dolmen.data.readers import PIECE, whole
from dolmen.data.sources import Source

FORMAT = 2
DOCUMENT = np.dtype([("bytes", "<i8"), ("hash", "<u8"), ("words", "<u8"), ("file", "<i4")])
SEAM = np.dtype([("document", "<i8"), ("tokens", "<i8"), ("bytes", "<i8")])


class Corpus:
    """A built folder. Its arrays are memory-mapped; `documents` has DOCUMENT's fields; `content`
    hashes the text; `different_count` counts copies once.
    """

    def __init__(self, folder: Path, name: str):
        index = json.loads((folder / "index.json").read_text())
        self.name = name
        self.files = [Path(path) for path, _, _ in index["files"]]
        self.tokens = np.asarray(
            np.memmap(folder / "tokens.bin", np.dtype(index["dtype"]), mode="r")
        )
        self.offsets = np.load(folder / "offsets.npy", mmap_mode="r")
        self.documents = np.load(folder / "documents.npy", mmap_mode="r")
        self.seams = np.load(folder / "seams.npy")
        self.token_count, self.document_count = index["tokens"], index["documents"]
        self.byte_count, self.content = index["bytes"], index["content"]
        self.different_count = index["different"]

    def doc(self, index: int) -> np.ndarray:
        """Tokens of a document, its end-of-text token included."""
        return self.tokens[self.offsets[index] : self.offsets[index + 1]]

    def file(self, index: int) -> Path | None:
        """The file that is this document, or None for a document that is a row."""
        file = int(self.documents["file"][index])
        return self.files[file] if file >= 0 else None


def open_corpus(
    source: Source,
    tokenizer,
    end_of_text: int,
    text_field: str,
    cache: Path,
    workers: int | None = None,
    progress: bool = True,
    option: str = "--data.path",
) -> Corpus:
    """The tokens of `source`, from the cache or built into it. ValueError if it holds no text."""
    origin = provenance(source, tokenizer, end_of_text, text_field, option)
    key = hashlib.blake2b(json.dumps(origin).encode(), digest_size=16).hexdigest()
    folder = cache / "corpora" / key
    if not complete(folder):
        try:
            folder.parent.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ValueError(
                f"cannot write the cache folder {cache}: {error}; use --data.cache"
            ) from error
        with lock(folder.with_suffix(".lock")):
            if not complete(folder):
                threads = workers or len(os.sched_getaffinity(0))
                build_in_place(source, tokenizer, origin, folder, threads, progress, option)
    return Corpus(folder, source.name)


def provenance(source: Source, tokenizer, end_of_text: int, text_field: str, option: str) -> dict:
    """Everything that decides the tokens, as JSON. Changes when a file does."""
    stats = [(str(file), file.stat()) for file in source.files]
    hubs = []
    for name in source.hubs:
        table = load_hub(name, option)
        shards = [Path(shard["filename"]) for shard in table.cache_files]
        hubs.append(
            [name, table.num_rows, [[str(shard), shard.stat().st_size] for shard in shards]]
        )
    return {
        "format": FORMAT,
        "files": [[name, stat.st_size, stat.st_mtime_ns] for name, stat in stats],
        "hubs": hubs,
        "text_field": text_field,
        "tokenizer": tokenizers.fingerprint(tokenizer),
        "end_of_text": end_of_text,
        "dtype": tokenizers.token_dtype(tokenizer).str,
    }


def complete(folder: Path) -> bool:
    """Whether the folder is there and each file has the size that the index gives."""
    try:
        sizes = json.loads((folder / "index.json").read_text())["sizes"]
        return all((folder / name).stat().st_size == size for name, size in sizes.items())
    except (OSError, ValueError, KeyError, AttributeError, TypeError):
        return False


@contextmanager
def lock(path: Path) -> Iterator[None]:
    with open(path, "w") as handle:
        with suppress(OSError):  # a file system without locks
            fcntl.flock(handle, fcntl.LOCK_EX)
        try:
            yield
        finally:
            path.unlink(missing_ok=True)


def build_in_place(
    source: Source, tokenizer, origin: dict, folder: Path, workers: int, progress: bool, option: str
) -> None:
    """Builds beside `folder` and renames; leaves nothing behind when it fails."""
    temporary = Path(tempfile.mkdtemp(prefix=f"{folder.name}.", dir=folder.parent))
    try:
        build(source, tokenizer, origin, temporary, workers, progress, option)
        shutil.rmtree(folder, ignore_errors=True)  # what an incomplete one left
        with suppress(OSError):  # another process was first
            os.rename(temporary, folder)
        if not complete(folder):
            raise OSError(f"could not write {folder}: use another --data.cache")
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def build(
    source: Source, tokenizer, origin: dict, folder: Path, workers: int, progress: bool, option: str
) -> None:
    started, sizes = time.monotonic(), [size for _, size, _ in origin["files"]]
    title = (
        f"tokenising {source.name}: {sum(sizes) / 1e6:,.1f} MB in {len(sizes):,} files, "
        f"{workers} threads"
    )
    with bar(title, None if source.hubs else sum(sizes), progress) as reach:
        ends, documents, seams = write_tokens(
            source, tokenizer, origin, folder, workers, reach, option
        )
    if not len(ends):
        raise ValueError(
            f"{option} {source.name}: no text in {len(sizes):,} files and {len(source.hubs)} "
            f"data sets"
        )
    if origin["files"] != [[str(f), f.stat().st_size, f.stat().st_mtime_ns] for f in source.files]:
        raise ValueError(
            f"{option} {source.name}: a file changed while it was tokenised; start again"
        )
    np.save(folder / "offsets.npy", np.concatenate([[0], ends]).astype("<i8"))
    np.save(folder / "documents.npy", documents)
    np.save(folder / "seams.npy", seams)
    content = hashlib.blake2b(documents["hash"].tobytes(), digest_size=8).hexdigest()
    index = {
        **origin,
        "tokens": int(ends[-1]),
        "documents": len(ends),
        "different": len(np.unique(documents["words"])),
        "bytes": int(documents["bytes"].sum()),
        "content": content,
        "sizes": {file.name: file.stat().st_size for file in sorted(folder.iterdir())},
    }
    (folder / "index.json").write_text(json.dumps(index))
    say(
        f"  {index['tokens']:,} tokens of {index['documents']:,} documents, "
        f"{index['bytes'] / index['tokens']:.2f} bytes a token, {time.monotonic() - started:.1f} s "
        f"-> {folder.parent}",
        progress,
    )


def write_tokens(
    source: Source,
    tokenizer,
    origin: dict,
    folder: Path,
    workers: int,
    reach: Callable[[int], None],
    option: str,
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Writes tokens.bin; returns each document's end [documents], DOCUMENT [documents] and SEAM
    [pieces]. `reach` is told how much has been read.
    """
    ends, documents, seams = array("q"), Column(DOCUMENT), Column(SEAM)
    before = np.cumsum([0] + [size for _, size, _ in origin["files"]])
    mark = np.array([origin["end_of_text"]], origin["dtype"])
    position = start = read = current = 0
    text = TextHash()
    with open(folder / "tokens.bin", "wb") as out:
        for piece, ids in encoded(
            pieces(source, origin["text_field"], option), tokenizers.encoder(tokenizer), workers
        ):
            text.update(added := piece.text.encode())
            out.write(ids)
            position += len(ids)
            read, current = (read if piece.source == current else 0) + len(added), piece.source
            reach(
                int(min(before[current] + read, before[current + 1]))
                if current < len(source.files)
                else text.size
            )
            if not piece.last or text.pieces > 1:
                seams.append((len(ends), position - start, text.size))
            if not piece.last:
                continue
            out.write(mark)
            position += 1
            is_file = current < len(source.files) and whole(source.files[current])
            documents.append((text.size, text.exact, text.words, current if is_file else -1))
            ends.append(position)
            text, start = TextHash(), position
    return np.frombuffer(ends, np.int64), documents.array(), seams.array()


class Column:
    """Records of `dtype`, appended one by one without an object for each."""

    def __init__(self, dtype: np.dtype):
        self.dtype, self.bytes = dtype, bytearray()

    def append(self, record: tuple[int, ...]) -> None:
        self.bytes += np.array(record, self.dtype).tobytes()

    def array(self) -> np.ndarray:
        return np.frombuffer(self.bytes, self.dtype)


def encoded(
    parts: Iterable[Piece], encode: Callable[[str], np.ndarray], workers: int
) -> Iterator[tuple[Piece, np.ndarray]]:
    """(piece, its ids) in order; at most 2 x `workers` + 1 groups are in memory at a time.

    Threads and not processes: the tokenizer releases the interpreter's lock (12.1 MB on 2 cores:
    2.8 s with one, 1.5 s with two), and there is nothing to fork beside CUDA or gloo and no main
    module to import again.
    """
    with ThreadPoolExecutor(workers) as pool:
        waiting: deque = deque()
        for group in grouped(parts):
            waiting.append(
                (group, pool.submit(lambda group: [encode(piece.text) for piece in group], group))
            )
            if len(waiting) > 2 * workers:
                group, ids = waiting.popleft()
                yield from zip(group, ids.result(), strict=True)
        for group, ids in waiting:
            yield from zip(group, ids.result(), strict=True)


def grouped(parts: Iterable[Piece]) -> Iterator[list[Piece]]:
    """Pieces in lists of about PIECE characters, so that a short document is not a task of
    its own.
    """
    group, characters = [], 0
    for piece in parts:
        group.append(piece)
        characters += len(piece.text)
        if characters >= PIECE:
            yield group
            group, characters = [], 0
    if group:
        yield group
