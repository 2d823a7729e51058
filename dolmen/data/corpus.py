"""Tokenised corpora: documents as tokens on disk, memory-mapped. Text is tokenised once and reused
until something that its tokens depend on changes (token_cache.py):

    tokens.bin      every document's tokens and its end-of-text token, little-endian uint16, or
                    uint32 if the tokenizer has more than 65,536 tokens
    offsets.npy     int64 [documents + 1]: document i is tokens[offsets[i]:offsets[i + 1]]
    documents.npy   per document: bytes of text, hash of its text, hash of its text without white
                    space, index of its file (-1: a row of a data set)
    seams.npy       per piece of a document that was tokenised in several: index of the document,
                    tokens and bytes of the document up to the end of the piece

The tokens depend on the files (for a data set of the hub, each shard's), the text field, the
tokenizer, the end-of-text id and FORMAT. Megatron's .bin is not rebuilt but read in place
(indexed.py).
"""

import hashlib
import os
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from dolmen.core.log import bar, say
from dolmen.core.messages import megabytes, plural
from dolmen.data import tokenizer as tokenizers
from dolmen.data.mixture import TokenStream
from dolmen.data.sources import DataSource
from dolmen.data.token_cache import (
    Form,
    find_or_build,
    identity_of,
    write_index,
)
from dolmen.data.tokenise import load_hub, write_tokens
from dolmen.files.kinds import CORPUS
from dolmen.files.remote_file import TextFile

FORMAT = 2
FORM = Form(CORPUS, ("tokens.bin", "offsets.npy", "documents.npy", "seams.npy"))


@dataclass(frozen=True, eq=False)
class Corpus:
    """Documents as memory-mapped tokens, from the cache, from a .bin of Megatron, or from several
    of these in order.
    """

    name: str
    files: Sequence[TextFile]
    """Files that are documents."""
    memory: Sequence[np.ndarray]
    """Memory-mapped tokens; a document lies in one of these arrays, and documents go on from one to
    the next.
    """
    sequences: Sequence[np.ndarray]
    """For each array of `memory`, where its sequences begin, and its end: documents, or the
    sequences of a .bin.
    """
    offsets: np.ndarray
    """int64 [documents + 1]: the first token of each, counted over all of `memory`."""
    documents: np.ndarray
    """Records DOCUMENT [documents]. For token data `bytes` and both hashes are of the tokens."""
    seams: np.ndarray
    """Records SEAM [pieces] of documents that were tokenised in several pieces."""
    byte_count: int | None
    """Bytes of text; None where some of it is known as tokens only."""
    content: str
    """Hash of all text."""
    different_count: int
    """Documents, copies counted once."""
    notes: tuple[str, ...] = ()
    """Notes for the header of a run, a line each."""

    @property
    def token_count(self) -> int:
        """Number of tokens, end-of-text tokens included."""
        return int(self.offsets[-1])

    @property
    def document_count(self) -> int:
        """Number of documents."""
        return len(self.documents)

    def stream(self, starts: np.ndarray, stops: np.ndarray) -> TokenStream:
        """Return a stream of the token ranges starts[i]:stops[i], counted over all of `memory`;
        none may cross from one array of `memory` into the next.
        """
        return TokenStream.from_arrays(self.memory, starts, stops)

    def doc(self, index: int) -> np.ndarray:
        """Return the tokens of document `index`, its end-of-text token included, int64."""
        start, stop = self.offsets[index : index + 2]
        return self.stream(np.array([start]), np.array([stop])).read(0, int(stop - start))

    @property
    def last_tokens(self) -> np.ndarray:
        """Last token of each document, int64 [documents]."""
        bases = np.cumsum([0] + [len(tokens) for tokens in self.memory])
        # positions of last tokens
        at = self.offsets[1:] - 1
        last = np.empty(len(at), np.int64)
        for tokens, base, stop in zip(self.memory, bases, bases[1:], strict=False):
            # last tokens that lie in this array
            here = (at >= base) & (at < stop)
            last[here] = tokens[at[here] - base]
        return last

    def file(self, index: int) -> TextFile | None:
        """Return the file that document `index` is all of; None if it is a row of a file or data
        set.
        """
        file = int(self.documents["file"][index])
        return self.files[file] if file >= 0 else None


def join(name: str, parts: Sequence[Corpus]) -> Corpus:
    """Return the concatenation of several corpora as one called `name`; a single one is returned as
    it is.
    """
    if len(parts) == 1:
        return parts[0]
    tables, seams, documents, files = [], [], 0, 0
    for part in parts:
        table, seam = part.documents.copy(), part.seams.copy()
        # -1 marks a row: not an index into files
        table["file"] += np.where(table["file"] < 0, 0, files).astype(np.int32)
        seam["document"] += documents
        tables.append(table)
        seams.append(seam)
        # indices count on from part to part
        documents, files = documents + part.document_count, files + len(part.files)
    table = np.concatenate(tables)
    bases = np.cumsum([0] + [part.token_count for part in parts])
    # positions in the concatenation of all parts
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
        total_size([part.byte_count for part in parts]),
        hashlib.blake2b(contents.encode(), digest_size=8).hexdigest(),
        len(np.unique(table["words"])),
        tuple(note for part in parts for note in part.notes),
    )


def total_size(sizes: Sequence[int | None]) -> int | None:
    """Return the sum of the sizes; None if one of them is not known."""
    known = [size for size in sizes if size is not None]
    return sum(known) if len(known) == len(sizes) else None


def open_text(
    source: DataSource,
    tokenizer: tokenizers.PreTrainedTokenizer,
    end_of_text: int,
    text_field: str,
    cache: Path,
    workers: int | None = None,
    progress: bool = True,
    verify: bool = True,
) -> Corpus:
    """Return the tokenised text of `source`, from the cache, or tokenised into it now by `workers`
    threads. `verify`: compare the cache with its digests. Raises ValueError where there is no text.
    """
    origin = provenance(source, tokenizer, end_of_text, text_field)
    # cores of this process, not of the machine
    threads = workers or len(os.sched_getaffinity(0))

    def build(part: Path) -> None:
        """Tokenise the source into the new cache folder `part`."""
        build_corpus(source, tokenizer, origin, part, threads, progress)

    folder, index = find_or_build(cache, origin, FORM, build, verify, progress)
    offsets = np.load(folder / "offsets.npy", mmap_mode="r")
    return Corpus(
        source.name,
        source.files,
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
    source: DataSource,
    tokenizer: tokenizers.PreTrainedTokenizer,
    end_of_text: int,
    text_field: str,
) -> dict:
    """Return everything that the tokens depend on (format, files, tokenizer, options) as JSON
    values, from which the cache key is hashed.
    """
    return {
        "format": FORMAT,
        **identities(source),
        "text_field": text_field,
        "tokenizer": tokenizers.fingerprint(tokenizer),
        "vocabulary": tokenizers.vocabulary_size(tokenizer),
        "end_of_text": end_of_text,
        "dtype": tokenizers.token_dtype(tokenizer).str,
    }


def identities(source: DataSource) -> dict[str, list]:
    """Return what identifies the source's text without reading it, as JSON values: path, size and
    times of each file; name, rows and shards of each hub data set.
    """
    hubs = []
    for name in source.hubs:
        table = load_hub(name, source.option)
        # Arrow files in the cache of `datasets`
        shards = [identity_of(Path(shard["filename"])) for shard in table.cache_files]
        hubs.append([name, table.num_rows, shards])
    return {"files": [identity_of(file) for file in source.files], "hubs": hubs}


def build_corpus(
    source: DataSource,
    tokenizer: tokenizers.PreTrainedTokenizer,
    origin: dict,
    folder: Path,
    workers: int,
    progress: bool,
) -> None:
    """Tokenise a source with `workers` threads and write the cache files and the index into
    `folder`. Raises ValueError where there is no text or no tokens, or a file changes meanwhile.
    """
    started, sizes = time.monotonic(), [size for _, size, *_ in origin["files"]]
    title = (
        f"tokenising {source.name}: {megabytes(sum(sizes))} in {plural(len(sizes), 'file')}, "
        f"{workers} threads"
    )
    with bar(title, None if source.hubs else sum(sizes), progress) as reach:
        written = write_tokens(source, tokenizer, origin, folder, workers, reach)
    ends, documents = written.ends, written.documents
    if not len(ends):
        raise ValueError(
            f"{source.label}: no text in {plural(len(sizes), 'file')} and "
            f"{plural(len(source.hubs), 'data set')}"
        )
    if ends[-1] == len(ends):
        raise ValueError(
            f"{source.label}: the tokenizer gives no tokens for any of the {len(ends):,} "
            "documents: use another --data.tokenizer"
        )
    # otherwise the cache would hold text under the wrong key
    if origin["files"] != [identity_of(file) for file in source.files]:
        raise ValueError(f"{source.label}: a file changed while it was tokenised; start again")
    np.save(folder / "offsets.npy", np.concatenate([[0], ends]).astype("<i8"))
    np.save(folder / "documents.npy", documents)
    np.save(folder / "seams.npy", written.seams)
    index = {
        **origin,
        "tokens": int(ends[-1]),
        "largest": written.largest,
        "documents": len(ends),
        # copies are equal but for white space
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
