"""Bytes held at every moment, by kind: each storage from the operator that makes it to the last
tensor that lets it go.

A storage is of the kind that `making` says, until something is known better of it (`is_now`): a
gradient is a temporary of its module until it has been added to its parameter's.
"""

import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import get_args

import torch
from torch import Tensor

from dolmen.planning.ledger import Kind, Live


@dataclass(slots=True)
class _Held:
    """A storage that is alive."""

    bytes: int
    kind: Kind
    reference: weakref.ref[torch.UntypedStorage]


class Memory:
    """Storages by the identity of their Python object, which lives as long as they do."""

    def __init__(self) -> None:
        self.held: dict[int, _Held] = {}
        self.bytes: dict[Kind, int] = dict.fromkeys(get_args(Kind), 0)
        self.total = self.most = 0
        self.at_most = Live()
        """By kind, when there were `most`."""
        self.lately = Live()
        """The most since `since_last`, by kind."""
        self.making: Kind = "parameter"

    @property
    def live(self) -> Live:
        """Bytes held now, by kind."""
        return Live(*self.bytes.values())

    @contextmanager
    def makes(self, kind: Kind) -> Iterator[None]:
        """Within, what is made is of this kind."""
        before, self.making = self.making, kind
        try:
            yield
        finally:
            self.making = before

    def begin(self) -> None:
        """The peak is of what comes."""
        self.most = self.total
        self.at_most = self.lately = self.live

    def since_last(self) -> Live:
        """The most at once since the last call."""
        most, self.lately = self.lately, self.live
        return most

    def add(self, tensor: Tensor) -> None:
        """Count the result of an operator, where it is new."""
        storage = tensor.untyped_storage()
        key = id(storage)
        if key in self.held:
            self.resize(storage)
            return
        reference = weakref.ref(storage, lambda _: self._remove(key))
        self.held[key] = _Held(storage.nbytes(), self.making, reference)
        self._add(self.making, storage.nbytes())

    def resize(self, storage: torch.UntypedStorage) -> None:
        """A storage that may have another size than before; of those not seen here, nothing."""
        found = self.held.get(id(storage))
        if found is not None and found.bytes != storage.nbytes():
            self._add(found.kind, storage.nbytes() - found.bytes)
            found.bytes = storage.nbytes()

    def is_now(self, kind: Kind, tensor: Tensor) -> None:
        """Set the kind of the storage of `tensor` from here on."""
        found = self.held.get(id(tensor.untyped_storage()))
        if found is not None and found.kind != kind:
            self.bytes[found.kind] -= found.bytes
            self.bytes[kind] += found.bytes
            found.kind = kind

    def kind_of(self, tensor: Tensor) -> Kind | None:
        """None of one that was not made here."""
        found = self.held.get(id(tensor.untyped_storage()))
        return None if found is None else found.kind

    def _remove(self, key: int) -> None:
        found = self.held.pop(key)
        self._add(found.kind, -found.bytes)

    def _add(self, kind: Kind, size: int) -> None:
        self.bytes[kind] += size
        self.total += size
        if self.total > self.lately.total:
            self.lately = self.live
        if self.total > self.most:
            self.most, self.at_most = self.total, self.live
