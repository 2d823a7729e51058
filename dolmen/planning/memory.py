"""Bytes of tensors that are alive, by kind: a storage counts from the operator that creates it
until its last tensor is freed.

A new storage has the kind `making`, until a later operator shows what it is (`is_now`): a gradient
is a temporary of its module (activation) until it has been added to its parameter's.
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
    """A storage that is alive, with the size and kind under which it is counted."""

    bytes: int
    kind: Kind
    reference: weakref.ref[torch.UntypedStorage]


class Memory:
    """Bytes of live storages by kind, with their maximum. Storages are known by the identity of
    their Python object, which lives as long as they do.
    """

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
        """Count storages that are made within this context as `kind`."""
        before, self.making = self.making, kind
        try:
            yield
        finally:
            self.making = before

    def begin(self) -> None:
        """Restart the peak from what is held now."""
        self.most = self.total
        self.at_most = self.lately = self.live

    def since_last(self) -> Live:
        """Return the bytes by kind when most were held since the last call (or `begin`), and start
        anew.
        """
        # the next interval begins with what is held now
        most, self.lately = self.lately, self.live
        return most

    def add(self, tensor: Tensor) -> None:
        """Count the storage of an operator's result, if it is new; else update its size."""
        storage = tensor.untyped_storage()
        key = id(storage)
        # a view, or an in-place operator
        if key in self.held:
            self.resize(storage)
            return
        # called when the last tensor of the storage dies
        reference = weakref.ref(storage, lambda _: self._remove(key))
        self.held[key] = _Held(storage.nbytes(), self.making, reference)
        self._add_bytes(self.making, storage.nbytes())

    def resize(self, storage: torch.UntypedStorage) -> None:
        """Update the size of a storage, as FSDP frees and allocates them; unknown ones are
        ignored.
        """
        entry = self.held.get(id(storage))
        if entry is not None and entry.bytes != storage.nbytes():
            self._add_bytes(entry.kind, storage.nbytes() - entry.bytes)
            entry.bytes = storage.nbytes()

    def is_now(self, kind: Kind, tensor: Tensor) -> None:
        """Change the kind of the storage of `tensor`; unknown ones are ignored."""
        entry = self.held.get(id(tensor.untyped_storage()))
        if entry is not None and entry.kind != kind:
            # the sum does not change, so neither does the peak
            self.bytes[entry.kind] -= entry.bytes
            self.bytes[kind] += entry.bytes
            entry.kind = kind

    def kind_of(self, tensor: Tensor) -> Kind | None:
        """Return the kind of a tensor's storage; None if it was not counted."""
        entry = self.held.get(id(tensor.untyped_storage()))
        return None if entry is None else entry.kind

    def _remove(self, key: int) -> None:
        """Subtract a storage that has been freed."""
        entry = self.held.pop(key)
        self._add_bytes(entry.kind, -entry.bytes)

    def _add_bytes(self, kind: Kind, size: int) -> None:
        """Add bytes (negative: subtract) to a kind, and update `lately` and `most`."""
        self.bytes[kind] += size
        self.total += size
        if self.total > self.lately.total:
            self.lately = self.live
        if self.total > self.most:
            self.most, self.at_most = self.total, self.live
