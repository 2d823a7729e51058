"""The ledger of a rank as a sum of few: of a block of each kind, of the embedding and of the head,
each dry-run once for all layouts that give it the same sizes, and kept on disk.

    block_ledgers(run, layout, hardware)    the pieces, from the cache or dry-run
    compose(run, layout, rank, pieces)      the ledger of a rank: that of a dry run of it
    held(run, layout, rank, pieces)         its bytes at the peak alone, in microseconds
"""

from dataclasses import dataclass
from pathlib import Path

from dolmen.model.layout import Layout
from dolmen.ops.kernels import Hardware
from dolmen.planning.ledger import Ledger, Live, Row
from dolmen.training.config import RunConfig


@dataclass(frozen=True)
class Piece:
    """One part of a stage: what it does for one microbatch, without what fsdp sends for it.

    Equal pieces of a model are one object, so that what is made of its rows (seconds) can be kept
    by its `key`.
    """

    key: str
    """A hash of all that decides it."""
    forward: tuple[Row, ...]
    """Of F. Its rows have the action "F", and modules within the piece: "attn.q", "" itself."""
    backward: tuple[Row, ...]
    """Of B, with what is computed again."""
    inputs: tuple[Row, ...]
    """Of I: backward without weight gradients. Empty where the schedule has none."""
    weights: tuple[Row, ...]
    """Of W, the weight gradients. Empty where the schedule has none."""
    kept: int
    """Bytes that stay from its F to its B."""
    peaks: dict[str, int]
    """Of each kind of action, the most bytes at once over those that were there as it began."""
    elements: int
    """Parameters on a rank of tp (and ep)."""


@dataclass(frozen=True)
class Pieces:
    """All parts of a model under a layout, as far as they do not depend on pp, dp and ZeRO."""

    embedding: Piece
    blocks: tuple[Piece, ...]
    """One per layer; equal ones are one object."""
    head: Piece
    """With the final norm and the loss."""


def block_ledgers(
    run: RunConfig, layout: Layout, hardware: Hardware, cache: Path | None = None
) -> Pieces:
    """The pieces of `run` under `layout`, from memory, else from the folder `cache` (None: that of
    the house), else dry-run and kept there. They depend on the model, tp, cp, ep, sequence
    parallelism, recompute, how cp attends, the microbatch and its length, the dtype and the
    hardware, and on no other part of the layout. Raises ValueError as the run would.
    """
    raise NotImplementedError


def compose(run: RunConfig, layout: Layout, rank: int, pieces: Pieces) -> Ledger:
    """The ledger that a dry run of this rank gives, from `pieces`: its stages' pieces for each
    microbatch, what fsdp sends for them, and the update.
    """
    raise NotImplementedError


def held(run: RunConfig, layout: Layout, rank: int, pieces: Pieces) -> Live:
    """What the rank holds at the peak, by kind, without its rows."""
    raise NotImplementedError
