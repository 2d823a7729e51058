"""What a model is, as a tree of components: small frozen values, without torch. Each says what its
parameters are (`leaves`); dolmen/model computes what it says, and a family (dolmen/families) reads
it from a `config.json`.

    Tree
      embedding    rows, scale, norm, a table of positions
      runs         ((block, ...), repeat): Llama is one block x 32
        block      mixer + mlp + norms + arrangement
      final norm, head
"""

from dataclasses import dataclass

from dolmen.model.tree.attention import Attention
from dolmen.model.tree.block import Block, Pre, Run, runs
from dolmen.model.tree.ends import Embedding, Head
from dolmen.model.tree.experts import Experts, Router
from dolmen.model.tree.mlp import Mlp
from dolmen.model.tree.norm import Norm
from dolmen.model.tree.positions import Alibi, Linear, Llama3, Rope, Table, Yarn

__all__ = [
    "Alibi",
    "Attention",
    "Block",
    "Embedding",
    "Experts",
    "Head",
    "Linear",
    "Llama3",
    "Mlp",
    "Norm",
    "Pre",
    "Rope",
    "Router",
    "Run",
    "Table",
    "Tree",
    "Yarn",
    "runs",
]


@dataclass(frozen=True)
class Tree:
    hidden_size: int
    """Width of the residual stream."""
    embedding: Embedding
    runs: tuple[Run, ...]
    final_norm: Norm
    head: Head
    max_position_embeddings: int
    """Longest sequence that the model was made for, tokens."""
    initializer_range: float = 0.02
    """Standard deviation of initial weights."""

    @property
    def blocks(self) -> tuple[Block, ...]:
        """Every layer, in order."""
        return tuple(b for run in self.runs for _ in range(run.repeat) for b in run.blocks)
