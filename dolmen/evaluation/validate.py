"""Mean loss over batches that are not trained on: the cross-entropy in nats per token, whose
exponential is the perplexity, or the loss of another objective. Also makes the batch and the
pretraining objective with which dolmen and transformers are compared on random tokens.
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


def batch_of(spec: ModelSpec, windows: Int64[np.ndarray, "sequences window"]) -> Batch:
    """Return the batch of windows [sequences, length + 1] of token ids. Labels are the next tokens,
    or for an encoder the tokens themselves; with a next-sentence head, every other sequence is
    labelled as following.
    """
    if not spec.both_ways:
        return Batch.from_windows(windows)
    tokens = torch.from_numpy(np.ascontiguousarray(windows[:, :-1]))
    if not has_next_sentence_head(spec):
        return Batch(tokens, tokens)
    follows = torch.zeros(tokens.shape)
    follows[0::2, 0], follows[1::2, 0] = 1.0, -1.0
    return Batch(tokens, tokens, numbers={FOLLOWS: follows})


def objective_of(spec: ModelSpec, batch: Batch) -> Objective:
    """Return the pretraining objective of the model on this batch: cross-entropy of the next token
    (or of an encoder's labels), or, with a next-sentence head, the sum of two means, the masked-LM
    loss over tokens and the next-sentence loss over sequences, like transformers.
    """
    if not has_next_sentence_head(spec):
        return CrossEntropy()
    return MaskedLM(follows=batch.weight / len(batch.tokens))


def has_next_sentence_head(spec: ModelSpec) -> bool:
    """Return whether the model has a next-sentence prediction head (BERT)."""
    return spec.both_ways and spec.head.follows


NEXT_TOKEN = CrossEntropy()


class Losses(NamedTuple):
    """Mean losses over all batches of all ranks."""

    loss: float
    """Mean loss: nats per predicted token, or another objective's loss per unit that it counts."""
    tokens: int
    """Tokens predicted: labels that are not IGNORED."""
    nats: float
    """Sum of the losses over all predictions."""
    metrics: dict[str, float] = {}
    """Further metrics of the objective."""

    def bits_per_byte(self, size: int) -> float:
        """Return the loss in bits per byte of the evaluated text, which has `size` bytes."""
        return self.nats / size / math.log(2)


def mean_loss(
    model: Decoder,
    batches: Iterable[Batch],
    mesh: Mesh,
    schedule: Schedule | None = None,
    objective: Objective = NEXT_TOKEN,
) -> Losses:
    """Return the mean loss over all batches of all ranks, with token count and metrics. Collective:
    each dp rank passes its own batches, and every rank returns the same result for any layout.
    Batches may differ in size, but under ZeRO each rank must pass equally many, as a forward is a
    collective. `schedule`: for a pipeline, whose microbatches must divide a batch. Raises
    ValueError where no label carries a loss, and for a model with another head than the
    objective's.
    """
    check(objective, model.spec)
    # the metrics in the order of names, then nats, tokens, count: exact in float64 up to 2^53
    metric_count = len(objective.names)
    sums = torch.zeros(metric_count + 3, dtype=torch.float64, device=mesh.device)
    order = pipeline.forward_only(schedule or make_schedule("1f1b", 1, 1))
    with inference(model):
        for microbatch in batches:
            batch = microbatch.read_by(model.spec)
            sums[: metric_count + 1] += _sums(model, batch, mesh, order, objective)
            # labels are counted once per dp rank (and tp, divided out below)
            if mesh.pp.rank == mesh.cp.rank == 0:
                sums[metric_count + 1] += batch.real_tokens
                sums[metric_count + 2] += objective.count(batch)
    # one all-reduce for all batches: loss, counts and metrics together
    totals = device.read_back(collectives.reduce_scalar(sums, mesh.world) / mesh.tp.size)
    *metrics, nats, tokens, count = totals
    if count == 0:
        raise ValueError(
            "the validation batches have no token with a label: give batches with text"
        )
    means = {name: total / count for name, total in zip(objective.names, metrics, strict=True)}
    return Losses(nats / count, int(tokens), nats, means)


def _sums(
    model: Decoder, batch: Batch, mesh: Mesh, order: Schedule, objective: Objective
) -> Tensor:
    """Return this rank's sums over one batch, float64: the objective's metrics, then its loss."""
    total = torch.zeros(len(objective.names) + 1, dtype=torch.float64, device=mesh.device)
    for output in forward.forward(model, batch, mesh, order, objective):
        total += torch.stack((*output.metrics, output.total.detach()))
    return total
