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
        index.json      what it was built from, the counts, size and digest of each file above, and
                        a digest of itself

`key` hashes what decides the tokens: each file's path, size, time of modification and time of
change (`identity_of`; of a data set of the hub, each shard's), the text field, the tokenizer, the
end-of-text id, FORMAT. The time of change (ctime) moves with every write and cannot be set, so
other text of the same size and time of modification is noticed without reading it again; where a
file system does not keep it, only the other two tell. It also moves with chmod, chown, a new hard
link and a restored backup: then the same text is tokenised once more.

Whoever starts a run compares every byte with the digests (XXH3, 128 bits, 15 GB/s per core, so that
reading the file decides), one process per host; the others check sizes. What differs is built
again.
"""

import hashlib
import json
import os
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import xxhash

from dolmen.core.words import counted
from dolmen.data import tokenizer as tokenizers
from dolmen.data.documents import load_hub
from dolmen.data.progress import bar, say
from dolmen.data.scratch import building, lock, remove_folder
from dolmen.data.sources import Source
from dolmen.data.tokenise import write_tokens
from dolmen.files.gate import Refused, read_json
from dolmen.files.kinds import CORPUS

FORMAT = 2
FILES = ("tokens.bin", "offsets.npy", "documents.npy", "seams.npy")


class Corpus:
    """A built folder. Its arrays are memory-mapped; `documents` has DOCUMENT's fields; `content`
    hashes the text; `different_count` counts copies once.
    """

    def __init__(self, folder: Path, index: Mapping[str, Any], name: str):
        self.name = name
        self.files = [Path(path) for path, *_ in index["files"]]
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
    tokenizer: tokenizers.PreTrainedTokenizer,
    end_of_text: int,
    text_field: str,
    cache: Path,
    workers: int | None = None,
    progress: bool = True,
    option: str = "--data.path",
    verify: bool = True,
) -> Corpus:
    """The tokens of `source`, from the cache or built into it. With `verify` each cached byte is
    compared with its digest, else only sizes. ValueError if it holds no text.
    """
    origin = provenance(source, tokenizer, end_of_text, text_field, option)
    key = hashlib.blake2b(json.dumps(origin).encode(), digest_size=16).hexdigest()
    folder = cache / "corpora" / key
    try:
        return Corpus(folder, examined(folder, origin, verify), source.name)
    except Refused as damage:
        told = damage
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ValueError(
            f"cannot write the cache folder {cache}: {error}; use --data.cache"
        ) from error
    with lock(folder.with_suffix(".lock")):
        try:
            index = examined(folder, origin, verify)  # another process may have built it meanwhile
        except Refused:
            if folder.exists():
                say(f"the cached tokens are damaged and made anew: {told}", progress)
                remove_folder(folder)
            threads = workers or len(os.sched_getaffinity(0))
            with building(folder) as part:
                build_corpus(source, tokenizer, origin, part, threads, progress, option)
            try:
                index = examined(folder, origin, verify=False)
            except Refused as error:
                raise ValueError(
                    f"could not write {folder} ({error}): remove it, or use another --data.cache"
                ) from None
    return Corpus(folder, index, source.name)


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


def identity_of(file: Path) -> list:
    """[path, bytes, time of modification, time of change] of a file; times in nanoseconds."""
    found = file.stat()
    return [str(file), found.st_size, found.st_mtime_ns, found.st_ctime_ns]


def examined(folder: Path, origin: Mapping[str, Any], verify: bool) -> dict[str, Any]:
    """The index of a whole folder of the tokens of `origin`. Raises Refused, with the file that is
    missing or damaged.
    """
    index = read_json(folder / "index.json", CORPUS)
    if index.pop("digest") != digest_of(index):
        raise Refused(f"{folder / 'index.json'}: its digest differs")
    if digest_of({name: index[name] for name in origin}) != digest_of(origin):
        raise Refused(f"{folder / 'index.json'}: it is of another text, or of another tokenizer")
    for name in FILES:
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


def file_digest(file: Path) -> str:
    """XXH3 of the content."""
    found = xxhash.xxh3_128()
    with open(file, "rb") as content:
        while block := content.read(1 << 22):
            found.update(block)
    return found.hexdigest()


def digest_of(index: Mapping[str, Any]) -> str:
    return xxhash.xxh3_128_hexdigest(json.dumps(index, sort_keys=True).encode())


def build_corpus(
    source: Source,
    tokenizer: tokenizers.PreTrainedTokenizer,
    origin: dict,
    folder: Path,
    workers: int,
    progress: bool,
    option: str,
) -> None:
    """Writes FILES and the index into `folder`. ValueError if there is no text, or a file changes
    meanwhile.
    """
    started, sizes = time.monotonic(), [size for _, size, *_ in origin["files"]]
    title = (
        f"tokenising {source.name}: {sum(sizes) / 1e6:,.1f} MB in {counted(len(sizes), 'file')}, "
        f"{workers} threads"
    )
    with bar(title, None if source.hubs else sum(sizes), progress) as reach:
        written = write_tokens(source, tokenizer, origin, folder, workers, reach, option)
    ends, documents = written.ends, written.documents
    if not len(ends):
        raise ValueError(
            f"{option} {source.name}: no text in {counted(len(sizes), 'file')} and "
            f"{counted(len(source.hubs), 'data set')}"
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
        "sizes": {name: (folder / name).stat().st_size for name in FILES},
        "digests": {
            name: written.digest if name == "tokens.bin" else file_digest(folder / name)
            for name in FILES
        },
    }
    (folder / "index.json").write_text(json.dumps({**index, "digest": digest_of(index)}))
    say(
        f"  {index['tokens']:,} tokens of {counted(index['documents'], 'document')}, "
        f"{index['bytes'] / index['tokens']:.2f} bytes per token, "
        f"{time.monotonic() - started:.1f} s -> {folder.parent}",
        progress,
    )
