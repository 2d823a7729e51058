"""The ledger of a step: the operations of one rank, counted, in the order in which the host issues
them.

It is the one thing that the planner, the report of memory and the pictures read. A dry run writes
it (planning/dryrun.py). Nothing here imports torch.
"""

import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Literal, NamedTuple, get_args

import torch
from torch import Tensor

Kind = Literal["parameter", "compute", "gradient", "unsharded", "optimizer", "activation", "buffer"]


class Live(NamedTuple):
    """Bytes that a rank holds, by kind."""

    parameter: int = 0
    """At rest, the shard of this rank."""
    compute: int = 0
    """Gathered or cast parameters."""
    gradient: int = 0
    """Reduced, the shard of this rank."""
    unsharded: int = 0
    """Gradients before their reduction."""
    optimizer: int = 0
    """Optimizer state."""
    activation: int = 0
    """Tensors that backward needs, and temporaries of a module."""
    buffer: int = 0
    """All else: the batch, tables, what a collective packs into."""

    @property
    def total(self) -> int:
        """Bytes of all kinds."""
        # of a NamedTuple: all kinds
        return sum(self)


WORDS: dict[str, str] = {
    "parameter": "parameter",
    "compute": "compute copy",
    "gradient": "gradient",
    "unsharded": "unsharded gradient",
    "optimizer": "optimizer",
    "activation": "activation",
    "buffer": "buffer",
}
"""Kinds as people call them."""


@dataclass(frozen=True)
class LedgerRow:
    """One operation. Bytes are of this rank."""

    action: str
    """Action of the schedule, as its text has it: "F0", "B3.1", "W2"; "optimizer" for what follows.
    """
    module: str
    """Module of the model: "layers.3.attn"; "" outside of it."""
    kind: Literal["product", "attention", "memory", "collective", "send", "host"]
    """product: a matrix product. attention: a kernel that holds scores. memory: bound by bytes.
    collective, send: over `axis`. host: a read that waits for the device.
    """
    op: str
    """The operator, "mm"; of a collective "all-reduce", "all-gather", "reduce-scatter",
    "all-to-all"; of a send "send" or "receive"."""
    flops: int = 0
    """Two per multiplication and addition of a product; 0 of memory-bound work."""
    read: int = 0
    """Bytes read."""
    written: int = 0
    """Bytes written."""
    shape: tuple[int, ...] = ()
    """Shape of a product (batch, rows, columns, contraction), or of attention (sequences x heads,
    queries, keys, size of a head).
    """
    dtype: str = ""
    """Dtype of a product's factors: "bf16", "fp8"; "" the dtype of the step."""
    axis: str = ""
    """Mesh axis that a collective or a send crosses."""
    payload: int = 0
    """Bytes of the largest tensor that a collective makes or takes, as the formulas of a ring have
    it: of an all-gather the gathered one, of a reduce-scatter the whole one."""
    overlapped: bool = False
    """For a collective: the program continues before it has ended, and the products that follow
    hide it.
    """
    live: Live = Live()
    """Bytes held after the operation."""
    peak: int = 0
    """The most bytes at once while it ran."""
    times: int = 1
    """How often the step does it: a row of the steady state stands for those of the microbatches
    that were not run one by one.
    """


@dataclass(frozen=True)
class Ledger:
    """All rows of a step of one rank, in order, and the memory before the first."""

    rank: int
    rest: Live
    """Bytes held before the step."""
    rows: tuple[LedgerRow, ...]
    at_peak: Live = Live()
    """Bytes by kind, when the rank held the most."""

    @property
    def flops(self) -> int:
        """FLOPs of the step, repeated rows counted `times`."""
        # rows of the steady state stand for many
        return sum(row.flops * row.times for row in self.rows)

    @property
    def peak(self) -> int:
        """The most bytes of tensors that are held at once."""
        # ledgers in closed form have no peaks by row
        return max([self.rest.total, *(row.peak or row.live.total for row in self.rows)])


# Bytes of tensors that are alive, by kind: a storage counts from the operator that creates it
# until its last tensor is freed.
#
# A new storage has the kind `making`, until a later operator shows what it is (`is_now`): a
# gradient is a temporary of its module (activation) until it has been added to its parameter's.


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
