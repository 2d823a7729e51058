"""One update of the model: the whole mathematics of a training step on one screen."""

import math
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
from dolmen.optim.optimizer import OptimizerConfig
from dolmen.optim.precision import LossScale
from dolmen.optim.schedule import learning_rate
from dolmen.parallel import data


@dataclass
class TrainState:
    """Everything that changes while training, and what it needs to change."""

    model: Decoder
    optimizer: torch.optim.AdamW
    config: OptimizerConfig
    steps: int                                             # length of the learning rate's schedule
    zero: int
    seed: int = 0
    scale: LossScale = field(default_factory=lambda: LossScale(False))
    step: int = 0                                          # updates made, and the index of the next batch
    tokens: int = 0                                        # real tokens trained on


@dataclass(frozen=True)
class Metrics:
    """What a step tells. `loss` is the mean over all real tokens of the global batch, `tokens` their number."""

    loss: float
    grad_norm: float
    lr: float
    tokens: int
    skipped: bool = False


def optimizer_step(state: TrainState, batch: Batch, mesh: Mesh, microbatch_size: int) -> Metrics:
    """Forward and backward of this rank's rows of the global batch, sum of gradients, clip, update.

    The loss is divided by the global count of real tokens before backward. A step whose gradient is not finite changes
    no parameter; with fp16 it also halves the loss scale. The norm is a sum over the world, so all ranks agree on it.
    """
    count = int(collectives.reduce_scalar(torch.tensor(batch.real_tokens, device=mesh.device), mesh.dp))
    if count == 0: raise ValueError(f"step {state.step}: no token of the global batch carries a loss")
    total = torch.zeros((), device=mesh.device)
    parts, key = batch.microbatches(microbatch_size), torch.tensor(seed_of(state.seed, "dropout", state.step), device=mesh.device)
    for i, part in enumerate(parts):
        first = mesh.dp.rank * len(batch.tokens) + i * microbatch_size
        noise = Noise(key, torch.arange(first, first + microbatch_size, device=mesh.device)) if state.model.config.dropout else None
        loss = state.model(part.tokens.to(mesh.device), part.labels.to(mesh.device), noise=noise)
        total += loss.detach()
        data.backward(loss * (state.scale.value / count), state.model, last=i == len(parts) - 1, zero=state.zero)

    parameters = [p for p in state.model.parameters() if p.requires_grad]
    norm = data.gradient_norm(parameters, mesh) / state.scale.value
    mean = float(collectives.reduce_scalar(total, mesh.dp)) / count
    lr = learning_rate(state.config, state.step, state.steps)
    finite = math.isfinite(float(norm))
    if finite: _update(state, parameters, norm, lr)
    state.optimizer.zero_grad(set_to_none=True)
    state.scale.update(finite)
    state.step += 1
    state.tokens += count
    return Metrics(mean, float(norm), lr, count, skipped=not finite)


def _update(state: TrainState, parameters: list[Any], norm: Tensor, lr: float) -> None:
    factor = torch.full_like(norm, 1 / state.scale.value)
    if state.config.clip > 0: factor = factor * (state.config.clip / (norm + 1e-6)).clamp(max=1.0)
    data.scale_gradients(parameters, factor)
    for group in state.optimizer.param_groups: group["lr"] = lr
    state.optimizer.step()
