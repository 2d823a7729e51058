"""Values with tensors in them as bytes, as Transformer Engine keeps the state of a module. pickle
itself has written them: in place of each tensor's numbers there is a whole older file of
`torch.save`, which holds one storage. Until 1.11 it was `torch.save`, an archive. Read by the
stand-ins of torch_files.py; nothing is run.
"""

import io
import pickle
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Shaped
from torch import Tensor

from dolmen.files.gate import MIB, refuse
from dolmen.files.torch_files import (
    ARCHIVE,
    INSTRUCTIONS,
    Held,
    Storage,
    Unpickler,
    of_archive,
    of_older,
)

MOST = 64 * MIB
"""Bytes. 256 experts with a history of 1,024 steps have 5 MiB."""
STORAGE = ("torch.storage", "_load_from_bytes")


class _Unpickler(Unpickler):
    def __init__(self, content: bytes):
        super().__init__(io.BytesIO(content), {})
        self.contents: list[tuple[Storage, bytes]] = []

    def find_class(self, module: str, name: str) -> Any:
        return self._storage if (module, name) == STORAGE else super().find_class(module, name)

    def _storage(self, content: Any) -> Storage:
        if type(content) is not bytes:
            raise pickle.UnpicklingError("the numbers of a tensor are not bytes")
        found = of_older(io.BytesIO(content))
        if not isinstance(found, Storage):
            raise pickle.UnpicklingError("the numbers of a tensor are no storage")
        self.contents.append((found, content))
        return found

    def of(self, held: Held) -> bytes:
        """That in which the numbers of a tensor lie."""
        (content,) = (bytes_ for one, bytes_ in self.contents if one is held.storage)
        return content


def _tensor(held: Held, content: bytes) -> Tensor:
    """What a tensor that has been read holds."""
    if not held.contiguous:
        raise pickle.UnpicklingError("a tensor's numbers do not lie in a row")
    start = held.storage.start + held.offset * held.dtype.itemsize
    if not held.reach:
        return torch.empty(held.shape, dtype=held.dtype)
    numbers = bytearray(content[start : start + held.reach * held.dtype.itemsize])
    return torch.frombuffer(numbers, dtype=held.dtype).view(held.shape)


def load_bytes(content: bytes, where: Path) -> dict[str, Any]:
    """The mapping that `content` is, its tensors in memory, with stand-ins in place of what is
    neither they nor plain values. `where` is the file that it was found in. Raises Refused.
    """
    if len(content) > MOST:
        raise refuse(where, f"holds a state of {len(content):,} bytes: {MOST:,} are read at most")
    try:
        value, of = _archived(content) if content.startswith(ARCHIVE) else _pickled(content)
        if value is None:  # a module that has no state wrote that
            return {}
        if not isinstance(value, Mapping):
            raise ValueError(f"it is a {type(value).__name__}, and no mapping")
        return {
            str(name): _tensor(one, of(one)) if isinstance(one, Held) else one
            for name, one in value.items()
        }
    except Exception as error:  # a damaged pickle can raise almost anything
        raise refuse(where, f"holds a state that is not read: {error}") from error


def _archived(content: bytes) -> tuple[Any, Callable[[Held], bytes]]:
    """What torch.save wrote, and in what the numbers of each tensor lie: all in the same."""
    return of_archive(io.BytesIO(content)), lambda _: content


def _pickled(content: bytes) -> tuple[Any, Callable[[Held], bytes]]:
    """The same of what pickle wrote."""
    end = INSTRUCTIONS.follow(content, 0, pickle.STOP)
    if end >= len(content):
        raise ValueError("it has no end")
    unpickler = _Unpickler(content[: end + 1])
    return unpickler.load(), unpickler.of


def dump_bytes(value: Mapping[str, Shaped[Tensor, "..."] | Mapping[str, int | str]]) -> bytes:
    """The inverse, of tensors and plain values: as pickle itself writes them."""
    return pickle.dumps(dict(value), protocol=4)
