"""The batch, and the one place where labels are shifted: `labels[:, i]` is the token that follows
`tokens[:, i]`.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace

import numpy as np
import torch
from jaxtyping import Float, Int64
from torch import Tensor

from dolmen.core.device import to_device
from dolmen.model.spec import ModelSpec
from dolmen.ops.attention import Documents, begins, document_ends
from dolmen.ops.loss import IGNORED
from dolmen.ops.rope import PositionIds, prefix_positions, span_positions

FOLLOWS = "follows"
"""Key of Batch.numbers: 1 if the second text of a sequence follows the first, -1 if not, 0 for
none.
"""
SIDE = "side"
"""Key of Batch.numbers: 1 for tokens of a preferred answer, -1 for a rejected one, 0 for an answer
to another prompt (KTO).
"""
MARGIN = "margin"
"""Key of Batch.numbers: margin by which the chosen answer's reward should exceed the other's."""


@dataclass(frozen=True, eq=False)
class Batch:
    """Sequences of equal length, the unit that a training step or validation reads."""

    tokens: Int64[Tensor, "sequences length"]
    labels: Int64[Tensor, "sequences length"]
    documents: Documents | None = None
    """Documents of each window; None: a window is one document, without a prefix."""
    positions: PositionIds | None = None
    """Position ids; None: a token's index in its window."""
    weights: Float[Tensor, "sequences length"] | None = None
    """Weight of each token's loss, finite and not negative; None: 1. Weight 0 equals an IGNORED
    label.
    """
    numbers: Mapping[str, Float[Tensor, "sequences length"]] = field(default_factory=dict)
    """Further numbers per token that an objective needs, by name, such as log-probabilities of a
    reference model.
    """
    experts: Int64[Tensor, "sequences length choices"] | None = None
    """Experts of each token, of all MoE layers (model/routing_replay.py); None: routers choose."""

    @classmethod
    def from_windows(
        cls, windows: Int64[np.ndarray, "sequences window"], end_of_text: int | None = None
    ) -> "Batch":
        """Make a batch of windows of length + 1 consecutive tokens, where IGNORED follows the end
        of a text. With `end_of_text`, a document begins at each window's first token and after each
        such id.
        """
        full = torch.from_numpy(windows)
        tokens = full[:, :-1]
        return cls(
            # any valid id will do: such positions have no label
            torch.where(tokens == IGNORED, 0, tokens),
            full[:, 1:].contiguous(),
            None
            if end_of_text is None
            else Documents.from_starts(document_starts(tokens, end_of_text)),
        )

    def add_prefixes(self, lengths: Int64[Tensor, "#sequences #length"]) -> "Batch":
        """Return the batch (on CPU) for a prefix LM: the first `lengths` tokens of each document,
        at most all of it, attend to one another. `lengths`: per sequence, or per token, equal
        within a document. Labels inside a prefix are IGNORED, as those tokens see what they would
        predict.
        """
        starts = self.starts
        return self._reaching(torch.minimum(starts + lengths, document_ends(starts)))

    def _reaching(self, reach: Int64[Tensor, "sequences length"]) -> "Batch":
        """Return the batch as a prefix LM's, with `reach`: for each token the index behind the last
        token of its document's prefix. Labels inside prefixes are IGNORED.
        """
        starts = self.starts
        # the label of token i is token i + 1: inside the prefix if i + 1 < reach
        seen = torch.arange(1, starts.shape[1] + 1) < reach
        labels = torch.where(seen, IGNORED, self.labels)
        return replace(self, labels=labels, documents=Documents.from_starts(starts, reach))

    @property
    def starts(self) -> Int64[Tensor, "sequences length"]:
        """For each token, the index in its sequence of the first token of its document."""
        return torch.zeros_like(self.tokens) if self.documents is None else self.documents.starts

    def add_positions(self, streams: int) -> "Batch":
        """Return the batch (on CPU) with positions that restart in each document, in as many
        `streams` as the model's rope has (ops/rope.py).
        """
        index = torch.arange(self.tokens.shape[1]).expand_as(self.tokens)
        prefix = torch.zeros_like(index)
        if self.documents is not None:
            # position 0 at each document's first token
            index = index - self.documents.starts
        if self.documents is not None and self.documents.reach is not None:
            prefix = self.documents.reach - self.documents.starts
        ids = index[None] if streams == 1 else prefix_positions(index, prefix)
        return replace(self, positions=PositionIds.from_ids(ids.transpose(0, 1)))

    def read_by(self, model: ModelSpec) -> "Batch":
        """Return the batch (on CPU) as the model reads it: with prefixes and positions that its
        special tokens define (GLM), or positions that skip padding (RoBERTa). Raises ValueError
        where such tokens are not known.
        """
        table, blanks = model.embedding.positions, model.blanks
        # RoBERTa: positions skip padding
        if table is not None and table.padding is not None:
            return self._without(table.padding, model.streams)
        if blanks is None or self.positions is not None:
            return self
        spans, starts = [], self.starts
        for tokens, row_starts in zip(self.tokens.tolist(), begins(starts), strict=True):
            # each document [first, end) of the sequence
            for first, end in zip(row_starts, (*row_starts[1:], len(tokens)), strict=True):
                # GLM: special tokens say where the prefix ends and generation begins
                spans += [blanks.span(tokens[first:end])] * (end - first)
        of_token = torch.tensor(spans).view(*starts.shape, -1).unbind(-1)
        prefix, stay, at, begin = of_token
        index = torch.arange(starts.shape[1]) - starts
        ids = span_positions(index, stay, at, begin)[: model.streams]
        batch = self._reaching(starts + prefix)
        return replace(batch, positions=PositionIds.from_ids(ids.transpose(0, 1)))

    def _without(self, padding: int, streams: int) -> "Batch":
        """Return the batch with the first position stream less the number of `padding` tokens
        before each token, and -1 at padding itself, as transformers'
        create_position_ids_from_input_ids does; without padding, the batch itself. If it has no
        positions, `streams` are made, the others 0.
        """
        padded = self.tokens == padding
        if not padded.any():
            return self
        if self.positions is None:
            ids = torch.zeros(len(padded), streams, padded.shape[1], dtype=torch.int64)
            ids[:, 0] = torch.arange(padded.shape[1])
        else:
            ids = self.positions.ids.clone()
        # index less the padding before it
        ids[:, 0] = torch.where(padded, -1, ids[:, 0] - padded.cumsum(1))
        return replace(self, positions=PositionIds.from_ids(ids))

    def to(self, device: torch.device) -> "Batch":
        """Return a copy of the batch (on CPU) on `device`, copied asynchronously. Facts about
        documents that the host has worked out stay known.
        """
        documents = None if self.documents is None else self.documents.to_device(device)
        return self._map_tensors(lambda t: to_device(t, device), documents)

    @property
    def real_tokens(self) -> int:
        """Number of labels that are not IGNORED. For a batch on CPU."""
        return int(np.count_nonzero(self.labels.numpy() != IGNORED))

    @property
    def weight(self) -> float:
        """Sum of the loss weights of all labels that are not IGNORED: the divisor of the summed
        loss, after adding over ranks. For a batch on CPU. Raises ValueError for weights that are
        negative or not finite.
        """
        if self.weights is None:
            return self.real_tokens
        # float64: sums of 2^24 float32 weights would round
        weights = self.weights.numpy().astype(np.float64)
        if not np.all(np.isfinite(weights) & (weights >= 0)):
            raise ValueError(
                f"the weights of tokens are {weights.min()} to {weights.max()}: they must be "
                "finite and not negative"
            )
        return float(weights[self.labels.numpy() != IGNORED].sum())

    def split(self, parts: int) -> list["Batch"]:
        """Split into `parts` batches of consecutive sequences. Raises ValueError where they would
        not have equally many.
        """
        if parts < 1 or len(self.tokens) % parts:
            raise ValueError(
                f"a batch of {len(self.tokens)} sequences is not divisible into {parts} equal parts"
            )
        rows = len(self.tokens) // parts
        return [self._rows(slice(i * rows, (i + 1) * rows)) for i in range(parts)]

    def _rows(self, rows: slice) -> "Batch":
        """Return the sequences `rows` as a batch."""
        documents = (
            None if self.documents is None else self.documents.map_tensors(lambda t: t[rows])
        )
        return self._map_tensors(lambda t: t[rows], documents)

    def _map_tensors(
        self, change: Callable[[Tensor], Tensor], documents: Documents | None
    ) -> "Batch":
        """Return a batch with `change` applied to each tensor, and with `documents`."""
        return Batch(
            change(self.tokens),
            change(self.labels),
            documents,
            None if self.positions is None else self.positions.map_tensors(change),
            None if self.weights is None else change(self.weights),
            {name: change(t) for name, t in self.numbers.items()},
            None if self.experts is None else change(self.experts),
        )

    def microbatches(self, size: int) -> list["Batch"]:
        """Split into batches of `size` consecutive sequences. Raises ValueError, naming the
        options, where `size` does not divide them.
        """
        if size < 1 or len(self.tokens) % size:
            raise ValueError(
                f"{len(self.tokens)} sequences per rank are not divisible by the microbatch size "
                f"({size}): use --train.microbatch-size 1, or another --train.global-batch-size"
            )
        return self.split(len(self.tokens) // size)


def document_starts(
    tokens: Int64[Tensor, "sequences length"], end_of_text: int
) -> Int64[Tensor, "sequences length"]:
    """Return for each token the index of its document's first token, where documents are separated
    by end-of-text tokens, each of which belongs to the document that it ends.
    """
    document_starts = torch.zeros_like(tokens)
    document_starts[:, 1:] = torch.where(
        tokens[:, :-1] == end_of_text, torch.arange(1, tokens.shape[1]), 0
    )
    # nonzero only at first tokens: the running maximum spreads it over the document
    return document_starts.cummax(1).values
