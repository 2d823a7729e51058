"""Megatron's .bin and .idx as a corpus: tokens are read where they lie, and nothing of them is
copied. What is held out is decided by hashes, as of text, so each token is read once for these,
which are kept in the cache (corpus.py):

    documents.npy   per document: 4 bytes for each token, hash of its tokens, twice, no file

The text of these tokens is not known, nor are its bytes.
"""

import hashlib
from collections.abc import Callable
from pathlib import Path

import numpy as np
import xxhash

from dolmen.core.log import bar
from dolmen.core.messages import megabytes
from dolmen.data.corpus import Corpus
from dolmen.data.token_cache import Form, find_or_build, identity_of, write_index
from dolmen.data.tokenise import DOCUMENT, SEAM
from dolmen.files import indexed
from dolmen.files.kinds import INDEXED

FORMAT = 1
FORM = Form(INDEXED, ("documents.npy",))
BLOCK = 1 << 20  # tokens that are hashed at once


def open_indexed(
    file: Path,
    vocab_size: int,
    end_of_text: int,
    cache: Path,
    progress: bool = True,
    verify: bool = True,
    option: str = "--data.path",
) -> Corpus:
    """Open Megatron's data set `file` (.bin) as a corpus; its documents are hashed once, into the
    cache. Raises ValueError for tokens that are not below `vocab_size`, or not text.
    """
    content = check_indexed(file, option)
    # sequences that begin a document
    bounds = content.offsets[content.documents]
    # a document without tokens is none
    offsets = np.append(bounds[:-1][bounds[1:] > bounds[:-1]], bounds[-1:])
    origin = {
        "format": FORMAT,
        "files": [identity_of(file), identity_of(file.with_suffix(indexed.IDX))],
        "vocabulary": vocab_size,
        "end_of_text": end_of_text,
    }

    def build(part: Path) -> None:
        """Hash all documents into a new cache folder."""
        title = f"hashing the documents of {file}: {megabytes(content.tokens.nbytes)}"
        with bar(title, content.tokens.nbytes, progress) as reach:
            hashes, largest = hash_documents(
                file, content.tokens, offsets, vocab_size, option, reach
            )
        table = np.zeros(len(hashes), DOCUMENT)
        # 4 bytes per token stand for its text, whose size is unknown
        table["bytes"], table["file"] = 4 * np.diff(offsets), -1
        table["hash"] = table["words"] = hashes
        np.save(part / "documents.npy", table)
        index = {
            **origin,
            "tokens": len(content.tokens),
            "largest": largest,
            "documents": len(hashes),
            "different": len(np.unique(hashes)),
            "unended": int(np.count_nonzero(content.tokens[offsets[1:] - 1] != end_of_text)),
            "content": hashlib.blake2b(hashes.tobytes(), digest_size=8).hexdigest(),
        }
        write_index(part, FORM, index)

    folder, index = find_or_build(cache, origin, FORM, build, verify, progress)
    note = (
        f"{index['unended']:,} of {index['documents']:,} documents of {file} do not end with the "
        f"end-of-text token ({end_of_text})"
    )
    return Corpus(
        str(file),
        (),
        [content.tokens],
        [content.offsets],
        offsets,
        np.load(folder / "documents.npy", mmap_mode="r"),
        np.zeros(0, SEAM),
        None,
        index["content"],
        index["different"],
        (note,) if index["unended"] else (),
    )


def check_indexed(file: Path, option: str) -> indexed.Indexed:
    """Open a .bin and its .idx without reading tokens. Raises ValueError where it is empty, has
    floats, or sequences of another modality.
    """
    index = indexed.read(file)
    if not len(index.tokens):
        raise ValueError(f"{option} {file}: no tokens in {len(index.lengths):,} sequences")
    if index.tokens.dtype.kind == "f":
        raise ValueError(
            f"{option} {file} has dtype {index.tokens.dtype.name}, but token ids are integers"
        )
    if index.modes is not None and index.modes.any():
        # Megatron marks other modalities by a mode per sequence
        at = int(np.argmax(index.modes != 0))
        raise ValueError(
            f"{option} {file}: sequence {at} has mode {index.modes[at]}: only sequences of mode 0 "
            "(text) are supported"
        )
    return index


def hash_documents(
    file: Path,
    tokens: np.ndarray,
    offsets: np.ndarray,
    vocab_size: int,
    option: str,
    reach: Callable[[int], None],
) -> tuple[np.ndarray, int]:
    """Return (hash of each document's tokens, uint64 [documents], the same for any dtype; the
    largest token). `reach(bytes read)` reports progress. Raises ValueError for a token outside the
    vocabulary.
    """
    hashes, at, state, largest = np.empty(len(offsets) - 1, np.uint64), 0, xxhash.xxh3_64(), 0
    for first in range(0, len(tokens), BLOCK):
        block = tokens[first : first + BLOCK]
        behind, most = first + len(block), int(block.max())
        if most >= vocab_size or block.min() < 0:
            wrong = first + int(np.argmax((block < 0) | (block >= vocab_size)))
            raise ValueError(
                f"{option} {file}: token {wrong:,} is {tokens[wrong]}, but the tokenizer has "
                f"{vocab_size:,} tokens: use the --data.tokenizer that it was tokenised with"
            )
        largest = max(largest, most)
        # one type for all files, so that copies in uint16 and int32 are equal
        plain = memoryview(block.astype("<u4").tobytes())
        # of a document that began in a block before, the rest
        while at < len(hashes) and offsets[at] < behind:
            begin, end = max(offsets[at], first) - first, min(offsets[at + 1], behind) - first
            state.update(plain[4 * begin : 4 * end])
            # the document goes on in the next block
            if offsets[at + 1] > behind:
                break
            hashes[at] = state.intdigest()
            state.reset()
            at += 1
        reach(behind * tokens.itemsize)
    return hashes, largest
