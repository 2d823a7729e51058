"""What a step descends, means of objectives over batches, and its gradients, as a schedule says."""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from dolmen.core import device
from dolmen.core.mesh import Mesh
from dolmen.core.rng import seed_of
from dolmen.data.batch import Batch
from dolmen.model.routing_replay import replayed
from dolmen.model.spec import Scalar
from dolmen.objectives.objective import Objective
from dolmen.ops.elementwise import Noise
from dolmen.parallel import data, pipeline
from dolmen.parallel.pipeline import Work
from dolmen.parallel.schedule import Action
from dolmen.training import balance
from dolmen.training.state import TrainState


class Learned(NamedTuple):
    """A part of what a step descends: `weight` times the mean of an objective over a batch."""

    objective: Objective
    batch: Batch
    weight: float = 1.0
    noise: str = ""
    """What tells its dropout from that of others."""


def counts(one: Learned, state: TrainState) -> tuple[float, float]:
    """Of this rank's rows: the tokens that are read, and what the loss is divided by."""
    micros = one.batch.microbatches(len(one.batch.tokens) // state.schedule.micros)
    # a model that fills in tokens, or says one number of a text, reads all, though few have a label
    reads_all = state.model.tree.both_ways or isinstance(state.model.tree.head, Scalar)
    read = one.batch.tokens.numel() if reads_all else one.batch.real_tokens
    return read, sum(one.objective.count(micro) for micro in micros)


def whole(learned: Sequence[Learned], means: Sequence[Tensor]) -> Tensor:
    """The loss, what the first objective tells beside it, and the loss of each other."""
    losses = [mean[:1] * one.weight for one, mean in zip(learned, means, strict=True)]
    return torch.cat([torch.stack(losses).sum(0), means[0][1:], *(mean[:1] for mean in means[1:])])


def forward_backward(
    state: TrainState,
    one: Learned,
    mesh: Mesh,
    count: Tensor,
    observe: Callable[[Action], None],
) -> tuple[Tensor, Tensor]:
    """Gradients of a part of the step, added to those that there are; the sums that its objective
    made on this rank, fp64, of losses and of each of its names; and what its experts counted
    (balance.tallied), whose auxiliary losses have their own coefficients alone.
    """
    model, micros, batch = state.model, state.schedule.micros, one.batch
    objective, rows = one.objective, len(batch.tokens)
    size, scale = rows // micros, state.scale.value
    key = seed_of(state.seed, f"dropout{one.noise}", state.step)
    key = device.number(key, torch.int64, mesh.device)
    sums = torch.zeros(1 + len(objective.names), dtype=torch.float64, device=mesh.device)
    parts = batch.to(mesh.device).microbatches(size)
    share = scale / (rows * mesh.dp.size)
    losses = balance.begin(model, device.number(share, torch.float64, mesh.device))
    factor = scale * one.weight / count

    def forward(chunk: int, micro: int, x: Tensor | None) -> Tensor:
        first = mesh.dp.rank * rows + micro * size
        noise = (
            Noise(key, torch.arange(first, first + size, device=mesh.device))
            if model.dropout
            else None
        )
        part = parts[micro]
        y = model(
            part.tokens,
            lambda hidden, head: objective(hidden, head, part),
            noise=noise,
            documents=part.documents,
            positions=part.positions,
            balance=losses,
            x=x,
            part=chunk,
            routes=None
            if part.experts is None
            else replayed(model.tree, model.split, part.experts),
        )
        if not model.split.parts[chunk].last:
            return y
        for i, judged in enumerate((y.total.detach(), *y.metrics)):
            sums[i].add_(judged)
        return y.total * factor.to(y.total.dtype)

    reduction = data.Reduction(model, state.zero, state.schedule.splits_backward)
    chunks = [model.blocks(chunk) for chunk in range(state.schedule.chunks)]

    def boundary() -> Tensor:
        return model.boundary(size, batch.tokens.shape[1])

    pipeline.execute(
        state.schedule, mesh, Work(forward, boundary, reduction, chunks, model.tp.later, observe)
    )
    return sums, balance.tallied(model, losses)
