"""Reads a checkpoint that somebody else may have written: nothing in it is executed, and no row is
read without need.

Files of tensors are never unpickled: this rank's rows are read from each stored part
(metadata.py). A part's checksum is verified where all its rows are read, which a resume at the same
layout does; `partly` lists the others, for `verify`. (torch.load reads each part whole, and
verifies no checksum.)

`Checkpoint` streams whole tensors, one in memory at a time, in one process without a process group:
what export, verification and serving read.
"""

import math
import zipfile
import zlib
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import contextmanager
from io import BufferedIOBase
from pathlib import Path
from typing import Protocol

import torch
from jaxtyping import Shaped
from torch import Tensor
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex
from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner, ReadItem
from torch.futures import Future

from dolmen.checkpoint import folders, metadata, seal
from dolmen.checkpoint.folders import METADATA, Damaged
from dolmen.checkpoint.metadata import Numbers, read_metadata, stored_tensors
from dolmen.core.state import local_elements
from dolmen.files.safetensors import Spec
from dolmen.files.storage import PARTIAL


class RemoteFiles(Protocol):
    """The files of one checkpoint at a URL."""

    def size(self, name: str) -> int:
        """Size of a file in bytes, -1 where it is missing."""
        ...

    def fetch(self, name: str, check: Callable[[Path], None]) -> None:
        """Download a file into the checkpoint's folder. `check` raises Damaged for wrong content:
        then it is downloaded again, and the error raised in the end.
        """
        ...


@contextmanager
def damage_named(file: Path) -> Iterator[None]:
    """Context manager: errors of reading a file of tensors are raised as Damaged, which names
    it.
    """
    try:
        yield
    except Damaged:
        raise
    except (OSError, EOFError, ValueError, NotImplementedError, zipfile.BadZipFile) as error:
        raise Damaged(f"{file} is missing, damaged or truncated: {error}") from error


class Reader(FileSystemReader):
    """DCP storage reader that executes nothing from the checkpoint. `load` reads tensors without
    communication between ranks. `state` is the content of state.json, `partly` the stored parts of
    which not all rows were read, so that their checksum is not verified yet. Raises Damaged where
    the folder is not what was saved.
    """

    def __init__(self, folder: Path, remote: RemoteFiles | None = None):
        """Read the seal, state.json and the description of `folder`; no tensors. `remote` has the
        files of tensors that are not there. Raises Damaged, or ValueError for a newer format.
        """
        super().__init__(folder)
        self.folder, self.remote = folder, remote
        self.seal, self.state = seal.read_sealed(folder)
        self.metadata = read_metadata(self.seal)
        self.stored = stored_tensors(self.metadata)
        self.partly: set[MetadataIndex] = set()  # stored parts of which some rows were not read
        self._places: dict[str, list[tuple[int, int]]] = {}  # file -> where its parts are
        for place in self.metadata.storage_data.values():
            where = self._places.setdefault(place.relative_path, [])
            where.append((place.offset, place.length))
        self._numbers: dict[str, dict[int, Numbers]] = {}  # of files that were opened, by position

    def read_metadata(self, *args, **kwargs) -> Metadata:
        """Return DCP's description, which was read and checked on opening."""
        return self.metadata

    def check_files(self) -> None:
        """Raise Damaged if a file of tensors is missing or of another size than it was; reads
        none.
        """
        for name in self._places:
            is_remote = self.remote is not None and not (self.folder / name).exists()
            size = self.remote.size(name) if self.remote is not None and is_remote else None
            self.seal.check_size(name, self._least(name), size)

    def _least(self, name: str) -> int:
        """Bytes that the parts in a file need."""
        return max(offset + length for offset, length in self._places[name])

    def fetch(self, name: str) -> None:
        """Download a file of tensors that is not in the folder, compared with the seal. Raises
        Damaged where it differs each time, and StorageError.
        """
        if self.remote is not None and not (self.folder / name).exists():
            # before anything is downloaded
            self.seal.check_size(name, self._least(name), self.remote.size(name))
            self.remote.fetch(name, lambda file: self._verify_file(file, name))

    def fetch_all(self) -> None:
        """Download all files of tensors that are not in the folder. Raises as `fetch`."""
        for name in self._places:
            self.fetch(name)

    def _verify_file(self, file: Path, name: str) -> None:
        """Read all parts in a file of tensors. Raises Damaged unless the file, at the path `file`,
        is that of the seal.
        """
        with damage_named(self.folder / name), open(file, "rb") as content:
            for at, numbers in self._heads(content, name).items():
                checksum, what = 0, f"the part at {at}"
                for block in metadata.blocks(content, numbers.start, numbers.size, 1, what):
                    checksum = zlib.crc32(block.numpy().data, checksum)
                metadata.compare(checksum, numbers.crc, what)

    def load(self, tensors: dict[str, Tensor], elsewhere: Collection[str] = ()) -> None:
        """Fill `tensors` in place, each rank its own part. `elsewhere`: stored names that may be
        absent from `tensors`, as other pipeline stages have them. Raises KeyError for missing or
        unexpected names, ValueError for other shapes, Damaged for a file that is missing, damaged
        or truncated.
        """
        self._check(tensors, elsewhere)
        self.fill(tensors)

    def fill(self, tensors: dict[str, Tensor]) -> None:
        """Fill tensors in place whose names and shapes are known to match. Raises Damaged for
        damaged files, also where the stored parts do not cover a tensor.
        """
        # DCP's planner intersects what this rank holds of each tensor with the parts that are
        # stored, whatever layout cut either. What is in no part it leaves as it was, and says
        # nothing: so the elements that the plan fills are counted.
        planner = DefaultLoadPlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
        planner.set_up_planner(dict(tensors), self.metadata)
        plan, read = planner.create_local_plan(), Counter()
        for item in plan.items:
            if item.storage_index in self.metadata.storage_data:
                read[item.dest_index.fqn] += math.prod(item.lengths)
        if holes := [n for n, t in tensors.items() if read[n] != local_elements(t)]:
            raise Damaged(
                f"{self.folder / METADATA} is damaged: it describes only parts of {len(holes)} "
                f"tensors, e.g. {holes[:3]}"
            )
        self.read_data(plan, planner)

    def _check(self, tensors: dict[str, Tensor], elsewhere: Collection[str]) -> None:
        """Raise KeyError for names that are missing or unexpected (a whole kind, the part before
        "/", may be left out), ValueError for other shapes.
        """
        stored = self.stored
        kinds = {n.split("/")[0] for n in tensors}  # a kind may be left out whole: the model alone
        if missing := [n for n in tensors if n not in stored]:
            raise KeyError(
                f"{self.folder} lacks {len(missing)} of {len(tensors)} tensors, e.g. {missing[:3]}"
            )
        if extra := [
            n
            for n in stored
            if n not in tensors and n not in elsewhere and n.split("/")[0] in kinds
        ]:
            raise KeyError(
                f"{self.folder} holds {len(extra)} tensors that the model does not have, e.g. "
                f"{extra[:3]}"
            )
        if other := [n for n, t in tensors.items() if t.shape != stored[n].size]:
            shapes = ", ".join(
                f"{n} {tuple(stored[n].size)} for {tuple(tensors[n].shape)}" for n in other[:3]
            )
            raise ValueError(f"{self.folder} holds {len(other)} tensors of other shapes: {shapes}")

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Read the plan's items, file by file in the order of their bytes."""
        # by position: a resume at the same layout then reads each file once, from its beginning on
        places = self.metadata.storage_data
        files: dict[str, list[ReadItem]] = {}
        for item in sorted(plan.items, key=lambda item: places[item.storage_index].offset):
            files.setdefault(places[item.storage_index].relative_path, []).append(item)
        for name, items in files.items():
            with self._open(name) as file:
                for item in items:
                    self._read(file, item, planner.resolve_tensor(item).detach())
        done: Future[None] = Future()
        done.set_result(None)
        return done

    @contextmanager
    def _open(self, name: str) -> Iterator[BufferedIOBase]:
        """Context manager: an open file of tensors whose list of parts matches the seal. Errors of
        reading inside it are raised as Damaged.
        """
        self.fetch(name)
        with damage_named(self.folder / name), open(self.folder / name, "rb") as file:
            if name not in self._numbers:
                self.seal.check_size(name, self._least(name))
                self._numbers[name] = self._heads(file, name)
            yield file

    def _heads(self, file: BufferedIOBase, name: str) -> dict[int, Numbers]:
        """Byte position -> place of the numbers, for every part in a file. Raises Damaged where
        checksums are not those of the seal.
        """
        where = self._places[name]
        heads = {offset: metadata.find_numbers(file, offset, length) for offset, length in where}
        self.seal.check_parts(name, [(at, length, heads[at].crc) for at, length in where])
        return heads

    def verify(self, stored: Iterable[MetadataIndex]) -> None:
        """Read these stored parts whole, only to verify their checksums. Raises Damaged where one
        is wrong.
        """
        for index in stored:
            with self._open(self.metadata.storage_data[index].relative_path) as file:
                sizes, row, start, expected = self._place(index)
                checksum = 0
                for block in metadata.blocks(file, start, sizes[0] * row, row, index.fqn):
                    checksum = zlib.crc32(block.numpy().data, checksum)
                metadata.compare(checksum, expected, index.fqn)

    def _place(self, index: MetadataIndex) -> tuple[tuple[int, ...], int, int, int]:
        """Return of a stored part in an open file: its sizes, bytes per row, position of its
        numbers in the file, and their CRC-32.
        """
        stored = self.stored[index.fqn]
        chunk = (
            next(c for c in stored.chunks if c.offsets == index.offset)
            if index.index is None
            else stored.chunks[index.index]
        )
        sizes = tuple(chunk.sizes) or (1,)
        row = math.prod(sizes[1:]) * stored.properties.dtype.itemsize
        place = self.metadata.storage_data[index]
        numbers = self._numbers[place.relative_path][place.offset]
        if numbers.size != row * sizes[0]:
            raise zipfile.BadZipFile(
                f"{index.fqn} is not the {row * sizes[0]} bytes that {METADATA} describes"
            )
        return sizes, row, numbers.start, numbers.crc

    def _read(self, file: BufferedIOBase, item: ReadItem, target: Tensor) -> None:
        """Copy the rows and columns that `item` names, of one stored part, into `target`. Verifies
        the checksum if all rows are read, else adds the part to `partly`.
        """
        index = item.storage_index
        offsets = tuple(item.storage_offsets) or (0,)
        lengths = tuple(item.lengths) or (1,)
        sizes, row, start, expected = self._place(index)
        dtype = self.stored[index.fqn].properties.dtype
        target = target.reshape(lengths)
        # Rows lie one after the other in the file, columns do not. So whole rows are read, 64 MiB
        # at a time, and of these the columns that are wanted. At the layout of the save that is all
        # of a part; where tp now cuts columns that it did not cut then, each of its ranks reads
        # them all. The checksum is of whole rows, columns that are dropped included.
        checksum = top = 0
        for block in metadata.blocks(
            file, start + offsets[0] * row, lengths[0] * row, row, index.fqn
        ):
            checksum = zlib.crc32(block.numpy().data, checksum)
            rows = block.view(dtype).reshape(-1, *sizes[1:])
            for dim in range(1, len(sizes)):
                rows = rows.narrow(dim, offsets[dim], lengths[dim])
            target[top : (top := top + len(rows))].copy_(rows)
        if lengths[0] == sizes[0]:
            metadata.compare(checksum, expected, index.fqn)
        else:
            self.partly.add(index)


class Checkpoint:
    """An open checkpoint for one process: `meta` is its state.json, `specs` the shape and dtype of
    every tensor (`model/NAME`, `exp_avg/NAME`, ...).
    """

    def __init__(self, folder: Path, remote: RemoteFiles | None = None):
        """Open the checkpoint in step folder `folder` and check the sizes of its files. `remote`
        has the files of tensors that are not there. Raises Damaged.
        """
        self._reader = Reader(folder, remote)
        self._reader.check_files()
        self.folder, self.meta = folder, self._reader.state
        self.specs = {
            name: Spec(tuple(t.size), t.properties.dtype) for name, t in self._reader.stored.items()
        }

    def read(self, name: str) -> Shaped[Tensor, "*whole"]:
        """Read a whole tensor to CPU. Raises KeyError for an unknown name, Damaged for a damaged
        file.
        """
        if name not in self.specs:
            raise KeyError(
                f"{self.folder} has no {name}, but {len(self.specs)} others, e.g. "
                f"{list(self.specs)[:3]}"
            )
        tensor = torch.empty(self.specs[name].shape, dtype=self.specs[name].dtype)
        self._reader.fill({name: tensor})
        return tensor

    def stream(self, kind: str = "model") -> Iterator[tuple[str, Tensor]]:
        """Yield (NAME, whole CPU tensor) of every `kind/NAME`. Raises Damaged."""
        for name in self.specs:
            if name.startswith(f"{kind}/"):
                yield name.removeprefix(f"{kind}/"), self.read(name)


def open_checkpoint(folder: Path) -> Checkpoint:
    """Open the checkpoint in a step folder (see `locate`). Raises Damaged where it is damaged or
    unsafe to read.
    """
    return Checkpoint(Path(folder))


def locate(path: Path) -> Path:
    """Return the step folder that `path` stands for: itself, or the newest complete one in a run's
    folder or folder of checkpoints. Raises ValueError where there is none.
    """
    path = Path(path)
    partial = path.name.endswith(PARTIAL)
    if folders.is_whole(path) or ((path / folders.STATE).is_file() and not partial):
        return path
    for folder in (path / "checkpoints", path):
        if checkpoints := folders.list_checkpoints(folder):
            return checkpoints[max(checkpoints)]
    if (path / "checkpoints").is_dir():
        lies = [entry.name for entry in sorted((path / "checkpoints").iterdir())]
        what = f"checkpoints/ has only {', '.join(lies[:3])}" if lies else "nothing is saved yet"
        raise ValueError(f"{path} has no complete checkpoint: {what}")
    raise ValueError(
        f"{path} has no complete checkpoint: give a run's folder (with checkpoints/ in it), its "
        "folder of checkpoints (with step-NNNNNNNN/ in it) or one of those"
    )
