"""Files of `torch.save`, read without running anything, one tensor in memory at a time. They hold
nested values with tensors in them, as a pickle, and separately the storages of the tensors:

    archive   name/data.pkl | name/data/0 | name/data/1 | ...                     since torch 1.6
    older     magic | version | system | values | keys | u64 n, numbers | u64 n, numbers | ...

A pickle says what it is made of by naming classes and functions, which Python would import and
call. Here each name of a written list has a stand-in of ours, and every other one is refused
(pickles.py). A stand-in computes nothing: a tensor becomes the place of its numbers (`StoredView`),
a Namespace its values, anything else that training leaves in its files (`Left`) nothing at all.
"""

import io
import math
import pickle
import re
import zipfile
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO

import torch
from jaxtyping import Shaped
from torch import Tensor

from dolmen.core.torch_private.checkpoints import MAGIC, NUMBERS, PARAMETERS, TENSORS, rebuild
from dolmen.files import pickles
from dolmen.files.gate import MIB, Refused, open_file, refuse
from dolmen.files.safetensors import NAMES, FolderFormat, Spec, Stored
from dolmen.files.window import Window

MOST = 256 * MIB
"""Bytes of a pickle. That of a model with 140,000 tensors has 30 MB."""
MOST_BYTES = 64 * MIB
"""Bytes of a pickle with numbers. 256 experts with a history of 1,024 steps have 5 MiB."""
STORAGES = {
    "DoubleStorage": torch.float64,
    "FloatStorage": torch.float32,
    "HalfStorage": torch.float16,
    "BFloat16Storage": torch.bfloat16,
    "LongStorage": torch.int64,
    "IntStorage": torch.int32,
    "ShortStorage": torch.int16,
    "CharStorage": torch.int8,
    "ByteStorage": torch.uint8,
    "BoolStorage": torch.bool,
}
"""Dtypes by the name of the storage class that a pickle gives for them."""
DTYPES = {str(dtype).removeprefix("torch."): dtype for dtype in NAMES}
CLASSES = {dtype: vars(torch)[name] for name, dtype in STORAGES.items()}
ALIGNED = 64  # bytes, as torch puts numbers
ARCHIVE = b"PK\x03\x04"
"""First bytes of an archive."""
LARGE = 2**31  # bytes: from here on an archive says sizes in 8


@dataclass
class Storage:
    """Numbers that one or several tensors have parts of."""

    key: str
    dtype: torch.dtype
    elements: int
    start: int = -1
    """Position of the first number in the file, or in `content`."""
    content: bytes = b""
    """The bytes that they lie in, of a pickle that has them in memory (`load_bytes`)."""


@dataclass
class StoredView:
    """A tensor in a file, as a view of a storage. Offset and strides are in elements."""

    storage: Storage
    offset: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: torch.dtype

    @property
    def contiguous(self) -> bool:
        """True if its numbers are contiguous."""
        expected = 1
        for size, stride in zip(reversed(self.shape), reversed(self.strides), strict=True):
            if size != 1 and stride != expected:
                return False
            expected *= size
        return True

    @property
    def reach(self) -> int:
        """Elements from its first to its last, both included."""
        if 0 in self.shape:
            return 0
        return 1 + sum((n - 1) * s for n, s in zip(self.shape, self.strides, strict=True))

    def locate(self, name: str, file: Path) -> Stored:
        """The tensor, to be read."""
        at = self.storage.start + self.offset * self.dtype.itemsize
        spec = Spec(self.shape, self.dtype)
        if self.contiguous:
            return Stored(name, spec, file, at)
        return Strided(name, spec, file, at, self.strides, self.reach)


@dataclass(frozen=True)
class Strided(Stored):
    """One whose numbers do not lie in a row, such as a transposed one."""

    strides: tuple[int, ...] = ()
    reach: int = 0

    def read(self) -> Shaped[Tensor, "*whole"]:
        flat = replace(self.flat, name=self.name).read()
        return flat.as_strided(self.spec.shape, self.strides).contiguous()

    def chunks(self, size: int = 2**20) -> Iterator[bytes]:
        data = self.read().reshape(-1).view(torch.uint8)
        return (bytes(part.numpy()) for part in data.split(size))

    @property
    def flat(self) -> Stored:
        """All numbers from its first to its last."""
        return Stored(self.name, Spec((self.reach,), self.spec.dtype), self.file, self.offset)


class Left:
    """An object of a class that is not here, and was not imported: an enum, a random state. What it
    was made of is kept, and nothing is done with it.
    """

    def __init__(self, *made_of: Any):
        self.made_of = made_of

    def __setstate__(self, state: Any) -> None:
        pass


@dataclass
class Buffer:
    """Bytes that were a file in memory."""

    content: bytes = b""

    def __setstate__(self, state: Any) -> None:
        if not isinstance(state, tuple) or not state or type(state[0]) is not bytes:
            raise pickle.UnpicklingError("a BytesIO has a state that is no bytes")
        self.content = state[0]


@dataclass
class Namespace:
    """Namespace of `argparse`, with the values of a command line."""

    values: dict[str, Any] = field(default_factory=dict)

    def __new__(cls, *_: Any) -> "Namespace":  # of one without options a pickle says no more
        made = super().__new__(cls)
        made.values = {}
        return made

    def __setstate__(self, state: Any) -> None:
        if not isinstance(state, dict):
            raise pickle.UnpicklingError("a Namespace has a state that is no mapping")
        self.values = {str(name): value for name, value in state.items()}


LEFT = re.compile(
    r"(?:megatron(?:\.\w+)*\.enums\.\w+"  # ModelType, AttnBackend, ...
    r"|megatron\.core\.rerun_state_machine\.\w+"
    r"|megatron\.core\.transformer\.pipeline_parallel_layer_layout\.\w+"
    r"|transformer_engine\.common\.recipe\.\w+"
    r"|datetime\.timedelta"
    r"|signal\.\w+"
    r"|numpy\.(?:_?core\.multiarray\.(?:_reconstruct|scalar)|ndarray|dtype)"
    r"|pathlib\.(?:\w+\.)?\w*Path"
    r"|torch\.(?:device|Generator))"
)
"""Classes and functions whose objects training leaves in its files beside tensors and options. None
of them is imported.
"""


def _find(module: str, name: str) -> Any:
    """Stand-in for a name of a file of tensors (pickles.Find)."""
    full = f"{module}.{name}"
    if module in ("torch", "torch.storage") and name in STORAGES:
        return STORAGES[name]
    if module == "torch" and name in DTYPES:
        return DTYPES[name]
    return KNOWN.get(full) or (Left if LEFT.fullmatch(full) else None)


def _resolve(pid: Any, storages: dict[str, Storage]) -> Storage:
    """The storage that a pickle means by a persistent id; it is added to `storages`."""
    kind, dtype, key, _, elements, *view = pid
    if kind != "storage" or not isinstance(dtype, torch.dtype) or any(view):
        raise pickle.UnpicklingError(f"it has a part that is no storage: {str(pid)[:100]}")
    found = storages.setdefault(str(key), Storage(str(key), dtype, _count(elements)))
    if (found.dtype, found.elements) != (dtype, elements):
        raise pickle.UnpicklingError(f"storage {key} is described in two ways")
    return found


def _rebuild_tensor(storage: Any, offset: Any, shape: Any, strides: Any, *more: Any) -> StoredView:
    """A tensor, all of which lies in its storage. `more`: whether it has gradients, hooks, of an
    untyped storage the dtype.
    """
    if not isinstance(storage, Storage) or type(shape) is not tuple or type(strides) is not tuple:
        raise pickle.UnpicklingError("a tensor has no storage or shape")
    dtype = next((one for one in more if isinstance(one, torch.dtype)), storage.dtype)
    sizes, steps = tuple(map(_count, shape)), tuple(map(_count, strides))
    if len(sizes) != len(steps) or len(sizes) > 64:
        raise pickle.UnpicklingError(f"a tensor of shape {sizes} has strides {steps}")
    held = StoredView(storage, _count(offset), sizes, steps, dtype)
    room = storage.elements * storage.dtype.itemsize // dtype.itemsize
    if held.offset + held.reach > room or math.prod(sizes) > room:
        raise pickle.UnpicklingError(
            f"a tensor of shape {sizes} reaches over the {room:,} numbers of its storage"
        )
    return held


def _count(value: Any) -> int:
    if type(value) is not int or not 0 <= value < 2**60:
        raise pickle.UnpicklingError(f"{str(value)[:100]} is no number of elements")
    return value


def _encode_latin1(text: Any, encoding: Any) -> bytes:
    """Encode bytes that a protocol without bytes has written as text."""
    if type(text) is not str or encoding != "latin1":
        raise pickle.UnpicklingError("bytes are not written as text of latin1")
    return text.encode("latin1")


def _first_argument(value: Any, *_: Any) -> Any:
    return value


KNOWN: dict[str, Any] = {
    **{".".join(one): _rebuild_tensor for one in TENSORS},
    **{".".join(one): _first_argument for one in PARAMETERS},
    "torch.storage.UntypedStorage": torch.uint8,
    "argparse.Namespace": Namespace,
    "types.SimpleNamespace": Namespace,
    "_codecs.encode": _encode_latin1,
    "io.BytesIO": Buffer,
    "_io.BytesIO": Buffer,
    "collections.OrderedDict": OrderedDict,
    "torch.Size": tuple,
    "builtins.set": list,
    "__builtin__.set": list,
}
"""Full name -> what stands for it."""


def load(file: Path | str) -> Any:
    """The values of a file of `torch.save`, whose tensors are `StoredView`. Reads its pickle alone.
    Raises Refused, naming what it may not name, and for what is cut or damaged.
    """
    file = Path(file)
    with open_file(file) as stream:
        try:
            if stream.read(len(ARCHIVE)) == ARCHIVE:
                return read_archive(stream)
            return read_legacy(stream)
        except Refused:
            raise
        except zipfile.BadZipFile as error:
            raise refuse(file, f"is not read: it is cut short, or damaged: {error}") from error
        except Exception as error:  # a damaged pickle can raise almost anything
            raise refuse(file, f"is not read: {error}") from error


def load_part(file: Path, position: int, length: int) -> Any:
    """`load` of an archive that is `length` bytes of a file, from `position` on. Raises Refused."""
    with open_file(file) as stream:
        try:
            window = Window(stream, position, length)
            return read_archive(io.BufferedReader(window), position)
        except Refused:
            raise
        except Exception as error:  # a damaged pickle can raise almost anything
            raise refuse(file, f"is not read from byte {position:,} on: {error}") from error


def tensors(value: Any, file: Path) -> dict[str, Stored]:
    """Every tensor that lies in mappings, by the names on its way: {"a": {"b.weight": t}} is
    a.b.weight. Raises Refused for two of one name.
    """
    found: dict[str, Stored] = {}
    for name, one in leaves(value):
        if isinstance(one, StoredView):
            if name in found:
                raise refuse(file, f"holds {name} twice")
            found[name] = one.locate(name, file)
    return found


def read_header(file: Path) -> dict[str, Stored]:
    """The tensors of one file, in the order in which it names them. Raises Refused."""
    return tensors(load(file), file)


BIN = FolderFormat("pytorch_model.bin", "pytorch_model.bin.index.json", read_header)
"""Format of transformers' models from before safetensors."""


def leaves(value: Any) -> Iterator[tuple[str, Any]]:
    """(name, value) of all that lies in mappings and is none, in order."""
    left = [("", value)]
    while left:
        name, one = left.pop()
        if not isinstance(one, Mapping):
            yield name, one
            continue
        start = f"{name}." if name else ""
        left += [(f"{start}{inner}", content) for inner, content in reversed([*one.items()])]


def read_archive(stream: BinaryIO, position: int = 0) -> Any:
    """Read the archive that begins at `position` of the file."""
    with zipfile.ZipFile(stream) as archive:
        entries = {entry.filename: entry for entry in archive.infolist()}
        (pickled,) = [name for name in entries if name.endswith("/data.pkl")]
        root = pickled.removesuffix("/data.pkl")
        if any(entry.compress_type != zipfile.ZIP_STORED for entry in entries.values()):
            raise ValueError("it is compressed")
        order = f"{root}/byteorder"
        if order in entries:
            with archive.open(entries[order]) as said:
                if said.read(6) != b"little":
                    raise ValueError("its numbers are big-endian")
        if entries[pickled].file_size > MOST:
            raise ValueError(f"its pickle has more than {MOST:,} bytes")
        storages: dict[str, Storage] = {}
        value = pickles.load(
            archive.read(entries[pickled]), _find, partial(_resolve, storages=storages)
        )
    for storage in storages.values():
        entry = entries.get(f"{root}{NUMBERS}{storage.key}")
        size = storage.elements * storage.dtype.itemsize
        if entry is None or entry.file_size < size:
            raise ValueError(f"storage {storage.key} is not there, or has less than {size:,} bytes")
        storage.start = position + _data_start(stream, entry.header_offset)
    return value


def _data_start(stream: BinaryIO, header: int) -> int:
    """Position of the first byte of an entry of an archive, behind its header, of 30 bytes, a name
    and padding.
    """
    stream.seek(header + 26)
    lengths = stream.read(4)
    name, padding = (int.from_bytes(lengths[i : i + 2], "little") for i in (0, 2))
    return header + 30 + name + padding


def read_legacy(stream: BinaryIO) -> Any:
    """The values of a file from before archives. Raises ValueError, UnpicklingError."""
    stream.seek(0, 2)
    length = stream.tell()
    stream.seek(0)
    head, at, storages = stream.read(MOST), 0, {}
    values = []
    for _ in range(5):
        end = pickles.scan(head, at)
        values.append(pickles.load(head[at:end], _find, partial(_resolve, storages=storages)))
        if values[0] != MAGIC:
            raise ValueError("it is no file of torch.save")
        at = end
    *_, value, keys = values
    if type(keys) is not list or {*storages} - {*map(str, keys)}:
        raise ValueError("it does not list the storages that it has")
    for key in keys:
        storage = storages.get(str(key))
        if storage is None:
            raise ValueError(f"storage {str(key)[:100]} is listed, and is no tensor's")
        stream.seek(at)
        elements = int.from_bytes(stream.read(8), "little")
        storage.start, size = at + 8, elements * storage.dtype.itemsize
        at += 8 + size
        if elements < storage.elements or at > length:
            raise ValueError(f"it is truncated: storage {storage.key} has {size:,} bytes")
    return value


def load_bytes(content: bytes, where: Path) -> dict[str, Any]:
    """The mapping that `content` is, its tensors in memory, with stand-ins in place of what is
    neither they nor plain values. `where` is the file that it was found in. Raises Refused.

    Transformer Engine keeps the state of a module so. pickle itself has written it: in place of
    each tensor's numbers stands a whole older file of `torch.save`, which holds one storage. Until
    1.11 it was `torch.save`, an archive.
    """
    if len(content) > MOST_BYTES:
        raise refuse(
            where, f"holds a state of {len(content):,} bytes: {MOST_BYTES:,} are read at most"
        )
    try:
        if content.startswith(ARCHIVE):
            value = read_archive(io.BytesIO(content))
        else:
            value = pickles.load(content, _find_in_bytes)
        if value is None:  # a module that has no state wrote that
            return {}
        if not isinstance(value, Mapping):
            raise ValueError(f"it is a {type(value).__name__}, and no mapping")
        return {
            str(name): _tensor(one, one.storage.content or content)
            if isinstance(one, StoredView)
            else one
            for name, one in value.items()
        }
    except Exception as error:  # a damaged pickle can raise almost anything
        raise refuse(where, f"holds a state that is not read: {error}") from error


def _find_in_bytes(module: str, name: str) -> Any:
    """`_find`, with the function that stands where pickle itself has written a storage."""
    if (module, name) == ("torch.storage", "_load_from_bytes"):
        return _storage
    return _find(module, name)


def _storage(content: Any) -> Storage:
    """A storage that a file from before archives in memory holds."""
    if type(content) is not bytes:
        raise pickle.UnpicklingError("the numbers of a tensor are not bytes")
    found = read_legacy(io.BytesIO(content))
    if not isinstance(found, Storage):
        raise pickle.UnpicklingError("the numbers of a tensor are no storage")
    found.content = content
    return found


def _tensor(held: StoredView, content: bytes) -> Tensor:
    """The tensor, of numbers in memory."""
    if not held.contiguous:
        raise pickle.UnpicklingError("a tensor's numbers do not lie in a row")
    start = held.storage.start + held.offset * held.dtype.itemsize
    if not held.reach:
        return torch.empty(held.shape, dtype=held.dtype)
    numbers = bytearray(content[start : start + held.reach * held.dtype.itemsize])
    return torch.frombuffer(numbers, dtype=held.dtype).view(held.shape)


def dump_bytes(value: Mapping[str, Shaped[Tensor, "..."] | Mapping[str, int | str]]) -> bytes:
    """The inverse of `load_bytes`, of tensors and plain values: as pickle itself writes them."""
    return pickle.dumps(dict(value), protocol=4)


class TorchFileWriter:
    """A file of `torch.save`, whose tensors are written as they come, each once, in the shape and
    dtype of the Spec that `value` has in its place. To be closed when all have come; classes in
    `value` are named in its pickle.
    """

    def __init__(self, file: Path, value: Any):
        self.file = file
        self.specs = {n: spec for n, spec in leaves(value) if isinstance(spec, Spec)}
        self.keys = {name: str(i) for i, name in enumerate(self.specs)}
        self.archive = zipfile.ZipFile(file, "x")
        pickled = io.BytesIO()
        _Pickler(pickled, iter(self.keys.values())).dump(_copy_specs(value))
        for name, content in (
            ("data.pkl", pickled.getvalue()),
            ("byteorder", b"little"),
            ("version", b"3\n"),
        ):
            self._add(name, [memoryview(content)], len(content))
        self.left = dict(self.keys)

    def write(self, name: str, tensor: Shaped[Tensor, "*whole"]) -> None:
        """Raises ValueError for one of another shape, and KeyError for one that has no place, or
        has come.
        """
        spec, key = self.specs[name], self.left.pop(name)
        if tuple(tensor.shape) != spec.shape:
            raise ValueError(f"{name} is {tuple(tensor.shape)}, to be stored as {spec.shape}")
        data = tensor.detach().to("cpu", spec.dtype).contiguous().reshape(-1).view(torch.uint8)
        self._add(f"data/{key}", (part.numpy().data for part in data.split(2**26)), spec.nbytes)

    def close(self) -> None:
        """Raises KeyError where tensors have not come."""
        self.archive.close()
        if self.left:
            raise KeyError(f"{len(self.left)} tensors never came, e.g. {list(self.left)[:3]}")

    def _add(self, name: str, parts: Iterable[memoryview], size: int) -> None:
        entry = zipfile.ZipInfo(f"{self.file.stem}/{name}")
        large = size >= LARGE
        head = 30 + len(entry.filename) + 20 * large + 4
        padding = -(self.archive.start_dir + head) % ALIGNED
        entry.extra = b"FB" + padding.to_bytes(2, "little") + b"Z" * padding
        with self.archive.open(entry, "w", force_zip64=large) as stream:
            for part in parts:
                stream.write(part)


def _copy_specs(value: Any) -> Any:
    """The same with a Spec of its own in each place: of an object that came before, a pickle says
    that it is the same one.
    """
    if isinstance(value, Spec):
        return replace(value)
    if isinstance(value, Mapping):
        return {name: _copy_specs(inner) for name, inner in value.items()}
    return value


class _Pickler(pickle.Pickler):
    """Pickles values with a Spec for each tensor; each gets a storage with the next of `keys`."""

    def __init__(self, stream: BinaryIO, keys: Iterator[str]):
        super().__init__(stream, protocol=2)
        self.keys = keys

    def reducer_override(self, obj: Any) -> Any:
        if not isinstance(obj, Spec):
            return NotImplemented
        held = Storage(next(self.keys), obj.dtype, math.prod(obj.shape))
        strides = torch.empty(obj.shape, device="meta").stride()
        return rebuild, (held, 0, obj.shape, strides, False, OrderedDict())

    def persistent_id(self, obj: Any) -> Any:
        if not isinstance(obj, Storage):
            return None
        return ("storage", CLASSES[obj.dtype], obj.key, "cpu", obj.elements)
