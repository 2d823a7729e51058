"""A reward model as a judge: one that `dolmen train reward` has made, or any other of transformers
that ends in one number, in the layout of the run, which scores the tokens themselves.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from dolmen.conversion.source import Source, open_source
from dolmen.core.mesh import Mesh
from dolmen.data import tokenizer as tokenizers
from dolmen.data.batch import Batch
from dolmen.model.decoder import Decoder
from dolmen.model.tree import Scalar
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
        """Of texts of a token or more, on every rank. Every rank calls it. Raises ValueError for a
        text that is longer than the model reads.
        """
        longest, most = max(map(len, texts)), self.model.tree.max_position_embeddings
        if longest > most:
            raise ValueError(
                f"a text has {longest} tokens, and the reward model reads {most} "
                "(max_position_embeddings): draw shorter answers"
            )
        unit = 2 * self.mesh.cp.size * self.mesh.tp.size
        width = -(-longest // unit) * unit
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


def check(name: str, vocab_size: int, tokenizer: str | None) -> Source:
    """The source of the reward model `name`. Raises ValueError where it does not end in one number,
    or reads other tokens than a model of `vocab_size` with this `tokenizer`.
    """
    source = open_source(name)
    tree = source.tree
    if not isinstance(tree.head, Scalar):
        raise ValueError(
            f"reward {name} foretells tokens: give a model that ends in one number, as dolmen "
            "train reward makes one"
        )
    if tree.vocab_size != vocab_size:
        raise ValueError(
            f"reward {name} has a vocab_size of {tree.vocab_size:,}, the model {vocab_size:,}: "
            "give a reward model of the same tokens"
        )
    if source.tokenizer is None or tokenizer is None:
        return source
    ours, theirs = (
        tokenizers.load_tokenizer(folder, "--reward", probe=False).get_vocab()
        for folder in (tokenizer, str(source.tokenizer))
    )
    other = sorted(token for token, number in ours.items() if theirs.get(token) != number)
    if other:
        raise ValueError(
            f"reward {name} has a tokenizer of its own: {len(other):,} of {len(ours):,} tokens, as "
            f"{other[0]!r}, have other ids; give a reward model of the same tokens"
        )
    return source
