"""Files of `torch.save`, read without running anything, one tensor in memory at a time. They hold
nested values with tensors in them, as a pickle, and separately the storages of the tensors:

    archive   name/data.pkl | name/data/0 | name/data/1 | ...                     since torch 1.6
    older     magic | version | system | values | keys | u64 n, numbers | u64 n, numbers | ...

A pickle states what it is made of by naming classes and functions, which Python would import and
call. Here each name of a written list has a stand-in of ours, and every other one is refused
(pickles.py). A stand-in computes nothing: a tensor becomes the place of its numbers (`StoredView`),
a Namespace its values, anything else that training leaves in its files (`Opaque`) nothing at all.
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
from dolmen.files.pickles import Window
from dolmen.files.safetensors import NAMES, FolderFormat, Spec, Stored

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
LARGE = 2**31  # bytes: from here on an archive stores sizes in 8


@dataclass
class Storage:
    """A storage of a pickle: consecutive numbers of which one or several tensors are views."""

    key: str
    dtype: torch.dtype
    elements: int
    start: int = -1
    """Position of the first number in the file, or in `content`."""
    content: bytes = b""
    """The bytes that `start` refers to, where a pickle was in memory (`load_bytes`); empty: the
    file.
    """


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
        """True if its elements lie in row-major order without gaps."""
        expected = 1
        for size, stride in zip(reversed(self.shape), reversed(self.strides), strict=True):
            # the stride of a dimension of size 1 means nothing
            if size != 1 and stride != expected:
                return False
            expected *= size
        return True

    @property
    def reach(self) -> int:
        """Number of elements of the storage from the first to the last of the tensor, both
        included; 0 if it is empty.
        """
        if 0 in self.shape:
            return 0
        return 1 + sum((n - 1) * s for n, s in zip(self.shape, self.strides, strict=True))

    def locate(self, name: str, file: Path) -> Stored:
        """Return where the tensor lies in `file`, to be read under `name`."""
        at = self.storage.start + self.offset * self.dtype.itemsize
        spec = Spec(self.shape, self.dtype)
        if self.contiguous:
            return Stored(name, spec, file, at)
        return Strided(name, spec, file, at, self.strides, self.reach)


@dataclass(frozen=True)
class Strided(Stored):
    """A stored tensor whose elements are not contiguous, such as a transposed one."""

    strides: tuple[int, ...] = ()
    reach: int = 0

    def read(self) -> Shaped[Tensor, "*whole"]:
        """Read the tensor into contiguous memory. Raises Refused if the file is too short."""
        flat = replace(self.flat, name=self.name).read()
        return flat.as_strided(self.spec.shape, self.strides).contiguous()

    def chunks(self, size: int = 2**20) -> Iterator[bytes]:
        """Yield the bytes of the contiguous tensor, `size` at a time; the tensor is read at
        once.
        """
        data = self.read().reshape(-1).view(torch.uint8)
        return (bytes(part.numpy()) for part in data.split(size))

    @property
    def flat(self) -> Stored:
        """The elements of the storage from its first to its last, as a stored tensor of one
        dimension.
        """
        return Stored(self.name, Spec((self.reach,), self.spec.dtype), self.file, self.offset)


class Opaque:
    """Stand-in for an object of a class that is not imported (an enum, a random state). Its
    arguments are kept, its state is dropped.
    """

    def __init__(self, *made_of: Any):
        """Keep the arguments of the constructor, `made_of`."""
        self.made_of = made_of

    def __setstate__(self, state: Any) -> None:
        """Ignore the state."""
        pass


@dataclass
class Buffer:
    """Stand-in for io.BytesIO: the bytes of a file in memory."""

    content: bytes = b""

    def __setstate__(self, state: Any) -> None:
        """Store the bytes of a pickled BytesIO, the first item of its state. Raises UnpicklingError
        for a state that has none.
        """
        if not isinstance(state, tuple) or not state or type(state[0]) is not bytes:
            raise pickle.UnpicklingError("a BytesIO has a state that is not bytes")
        self.content = state[0]


@dataclass
class Namespace:
    """Stand-in for argparse.Namespace: the values of a command line."""

    values: dict[str, Any] = field(default_factory=dict)

    def __new__(cls, *_: Any) -> "Namespace":  # a pickle of one without options has no more
        """Create an empty one, as a pickle of a Namespace without options sets no state."""
        namespace = super().__new__(cls)
        namespace.values = {}
        return namespace

    def __setstate__(self, state: Any) -> None:
        """Take the options from the pickled state, a dict. Raises UnpicklingError for another
        state.
        """
        if not isinstance(state, dict):
            raise pickle.UnpicklingError("a Namespace has a state that is not a mapping")
        self.values = {str(name): value for name, value in state.items()}


OPAQUE = re.compile(
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


def _find_stand_in(module: str, name: str) -> Any:
    """Return the stand-in for a name that a pickle refers to (`pickles.Find`): a dtype for a
    storage class, a rebuild function, `Opaque`; None for a name that is not allowed.
    """
    full = f"{module}.{name}"
    if module in ("torch", "torch.storage") and name in STORAGES:
        return STORAGES[name]
    if module == "torch" and name in DTYPES:
        return DTYPES[name]
    return KNOWN.get(full) or (Opaque if OPAQUE.fullmatch(full) else None)


def _resolve_storage(pid: Any, storages: dict[str, Storage]) -> Storage:
    """Return the storage that a persistent id of a pickle describes, from `storages`, to which a
    new one is added. Raises UnpicklingError for a malformed id, or one that contradicts an earlier
    one.
    """
    kind, dtype, key, _, elements, *view = pid
    if kind != "storage" or not isinstance(dtype, torch.dtype) or any(view):
        raise pickle.UnpicklingError(
            f"it has a persistent id that is not a storage: {str(pid)[:100]}"
        )
    storage = storages.setdefault(str(key), Storage(str(key), dtype, _check_count(elements)))
    if (storage.dtype, storage.elements) != (dtype, elements):
        raise pickle.UnpicklingError(f"storage {key} is described in two ways")
    return storage


def _rebuild_tensor(storage: Any, offset: Any, shape: Any, strides: Any, *more: Any) -> StoredView:
    """Return the view that a pickle describes. `more`: requires_grad, hooks, and for an untyped
    storage the dtype. Raises UnpicklingError unless all of it lies within its storage.
    """
    if not isinstance(storage, Storage) or type(shape) is not tuple or type(strides) is not tuple:
        raise pickle.UnpicklingError("a tensor has no storage or shape")
    dtype = next((value for value in more if isinstance(value, torch.dtype)), storage.dtype)
    sizes, steps = tuple(map(_check_count, shape)), tuple(map(_check_count, strides))
    if len(sizes) != len(steps) or len(sizes) > 64:
        raise pickle.UnpicklingError(f"a tensor of shape {sizes} has strides {steps}")
    view = StoredView(storage, _check_count(offset), sizes, steps, dtype)
    # an untyped storage counts bytes
    room = storage.elements * storage.dtype.itemsize // dtype.itemsize
    if view.offset + view.reach > room or math.prod(sizes) > room:
        raise pickle.UnpicklingError(
            f"a tensor of shape {sizes} reaches over the {room:,} numbers of its storage"
        )
    return view


def _check_count(value: Any) -> int:
    """Return a number of elements. Raises UnpicklingError unless it is an int from 0 to 2**60."""
    if type(value) is not int or not 0 <= value < 2**60:
        raise pickle.UnpicklingError(f"{str(value)[:100]} is not a number of elements")
    return value


def _encode_latin1(text: Any, encoding: Any) -> bytes:
    """Return the bytes that a pickle of protocol 2 has written as text. Raises UnpicklingError for
    another encoding.
    """
    if type(text) is not str or encoding != "latin1":
        raise pickle.UnpicklingError("bytes are not written as text of latin1")
    return text.encode("latin1")


def _first_argument(value: Any, *_: Any) -> Any:
    """Return the first argument: stand-in for a function that wraps a tensor as a Parameter."""
    return value


KNOWN: dict[str, Any] = {
    **{".".join(name): _rebuild_tensor for name in TENSORS},
    **{".".join(name): _first_argument for name in PARAMETERS},
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
    """Return the values of a file of torch.save, with a `StoredView` for each tensor. Reads only
    the pickle. Raises Refused for a name that is not allowed, and for a cut or damaged file.
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
            raise refuse(file, f"cannot be read: it is truncated or damaged: {error}") from error
        except Exception as error:  # a damaged pickle can raise almost anything
            raise refuse(file, f"cannot be read: {error}") from error


def load_part(file: Path, position: int, length: int) -> Any:
    """Return the values of an archive of torch.save that is `length` bytes of a file from byte
    `position` on. Raises Refused.
    """
    with open_file(file) as stream:
        try:
            window = Window(stream, position, length)
            return read_archive(io.BufferedReader(window), position)
        except Refused:
            raise
        except Exception as error:  # a damaged pickle can raise almost anything
            raise refuse(file, f"cannot be read from byte {position:,} on: {error}") from error


def tensors(value: Any, file: Path) -> dict[str, Stored]:
    """Return every tensor in nested mappings, as where it lies in `file`, by its dotted path: {"a":
    {"b.weight": t}} is a.b.weight. Raises Refused for two of one name.
    """
    stored: dict[str, Stored] = {}
    for name, leaf in leaves(value):
        if isinstance(leaf, StoredView):
            if name in stored:
                raise refuse(file, f"holds {name} twice")
            stored[name] = leaf.locate(name, file)
    return stored


def read_header(file: Path) -> dict[str, Stored]:
    """Return name -> where it lies (offset, shape, dtype) of each tensor of a file of torch.save,
    in the order in which it names them. Raises Refused.
    """
    return tensors(load(file), file)


BIN = FolderFormat("pytorch_model.bin", "pytorch_model.bin.index.json", read_header)
"""Format of transformers' models from before safetensors."""


def leaves(value: Any) -> Iterator[tuple[str, Any]]:
    """Yield (dotted path, value) of everything in nested mappings that is no mapping itself, in
    order.
    """
    left = [("", value)]
    while left:
        name, node = left.pop()
        if not isinstance(node, Mapping):
            yield name, node
            continue
        start = f"{name}." if name else ""
        left += [(f"{start}{inner}", content) for inner, content in reversed([*node.items()])]


def read_archive(stream: BinaryIO, position: int = 0) -> Any:
    """Return the values of a zip archive (torch 1.6 and later) that begins at byte `position` of
    its file. Raises ValueError for a compressed or big-endian archive, a large pickle, and missing
    storages.
    """
    with zipfile.ZipFile(stream) as archive:
        entries = {entry.filename: entry for entry in archive.infolist()}
        (pickled,) = [name for name in entries if name.endswith("/data.pkl")]
        root = pickled.removesuffix("/data.pkl")
        # tensors are read by position
        if any(entry.compress_type != zipfile.ZIP_STORED for entry in entries.values()):
            raise ValueError("it is compressed")
        order = f"{root}/byteorder"
        if order in entries:
            with archive.open(entries[order]) as order_file:
                if order_file.read(6) != b"little":
                    raise ValueError("its numbers are big-endian")
        if entries[pickled].file_size > MOST:
            raise ValueError(f"its pickle has more than {MOST:,} bytes")
        storages: dict[str, Storage] = {}
        value = pickles.load(
            archive.read(entries[pickled]),
            _find_stand_in,
            partial(_resolve_storage, storages=storages),
        )
    for storage in storages.values():
        entry = entries.get(f"{root}{NUMBERS}{storage.key}")
        size = storage.elements * storage.dtype.itemsize
        if entry is None or entry.file_size < size:
            raise ValueError(f"storage {storage.key} is missing, or has fewer than {size:,} bytes")
        storage.start = position + _data_start(stream, entry.header_offset)
    return value


def _data_start(stream: BinaryIO, header: int) -> int:
    """Return the position of an archive entry's data, behind its local header at `header`: 30
    bytes, a name and padding.
    """
    stream.seek(header + 26)
    lengths = stream.read(4)
    name, padding = (int.from_bytes(lengths[i : i + 2], "little") for i in (0, 2))
    return header + 30 + name + padding


def read_legacy(stream: BinaryIO) -> Any:
    """Return the values of a file of torch.save from before archives. Raises ValueError or
    UnpicklingError.
    """
    stream.seek(0, 2)
    length = stream.tell()
    stream.seek(0)
    head, at, storages = stream.read(MOST), 0, {}
    values = []
    # magic, version, system, values, keys
    for _ in range(5):
        end = pickles.scan(head, at)
        values.append(
            pickles.load(head[at:end], _find_stand_in, partial(_resolve_storage, storages=storages))
        )
        # after the first pickle, before any other is read
        if values[0] != MAGIC:
            raise ValueError("it is not a file of torch.save")
        at = end
    *_, value, keys = values
    if type(keys) is not list or {*storages} - {*map(str, keys)}:
        raise ValueError("it has no list of its storages")
    for key in keys:
        storage = storages.get(str(key))
        if storage is None:
            raise ValueError(f"storage {str(key)[:100]} is listed, but belongs to no tensor")
        stream.seek(at)
        elements = int.from_bytes(stream.read(8), "little")
        storage.start, size = at + 8, elements * storage.dtype.itemsize
        at += 8 + size
        # the file may be cut anywhere
        if elements < storage.elements or at > length:
            raise ValueError(f"it is truncated: storage {storage.key} has {size:,} bytes")
    return value


def load_bytes(content: bytes, where: Path) -> dict[str, Any]:
    """Return the mapping that the bytes `content` pickle, with its tensors in memory, and stand-ins
    for anything but tensors and plain values; {} for None. `where`: the file they were found in.
    Raises Refused.

    Transformer Engine keeps the state of a module so. pickle itself has written it: in place of
    each tensor's numbers stands a whole older file of `torch.save`, which holds one storage. Until
    1.11 it was `torch.save`, an archive.
    """
    if len(content) > MOST_BYTES:
        raise refuse(
            where, f"holds a state of {len(content):,} bytes, more than the allowed {MOST_BYTES:,}"
        )
    try:
        if content.startswith(ARCHIVE):
            value = read_archive(io.BytesIO(content))
        else:
            value = pickles.load(content, _find_stand_in_of_bytes)
        if value is None:  # a module that has no state wrote that
            return {}
        if not isinstance(value, Mapping):
            raise ValueError(f"it is a {type(value).__name__}, not a mapping")
        return {
            str(name): _tensor(item, item.storage.content or content)
            if isinstance(item, StoredView)
            else item
            for name, item in value.items()
        }
    except Exception as error:  # a damaged pickle can raise almost anything
        raise refuse(where, f"has a state that cannot be read: {error}") from error


def _find_stand_in_of_bytes(module: str, name: str) -> Any:
    """Return the stand-in for a name that a pickle in memory refers to: a dtype, a rebuild function
    or an opaque object, and also the function by which pickle itself stores a storage; None for a
    name that is not allowed.
    """
    if (module, name) == ("torch.storage", "_load_from_bytes"):
        return _load_storage
    return _find_stand_in(module, name)


def _load_storage(content: Any) -> Storage:
    """Return the storage in the bytes of a file from before archives. Raises UnpicklingError for
    anything else.
    """
    if type(content) is not bytes:
        raise pickle.UnpicklingError("the numbers of a tensor are not bytes")
    storage = read_legacy(io.BytesIO(content))
    if not isinstance(storage, Storage):
        raise pickle.UnpicklingError("a tensor's data is not a storage")
    # its tensor's numbers are in these bytes, not in a file
    storage.content = content
    return storage


def _tensor(view: StoredView, content: bytes) -> Tensor:
    """Return a tensor in new memory, copied from `content`, in which its storage begins at
    `view.storage.start`. Raises UnpicklingError unless its elements are contiguous; that `content`
    is long enough is not checked.
    """
    if not view.contiguous:
        raise pickle.UnpicklingError("a tensor is not contiguous")
    start = view.storage.start + view.offset * view.dtype.itemsize
    if not view.reach:
        return torch.empty(view.shape, dtype=view.dtype)
    # writable, as torch wants it
    numbers = bytearray(content[start : start + view.reach * view.dtype.itemsize])
    return torch.frombuffer(numbers, dtype=view.dtype).view(view.shape)


def dump_bytes(value: Mapping[str, Shaped[Tensor, "..."] | Mapping[str, int | str]]) -> bytes:
    """Pickle a mapping of tensors and plain values by `pickle`, not torch.save; `load_bytes` reads
    it.
    """
    return pickle.dumps(dict(value), protocol=4)


class TorchFileWriter:
    """Writes a file of torch.save, with its tensors one by one in any order. `value` has a `Spec`
    in place of each tensor. Call `close` when all are written.
    """

    def __init__(self, file: Path, value: Any):
        """Create the file and write the pickle of `value`, which has a `Spec` in place of each
        tensor. Raises FileExistsError.
        """
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
        """Write a tensor, cast to the dtype of its Spec. Raises ValueError for another shape, and
        KeyError for a name that is unknown or was written already.
        """
        spec, key = self.specs[name], self.left.pop(name)
        if tuple(tensor.shape) != spec.shape:
            raise ValueError(f"{name} is {tuple(tensor.shape)}, to be stored as {spec.shape}")
        data = tensor.detach().to("cpu", spec.dtype).contiguous().reshape(-1).view(torch.uint8)
        self._add(f"data/{key}", (part.numpy().data for part in data.split(2**26)), spec.nbytes)

    def close(self) -> None:
        """Close the archive. Raises KeyError if tensors of the file were not written."""
        self.archive.close()
        if self.left:
            raise KeyError(f"{len(self.left)} tensors were not written, e.g. {list(self.left)[:3]}")

    def _add(self, name: str, parts: Iterable[memoryview], size: int) -> None:
        """Write an entry of the archive, of `size` bytes in all, whose data is aligned to ALIGNED
        bytes.
        """
        entry = zipfile.ZipInfo(f"{self.file.stem}/{name}")
        large = size >= LARGE
        # local header, name, zip64 field, and head of the padding
        head = 30 + len(entry.filename) + 20 * large + 4
        padding = -(self.archive.start_dir + head) % ALIGNED
        entry.extra = b"FB" + padding.to_bytes(2, "little") + b"Z" * padding
        with self.archive.open(entry, "w", force_zip64=large) as stream:
            for part in parts:
                stream.write(part)


def _copy_specs(value: Any) -> Any:
    """Return a copy with a separate Spec in each place: pickle would write a repeated object as a
    reference to the first.
    """
    if isinstance(value, Spec):
        return replace(value)
    if isinstance(value, Mapping):
        return {name: _copy_specs(inner) for name, inner in value.items()}
    return value


class _Pickler(pickle.Pickler):
    """Pickles values with a tensor for each Spec; their storages get `keys` in turn."""

    def __init__(self, stream: BinaryIO, keys: Iterator[str]):
        """`keys`: names of the storages, in order of their tensors."""
        super().__init__(stream, protocol=2)
        self.keys = keys

    def reducer_override(self, obj: Any) -> Any:
        """Return the call that rebuilds a tensor, to be pickled in place of a Spec; NotImplemented
        for other objects, which are pickled as usual.
        """
        if not isinstance(obj, Spec):
            return NotImplemented
        storage = Storage(next(self.keys), obj.dtype, math.prod(obj.shape))
        # computed by torch itself, without memory
        strides = torch.empty(obj.shape, device="meta").stride()
        return rebuild, (storage, 0, obj.shape, strides, False, OrderedDict())

    def persistent_id(self, obj: Any) -> Any:
        """Return the id by which a storage is stored outside of the pickle; None for other
        objects.
        """
        if not isinstance(obj, Storage):
            return None
        return ("storage", CLASSES[obj.dtype], obj.key, "cpu", obj.elements)
