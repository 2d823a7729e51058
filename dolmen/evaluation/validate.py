"""The mean cross-entropy of text that is not trained on, in nats per token: validation loss, and
the exponent of perplexity.
"""

import math
from collections.abc import Iterable
from typing import NamedTuple

import torch
from torch import Tensor

from dolmen.core import collectives, host
from dolmen.core.mesh import Mesh
from dolmen.data.batch import Batch
from dolmen.model.decoder import Decoder
from dolmen.model.head import Logits
from dolmen.objectives import score
from dolmen.objectives.cross_entropy import CrossEntropy
from dolmen.objectives.objective import check
from dolmen.parallel import pipeline
from dolmen.parallel import schedule as schedules
from dolmen.parallel.actions import Schedule
from dolmen.parallel.data import inference


class Losses(NamedTuple):
    """Over all batches of all ranks."""

    loss: float
    """Nats per predicted token."""
    tokens: int
    """Tokens predicted: labels that are not IGNORED."""
    nats: float
    """Sum of the losses."""

    def bits_per_byte(self, size: int) -> float:
        """Where the tokens are those of `size` bytes of text."""
        return self.nats / size / math.log(2)


def mean_loss(
    model: Decoder, batches: Iterable[Batch], mesh: Mesh, schedule: Schedule | None = None
) -> Losses:
    """Each rank of dp brings its own batches; the result is the same on every rank, and does not
    depend on the layout.

    Batches may differ in size, but under ZeRO the ranks bring equally many: each forward is a
    collective. `schedule`: of a model whose stages lie on several ranks; its forwards are carried
    out, on batches that its microbatches divide. Raises ValueError where no label carries a loss,
    and for a model that has no logits.
    """
    check(CrossEntropy(), model.tree)
    # nats, tokens: exact to 2^53 of them
    sums = torch.zeros(2, dtype=torch.float64, device=mesh.device)
    order = pipeline.forward_only(schedule or schedules.make("1f1b", 1, 1))
    with inference(model):
        for one in batches:
            batch = one.read_by(model.tree)
            sums[0] += _nats(model, batch, mesh, order)
            if mesh.pp.rank == mesh.cp.rank == 0:
                sums[1] += batch.real_tokens
    nats, tokens = host.read_back(collectives.reduce_scalar(sums, mesh.world) / mesh.tp.size)
    if tokens == 0:
        raise ValueError("no token to evaluate carries a loss: give batches that hold text")
    return Losses(nats / tokens, int(tokens), nats)


def _nats(model: Decoder, batch: Batch, mesh: Mesh, order: Schedule) -> Tensor:
    """The sum of the losses that this rank computes of one batch."""
    total = torch.zeros((), dtype=torch.float64, device=mesh.device)

    def end(hidden: Tensor, head: Logits, part: Batch) -> Tensor:
        return head.cross_entropy(hidden, part.labels)

    for nats in score.forward(model, batch, mesh, order, end):
        total.add_(nats)
    return total
