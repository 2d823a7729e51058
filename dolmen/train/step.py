"""One update of the model: the whole mathematics of a training step on one screen."""

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from dolmen.core import collectives
from dolmen.core.mesh import Mesh
from dolmen.core.rng import seed_of
from dolmen.data.batch import Batch
from dolmen.model.decoder import Decoder
from dolmen.ops.dropout import Noise
from dolmen.optim.config import OptimizerConfig
from dolmen.optim.precision import LossScale
from dolmen.optim.schedule import learning_rate
from dolmen.parallel import data, pipeline
from dolmen.parallel.actions import Action, Schedule
from dolmen.parallel.pipeline import Work
from dolmen.train import balance
from dolmen.train.spike import SpikePolicy


@dataclass
class TrainState:
    """Everything that changes while training, and what it needs to change."""

    model: Decoder
    optimizer: torch.optim.AdamW
    config: OptimizerConfig
    steps: int  # length of the learning rate's schedule
    zero: int
    schedule: Schedule  # what each rank of pp does in a step
    seed: int = 0
    scale: LossScale = field(default_factory=lambda: LossScale(False))
    spike: SpikePolicy = field(default_factory=SpikePolicy)
    step: int = 0  # updates made, and the index of the next batch
    tokens: int = 0  # real tokens trained on


@dataclass(frozen=True)
class Metrics:
    """What a step tells. `loss` is the mean over all real tokens of the global batch, `tokens`
    their number.
    """

    loss: float
    grad_norm: float
    lr: float
    tokens: int
    skipped: bool = False
    router: dict[str, float] = field(default_factory=dict)
    """Of a model with experts: see train/balance.py."""


def optimizer_step(
    state: TrainState,
    batch: Batch,
    mesh: Mesh,
    observe: Callable[[Action], None] = lambda action: None,
) -> Metrics:
    """Forward and backward of this rank's rows of the global batch as the schedule says, sum of
    gradients, clip, update.

    The loss is divided by the global count of real tokens before backward. A step whose loss or
    gradient is not finite, or that the spike policy does not allow, changes no parameter; what is
    not finite also halves the loss scale of fp16. Both numbers are sums over the world, so all
    ranks agree on them. `observe` is told each action of the schedule after it is done.
    """
    count = int(
        collectives.reduce_scalar(torch.tensor(batch.real_tokens, device=mesh.device), mesh.dp)
    )
    if count == 0:
        raise ValueError(f"step {state.step}: no token of the global batch carries a loss")
    key = torch.tensor(seed_of(state.seed, "dropout", state.step), device=mesh.device)
    total = _forward_backward(state, batch, mesh, count, key, observe)

    parameters = [p for p in state.model.parameters() if p.requires_grad]
    tied = state.model.tied_apart
    if tied is not None:
        data.sum_over(tied, mesh.ends)
    norm = data.gradient_norm(parameters, mesh, twice=tied) / state.scale.value
    mean = float(collectives.reduce_scalar(total, mesh.world)) / mesh.tp.size / count
    lr = learning_rate(state.config, state.step, state.steps)
    finite = math.isfinite(float(norm)) and math.isfinite(mean)
    allowed = finite and state.spike.allow(float(norm))
    if allowed:
        _update(state, parameters, norm, lr)
    router = balance.settle(state.model, mesh, len(batch.tokens) * mesh.dp.size, update=allowed)
    state.optimizer.zero_grad(set_to_none=True)
    state.scale.update(finite)
    state.step += 1
    state.tokens += count
    return Metrics(mean, float(norm), lr, count, not allowed, router)


def _forward_backward(
    state: TrainState,
    batch: Batch,
    mesh: Mesh,
    count: int,
    key: Tensor,
    observe: Callable[[Action], None],
) -> Tensor:
    """Gradients of the step, and the sum of the losses that this rank computed, fp64."""
    model, micros, rows = state.model, state.schedule.micros, len(batch.tokens)
    total, scale = torch.zeros((), dtype=torch.float64, device=mesh.device), state.scale.value
    parts, size = batch.microbatches(rows // micros), rows // micros
    share = torch.tensor(scale / (rows * mesh.dp.size), dtype=torch.float64, device=mesh.device)

    def forward(chunk: int, micro: int, x: Tensor | None) -> Tensor:
        first = mesh.dp.rank * rows + micro * size
        noise = (
            Noise(key, torch.arange(first, first + size, device=mesh.device))
            if model.config.dropout
            else None
        )
        part = parts[micro].to(mesh.device)
        y = model(
            part.tokens,
            part.labels,
            noise=noise,
            starts=part.starts,
            balance=share,
            x=x,
            part=chunk,
        )
        if not model.split.parts[chunk].last:
            return y
        total.add_(y.detach())
        return y * (scale / count)

    reduction = data.Reduction(model, state.zero, state.schedule.splits_backward)
    chunks = [model.blocks(chunk) for chunk in range(state.schedule.chunks)]
    boundary = lambda: model.boundary(size, batch.tokens.shape[1])
    pipeline.execute(
        state.schedule, mesh, Work(forward, boundary, reduction, chunks, model.tp.later, observe)
    )
    return total


def _update(state: TrainState, parameters: list[Any], norm: Tensor, lr: float) -> None:
    factor = torch.full_like(norm, 1 / state.scale.value)
    if state.config.clip > 0:
        factor = factor * (state.config.clip / (norm + 1e-6)).clamp(max=1.0)
    data.scale_gradients(parameters, factor)
    for group in state.optimizer.param_groups:
        group["lr"] = lr
    state.optimizer.step()
