"""The mean loss over batches.

What two programs of a model are asked of random tokens: a batch, and the loss that it is judged
by, which are those of pretraining.

The mean loss of what is not trained on: of text the cross-entropy in nats per token, which is
the exponent of perplexity, or that of another objective.
"""

import math
from collections.abc import Iterable
from typing import NamedTuple

import numpy as np
import torch
from jaxtyping import Int64
from torch import Tensor

from dolmen.core import collectives, device
from dolmen.core.mesh import Mesh
from dolmen.data.batch import FOLLOWS, Batch
from dolmen.model.decoder import Decoder
from dolmen.model.spec import ModelSpec
from dolmen.objectives import forward
from dolmen.objectives.objective import CrossEntropy, MaskedLM, Objective, check
from dolmen.parallel import pipeline
from dolmen.parallel.data import inference
from dolmen.parallel.schedule import Schedule
from dolmen.parallel.simulation import make_schedule


def batch_of(tree: ModelSpec, windows: Int64[np.ndarray, "sequences window"]) -> Batch:
    """Make the batch of these windows: the labels are the next tokens, or, for an encoder, the
    tokens themselves, and of every second sequence that its second text follows the first.
    """
    if not tree.both_ways:
        return Batch.of_windows(windows)
    tokens = torch.from_numpy(np.ascontiguousarray(windows[:, :-1]))
    if not judges_pairs(tree):
        return Batch(tokens, tokens)
    follows = torch.zeros(tokens.shape)
    follows[0::2, 0], follows[1::2, 0] = 1.0, -1.0
    return Batch(tokens, tokens, numbers={FOLLOWS: follows})


def objective_of(tree: ModelSpec, batch: Batch) -> Objective:
    """Return the pretraining loss: over all tokens, and over pairs once per sequence, the sum of
    two means, as transformers has it.
    """
    if not judges_pairs(tree):
        return CrossEntropy()
    return MaskedLM(follows=batch.weight / len(batch.tokens))


def judges_pairs(tree: ModelSpec) -> bool:
    """Return whether the head predicts if the second of two texts follows the first."""
    return tree.both_ways and tree.head.follows


NEXT_TOKEN = CrossEntropy()


class Losses(NamedTuple):
    """Mean losses over all batches of all ranks."""

    loss: float
    """Nats per predicted token, or what another objective's loss is of what that counts."""
    tokens: int
    """Tokens predicted: labels that are not IGNORED."""
    nats: float
    """Sum of the losses."""
    metrics: dict[str, float] = {}
    """Further metrics of the objective."""

    def bits_per_byte(self, size: int) -> float:
        """Return the bits per byte where the tokens are `size` bytes of text."""
        return self.nats / size / math.log(2)


def mean_loss(
    model: Decoder,
    batches: Iterable[Batch],
    mesh: Mesh,
    schedule: Schedule | None = None,
    objective: Objective = NEXT_TOKEN,
) -> Losses:
    """Each rank of dp brings its own batches; the result is the same on every rank, and does not
    depend on the layout.

    Batches may differ in size, but under ZeRO the ranks bring equally many: each forward is a
    collective. `schedule`: of a model whose stages lie on several ranks; its forwards are carried
    out, on batches that its microbatches divide. Raises ValueError where no label carries a loss,
    and for a model whose head is another than the objective's.
    """
    check(objective, model.tree)
    # what is told, in the order of names, then nats, tokens, count: exact to 2^53 of them
    told = len(objective.names)
    sums = torch.zeros(told + 3, dtype=torch.float64, device=mesh.device)
    order = pipeline.forward_only(schedule or make_schedule("1f1b", 1, 1))
    with inference(model):
        for one in batches:
            batch = one.read_by(model.tree)
            sums[: told + 1] += _sums(model, batch, mesh, order, objective)
            if mesh.pp.rank == mesh.cp.rank == 0:
                sums[told + 1] += batch.real_tokens
                sums[told + 2] += objective.count(batch)
    found = device.read_back(collectives.reduce_scalar(sums, mesh.world) / mesh.tp.size)
    *metrics, nats, tokens, count = found
    if count == 0:
        raise ValueError("no token to evaluate carries a loss: give batches that hold text")
    means = {name: one / count for name, one in zip(objective.names, metrics, strict=True)}
    return Losses(nats / count, int(tokens), nats, means)


def _sums(
    model: Decoder, batch: Batch, mesh: Mesh, order: Schedule, objective: Objective
) -> Tensor:
    """Return this rank's sums over one batch: metrics, then the losses."""
    total = torch.zeros(len(objective.names) + 1, dtype=torch.float64, device=mesh.device)
    for judged in forward.forward(model, batch, mesh, order, objective):
        total += torch.stack((*judged.metrics, judged.total.detach()))
    return total
