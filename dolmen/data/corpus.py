"""Tokenised corpora on disk, and the cache that holds them.

Folders of the cache that hold what was made of files, under a hash of what decides it.

    <cache>/corpora/<key>/
        ...             files, as their form says
        index.json      what they were made from, counts, size and digest of each, and a digest of
                        itself

`key` hashes the origin, in which each file that is read stands with its path, size, time of
modification and time of change (`identity_of`). The time of change (ctime) moves with every write
and cannot be set, so other text of the same size and time of modification is noticed without
reading it again; where a file system does not keep it, only the other two tell. It also moves with
chmod, chown, a new hard link and a restored backup: then the same is made once more.

Whoever starts a run compares every byte with the digests (XXH3, 128 bits, 15 GB/s per core, so that
reading the file decides), one process per host; the others check sizes. What differs is built
again.

Documents as tokens on disk, memory-mapped. Of text they are built once and reused until
something they depend on changes:

    tokens.bin      every document's tokens and its end-of-text token, little-endian uint16, or
                    uint32 if the tokenizer has more than 65,536 tokens
    offsets.npy     int64 [documents + 1]: document i is tokens[offsets[i]:offsets[i + 1]]
    documents.npy   per document: bytes of text, hash of its text, hash of its text without white
                    space, index of its file (-1: a row of a data set)
    seams.npy       per piece of a document that was tokenised in several: index of the document,
                    tokens and bytes of the document up to the end of the piece

What decides the tokens: the files (of a data set of the hub, each shard's), the text field, the
tokenizer, the end-of-text id, FORMAT. Megatron's .bin is not built but read where it lies
(indexed.py).
"""

import hashlib
import json
import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import xxhash

from dolmen.core.log import bar, say
from dolmen.core.messages import plural
from dolmen.data import tokenizer as tokenizers
from dolmen.data.mixture import TokenStream
from dolmen.data.scratch import building, lock, remove_folder
from dolmen.data.sources import Source
from dolmen.data.tokenise import load_hub, write_tokens
from dolmen.files.gate import Kind, Refused, read_json
from dolmen.files.kinds import CORPUS

INDEX = "index.json"


class Form(NamedTuple):
    """What such a folder holds: the index, and these files."""

    kind: Kind
    files: tuple[str, ...]


def found_or_built(
    cache: Path,
    origin: dict[str, Any],
    form: Form,
    build: Callable[[Path], None],
    verify: bool,
    progress: bool,
) -> tuple[Path, dict[str, Any]]:
    """The whole folder of `origin` and its index: the one there is, or else one that `build` fills.
    With `verify` each cached byte is compared with its digest, else only sizes. Raises ValueError
    where the cache cannot be written, and what `build` raises.
    """
    key = hashlib.blake2b(json.dumps(origin).encode(), digest_size=16).hexdigest()
    folder = cache / "corpora" / key
    try:
        return folder, examined(folder, form, origin, verify)
    except Refused as damage:
        told = damage
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ValueError(
            f"cannot write the cache folder {cache}: {error}; use --data.cache"
        ) from error
    with lock(folder.with_suffix(".lock")):
        try:  # another process may have built it meanwhile
            return folder, examined(folder, form, origin, verify)
        except Refused:
            if folder.exists():
                say(f"the cached tokens are damaged and made anew: {told}", progress)
                remove_folder(folder)
            with building(folder) as part:
                build(part)
            try:
                return folder, examined(folder, form, origin, verify=False)
            except Refused as error:
                raise ValueError(
                    f"could not write {folder} ({error}): remove it, or use another --data.cache"
                ) from None


def examined(folder: Path, form: Form, origin: Mapping[str, Any], verify: bool) -> dict[str, Any]:
    """The index of a whole folder of the tokens of `origin`. Raises Refused, with the file that is
    missing or damaged.
    """
    index = read_json(folder / INDEX, form.kind)
    if index.pop("digest") != digest_of(index):
        raise Refused(f"{folder / INDEX}: its digest differs")
    if digest_of({name: index.get(name) for name in origin}) != digest_of(origin):
        raise Refused(f"{folder / INDEX}: it is of another text, or of another tokenizer")
    for name in form.files:
        file = folder / name
        size = file.stat().st_size if file.is_file() else -1
        if size != index["sizes"].get(name):
            raise Refused(f"{file}: {size} bytes, not {index['sizes'].get(name)}")
        if verify and file_digest(file) != index["digests"].get(name):
            raise Refused(f"{file}: its digest differs")
    if index["largest"] >= index["vocabulary"]:
        raise Refused(
            f"{folder}: token {index['largest']} of a vocabulary of {index['vocabulary']}"
        )
    return index


def write_index(
    folder: Path, form: Form, index: dict[str, Any], digests: Mapping[str, str] | None = None
) -> None:
    """Writes the index of a folder that has its files; `digests` are those that are known."""
    known = digests or {}
    index = {
        **index,
        "sizes": {name: (folder / name).stat().st_size for name in form.files},
        "digests": {name: known.get(name) or file_digest(folder / name) for name in form.files},
    }
    (folder / INDEX).write_text(json.dumps({**index, "digest": digest_of(index)}))


def identity_of(file: Path) -> list:
    """[path, bytes, time of modification, time of change] of a file; times in nanoseconds."""
    found = file.stat()
    return [str(file), found.st_size, found.st_mtime_ns, found.st_ctime_ns]


def file_digest(file: Path) -> str:
    """XXH3 of the content."""
    found = xxhash.xxh3_128()
    with open(file, "rb") as content:
        while block := content.read(1 << 22):
            found.update(block)
    return found.hexdigest()


def digest_of(index: Mapping[str, Any]) -> str:
    return xxhash.xxh3_128_hexdigest(json.dumps(index, sort_keys=True).encode())


FORMAT = 2
FORM = Form(CORPUS, ("tokens.bin", "offsets.npy", "documents.npy", "seams.npy"))


@dataclass(frozen=True, eq=False)
class Corpus:
    """Documents as tokens, of one folder of the cache, of one .bin, or of several of these."""

    name: str
    files: Sequence[Path]
    """Those that are documents."""
    memory: Sequence[np.ndarray]
    """Tokens, memory-mapped; documents lie in one of them, one behind the other, and in those of
    the next.
    """
    sequences: Sequence[np.ndarray]
    """Of each of `memory`, the first token of each sequence, and their number: its documents, or
    the parts that a .bin has them in.
    """
    offsets: np.ndarray
    """int64 [documents + 1]: the first token of each, counted over all of `memory`."""
    documents: np.ndarray
    """DOCUMENT [documents]. Where there are tokens alone, `bytes` are theirs and both hashes are of
    them.
    """
    seams: np.ndarray
    """SEAM."""
    byte_count: int | None
    """Of text, exactly; None where some is known by its tokens alone."""
    content: str
    """Hash of all text."""
    different_count: int
    """Documents, copies counted once."""
    notes: tuple[str, ...] = ()
    """What to tell of it, a line each."""

    @property
    def token_count(self) -> int:
        return int(self.offsets[-1])

    @property
    def document_count(self) -> int:
        return len(self.documents)

    def stream(self, starts: np.ndarray, stops: np.ndarray) -> TokenStream:
        """Ranges of tokens, none of which goes from one of `memory` into the next."""
        return TokenStream.over(self.memory, starts, stops)

    def doc(self, index: int) -> np.ndarray:
        """Tokens of a document, its end-of-text token included."""
        start, stop = self.offsets[index : index + 2]
        return self.stream(np.array([start]), np.array([stop])).read(0, int(stop - start))

    @property
    def last_tokens(self) -> np.ndarray:
        """Of each document, int64."""
        bases = np.cumsum([0] + [len(tokens) for tokens in self.memory])
        at = self.offsets[1:] - 1
        found = np.empty(len(at), np.int64)
        for tokens, base, stop in zip(self.memory, bases, bases[1:], strict=False):
            here = (at >= base) & (at < stop)
            found[here] = tokens[at[here] - base]
        return found

    def file(self, index: int) -> Path | None:
        """The file that is this document, or None for a document that is a row."""
        file = int(self.documents["file"][index])
        return self.files[file] if file >= 0 else None


def join(name: str, parts: Sequence[Corpus]) -> Corpus:
    """The documents of all, in order."""
    if len(parts) == 1:
        return parts[0]
    tables, seams, documents, files = [], [], 0, 0
    for part in parts:
        table, seam = part.documents.copy(), part.seams.copy()
        table["file"] += np.where(table["file"] < 0, 0, files).astype(np.int32)
        seam["document"] += documents
        tables.append(table)
        seams.append(seam)
        documents, files = documents + part.document_count, files + len(part.files)
    table = np.concatenate(tables)
    bases = np.cumsum([0] + [part.token_count for part in parts])
    inner = [part.offsets[:-1] + base for part, base in zip(parts, bases, strict=False)]
    contents = "".join(part.content for part in parts)
    return Corpus(
        name,
        [file for part in parts for file in part.files],
        [tokens for part in parts for tokens in part.memory],
        [bounds for part in parts for bounds in part.sequences],
        np.concatenate([*inner, bases[-1:]]),
        table,
        np.concatenate(seams),
        added([part.byte_count for part in parts]),
        hashlib.blake2b(contents.encode(), digest_size=8).hexdigest(),
        len(np.unique(table["words"])),
        tuple(note for part in parts for note in part.notes),
    )


def added(sizes: Sequence[int | None]) -> int | None:
    """Their sum; None where one is not known."""
    known = [size for size in sizes if size is not None]
    return sum(known) if len(known) == len(sizes) else None


def open_text(
    source: Source,
    tokenizer: tokenizers.PreTrainedTokenizer,
    end_of_text: int,
    text_field: str,
    cache: Path,
    workers: int | None = None,
    progress: bool = True,
    option: str = "--data.path",
    verify: bool = True,
) -> Corpus:
    """The tokens of the text of `source`, from the cache or built into it. ValueError if it holds
    no text.
    """
    origin = provenance(source, tokenizer, end_of_text, text_field, option)
    threads = workers or len(os.sched_getaffinity(0))

    def build(part: Path) -> None:
        build_corpus(source, tokenizer, origin, part, threads, progress, option)

    folder, index = found_or_built(cache, origin, FORM, build, verify, progress)
    offsets = np.load(folder / "offsets.npy", mmap_mode="r")
    return Corpus(
        source.name,
        [Path(path) for path, *_ in index["files"]],
        [np.asarray(np.memmap(folder / "tokens.bin", np.dtype(index["dtype"]), mode="r"))],
        [offsets],
        offsets,
        np.load(folder / "documents.npy", mmap_mode="r"),
        np.load(folder / "seams.npy"),
        index["bytes"],
        index["content"],
        index["different"],
    )


def provenance(
    source: Source,
    tokenizer: tokenizers.PreTrainedTokenizer,
    end_of_text: int,
    text_field: str,
    option: str,
) -> dict:
    """Everything that decides the tokens, as JSON. Changes when a file does."""
    return {
        "format": FORMAT,
        **identities(source, option),
        "text_field": text_field,
        "tokenizer": tokenizers.fingerprint(tokenizer),
        "vocabulary": tokenizers.vocabulary_size(tokenizer),
        "end_of_text": end_of_text,
        "dtype": tokenizers.token_dtype(tokenizer).str,
    }


def identities(source: Source, option: str) -> dict[str, list]:
    """Which text the source is, as JSON, found without reading it: `identity_of` each file, and of
    each data set of the hub [name, rows, `identity_of` each shard].
    """
    hubs = []
    for name in source.hubs:
        table = load_hub(name, option)
        shards = [identity_of(Path(shard["filename"])) for shard in table.cache_files]
        hubs.append([name, table.num_rows, shards])
    return {"files": [identity_of(file) for file in source.files], "hubs": hubs}


def build_corpus(
    source: Source,
    tokenizer: tokenizers.PreTrainedTokenizer,
    origin: dict,
    folder: Path,
    workers: int,
    progress: bool,
    option: str,
) -> None:
    """Writes the files of FORM and the index into `folder`. ValueError if there is no text, or a
    file changes meanwhile.
    """
    started, sizes = time.monotonic(), [size for _, size, *_ in origin["files"]]
    title = (
        f"tokenising {source.name}: {sum(sizes) / 1e6:,.1f} MB in {plural(len(sizes), 'file')}, "
        f"{workers} threads"
    )
    with bar(title, None if source.hubs else sum(sizes), progress) as reach:
        written = write_tokens(source, tokenizer, origin, folder, workers, reach, option)
    ends, documents = written.ends, written.documents
    if not len(ends):
        raise ValueError(
            f"{option} {source.name}: no text in {plural(len(sizes), 'file')} and "
            f"{plural(len(source.hubs), 'data set')}"
        )
    if ends[-1] == len(ends):
        raise ValueError(
            f"{option} {source.name}: the tokenizer gives no tokens for the text of all "
            f"{len(ends):,} documents: use another --data.tokenizer"
        )
    if origin["files"] != [identity_of(file) for file in source.files]:
        raise ValueError(
            f"{option} {source.name}: a file changed while it was tokenised; start again"
        )
    np.save(folder / "offsets.npy", np.concatenate([[0], ends]).astype("<i8"))
    np.save(folder / "documents.npy", documents)
    np.save(folder / "seams.npy", written.seams)
    index = {
        **origin,
        "tokens": int(ends[-1]),
        "largest": written.largest,
        "documents": len(ends),
        "different": len(np.unique(documents["words"])),
        "bytes": int(documents["bytes"].sum()),
        "content": hashlib.blake2b(documents["hash"].tobytes(), digest_size=8).hexdigest(),
    }
    write_index(folder, FORM, index, {"tokens.bin": written.digest})
    say(
        f"  {index['tokens']:,} tokens of {plural(index['documents'], 'document')}, "
        f"{index['bytes'] / index['tokens']:.2f} bytes per token, "
        f"{time.monotonic() - started:.1f} s -> {folder.parent}",
        progress,
    )
