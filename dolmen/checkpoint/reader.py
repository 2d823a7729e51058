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
        """Return the size in bytes of the file `name` at the URL; -1 where it is missing."""
        ...

    def fetch(self, name: str, check: Callable[[Path], None]) -> None:
        """Download the file `name` into the checkpoint's local folder. `check` is called with the
        downloaded file and raises Damaged for wrong content; then the download is repeated a few
        times, and the error raised in the end.
        """
        ...


@contextmanager
def damage_named(file: Path) -> Iterator[None]:
    """Context manager: errors of reading a file of tensors are raised as Damaged that names
    `file`.
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
        """Open the checkpoint in the step folder `folder`: read and check its seal, state.json and
        .metadata, but no tensors. `remote`: the checkpoint at a URL, from where files of tensors
        that the folder lacks are downloaded. Raises Damaged, or ValueError for a newer format.
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
        """Return DCP's Metadata of the checkpoint, which was read and checked on opening. DCP calls
        this; arguments are ignored.
        """
        return self.metadata

    def check_files(self) -> None:
        """Raise Damaged if a file of tensors, here or at the URL, is missing or has not the size
        that the seal records. Reads sizes only.
        """
        for name in self._places:
            is_remote = self.remote is not None and not (self.folder / name).exists()
            size = self.remote.size(name) if self.remote is not None and is_remote else None
            self.seal.check_size(name, self._bytes_needed(name), size)

    def _bytes_needed(self, name: str) -> int:
        """Return how many bytes the file `name` must have: up to the end of its last stored part,
        by .metadata.
        """
        return max(offset + length for offset, length in self._places[name])

    def fetch(self, name: str) -> None:
        """Download the file of tensors `name` if there is a URL and the folder lacks it, verifying
        all its checksums. Raises Damaged where each download differs from the seal, and
        StorageError.
        """
        if self.remote is not None and not (self.folder / name).exists():
            # before anything is downloaded
            self.seal.check_size(name, self._bytes_needed(name), self.remote.size(name))
            self.remote.fetch(name, lambda file: self._verify_file(file, name))

    def fetch_all(self) -> None:
        """Download all files of tensors that the folder lacks, if there is a URL. Raises as
        `fetch`.
        """
        for name in self._places:
            self.fetch(name)

    def _verify_file(self, file: Path, name: str) -> None:
        """Read the file at path `file` whole, a download of the file of tensors `name`. Raises
        Damaged unless the parts in it are those that the seal records, with right checksums.
        """
        with damage_named(self.folder / name), open(file, "rb") as content:
            for at, numbers in self._find_parts(content, name).items():
                checksum, what = 0, f"the part at {at}"
                for block in metadata.blocks(content, numbers.start, numbers.size, 1, what):
                    checksum = zlib.crc32(block.numpy().data, checksum)
                metadata.compare(checksum, numbers.crc, what)

    def load(self, tensors: dict[str, Tensor], elsewhere: Collection[str] = ()) -> None:
        """Fill `tensors` (name -> tensor or DTensor) in place from the checkpoint, on each rank its
        own shard, without communication. `elsewhere`: stored names that may be absent from
        `tensors`, as other pipeline stages have them. Raises KeyError for missing or unexpected
        names, ValueError for other shapes, Damaged for a file that is missing, damaged or
        truncated.
        """
        self._check(tensors, elsewhere)
        self.fill(tensors)

    def fill(self, tensors: dict[str, Tensor]) -> None:
        """Fill `tensors` (name -> tensor or DTensor) in place from the checkpoint, on each rank its
        own shard, like `load` but without comparing names and shapes first. Raises Damaged for
        damaged files, and if the stored parts do not cover a tensor.
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
        """Compare names and shapes of `tensors` with those stored. Raises KeyError for names that
        are not stored, and for stored names that are neither in `tensors` nor in `elsewhere`,
        unless `tensors` has none of their kind (the part before "/"); ValueError for other shapes.
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
        """Read the items of DCP's load plan into the tensors that `planner` has for them, file by
        file in the order of their bytes. DCP calls this; the returned future is done. Raises
        Damaged.
        """
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
        """Context manager: open the file of tensors `name`, downloaded first if it is only at the
        URL, after comparing its size and the list of its parts with the seal (once per Reader).
        Errors of reading inside the context are raised as Damaged.
        """
        self.fetch(name)
        with damage_named(self.folder / name), open(self.folder / name, "rb") as file:
            if name not in self._numbers:
                self.seal.check_size(name, self._bytes_needed(name))
                self._numbers[name] = self._find_parts(file, name)
            yield file

    def _find_parts(self, file: BufferedIOBase, name: str) -> dict[int, Numbers]:
        """Return, for every stored part in the open file `name`, the byte position of the part ->
        where its numbers are and their recorded CRC-32. Raises Damaged where these checksums are
        not those that the seal records; the numbers are not read.
        """
        where = self._places[name]
        heads = {offset: metadata.find_numbers(file, offset, length) for offset, length in where}
        self.seal.check_parts(name, [(at, length, heads[at].crc) for at, length in where])
        return heads

    def verify(self, stored: Iterable[MetadataIndex]) -> None:
        """Read these stored parts of tensors whole, only to verify their checksums (CRC-32). Raises
        Damaged where one is wrong.
        """
        for index in stored:
            with self._open(self.metadata.storage_data[index].relative_path) as file:
                sizes, row, start, expected = self._locate_part(index)
                checksum = 0
                for block in metadata.blocks(file, start, sizes[0] * row, row, index.fqn):
                    checksum = zlib.crc32(block.numpy().data, checksum)
                metadata.compare(checksum, expected, index.fqn)

    def _locate_part(self, index: MetadataIndex) -> tuple[tuple[int, ...], int, int, int]:
        """Return, for a stored part of a tensor in a file opened before: its shape ((1,) for a
        scalar), bytes per row, byte position of its numbers in the file, and their recorded CRC-32.
        Raises BadZipFile where the numbers have another size than the shape needs.
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
        """Copy the rows and columns of one stored part that DCP's `item` names from the open file
        into `target`. Raises BadZipFile if all rows are read and their checksum is wrong; if only
        some are, the part is added to `partly`, to be verified later.
        """
        index = item.storage_index
        offsets = tuple(item.storage_offsets) or (0,)
        lengths = tuple(item.lengths) or (1,)
        sizes, row, start, expected = self._locate_part(index)
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
        """Open the checkpoint in the step folder `folder` for one process: read its seal,
        state.json and .metadata and check the sizes of its files. `remote`: the checkpoint at a
        URL, from where files of tensors that the folder lacks are downloaded when they are read.
        Raises Damaged, or ValueError for a newer format.
        """
        self._reader = Reader(folder, remote)
        self._reader.check_files()
        self.folder, self.meta = folder, self._reader.state
        self.specs = {
            name: Spec(tuple(t.size), t.properties.dtype) for name, t in self._reader.stored.items()
        }

    def read(self, name: str) -> Shaped[Tensor, "*whole"]:
        """Return the whole tensor `name` (model/NAME, exp_avg/NAME, ...) on the CPU, put together
        from its stored shards. Raises KeyError for an unknown name, Damaged for a damaged file.
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
        """Yield (NAME, whole CPU tensor) for every stored tensor `kind/NAME`, one in memory at a
        time; `kind`: model, exp_avg and so on. Raises Damaged.
        """
        for name in self.specs:
            if name.startswith(f"{kind}/"):
                yield name.removeprefix(f"{kind}/"), self.read(name)


def locate(path: Path) -> Path:
    """Return the step folder of a checkpoint that `path` stands for: itself if it is one, else the
    newest complete one in it, a run's folder or a folder of checkpoints. Raises ValueError where
    there is none.
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
