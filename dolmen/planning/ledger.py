"""The ledger of a step: the operations of one rank, counted, in the order in which the host issues
them.

It is the one thing that the planner, the report of memory and the pictures read. A dry run writes
it (planning/dryrun.py). Nothing here imports torch.
"""

from dataclasses import dataclass
from typing import Literal, NamedTuple

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
        """Bytes that a rank holds, summed over all kinds (parameters, gradients,
        activations, ...).
        """
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
        """FLOPs of the rank's step: each row's, times how often the step does it."""
        # rows of the steady state stand for many
        return sum(row.flops * row.times for row in self.rows)

    @property
    def peak(self) -> int:
        """Peak bytes that the rank holds at once before or during the step."""
        # ledgers in closed form have no peaks by row
        return max([self.rest.total, *(row.peak or row.live.total for row in self.rows)])
