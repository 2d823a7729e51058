"""The description of a DCP checkpoint, and the stored parts of its tensors.

A stored part of a tensor: a zip archive as `torch.save` writes it, somewhere in a file. Its
numbers are one uncompressed entry, of which the archive's directory holds the CRC-32.

    __3_0.distcp   | archive | archive | archive: data.pkl | data/0: 64-byte aligned numbers | ... ,
                   with their CRC-32 |

`.metadata`, DCP's description of a checkpoint, is a pickle that somebody else may have written
(files/pickles.py). It may name the dozen classes that describe tensors, and nothing else, and what
it describes is checked before anything is allocated or opened.
"""

import io
import math
import sys
import zipfile
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path, PurePosixPath
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)

from dolmen.checkpoint.folders import FILE, METADATA, Damaged
from dolmen.checkpoint.seal import Seal
from dolmen.core.torch_private.checkpoints import NUMBERS, PICKLED, Place
from dolmen.files import pickles
from dolmen.files.gate import MIB, read_bytes, refuse
from dolmen.files.pickles import Window
from dolmen.files.safetensors import NAMES

BLOCK = 64 * 2**20  # bytes


class Numbers(NamedTuple):
    """Place of a stored part's numbers: first byte in the file, size in bytes, and CRC-32."""

    start: int
    size: int
    crc: int


def find_numbers(file: io.BufferedIOBase, position: int, length: int) -> Numbers:
    """Return where the numbers of a tensor are that torch.save wrote into `length` bytes of an open
    file from byte `position` on: first byte in the file, size in bytes, and the recorded CRC-32.
    Reads the directory of the zip archive, not the numbers. Raises BadZipFile, ValueError, OSError,
    NotImplementedError or EOFError where it is not such an archive.
    """
    window = Window(file, position, length)
    with zipfile.ZipFile(window) as archive:
        entries = [e for e in archive.infolist() if NUMBERS in e.filename]
    if len(entries) != 1 or entries[0].compress_type != zipfile.ZIP_STORED:
        raise zipfile.BadZipFile(f"at {position} are not tensor data of torch.save")
    # The archive's directory, at its end, states where an entry's header begins, not its length:
    # that has the length of the name and of the padding which puts the numbers at 64 bytes.
    window.seek(entries[0].header_offset + 26)  # of the local header: 2 + 2 bytes, two lengths
    lengths = window.read(4)
    head = 30 + int.from_bytes(lengths[:2], "little") + int.from_bytes(lengths[2:], "little")
    return Numbers(position + entries[0].header_offset + head, entries[0].file_size, entries[0].CRC)


def blocks(file: io.BufferedIOBase, start: int, size: int, row: int, name: str) -> Iterator[Tensor]:
    """Yield `size` bytes of the file from `start` as uint8 tensors, each of as many whole rows of
    `row` bytes as fit into BLOCK (64 MiB), at least one. `name`: of the tensor, for errors. Raises
    EOFError where the file ends early.
    """
    # whole rows, at least one
    step = max(1, BLOCK // row) * row
    for at in range(0, size, step):
        data = torch.empty(min(step, size - at), dtype=torch.uint8)
        file.seek(start + at)
        if file.readinto(data.numpy().data) != len(data):
            raise EOFError(f"{name} ends early")
        yield data


def compare(checksum: int, expected: int, name: str) -> None:
    """Raise BadZipFile, naming the tensor `name`, unless `checksum` equals `expected`."""
    if checksum != expected:
        raise zipfile.BadZipFile(f"the checksum of {name} is wrong")


MOST = 1024 * MIB
"""Most bytes of a description; one of 140,000 tensors in 8 parts has 200 MB."""

KINDS = (TensorStorageMetadata, BytesStorageMetadata)


class _Skipped:
    """Stand-in for classes of a cached save plan: takes any arguments and does nothing."""

    def __init__(self, *args: object) -> None:
        """Ignore all arguments."""


OWN: dict[tuple[str, str], Any] = {
    **{name: getattr(sys.modules[name[0]], name[1]) for name in PICKLED},
    **{("torch", str(dtype).removeprefix("torch.")): dtype for dtype in NAMES},
}
"""Names that the description of a checkpoint of tensors may use."""
FOREIGN: dict[tuple[str, str], Any] = {
    **OWN,
    **{
        ("torch.distributed.checkpoint.planner", name): _Skipped
        for name in (
            "SavePlan",
            "WriteItem",
            "WriteItemType",
            "TensorWriteData",
            "BytesIOWriteData",
        )
    },
    ("megatron.core.dist_checkpointing.strategies.torch", "MCoreMetadata"): Metadata,
    (BytesStorageMetadata.__module__, BytesStorageMetadata.__name__): BytesStorageMetadata,
    **{
        (module, name): PurePosixPath
        for module in ("pathlib", "pathlib._local")
        for name in ("PosixPath", "PurePosixPath")
    },
}
"""Names that Megatron-Core's description may use too: entries of bytes, a class of Megatron's own,
the path that it was saved to, and cached save plans (`all_local_plans`), which are skipped.
"""


def read_metadata(seal: Seal) -> Metadata:
    """Return DCP's description of a checkpoint (the pickle .metadata), read without running code
    from it and checked: tensors with chunks that lie inside them, each with a place in a file of
    the folder. Raises Damaged where it is missing, not as sealed, or describes anything else.
    """
    path = seal.folder / METADATA
    content = seal.read(METADATA)
    try:
        metadata = _read_pickle(content, OWN)
        stored = stored_tensors(metadata)
        _check_tensors(stored)
        _check_places(metadata.storage_data, stored)
    except Exception as error:  # a damaged pickle can raise almost anything
        text = " ".join(str(error).split())[:300]
        raise Damaged(f"{path} is missing, damaged or not safe to read: {text}") from error
    return metadata


def _read_pickle(content: bytes, names: Mapping[tuple[str, str], Any]) -> Metadata:
    """Return the Metadata that a pickle describes, without running code from it: `names` maps
    (module, name) to the class used for it, and other names raise an error. Raises TypeError if
    the pickled object is no Metadata.
    """
    loaded = pickles.load(content, lambda module, name: names.get((module, name)))
    if not isinstance(loaded, Metadata):
        raise TypeError(f"it is a {type(loaded).__name__}")
    return loaded


class Foreign(NamedTuple):
    """DCP's description of a checkpoint written by Megatron."""

    tensors: dict[str, TensorStorageMetadata]
    places: dict[MetadataIndex, Place]
    """Place of every chunk of the tensors, each in a file of the folder."""
    others: dict[str, Place]
    """Place of each entry that is not a tensor, by its name."""


def read_foreign(file: Path) -> Foreign:
    """Read and check DCP's description (the .metadata file `file`) of a checkpoint written by
    Megatron-Core: its tensors, and where they and all other entries are stored. Raises Refused
    where it is missing, damaged, uses classes that do not belong there, or names files outside the
    folder.
    """
    content = read_bytes(file, MOST)
    try:
        metadata = _read_pickle(content, FOREIGN)
        entries = metadata.state_dict_metadata
        tensors = {n: t for n, t in entries.items() if isinstance(t, TensorStorageMetadata)}
        known = {n: type(t) in KINDS and type(n) is str for n, t in entries.items()}
        if odd := [n for n, value in known.items() if not value]:
            raise TypeError(f"{odd[:3]} are neither tensors nor bytes")
        _check_tensors(tensors)
        places = {i: p for i, p in metadata.storage_data.items() if i.fqn in tensors}
        other_places = {i.fqn: p for i, p in metadata.storage_data.items() if i.fqn not in tensors}
        _check_places(places, tensors)
        for name, place in other_places.items():
            _check_place(name, place, 0)
    except Exception as error:  # a damaged pickle can raise almost anything
        raise refuse(file, f"cannot be read: {error}") from error
    return Foreign(tensors, places, other_places)


def stored_tensors(metadata: Metadata) -> dict[str, TensorStorageMetadata]:
    """Return name -> description (shape, dtype, chunks) of each tensor in DCP's `metadata`. Raises
    TypeError if it describes anything but tensors.
    """
    entries = metadata.state_dict_metadata
    stored = {n: t for n, t in entries.items() if type(t) is TensorStorageMetadata}
    if odd := [n for n in entries if n not in stored]:
        raise TypeError(f"{odd[:3]} are not tensors")
    return stored


def _check_tensors(stored: dict[str, TensorStorageMetadata]) -> None:
    """Raise TypeError or ValueError unless each tensor (name -> DCP's description) has a known
    dtype, and chunks that lie inside it and have as many elements in total. Overlapping chunks are
    found when a tensor is read: checking all here would take quadratic time.
    """
    for name, t in stored.items():
        if type(name) is not str or type(t.properties) is not TensorProperties:
            raise TypeError(f"{name!r} is not described as a tensor")
        if t.properties.dtype not in NAMES:
            raise TypeError(f"{name} is of {t.properties.dtype}")
        _check_size(name, t.size, t.size)
        for chunk in t.chunks:
            if type(chunk) is not ChunkStorageMetadata:
                raise TypeError(f"{name} has a chunk that is not one")
            _check_size(name, chunk.offsets, t.size)
            _check_size(name, chunk.sizes, t.size)
            ends = [a + b for a, b in zip(chunk.offsets, chunk.sizes, strict=True)]
            _check_size(name, torch.Size(ends), t.size)
        # enough elements and no overlap means that nothing is missing
        if sum(math.prod(c.sizes) for c in t.chunks) != math.prod(t.size):
            raise ValueError(f"the chunks of {name} do not add up to it")


def _check_size(name: str, size: torch.Size, most: torch.Size) -> None:
    """Raise TypeError or ValueError, naming the tensor `name`, unless `size` is a torch.Size with
    as many dims as `most`, each between 0 and that of `most`.
    """
    if type(size) is not torch.Size or len(size) != len(most):
        raise TypeError(f"{name} has a size that is not one")
    if not all(0 <= n <= m for n, m in zip(size, most, strict=True)):
        raise ValueError(f"{name} has a chunk outside of it")


class Box(Protocol):
    """A rectangular part of a tensor."""

    @property
    def offsets(self) -> tuple[int, ...]:
        """Return the index of the part's first element along each dim of the tensor."""
        ...

    @property
    def sizes(self) -> tuple[int, ...]:
        """Return how many elements the part has along each dim."""
        ...


def overlap(chunks: Sequence[Box]) -> bool:
    """Return whether any two of these rectangular parts of one tensor share an element."""
    boxes = [list(zip(c.offsets, c.sizes, strict=True)) for c in chunks if math.prod(c.sizes)]
    return any(
        all(a < b + m and b < a + n for (a, n), (b, m) in zip(box, other, strict=True))
        for i, box in enumerate(boxes)
        for other in boxes[:i]
    )


def _check_places(places: Mapping, stored: dict[str, TensorStorageMetadata]) -> None:
    """Raise TypeError, ValueError or KeyError unless `places` (DCP's storage_data: index of a chunk
    -> file, offset, length) has a place of sufficient size for each chunk of the tensors `stored`
    and for nothing else, each in a file of the checkpoint's folder.
    """
    missing: dict[str, set] = defaultdict(set)
    for name, t in stored.items():
        missing[name] = {c.offsets for c in t.chunks}
    for index, place in places.items():
        if type(index) is not MetadataIndex or type(place) is not Place:
            raise TypeError("it has a place for something that is not part of a tensor")
        tensor = stored[index.fqn]
        # the index is a hint of the place in `chunks`, which may be absent
        hints = [index.index] if index.index is not None else range(len(tensor.chunks))
        chunk = next((c for i in hints if (c := tensor.chunks[i]).offsets == index.offset), None)
        if chunk is None:
            raise ValueError(f"it has a place for a part of {index.fqn} that is not described")
        size = math.prod(chunk.sizes) * tensor.properties.dtype.itemsize
        _check_place(index.fqn, place, size)
        missing[index.fqn].discard(chunk.offsets)
    if holes := [name for name, offsets in missing.items() if offsets]:
        raise ValueError(f"it describes only parts of {len(holes)} tensors, e.g. {holes[:3]}")


def _check_place(name: str, place: Place, size: int) -> None:
    """Raise TypeError or ValueError, naming the tensor `name`, unless `place` is a range of at
    least `size` bytes in a file that a save writes, in the checkpoint's own folder.
    """
    if type(place) is not Place or type(place.relative_path) is not str:
        raise TypeError(f"the place of {name} is missing")
    if not FILE.fullmatch(place.relative_path):
        raise ValueError(f"it names {place.relative_path}, a file outside the checkpoint")
    if type(place.offset) is not int or type(place.length) is not int or place.offset < 0:
        raise TypeError(f"the place of {name} is not a position in a file")
    if not size <= place.length < 2**60:
        raise ValueError(f"the place of {name} has no room for {size:,} bytes")
