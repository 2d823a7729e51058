"""A reward model as a judge: one that `dolmen train reward` has made, or any other of transformers
that ends in one number, in the layout of the run, which scores the tokens themselves.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from dolmen.core.mesh import Mesh
from dolmen.data.batch import Batch
from dolmen.model.decoder import Decoder
from dolmen.objectives import score
from dolmen.ops.attention import Documents
from dolmen.ops.loss import IGNORED
from dolmen.parallel.actions import Schedule
from dolmen.rollouts import asked


@dataclass(frozen=True, eq=False)
class Scorer:
    """Scores of texts, each the number of its last token."""

    model: Decoder
    """Ends in a scalar head."""
    mesh: Mesh
    schedule: Schedule
    """Of training, which splits `size` rows over dp."""
    size: int
    """Rows that are asked at once, over all of dp."""

    def __call__(self, texts: Sequence[Sequence[int]]) -> Float[Tensor, " texts"]:
        """Of texts of a token or more, on every rank. Every rank calls it."""
        unit = 2 * self.mesh.cp.size * self.mesh.tp.size
        width = -(-max(map(len, texts)) // unit) * unit
        tokens = torch.zeros(-(-len(texts) // self.size) * self.size, width, dtype=torch.int64)
        lengths = torch.ones(len(tokens), dtype=torch.int64)
        for row, text in enumerate(texts):
            tokens[row, : len(text)], lengths[row] = torch.tensor(text), len(text)
        index = torch.arange(width)
        # what fills a row up is a text of its own, which nobody reads
        starts = torch.where(index >= lengths[:, None], lengths[:, None], 0)

        def batch(rows: slice) -> Batch:
            nothing = torch.full_like(tokens[rows], IGNORED)
            documents = Documents.of(starts[rows].contiguous())
            return Batch(tokens[rows], nothing, documents).with_positions(1)

        def ask(rows: Batch) -> Tensor:
            return score.values(self.model, rows, self.mesh, self.schedule)

        found = asked.of_rows(batch, ask, len(tokens), self.size, self.mesh)
        return found[torch.arange(len(texts)), lengths[: len(texts)] - 1]
