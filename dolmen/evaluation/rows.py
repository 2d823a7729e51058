"""What a model foretells of rows of tokens, each read by itself: the loss of a corpus, and the
log-likelihoods that tasks ask for, under any layout.

    row       a b c d e f          tokens of one text
    read      a b c d e            without the last, which nothing asks about
    counted           d e f        those from `first` on (3 here), each foretold from all before it

Rows are read longest first, those of about equal length together, filled up at their ends, which
no token before them sees; each rank of dp takes its share of every batch. A row's sums are of one
row, so neither the batch nor the layout decides them, but for the order of sums.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np
import torch
from jaxtyping import Float64, Int64
from torch import Tensor

from dolmen.core import collectives, device
from dolmen.core.mesh import Mesh
from dolmen.data.batch import Batch
from dolmen.model import spec
from dolmen.model.decoder import Decoder
from dolmen.objectives import forward
from dolmen.objectives.objective import check_head
from dolmen.ops.loss import IGNORED
from dolmen.ops.rope import PositionIds
from dolmen.parallel import pipeline
from dolmen.parallel.data import inference
from dolmen.parallel.schedule import Schedule
from dolmen.parallel.simulation import make_schedule

TOKENS_AT_ONCE = 1 << 12  # that a rank reads in one forward: bounds activations


@dataclass(frozen=True, eq=False)
class Rows:
    """`read(i)` gives row i, int64 [lengths[i]], of two tokens or more."""

    lengths: Int64[np.ndarray, " rows"]
    firsts: Int64[np.ndarray, " rows"]
    """Of each row the index of the first token that is counted, 1 at least."""
    read: Callable[[int], np.ndarray]

    @property
    def counted(self) -> int:
        """Tokens that are counted, of all rows."""
        return int((self.lengths - self.firsts).sum())


class Foretold(NamedTuple):
    """Of each row, over its counted tokens."""

    log_likelihoods: Float64[np.ndarray, " rows"]
    """Sum of their log-probabilities, in nats."""
    likeliest: Int64[np.ndarray, " rows"]
    """How many of them are the likeliest token of all where they stand."""


class _Group(NamedTuple):
    """Rows that are read at once."""

    rows: Int64[np.ndarray, " group"]
    length: int
    """Tokens that are read of the longest."""
    padded: int
    """The same, as the layout divides it."""
    each: int
    """Rows per rank of dp, as the stages divide them."""


def foretold(
    model: Decoder,
    rows: Rows,
    mesh: Mesh,
    schedule: Schedule | None = None,
    reach: Callable[[int], None] = lambda done: None,
) -> Foretold:
    """The same on every rank of `mesh`, all of which call it with the same rows. `schedule`: of a
    model whose stages lie on several ranks; its forwards are carried out. `reach` is told how many
    counted tokens are done. The model is left as it was. Raises ValueError for a model that
    foretells no next token.
    """
    check_foretells(model.tree)
    order = pipeline.forward_only(schedule or make_schedule("1f1b", 1, 1))
    sums = torch.zeros(2, len(rows.lengths), dtype=torch.float64, device=mesh.device)
    done = 0
    # a compiled block would be compiled again for every length
    with inference(model), torch.compiler.set_stance("force_eager"):
        for group in _groups(model, rows, mesh, order.micros):
            own = group.rows[mesh.dp.rank * group.each : (mesh.dp.rank + 1) * group.each]
            batch = _batch(model, rows, own, group)
            found = forward.forward(model, batch, mesh, order, _end)
            if found and len(own):
                sums[:, torch.from_numpy(own)] = torch.cat(found, 1)[:, : len(own)]
            done += int((rows.lengths - rows.firsts)[group.rows].sum())
            reach(done)
    # each row is on one rank of dp, each of its tokens on one of cp, and its end on one of pp
    whole = collectives.reduce_scalar(sums, mesh.world) / mesh.tp.size
    likelihoods, likeliest = np.array(device.read_back(whole), np.float64).reshape(2, -1)
    return Foretold(likelihoods, likeliest.astype(np.int64))


def check_foretells(model: spec.ModelSpec) -> None:
    """Raises ValueError for a model that has no probability of a next token."""
    check_head("a loss of the next token", spec.LMHeadSpec, model)
    if model.both_ways:
        raise ValueError(
            "the model sees both ways: it fills in masked tokens, and no token has a probability "
            "of its own; use dolmen verify"
        )


def _groups(model: Decoder, rows: Rows, mesh: Mesh, micros: int) -> Iterator[_Group]:
    """All rows, the longest first: the same on every rank. Where the length of a text tells how its
    tokens are turned, those of a group have one length.
    """
    lengths = rows.lengths - 1
    order = np.argsort(-lengths, kind="stable")
    multiple = 2 * mesh.cp.size if mesh.cp.size > 1 else 1
    multiple *= mesh.tp.size if model.tp.sequence else 1
    at = 0
    while at < len(order):
        length = int(lengths[order[at]])
        padded = -(-length // multiple) * multiple
        left = len(order) - at
        if model.tree.by_length:
            left = int(np.searchsorted(-lengths[order[at:]], -length, side="right"))
        most = min(TOKENS_AT_ONCE // padded, -(-left // mesh.dp.size))
        each = -(-max(1, most) // micros) * micros
        group = order[at : at + min(each * mesh.dp.size, left)]
        yield _Group(group, length, padded, each)
        at += len(group)


def _batch(model: Decoder, rows: Rows, own: np.ndarray, group: _Group) -> Batch:
    """The rows `own` of a group, and empty ones."""
    tokens = np.zeros((group.each, group.padded), np.int64)
    labels = np.full(tokens.shape, IGNORED, np.int64)
    for place, row in enumerate(own):
        text, first = rows.read(int(row)), int(rows.firsts[row])
        tokens[place, : len(text) - 1] = text[:-1]
        labels[place, first - 1 : len(text) - 1] = text[first:]
    batch = Batch(torch.from_numpy(tokens), torch.from_numpy(labels))
    if group.padded > group.length and model.tree.blanks is None:
        # what fills up is nothing that a table has positions for, or that makes a text longer
        index = torch.arange(group.padded).clamp(max=group.length - 1)
        ids = index.expand(len(tokens), 1, -1)
        batch = replace(batch, positions=PositionIds.of(ids))
    return batch.read_by(model.tree)


def _end(hidden: Tensor, head: Any, part: Batch) -> Float64[Tensor, "2 sequences"]:
    """Of this rank of cp's tokens of each sequence of a microbatch, the two sums."""
    found, likeliest = head.log_probabilities_and_argmax(hidden, part.labels)
    right = likeliest == head.here(part.labels)
    return torch.stack((found.double().sum(1), right.double().sum(1)))
