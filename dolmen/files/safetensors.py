"""Safetensors folders, streamed: names, shapes and dtypes without reading data, then one tensor in
memory at a time.

A file is 8 bytes of header length, a JSON header, and the raw little-endian data
(github.com/huggingface/safetensors):

    | u64 n | {"name": {"dtype": "BF16", "shape": [2, 3], "data_offsets": [0, 12]}, ...} (n bytes) |
    data |

A model is one `model.safetensors`, or shards named by `model.safetensors.index.json`. The library
maps whole files into memory; reading by offset keeps one tensor resident, and the writer needs no
more: offsets follow from shapes. Nothing here ever unpickles.
"""

import json
import math
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Shaped
from torch import Tensor

from dolmen.core.messages import plural
from dolmen.files import gate, kinds
from dolmen.files.gate import refuse

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
SHARD_BYTES = 5 * 10**9
DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "U16": torch.uint16,
    "U32": torch.uint32,
    "U64": torch.uint64,
    "BOOL": torch.bool,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
}
NAMES = {dtype: name for name, dtype in DTYPES.items()}


@dataclass(frozen=True)
class Spec:
    """Shape and dtype of one tensor."""

    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def nbytes(self) -> int:
        """Bytes of the tensor."""
        return math.prod(self.shape) * self.dtype.itemsize


@dataclass(frozen=True)
class Stored:
    """One tensor of a file: name, shape and dtype, and where its bytes begin."""

    name: str
    spec: Spec
    file: Path
    offset: int
    """Position of its first byte in the file."""

    def read(self) -> Shaped[Tensor, "*whole"]:
        """Read the tensor into new memory. Raises Refused where the file ends before it does."""
        data = torch.empty(self.spec.nbytes, dtype=torch.uint8)
        with open(self.file, "rb") as file:
            file.seek(self.offset)
            got = file.readinto(data.numpy().data)
        # a file that another process is still writing
        if got != self.spec.nbytes:
            raise refuse(
                self.file, f"is truncated: {self.name} has {got} of {self.spec.nbytes} bytes"
            )
        return data.view(self.spec.dtype).reshape(self.spec.shape)

    def chunks(self, size: int = 2**20) -> Iterator[bytes]:
        """Yield the raw bytes of the tensor from the file, at most `size` at a time."""
        with open(self.file, "rb") as file:
            file.seek(self.offset)
            for start in range(0, self.spec.nbytes, size):
                yield file.read(min(size, self.spec.nbytes - start))


@dataclass(frozen=True)
class FolderFormat:
    """How transformers stores a model in a folder: a single file, or shards with an index."""

    single: str
    index: str
    read: Callable[[Path], dict[str, Stored]]
    """Returns the tensors of one file, in its order. Raises Refused."""

    def lies_in(self, folder: Path) -> bool:
        """Return whether the folder has the single file or the index."""
        return any((folder / name).is_file() for name in (self.single, self.index))


def index(folder: Path | str, form: FolderFormat | None = None) -> dict[str, Stored]:
    """Return name -> where it lies (file, offset, shape, dtype) of every tensor of a model folder,
    in the order of its files, from the headers only. `form`: format of the folder, safetensors by
    default. Raises ValueError for a folder without such files, and Refused for an index that names
    absent files or tensors, or for a truncated or damaged file.
    """
    folder, form = Path(folder), form or SAFETENSORS
    if (folder / form.single).is_file():
        return form.read(folder / form.single)
    if not (folder / form.index).is_file():
        raise ValueError(_explain_no_model(folder))
    weight_map = gate.read_json(folder / form.index, kinds.INDEX)["weight_map"]
    files = list(dict.fromkeys(weight_map.values()))
    if absent := [
        # a name with a folder in it could lead anywhere
        name
        for name in files
        if Path(name).name != name or not os.path.isfile(folder / name)
    ]:
        raise refuse(
            folder / form.index,
            f"lists files that are missing: {plural(len(absent), 'file')}, e.g. {absent[:3]}",
        )
    stored: dict[str, Stored] = {}
    for name in files:
        shard = form.read(folder / name)
        if twice := [tensor for tensor in shard if tensor in stored]:
            raise refuse(
                folder / name,
                f"{twice[0]} is stored twice, here and in {stored[twice[0]].file.name}",
            )
        stored |= shard
    if missing := [
        t for t, name in weight_map.items() if t not in stored or stored[t].file.name != name
    ]:
        raise refuse(
            folder / form.index,
            f"lists {len(missing)} tensors that are missing, e.g. {missing[:3]}",
        )
    return stored


def read_header(file: Path) -> dict[str, Stored]:
    """Return name -> where it lies (offset, shape, dtype) of each tensor of a safetensors file, in
    the order of their bytes. Raises Refused where its header does not describe all of it.
    """
    text, length = _header_text(file)
    size, end, tensors = len(text), 0, {}
    for start, stop, name, spec in _entries(text, file):
        # no gaps and no overlaps: every byte belongs to one tensor
        if start != end or stop - start != spec.nbytes:
            raise refuse(
                file,
                f"is damaged: {name} {spec.shape} of {spec.dtype} is given bytes {start} to "
                f"{stop}, expected {end} to {end + spec.nbytes}",
            )
        # 8 bytes of length, the header, then data
        tensors[name], end = Stored(name, spec, file, 8 + size + start), stop
    if length != 8 + size + end:
        raise refuse(
            file,
            f"is truncated or damaged: {length} bytes, but its header implies {8 + size + end}",
        )
    return tensors


SAFETENSORS = FolderFormat(SINGLE, INDEX, read_header)


def write_tensors(
    folder: Path | str,
    specs: Mapping[str, Spec],
    tensors: Iterable[tuple[str, Tensor]],
    shard_bytes: int = SHARD_BYTES,
) -> None:
    """Write `tensors`, in any order, cast to the dtype of their spec, as shards of at most
    `shard_bytes` (a larger tensor has a shard of its own). One tensor is in memory at a time. Files
    get their names when all are complete; on an error no unfinished one is left. Raises ValueError
    for a tensor that is unknown, comes twice or has another shape, and KeyError for those that
    never come.
    """
    shards = ShardFiles(Path(folder), specs, shard_bytes)
    try:
        shards.begin()
        for _ in shards.write(tensors, list(specs)):
            pass
        shards.end()
    finally:
        for part in shards.parts.values():
            part.unlink(missing_ok=True)


@dataclass(frozen=True)
class ShardFiles:
    """Shards that will hold tensors of these specs. The place of each tensor is known before any is
    written, so that several threads or processes may write into one file.
    """

    folder: Path
    specs: Mapping[str, Spec]
    shard_bytes: int = SHARD_BYTES

    @cached_property
    def names(self) -> dict[str, list[str]]:
        """File name -> names of its tensors."""
        shards = _split_into_shards(self.specs, self.shard_bytes)
        if len(shards) == 1:
            return {SINGLE: shards[0]}
        of = len(shards)
        return {
            f"model-{i + 1:05d}-of-{of:05d}.safetensors": shard for i, shard in enumerate(shards)
        }

    @cached_property
    def parts(self) -> dict[str, Path]:
        """File name -> path of the file while it is incomplete."""
        return {name: self.folder / f".{name}.part" for name in self.names}

    def begin(self) -> None:
        """Create the files with their full length and headers, without data."""
        for name, part in self.parts.items():
            header, places = self._layout[name]
            with open(part, "wb") as stream:
                stream.write(header)
                # sparse until it is written
                stream.truncate(len(header) + sum(place.spec.nbytes for place in places.values()))

    def write(
        self, tensors: Iterable[tuple[str, Tensor]], requested: Sequence[str]
    ) -> Iterator[str]:
        """Write tensors into their places and yield each name. `requested`: names that this caller
        writes. Raises ValueError for a tensor that is unknown, comes twice or has another shape,
        and KeyError for those that never come.
        """
        layout = {n: place for _, places in self._layout.values() for n, place in places.items()}
        places = {name: layout[name] for name in requested}
        for name, tensor in tensors:
            if name not in layout:
                raise ValueError(f"{name} is not among the {len(layout)} tensors to store")
            if name not in places:
                raise ValueError(f"{name} was written twice")
            if tuple(tensor.shape) != self.specs[name].shape:
                raise ValueError(
                    f"{name} is {tuple(tensor.shape)}, to be stored as {self.specs[name].shape}"
                )
            # what is left in `places` has not come yet
            _write_tensor(places.pop(name), tensor)
            del tensor  # or it would still be held while the next one is made
            yield name
        if places:
            raise KeyError(
                f"{len(places)} tensors to store were not written, e.g. {list(places)[:3]}"
            )

    def end(self) -> None:
        """Sync the complete files, rename them, and write the index if there are several."""
        for name, part in self.parts.items():
            with open(part, "rb") as file:
                # before the rename: a name must not refer to data that is not on disk
                os.fsync(file.fileno())
            part.rename(self.folder / name)
        if len(self.names) > 1:
            _write_index(self.folder, self.specs, self.names)

    @cached_property
    def _layout(self) -> dict[str, tuple[bytes, dict[str, Stored]]]:
        """File name -> its header, and the place of each tensor in it."""
        return {
            file: _file_layout(self.parts[file], {name: self.specs[name] for name in names})
            for file, names in self.names.items()
        }


def _split_into_shards(specs: Mapping[str, Spec], shard_bytes: int) -> list[list[str]]:
    """Return the tensor names of each shard, in order: a new one begins where the next tensor would
    exceed `shard_bytes`.
    """
    shards: list[list[str]] = [[]]
    filled = 0
    for name, spec in specs.items():
        # a shard has at least one tensor
        if shards[-1] and filled + spec.nbytes > shard_bytes:
            shards, filled = [*shards, []], 0
        shards[-1].append(name)
        filled += spec.nbytes
    return shards


def _file_layout(file: Path, specs: Mapping[str, Spec]) -> tuple[bytes, dict[str, Stored]]:
    """Return the header of a file, and the place of each tensor in it. Wide dtypes come first and
    the header is padded to a multiple of 8 bytes, so that every tensor is aligned.
    """
    entries: dict[str, dict[str, Any]] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, spec in sorted(specs.items(), key=lambda item: -item[1].dtype.itemsize):
        entries[name] = {
            "dtype": NAMES[spec.dtype],
            "shape": list(spec.shape),
            "data_offsets": [end, end + spec.nbytes],
        }
        end += spec.nbytes
    text = json.dumps(entries, separators=(",", ":")).encode()
    # the format allows spaces behind the JSON
    text += b" " * (-len(text) % 8)
    first = 8 + len(text)
    return len(text).to_bytes(8, "little") + text, {
        name: Stored(name, spec, file, first + entries[name]["data_offsets"][0])
        for name, spec in specs.items()
    }


def _write_tensor(place: Stored, tensor: Tensor) -> None:
    """Write a tensor into its place in an existing file, cast to its dtype."""
    data = tensor.detach().to("cpu", place.spec.dtype).contiguous().reshape(-1).view(torch.uint8)
    # opened anew for each tensor, so threads share no position
    with open(place.file, "r+b") as stream:
        stream.seek(place.offset)
        stream.write(data.numpy().data)


def _write_index(folder: Path, specs: Mapping[str, Spec], shards: Mapping[str, list[str]]) -> None:
    """Write model.safetensors.index.json, atomically."""
    content = {
        "metadata": {"total_size": sum(spec.nbytes for spec in specs.values())},
        "weight_map": {tensor: name for name, tensors in shards.items() for tensor in tensors},
    }
    part = folder / f".{INDEX}.part"
    # the index is last: with it the model is complete
    part.write_text(json.dumps(content, indent=2) + "\n")
    part.rename(folder / INDEX)


def _header_text(file: Path) -> tuple[bytes, int]:
    """Return the JSON header of a file, and the length of the file. Raises Refused."""
    with gate.open_file(file) as stream:
        length = os.fstat(stream.fileno()).st_size
        size = int.from_bytes(stream.read(8), "little")
        # the size is checked before so much is read
        if length < 8 or size > min(length - 8, kinds.HEADER.size):
            raise refuse(
                file,
                f"is truncated or not a safetensors file: header of {size} bytes, file of {length}",
            )
        return stream.read(size), length


def _entries(text: bytes, file: Path) -> list[tuple[int, int, str, Spec]]:
    """Return (start, stop, name, spec) of every tensor of a header, in the order of their bytes.
    Raises Refused for a malformed header or an unknown dtype.
    """
    entries = gate.parse_json(text, f"{file}, header", kinds.HEADER)
    entries.pop("__metadata__", None)
    if strange := sorted({entry["dtype"] for entry in entries.values()} - set(DTYPES)):
        raise refuse(file, f"dtype {strange[0]} is not among {', '.join(DTYPES)}")
    return sorted(
        (
            (*entry["data_offsets"], name, Spec(tuple(entry["shape"]), DTYPES[entry["dtype"]]))
            for name, entry in entries.items()
        ),
        # by position: names need no order
        key=lambda item: item[:2],
    )


def _explain_no_model(folder: Path) -> str:
    """Return why a folder has no model that can be read: it is no folder, is empty of models, or
    has only pickles of other names.
    """
    if not folder.is_dir():
        return f"{folder} is not a folder"
    pickles = sorted(
        p.name for p in folder.iterdir() if p.suffix in (".bin", ".pth", ".pt", ".ckpt")
    )
    if not pickles:
        return f"{folder} has neither {SINGLE} nor {INDEX}"
    return (
        f"{folder} has neither {SINGLE} nor {INDEX}, and pickles by names that no model of "
        f"transformers has ({', '.join(pickles[:3])})"
    )
