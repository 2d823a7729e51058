"""Reading a checkpoint that somebody else may have written: nothing in it is executed, no row is
read without need.

`.metadata` is a pickle: it may name the dozen classes that describe tensors, and nothing else. The
shards are never unpickled: each part of a tensor is a zip archive as `torch.save` writes it, and
its numbers are one uncompressed entry,

    __3_0.distcp   | archive | archive | ...
    an archive     | data.pkl | data/0: numbers, aligned to 64 bytes, with their CRC-32 | ...

of which the rows that a rank holds are read, BLOCK bytes at a time. The checksum is verified where
all rows are read, which a resume at the same layout does; `partly` are the others, for `verify`.
(torch.load reads each part whole, and verifies no checksum.)
"""

import io
import math
import pickle
import zipfile
import zlib
from collections import Counter
from collections.abc import Collection, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

import torch
from torch import Tensor
from torch.distributed.checkpoint import (
    DefaultLoadPlanner,
    FileSystemReader,
    LoadPlan,
    LoadPlanner,
    Metadata,
)
from torch.distributed.checkpoint.metadata import MetadataIndex, TensorStorageMetadata
from torch.distributed.checkpoint.planner import ReadItem
from torch.futures import Future

from dolmen.checkpoint.folders import METADATA
from dolmen.core.state import local_elements
from dolmen.files.safetensors import NAMES

BLOCK = 64 * 2**20  # bytes
ALLOWED = {
    ("torch.distributed.checkpoint.metadata", name)
    for name in (
        "Metadata",
        "MetadataIndex",
        "StorageMeta",
        "TensorStorageMetadata",
        "TensorProperties",
        "ChunkStorageMetadata",
        "_MEM_FORMAT_ENCODING",
    )
}
ALLOWED |= {("torch.distributed.checkpoint.filesystem", "_StorageInfo"), ("torch", "Size")}
ALLOWED |= {("torch.serialization", "_get_layout")}  # of a name: torch.strided
ALLOWED |= {("torch", str(dtype).removeprefix("torch.")) for dtype in NAMES}


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> object:
        if (module, name) not in ALLOWED:
            raise pickle.UnpicklingError(
                f"it names {module}.{name}, which a checkpoint of tensors has no use for"
            )
        return super().find_class(module, name)


def read_metadata(folder: Path) -> Metadata:
    """DCP's description of the checkpoint. Raises ValueError where it is missing, damaged, or more
    than tensors.
    """
    path = folder / METADATA
    try:
        with open(path, "rb") as file:
            found = _Unpickler(file).load()
        if not isinstance(found, Metadata):
            raise TypeError(f"it is a {type(found).__name__}")
        odd = [
            n
            for n, stored in found.state_dict_metadata.items()
            if not isinstance(stored, TensorStorageMetadata)
        ]
        if odd:
            raise TypeError(f"{odd[:3]} are no tensors")
    except Exception as error:  # a damaged pickle can raise almost anything
        raise ValueError(f"{path} is missing, damaged or not safe to read: {error}") from error
    return found


class Reader(FileSystemReader):
    """DCP's storage reader, safe; `load` is all that a checkpoint needs, and sends nothing between
    ranks.
    """

    def __init__(self, folder: Path):
        super().__init__(folder)
        self.metadata = read_metadata(folder)
        self.partly: set[MetadataIndex] = set()  # stored parts of which some rows were not read

    def read_metadata(self, *args, **kwargs) -> Metadata:
        return self.metadata

    def check_files(self) -> None:
        """Raises ValueError if a file that holds a part is missing or too short; reads none."""
        ends: dict[str, int] = {}
        for place in self.metadata.storage_data.values():
            ends[place.relative_path] = max(
                ends.get(place.relative_path, 0), place.offset + place.length
            )
        for name, end in ends.items():
            file = Path(self.path) / name
            if not file.is_file() or file.stat().st_size < end:
                raise ValueError(f"{file} is missing, damaged or truncated")

    def load(self, tensors: dict[str, Tensor], elsewhere: Collection[str] = ()) -> None:
        """Fill `tensors` in place, each rank its own part. Raises KeyError for names that are
        missing here or there and not `elsewhere`, ValueError for other shapes and for a file that
        is missing, damaged or truncated.
        """
        self._check(tensors, elsewhere)
        self.fill(tensors)

    def fill(self, tensors: dict[str, Tensor]) -> None:
        """`load` of tensors that are known to be there, in these shapes."""
        planner = DefaultLoadPlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
        planner.set_up_planner(dict(tensors), self.metadata)
        plan, found = planner.create_local_plan(), Counter()
        for item in plan.items:
            if item.storage_index in self.metadata.storage_data:
                found[item.dest_index.fqn] += math.prod(item.lengths)
        if holes := [n for n, t in tensors.items() if found[n] != local_elements(t)]:
            raise ValueError(
                f"{self.path / METADATA} is damaged: it describes a part of {len(holes)} tensors, "
                f"e.g. {holes[:3]}"
            )
        self.read_data(plan, planner)

    def _check(self, tensors: dict[str, Tensor], elsewhere: Collection[str]) -> None:
        stored = self.metadata.state_dict_metadata
        kinds = {n.split("/")[0] for n in tensors}  # a kind may be left out whole: the model alone
        if missing := [n for n in tensors if n not in stored]:
            raise KeyError(
                f"{self.path} lacks {len(missing)} of {len(tensors)} tensors, e.g. {missing[:3]}"
            )
        if extra := [
            n
            for n in stored
            if n not in tensors and n not in elsewhere and n.split("/")[0] in kinds
        ]:
            raise KeyError(
                f"{self.path} holds {len(extra)} tensors that have no place here, e.g. {extra[:3]}"
            )
        if other := [n for n, t in tensors.items() if t.shape != stored[n].size]:
            shapes = ", ".join(
                f"{n} {tuple(stored[n].size)} for {tuple(tensors[n].shape)}" for n in other[:3]
            )
            raise ValueError(f"{self.path} holds {len(other)} tensors of other shapes: {shapes}")

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Carry out the plan, file by file in the order of their bytes."""
        places = self.metadata.storage_data
        files: dict[str, list[ReadItem]] = {}
        for item in sorted(plan.items, key=lambda item: places[item.storage_index].offset):
            files.setdefault(places[item.storage_index].relative_path, []).append(item)
        for name, items in files.items():
            if Path(name).name != name:
                raise ValueError(
                    f"{self.path / METADATA} names {name}, a file outside the checkpoint"
                )
            with self._opened(name) as file:
                for item in items:
                    self._read(file, item, planner.resolve_tensor(item).detach())
        done: Future[None] = Future()
        done.set_result(None)
        return done

    @contextmanager
    def _opened(self, name: str) -> Iterator[BinaryIO]:
        """One file of numbers; what goes wrong within is told as ValueError."""
        try:
            with open(self.path / name, "rb") as file:
                yield file
        except (OSError, EOFError, ValueError, NotImplementedError, zipfile.BadZipFile) as error:
            raise ValueError(
                f"{self.path / name} is missing, damaged or truncated: {error}"
            ) from error

    def verify(self, parts: Iterable[MetadataIndex]) -> None:
        """Read all of these stored parts, keep nothing. Raises ValueError where a checksum is
        wrong.
        """
        for index in parts:
            with self._opened(self.metadata.storage_data[index].relative_path) as file:
                sizes, row, start, expected = self._place(file, index)
                checksum = 0
                for block in _blocks(file, start, sizes[0] * row, row, index.fqn):
                    checksum = zlib.crc32(block.numpy(), checksum)
                _compare(checksum, expected, index.fqn)

    def _place(self, file: BinaryIO, index: MetadataIndex) -> tuple[tuple[int, ...], int, int, int]:
        """Of a stored part: its sizes, bytes of a row, position of its numbers in the file, their
        CRC-32.
        """
        stored = self.metadata.state_dict_metadata[index.fqn]
        chunk = (
            next(c for c in stored.chunks if c.offsets == index.offset)
            if index.index is None
            else stored.chunks[index.index]
        )
        sizes = tuple(chunk.sizes) or (1,)
        row = math.prod(sizes[1:]) * stored.properties.dtype.itemsize
        return (
            sizes,
            row,
            *_numbers(file, self.metadata.storage_data[index], row * sizes[0], index.fqn),
        )

    def _read(self, file: BinaryIO, item: ReadItem, target: Tensor) -> None:
        """Copy the rows and columns of one stored part [sizes] that `item` names into `target`
        [lengths].
        """
        index = item.storage_index
        offsets = tuple(item.storage_offsets) or (0,)
        lengths = tuple(item.lengths) or (1,)
        sizes, row, start, expected = self._place(file, index)
        dtype = self.metadata.state_dict_metadata[index.fqn].properties.dtype
        target = target.reshape(lengths)
        checksum = top = 0
        for block in _blocks(file, start + offsets[0] * row, lengths[0] * row, row, index.fqn):
            checksum = zlib.crc32(block.numpy(), checksum)
            rows = block.view(dtype).reshape(-1, *sizes[1:])
            for dim in range(1, len(sizes)):
                rows = rows.narrow(dim, offsets[dim], lengths[dim])
            target[top : (top := top + len(rows))].copy_(rows)
        if lengths[0] == sizes[0]:
            _compare(checksum, expected, index.fqn)
        else:
            self.partly.add(index)


def _blocks(file: BinaryIO, start: int, size: int, row: int, name: str) -> Iterator[Tensor]:
    """The `size` bytes from `start` on, as many whole rows at a time as BLOCK holds."""
    step = max(1, BLOCK // row) * row
    for at in range(0, size, step):
        data = torch.empty(min(step, size - at), dtype=torch.uint8)
        file.seek(start + at)
        if file.readinto(data.numpy()) != len(data):
            raise EOFError(f"{name} ends early")
        yield data


def _compare(checksum: int, expected: int, name: str) -> None:
    if checksum != expected:
        raise zipfile.BadZipFile(f"the checksum of {name} is wrong")


def _numbers(file: BinaryIO, place, size: int, name: str) -> tuple[int, int]:
    """(position in the file, CRC-32) of the `size` bytes of numbers in the archive that lies at
    `place`.
    """
    window = _Window(file, place.offset, place.length)
    with zipfile.ZipFile(window) as archive:
        found = [e for e in archive.infolist() if "/data/" in e.filename]
    if (
        len(found) != 1
        or found[0].compress_type != zipfile.ZIP_STORED
        or found[0].file_size != size
    ):
        raise zipfile.BadZipFile(f"{name} is not the {size} bytes that {METADATA} describes")
    window.seek(found[0].header_offset + 26)  # of the local header: 2 + 2 bytes, two lengths
    lengths = window.read(4)
    return (
        place.offset
        + found[0].header_offset
        + 30
        + int.from_bytes(lengths[:2], "little")
        + int.from_bytes(lengths[2:], "little"),
        found[0].CRC,
    )


class _Window(io.RawIOBase):
    """`size` bytes of an open file, from `start`, as a file of its own."""

    def __init__(self, file: BinaryIO, start: int, size: int):
        self.file, self.start, self.size, self.at = file, start, size, 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        at = offset + (0, self.at, self.size)[whence]
        if at < 0:
            raise OSError(f"position {at} of {self.size} bytes")
        self.at = at
        return at

    def readinto(self, buffer) -> int:
        self.file.seek(self.start + self.at)
        got = self.file.readinto(memoryview(buffer)[: max(0, self.size - self.at)])
        self.at += got
        return got
