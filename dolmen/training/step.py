"""One update of the model: the whole mathematics of a training step on one screen."""

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor

from dolmen.core import collectives, device, ranges
from dolmen.core.mesh import Mesh
from dolmen.data.batch import Batch
from dolmen.objectives.preference import decided
from dolmen.optim.config import learning_rate
from dolmen.parallel import data, product
from dolmen.parallel.schedule import Action
from dolmen.training import balance, gradients, new_rows
from dolmen.training.state import TrainState

PRETRAINING = "pretraining_loss"  # the metric's name, among those of an objective


@dataclass(frozen=True)
class Metrics:
    """What a step tells. `loss` is the mean over what the objective counts in the global batch: by
    default its real tokens, of which there are `tokens`. Of a model that fills in tokens those are
    all that it reads.
    """

    loss: float
    grad_norm: float
    lr: float
    tokens: int
    skipped: bool = False
    router: dict[str, float] = field(default_factory=dict)
    """Of a model with experts: see training/balance.py."""
    objective: dict[str, float] = field(default_factory=dict)
    """What the objective tells beside the loss."""
    signal: int = 0
    """The largest that any rank was sent before the end of the step; 0: none."""
    tallies: Tensor | None = field(default=None, compare=False, repr=False)
    """What the world's experts counted (balance.tallied), on the device: nobody has read it."""
    critic: "Metrics | None" = None
    """Of the same step of the critic, where there is one."""

    @property
    def finite(self) -> bool:
        """Loss and gradient are."""
        own = math.isfinite(self.loss) and math.isfinite(self.grad_norm)
        return own and (self.critic is None or self.critic.finite)


def optimizer_step(
    state: TrainState,
    batch: Batch,
    mesh: Mesh,
    signal: Callable[[], int] = lambda: 0,
    observe: Callable[[Action], None] = lambda action: None,
) -> Metrics:
    """Forward and backward of this rank's rows of the global batch as the schedule says, sum of
    gradients, clip, update.

    The loss is divided by the objective's global count before backward. A step whose loss or
    gradient is not finite, or that the spike policy does not allow, changes no parameter; what is
    not finite also halves the loss scale of fp16. All numbers are of the world, so all ranks agree
    on them. `observe` is told each action of the schedule after it is done; `signal` is asked when
    the last is, for the number of a signal that this rank was sent, or 0. Raises ValueError, with
    no parameter changed, where no token of the batch carries a loss, and for a batch that the
    objective cannot judge.

    The host fills the device's queue, and reads what it must know to update or not: once.
    """
    if state.new_rows is not None and state.step == state.new_rows.until:
        new_rows.restart(state.optimizer)
        state.inherited = -state.updates
        state.spike.load([])
    learned = _learned(state, batch)
    tokens, counts = _counted(state, learned, mesh)
    made = [
        gradients.forward_backward(state, one, mesh, count, observe)
        for one, count in zip(learned, counts, strict=True)
    ]
    parameters, norm = _summed(state, mesh)
    # asked last, so that a signal in the middle of a step ends the run after it and not a step
    # later
    stop = device.number(signal(), torch.int64, mesh.device)
    stop = collectives.reduce_scalar(stop, mesh.world, "max")
    losses, tallies = _over_world(made, counts, mesh)
    sequences = sum(len(one.batch.tokens) for one in learned) * mesh.dp.size
    router = balance.router_metrics(state.model.tree, tallies, sequences)
    told = _read(tokens, counts.amin(), norm, stop, gradients.whole(learned, losses), router)
    if told.divisor == 0:
        state.model.zero_grad(set_to_none=True)  # they are of a division by 0
        raise ValueError(f"step {state.step}: no token of the global batch carries a loss")
    offset = state.lr_step_offset
    lr = learning_rate(state.config, state.step + offset, state.steps + offset, state.warmup)
    # of the world's numbers, so every rank decides the same
    finite = math.isfinite(told.norm) and math.isfinite(told.loss)
    allowed = finite and state.spike.allow(told.norm)
    learns = allowed and state.step >= state.critic_warmup_steps
    if learns:
        with ranges.mark("optimizer", "update"):
            _update(state, parameters, norm, lr)
    balance.move(state.model, tallies, update=learns)
    product.end_step(state.model.delayed().values(), mesh, state.updates if learns else None)
    state.optimizer.zero_grad(set_to_none=True)
    state.scale.update(finite)
    updates = state.updates  # behind the loss of this step
    state.step += 1
    state.updates += learns
    state.tokens += told.tokens
    meaningful = (*decided(state.objective, updates), PRETRAINING)
    names = [*state.objective.names, *([PRETRAINING] if state.pretraining is not None else [])]
    return Metrics(
        loss=told.loss,
        grad_norm=told.norm,
        lr=lr,
        tokens=told.tokens,
        skipped=not allowed,
        router=told.router,
        objective={
            name if "/" in name else f"objective/{name}": value
            for name, value in zip(names, told.metrics, strict=True)
            if name in meaningful
        },
        signal=told.signal,
        tallies=tallies,
    )


def _learned(state: TrainState, batch: Batch) -> list[gradients.Learned]:
    """What the step descends: the batch, and the text that is learned beside."""
    learned = [gradients.Learned(state.objective, batch)]
    if state.pretraining is not None:
        text, own = state.pretraining, state.pretraining.batch(state.step)
        learned.append(gradients.Learned(text.objective, own, text.coefficient, " of text"))
    return learned


def _counted(
    state: TrainState, learned: list[gradients.Learned], mesh: Mesh
) -> tuple[Tensor, Tensor]:
    """Of the global batch: the tokens that are read, and what each loss is divided by, [learned].

    The count divides the loss before backward, so gradients are summed and never averaged: a rank
    with fewer real tokens weighs less, as its rows do in one process. It is not read here, which
    would keep the device waiting for the first product.
    """
    numbers = [each for one in learned for each in gradients.counts(one, state)]
    numbers = [device.number(n, torch.float64, mesh.device) for n in numbers]
    read, counts = collectives.reduce_scalar(torch.stack(numbers), mesh.dp).view(-1, 2).unbind(1)
    return read.sum(), counts


def _over_world(
    made: list[tuple[Tensor, Tensor]], counts: Tensor, mesh: Mesh
) -> tuple[list[Tensor], Tensor]:
    """Of what `forward_backward` made on every rank: the mean loss of each that is learned with
    what its objective tells beside it, and what experts counted.
    """
    tallies = torch.stack([each for _, each in made]).sum(0)
    sizes = [len(sums) for sums, _ in made]
    parts = torch.cat([*(sums for sums, _ in made), tallies.flatten()])
    # every rank of tp computed the same losses and counted the same tokens
    parts = collectives.reduce_scalar(parts, mesh.world) / mesh.tp.size
    *summed, counted = parts.split([*sizes, tallies.numel()])
    means = [sums / count for sums, count in zip(summed, counts, strict=True)]
    return means, counted.view_as(tallies)


def _summed(state: TrainState, mesh: Mesh) -> tuple[list[Any], Tensor]:
    """What is trained, with whole gradients, and their norm over all ranks, without the loss
    scale.
    """
    parameters = [p for p in state.model.parameters() if p.requires_grad]
    tied = state.model.tied_apart
    if tied is not None and tied.requires_grad:
        data.sum_over(tied, mesh.ends)
    if state.frozen_phase is not None:
        state.frozen_phase.keep(state.model)
    with ranges.mark("optimizer", "norm"):
        squares = state.model.split.kernels.squares
        norm = data.gradient_norm(parameters, mesh, tied, squares) / state.scale.value
    return parameters, norm


class _Told(NamedTuple):
    """What the host knows of a step, of the world."""

    tokens: int
    divisor: float
    norm: float
    signal: int
    loss: float
    metrics: list[float]
    router: dict[str, float]


def _read(
    tokens: Tensor, count: Tensor, norm: Tensor, signal: Tensor, judged: Tensor, router: Tensor
) -> _Told:
    """All in one: the host waits for the device. In fp64, which holds a count up to 2^53. `judged`
    are the loss and what the objective tells beside it.
    """
    first = torch.stack([t.double() for t in (tokens, count, norm, signal)])
    real, by, length, stop, mean, *others = device.read_back(torch.cat([first, judged, router]))
    metrics, others = others[: len(judged) - 1], others[len(judged) - 1 :]
    told: dict[str, float] = dict(zip(balance.NAMES, others, strict=True)) if others else {}
    return _Told(int(real), by, length, int(stop), mean, metrics, told)


def _update(state: TrainState, parameters: list[Any], norm: Tensor, lr: float) -> None:
    factor = torch.full_like(norm, 1 / state.scale.value)
    if state.config.clip > 0:
        factor = factor * (state.config.clip / (norm + 1e-6)).clamp(max=1.0)
    data.scale_gradients(parameters, factor)
    for group in state.optimizer.param_groups:
        group["lr"] = lr
    if state.frozen_phase is not None:
        new_rows.update(state.optimizer)
    else:
        state.optimizer.step()
