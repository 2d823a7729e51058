"""Megatron's indexed data sets: `.bin` has tokens and nothing else, `.idx` has where its sequences
and documents begin (megatron/core/datasets/indexed_dataset.py). All little-endian:

    offset    size    .idx
    0         9       MMIDIDX\\0\\0
    9         8       u64, the version: 1
    17        1       u8, the type of a token: 1 u8, 2 i8, 3 i16, 4 i32, 5 i64, 6 f64, 7 f32, 8 u16
    18        8       u64, sequences N
    26        8       u64, documents + 1, D
    34        4 N     i32, tokens per sequence
    34 + 4 N  8 N     i64, where each begins in .bin, in bytes
    34 + 12 N 8 D     i64, the first sequence of each document, and N
    ...       N       i8, the mode of each sequence; of multimodal data alone

What is read follows from the lengths alone: sequences lie one behind the other, as every writer of
the field lays them, and the rest of the index must say so too.
"""

import os
import struct
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from jaxtyping import Int8, Int32, Int64, Shaped

from dolmen.files import gate, write
from dolmen.files.gate import refuse

BIN, IDX = ".bin", ".idx"
MAGIC, VERSION = b"MMIDIDX\x00\x00", 1
HEAD = struct.Struct("<9sQBQQ")
DTYPES = {
    code: np.dtype(f"<{kind}")
    for code, kind in enumerate(("u1", "i1", "i2", "i4", "i8", "f8", "f4", "u2"), 1)
}
CODES = {dtype: code for code, dtype in DTYPES.items()}
MOST = 2**31 - 1  # tokens of a sequence
# From so many tokens of a vocabulary on Megatron writes 4 bytes for each, and not 2.
LARGE = 65500


@dataclass(frozen=True, eq=False)
class Indexed:
    """An indexed data set, memory-mapped."""

    tokens: Shaped[np.ndarray, " tokens"]
    """Tokens of all sequences, in the type of the file."""
    lengths: Int32[np.ndarray, " sequences"]
    """Tokens of each sequence."""
    documents: Int64[np.ndarray, " bounds"]
    """The first sequence of each document, then the number of sequences."""
    modes: Int8[np.ndarray, " sequences"] | None = None
    """Mode of each sequence, for multimodal data; None: there are none."""

    @property
    def offsets(self) -> Int64[np.ndarray, " bounds"]:
        """Index of the first token of each sequence, and at the end the number of tokens: int64
        [sequences + 1].
        """
        return np.concatenate([[0], np.cumsum(self.lengths, dtype=np.int64)])


def is_indexed(file: Path) -> bool:
    """Return whether `file` is the .bin of an indexed data set: its .idx exists and begins with
    MMIDIDX.
    """
    if file.suffix != BIN or not (file.is_file() and file.with_suffix(IDX).is_file()):
        return False
    with gate.open_file(file.with_suffix(IDX)) as stream:
        return stream.read(len(MAGIC)) == MAGIC


def read(file: Path) -> Indexed:
    """Open the data set whose .bin is `file`, without reading its tokens. Raises Refused, with the
    numbers, for a malformed index or where its two files do not fit each other.
    """
    index = file.with_suffix(IDX)
    with gate.open_file(index) as stream:
        size, head = os.fstat(stream.fileno()).st_size, stream.read(HEAD.size)
    if len(head) < HEAD.size or not head.startswith(MAGIC):
        raise refuse(index, "is not an index of Megatron: it does not start with MMIDIDX")
    _, version, code, sequences, documents = HEAD.unpack(head)
    if version != VERSION:
        raise refuse(index, f"has version {version}: only {VERSION} is supported")
    # floats are read too, though no tokenizer writes them
    if code not in DTYPES:
        raise refuse(index, f"has tokens of type {code}: it must be 1 to {len(DTYPES)}")
    least = HEAD.size + 12 * sequences + 8 * documents
    if size not in (least, least + sequences):
        raise refuse(
            index,
            f"has {size:,} bytes, and of {sequences:,} sequences and {documents:,} ends of "
            f"documents {least:,}, or {least + sequences:,} with modes",
        )
    # columns of it are not aligned, which numpy allows
    content = np.memmap(index, np.uint8, "r")

    def column(dtype: str, count: int, offset: int) -> np.ndarray:
        """Return `count` numbers of the index from byte `offset`, as an array without a copy."""
        return np.ndarray(count, dtype, content, offset)

    at = HEAD.size + 4 * sequences
    lengths, starts = column("<i4", sequences, HEAD.size), column("<i8", sequences, at)
    firsts = column("<i8", documents, HEAD.size + 12 * sequences)
    modes = column("<i1", sequences, least) if sequences and size > least else None
    check_sequences(index, lengths, starts, DTYPES[code].itemsize)
    check_documents(index, firsts, sequences)
    tokens = int(np.sum(lengths, dtype=np.int64))
    return Indexed(_map_tokens(file, tokens, DTYPES[code]), lengths, firsts, modes)


def check_sequences(
    index: Path,
    lengths: Int32[np.ndarray, " sequences"],
    starts: Int64[np.ndarray, " sequences"],
    itemsize: int,
) -> None:
    """Raise Refused unless the sequences, which begin at bytes `starts`, follow one another from
    byte 0.
    """
    if len(lengths) and lengths.min() < 0:
        at = int(np.argmax(lengths < 0))
        raise refuse(index, f"sequence {at} has {lengths[at]} tokens")
    # int64: int32 overflows at 2 G tokens
    ends = np.cumsum(lengths, dtype=np.int64) * itemsize
    wrong = starts != ends - lengths.astype(np.int64) * itemsize
    if wrong.any():
        at = int(np.argmax(wrong))
        raise refuse(
            index,
            f"sequence {at} begins at byte {starts[at]:,}, and those before it, of {itemsize} "
            f"bytes per token, end at {ends[at - 1] if at else 0:,}: sequences must follow one "
            "another",
        )


def check_documents(index: Path, firsts: Int64[np.ndarray, " bounds"], sequences: int) -> None:
    """Raise Refused unless the documents cover sequences 0 to `sequences`, one after the other."""
    if not len(firsts) or firsts[0] != 0 or firsts[-1] != sequences:
        span = f"{firsts[0]} to {firsts[-1]}" if len(firsts) else "none"
        raise refuse(index, f"its documents are sequences {span}, but there are 0 to {sequences}")
    if (back := firsts[1:] < firsts[:-1]).any():
        at = int(np.argmax(back))
        raise refuse(
            index, f"document {at} goes from sequence {firsts[at]:,} back to {firsts[at + 1]:,}"
        )


def _map_tokens(file: Path, tokens: int, dtype: np.dtype) -> np.ndarray:
    """Return the tokens of a .bin, memory-mapped. Raises Refused unless the file has exactly
    `tokens` tokens of this dtype.
    """
    with gate.open_file(file) as stream:
        size = os.fstat(stream.fileno()).st_size
    if size != tokens * dtype.itemsize:
        raise refuse(
            file,
            f"has {size:,} bytes, and its index {tokens:,} tokens of {dtype.itemsize}: "
            f"{tokens * dtype.itemsize:,}",
        )
    # an empty file cannot be mapped
    return np.asarray(np.memmap(file, dtype, "r")) if tokens else np.zeros(0, dtype)


def dtype_of(vocab_size: int) -> np.dtype:
    """Return the dtype in which Megatron writes the tokens of a vocabulary of this size."""
    # a vocabulary of 65,500 still fits 2 bytes, but Megatron does so
    return np.dtype("<u2" if vocab_size < LARGE else "<i4")


def check_free(file: Path) -> list[Path]:
    """Return the paths of the .bin and .idx that a data set is written to. Raises ValueError if one
    exists.
    """
    targets = [file, file.with_suffix(IDX)]
    return [write.check_new("--to", target, parents=True) for target in targets]


def save(
    file: Path,
    blocks: Iterable[np.ndarray],
    dtype: np.dtype,
    lengths: Shaped[np.ndarray, " sequences"],
    documents: Shaped[np.ndarray, " bounds"],
    modes: Shaped[np.ndarray, " sequences"] | None = None,
) -> None:
    """Write an indexed data set byte for byte as Megatron would: `file` (.bin) from the `blocks` of
    tokens, and its .idx. Neither is left if it fails. `lengths`: tokens of each sequence;
    `documents`: the first sequence of each document, then the number of sequences. Raises
    ValueError for a sequence that is too long, and where one of the two files exists.
    """
    if len(lengths) and lengths.max() > MOST:
        raise ValueError(
            f"{file}: a document has {lengths.max():,} tokens, but an index holds {MOST:,} at most"
        )
    targets = check_free(file)
    parts = [target.with_name(f"{target.name}.part") for target in targets]
    # in bytes
    starts = (np.cumsum(lengths, dtype=np.int64) - lengths) * dtype.itemsize
    columns = [lengths.astype("<i4"), starts.astype("<i8"), documents.astype("<i8")]
    columns += [] if modes is None else [modes.astype("<i1")]
    head = HEAD.pack(MAGIC, VERSION, CODES[dtype], len(lengths), len(documents))
    try:
        _write(parts[0], (block.astype(dtype).data for block in blocks))
        _write(parts[1], [head, *(column.data for column in columns)])
        # the .bin first: an index without data would be wrong
        for part, target in zip(parts, targets, strict=True):
            part.rename(target)
    finally:
        for part in parts:
            with suppress(FileNotFoundError):
                part.unlink()


def _write(part: Path, content: Iterable[bytes | memoryview]) -> None:
    """Write blocks of bytes to the new file `part` and fsync it; a file that a killed run has left
    there is replaced.
    """
    part.unlink(missing_ok=True)  # of a killed run
    with open(os.open(part, write.NEW, 0o666), "wb") as stream:
        for block in content:
            stream.write(block)
        stream.flush()
        os.fsync(stream.fileno())
