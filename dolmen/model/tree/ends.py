"""What stands before the blocks and after them."""

from dataclasses import dataclass

from dolmen.model.tree.norm import Norm
from dolmen.model.tree.positions import Table


@dataclass(frozen=True)
class Embedding:
    rows: int
    """Of the vocabulary, tokens."""
    scale: float = 1.0
    """What its rows are multiplied by as they enter (Gemma: sqrt(hidden_size))."""
    norm: Norm | None = None
    """Of what enters (BLOOM)."""
    positions: Table | None = None


@dataclass(frozen=True)
class Head:
    tied: bool = False
    """Its weight is the embedding's."""
    soft_cap: float | None = None
    """Logits become cap * tanh(logit / cap)."""
