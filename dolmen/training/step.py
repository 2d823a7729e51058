"""One update of the model: the whole mathematics of a training step on one screen."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor

from dolmen.core import collectives, host, ranges
from dolmen.core.mesh import Mesh
from dolmen.core.rng import seed_of
from dolmen.data.batch import Batch
from dolmen.model.decoder import Decoder
from dolmen.model.replay import replayed
from dolmen.model.tree import Scalar
from dolmen.objectives.cross_entropy import CrossEntropy
from dolmen.objectives.objective import Objective, check
from dolmen.ops.dropout import Noise
from dolmen.optim import optimizer as optim
from dolmen.optim.config import OptimizerConfig
from dolmen.optim.optimizer import Optimizer
from dolmen.optim.precision import LossScale
from dolmen.optim.schedule import learning_rate
from dolmen.parallel import data, pipeline, product
from dolmen.parallel.actions import Action, Schedule
from dolmen.parallel.pipeline import Work
from dolmen.rollouts.coefficient import Coefficient
from dolmen.training import balance, new_rows
from dolmen.training.new_rows import NewRows
from dolmen.training.pretraining import LOSS, Text
from dolmen.training.spike import SpikePolicy


@dataclass
class TrainState:
    """Everything that changes while training, and what it needs to change."""

    model: Decoder
    optimizer: Optimizer
    config: OptimizerConfig
    steps: int  # length of the learning rate's schedule
    zero: int
    schedule: Schedule  # what each rank of pp does in a step
    seed: int = 0
    scale: LossScale = field(default_factory=lambda: LossScale(False))
    spike: SpikePolicy = field(default_factory=SpikePolicy)
    step: int = 0  # steps made, and the index of the next batch
    updates: int = 0  # those of them that were not skipped
    # what the optimizer's count of updates is over these: of the run whose moments it began with;
    # less than 0 where it has begun anew since
    inherited: int = 0
    tokens: int = 0  # real tokens trained on
    warmup: float | None = None  # steps in which the learning rate rises; None: as `config` says
    ahead: float = 0.0  # steps of the batch of today that earlier batches read over `step`
    objective: Objective = CrossEntropy()
    new_rows: NewRows | None = None  # which learn alone at first
    waits: int = 0  # steps at the beginning that update nothing: others learn before it
    beside: "Critic | None" = None
    text: Text | None = None
    """What is learned of plain text in each step besides."""

    @property
    def alone(self) -> NewRows | None:
        """Those that learn alone in the coming step."""
        rows = self.new_rows
        return rows if rows is not None and self.step < rows.until else None

    def __post_init__(self):
        check(self.objective, self.model.tree)

    def tensors(self) -> dict[str, Tensor]:
        """All that a checkpoint keeps as tensors, by name, those of a critic among them."""
        beside = {} if self.beside is None else self.beside.state.tensors()
        return {
            **optim.tensors(self.model, self.optimizer),
            **self.model.scaling(),
            **{f"{CRITIC}{name}": tensor for name, tensor in beside.items()},
        }

    def scaling(self) -> dict[str, Tensor]:
        """Those of them that are scales of delayed scaling."""
        beside = {} if self.beside is None else self.beside.state.scaling()
        return self.model.scaling() | {f"{CRITIC}{name}": t for name, t in beside.items()}

    def delayed(self) -> list[product.Delayed]:
        """Who has these."""
        beside = [] if self.beside is None else self.beside.state.delayed()
        return [*self.model.delayed().values(), *beside]

    def names(self) -> set[str]:
        """Names of those of the whole model, of whatever stage."""
        leaves = self.model.tree.leaves
        beside = set() if self.beside is None else self.beside.state.names()
        own = optim.names(leaves, self.config.name) | {
            f"{kind}/{name}"
            for name, leaf in leaves.items()
            if leaf.fp8 is not None and leaf.fp8.delayed
            for kind in (product.HISTORY, product.SCALE)
        }
        return own | {f"{CRITIC}{name}" for name in beside}


CRITIC = "critic."  # what the names of its tensors begin with, in a checkpoint


@dataclass(frozen=True)
class Critic:
    """What learns beside a policy from the same batches (PPO), by the same steps."""

    state: TrainState
    """Of a model that ends in one number for each token, with an optimizer of its own."""
    coefficient: Coefficient
    """Of the KL in rewards, for the next phase."""


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
    # The count divides the loss before backward, so gradients are summed and never averaged: a rank
    # with fewer real tokens weighs less, as its rows do in one process. It is not read here, which
    # would keep the device waiting for the first product.
    learned = [_Learned(state.objective, batch)]
    if state.text is not None:
        own = state.text.batch(state.step)
        learned.append(_Learned(state.text.objective, own, state.text.coefficient, " of text"))
    numbers = [each for one in learned for each in _counts(one, state)]
    numbers = [host.number(n, torch.float64, mesh.device) for n in numbers]
    read, counts = collectives.reduce_scalar(torch.stack(numbers), mesh.dp).view(-1, 2).unbind(1)
    made = [
        _forward_backward(state, one, mesh, count, observe)
        for one, count in zip(learned, counts, strict=True)
    ]
    judged = torch.cat([sums for sums, _ in made])
    tallies = torch.stack([each for _, each in made]).sum(0)

    parameters, norm = _summed(state, mesh)
    # asked last, so that a signal in the middle of a step ends the run after it and not a step
    # later
    stop = host.number(signal(), torch.int64, mesh.device)
    stop = collectives.reduce_scalar(stop, mesh.world, "max")
    sums = collectives.reduce_scalar(torch.cat([judged, tallies.flatten()]), mesh.world)
    # every rank of tp computed the same losses and counted the same tokens
    summed, counted = (sums / mesh.tp.size).split([len(judged), tallies.numel()])
    tallies = counted.view_as(tallies)
    sequences = sum(len(one.batch.tokens) for one in learned) * mesh.dp.size
    router = balance.router_metrics(state.model.tree, tallies, sequences)
    means = [
        sums / count
        for sums, count in zip(summed.split([len(sums) for sums, _ in made]), counts, strict=True)
    ]
    told = _read(read.sum(), counts.amin(), norm, stop, _whole(learned, means), router)
    if told.divisor == 0:
        state.model.zero_grad(set_to_none=True)  # they are of a division by 0
        raise ValueError(f"step {state.step}: no token of the global batch carries a loss")
    ahead = state.ahead
    lr = learning_rate(state.config, state.step + ahead, state.steps + ahead, state.warmup)
    # of the world's numbers, so every rank decides the same
    finite = math.isfinite(told.norm) and math.isfinite(told.loss)
    allowed = finite and state.spike.allow(told.norm)
    learns = allowed and state.step >= state.waits
    if learns:
        with ranges.mark("optimizer", "update"):
            _update(state, parameters, norm, lr)
    balance.move(state.model, tallies, update=learns)
    product.end_step(state.model.delayed().values(), mesh, state.updates if learns else None)
    state.optimizer.zero_grad(set_to_none=True)
    state.scale.update(finite)
    state.step += 1
    state.updates += learns
    state.tokens += told.tokens
    names = [*state.objective.names, *([LOSS] if state.text is not None else [])]
    names = [f"objective/{name}" for name in names]
    beside = dict(zip(names, told.metrics, strict=True))
    return Metrics(
        told.loss,
        told.norm,
        lr,
        told.tokens,
        not allowed,
        told.router,
        beside,
        told.signal,
        tallies,
    )


class _Learned(NamedTuple):
    """A part of what a step descends: `weight` times the mean of an objective over a batch."""

    objective: Objective
    batch: Batch
    weight: float = 1.0
    noise: str = ""
    """What tells its dropout from that of others."""


def _counts(one: _Learned, state: TrainState) -> tuple[float, float]:
    """Of this rank's rows: the tokens that are read, and what the loss is divided by."""
    micros = one.batch.microbatches(len(one.batch.tokens) // state.schedule.micros)
    # a model that fills in tokens, or says one number of a text, reads all, though few have a label
    whole = state.model.tree.both_ways or isinstance(state.model.tree.head, Scalar)
    read = one.batch.tokens.numel() if whole else one.batch.real_tokens
    return read, sum(one.objective.count(micro) for micro in micros)


def _whole(learned: Sequence[_Learned], means: Sequence[Tensor]) -> Tensor:
    """The loss, what the first objective tells beside it, and the loss of each other."""
    losses = [mean[:1] * one.weight for one, mean in zip(learned, means, strict=True)]
    return torch.cat([torch.stack(losses).sum(0), means[0][1:], *(mean[:1] for mean in means[1:])])


def _summed(state: TrainState, mesh: Mesh) -> tuple[list[Any], Tensor]:
    """What is trained, with whole gradients, and their norm over all ranks, without the loss
    scale.
    """
    parameters = [p for p in state.model.parameters() if p.requires_grad]
    tied = state.model.tied_apart
    if tied is not None and tied.requires_grad:
        data.sum_over(tied, mesh.ends)
    if state.alone is not None:
        state.alone.keep(state.model)
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
    real, by, length, stop, mean, *others = host.read_back(torch.cat([first, judged, router]))
    metrics, others = others[: len(judged) - 1], others[len(judged) - 1 :]
    told: dict[str, float] = dict(zip(balance.NAMES, others, strict=True)) if others else {}
    return _Told(int(real), by, length, int(stop), mean, metrics, told)


def _forward_backward(
    state: TrainState,
    one: _Learned,
    mesh: Mesh,
    count: Tensor,
    observe: Callable[[Action], None],
) -> tuple[Tensor, Tensor]:
    """Gradients of a part of the step, added to those that there are; the sums that its objective
    made on this rank, fp64, of losses and of each of its names; and what its experts counted
    (balance.tallied).
    """
    model, micros, batch = state.model, state.schedule.micros, one.batch
    objective, rows = one.objective, len(batch.tokens)
    size, scale = rows // micros, state.scale.value * one.weight
    key = seed_of(state.seed, f"dropout{one.noise}", state.step)
    key = host.number(key, torch.int64, mesh.device)
    sums = torch.zeros(1 + len(objective.names), dtype=torch.float64, device=mesh.device)
    parts = batch.to(mesh.device).microbatches(size)
    share = scale / (rows * mesh.dp.size)
    losses = balance.begin(model, host.number(share, torch.float64, mesh.device))
    factor = scale / count

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


def _update(state: TrainState, parameters: list[Any], norm: Tensor, lr: float) -> None:
    factor = torch.full_like(norm, 1 / state.scale.value)
    if state.config.clip > 0:
        factor = factor * (state.config.clip / (norm + 1e-6)).clamp(max=1.0)
    data.scale_gradients(parameters, factor)
    for group in state.optimizer.param_groups:
        group["lr"] = lr
    if state.alone is not None:
        new_rows.update(state.optimizer)
    else:
        state.optimizer.step()
