"""One update of the model: the whole mathematics of a training step.

    counts       real tokens, divisor of each loss               all-reduce over dp
    forward and  losses / global count, by the schedule:    tp, cp, ep inside layers; pp
    backward     gradients accumulate over microbatches          between stages; gradients over dp
    tied weight  embedding and head on different stages          all-reduce over boundary stages
    norm         of all gradients, without the loss scale        all-reduce over all axes
    signal       the largest that any rank has received          all-reduce (max) over the world
    losses       sums of losses and metrics, expert tallies      all-reduce over the world
    read back    all numbers at once: the only wait for the device
    update       clip, optimizer, router bias, fp8 scales        none (Muon gathers its matrices;
                                                                 fp8 maxima: tp, fsdp)

Every rank makes these calls in this order, whatever its own numbers are: a rank that branched on a
local value would leave the others in a collective. So each decision (skip, clip, stop) is taken
after `_read_back`, from numbers that are the same on all ranks.

Normalisation. The loss of a term is (sum over all tokens of the global batch) / (global count), and
the count divides the loss before backward. Gradients are then sums over dp, never means: with n_r
real tokens on rank r, a mean over ranks of per-rank means weighs every rank by 1 / dp, where one
process weighs it by n_r / sum(n). That is also why no number of microbatches changes the result.

Skipping. A loss or gradient that is not finite, or a norm that the spike policy rejects, leaves
parameters and moments as they are; the step still counts, as its batch has been read. Non-finite
steps halve the loss scale of fp16. With a critic in its warm-up the policy's step is computed, for
its metrics and the same order of collectives, and updates nothing.

The host queues the whole step before it reads anything, so it runs ahead of the device by up to a
step; `StepMetrics.tallies` stays on the device for the same reason.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor

from dolmen.core import collectives, device, profiling
from dolmen.core.determinism import seed_of
from dolmen.core.mesh import Mesh
from dolmen.data.batch import Batch
from dolmen.model.routing_replay import replay_routes
from dolmen.model.spec import ScalarHeadSpec
from dolmen.objectives.objective import Objective
from dolmen.objectives.preference import meaningful_metrics
from dolmen.ops.elementwise import Noise
from dolmen.optim.config import learning_rate
from dolmen.parallel import data, exact, pipeline, quantized_product
from dolmen.parallel.pipeline import StepWork
from dolmen.parallel.schedule import Action
from dolmen.training import balance
from dolmen.training.state import TrainState, reset_optimizer, step_without_decay

PRETRAINING = "pretraining_loss"  # the name of its metric, after those of the objective


class LossTerm(NamedTuple):
    """A term of the loss: `weight` times the mean of an objective over a batch."""

    objective: Objective
    batch: Batch
    weight: float = 1.0
    noise: str = ""
    """Part of the seed of its dropout masks, so that terms do not share them."""


@dataclass(frozen=True)
class StepMetrics:
    """Metrics of one step, the same on every rank."""

    loss: float
    """Sum over the global batch, divided by the objective's count: by default its real tokens."""
    grad_norm: float
    """L2 norm of all gradients before clipping, without the loss scale."""
    lr: float
    tokens: int
    """Real tokens of the global batch; all tokens that are read, for encoders and scalar heads."""
    skipped: bool = False
    router: dict[str, float] = field(default_factory=dict)
    """Router metrics of a model with experts (training/balance.py)."""
    objective: dict[str, float] = field(default_factory=dict)
    """The objective's metrics, by name."""
    signal: int = 0
    """The largest signal that any rank received before the end of the step; 0: none."""
    tallies: Tensor | None = field(default=None, compare=False, repr=False)
    """Tallies of all experts (balance.local_tallies, summed over the world), on the device."""
    critic: "StepMetrics | None" = None
    """Metrics of the critic's step on the same batch, where there is a critic."""

    @property
    def finite(self) -> bool:
        """True if loss and gradient norm are finite, and those of the critic's step if there is
        one.
        """
        local_finite = math.isfinite(self.loss) and math.isfinite(self.grad_norm)
        return local_finite and (self.critic is None or self.critic.finite)


def optimizer_step(
    state: TrainState,
    batch: Batch,
    mesh: Mesh,
    signal: Callable[[], int] = lambda: 0,
    observe: Callable[[Action], None] = lambda action: None,
) -> StepMetrics:
    """Make one training step on this rank's rows of the global batch: forward and backward in the
    order of state.schedule, reduction and clipping of gradients, update. Return the step's metrics,
    the same on every rank; `state` changes in place. No parameter is updated if loss or gradient
    norm is not finite, for a spike of the norm, and in a critic's warm-up. Collective.

    `batch` has global_batch_size / dp rows [rows, length], a multiple of the schedule's
    microbatches. Parameters, gradients and moments stay sharded as the model is.

    `observe` is called with each action of the schedule after it is done. `signal` is called after
    the last one and returns the number of a signal that this rank received, or 0. Raises
    ValueError, with no parameter changed, where no token of the global batch carries a loss, and
    for a batch that the objective cannot be computed from.
    """
    if state.new_rows is not None and state.step == state.new_rows.until:
        reset_optimizer(state.optimizer)
        state.inherited = -state.updates
        state.spike.load([])
    terms = _loss_terms(state, batch)
    tokens, counts = _global_counts(state, terms, mesh)
    local_sums = [
        forward_backward(state, term, mesh, count, observe)
        for term, count in zip(terms, counts, strict=True)
    ]
    parameters, norm = _reduce_gradients(state, mesh, counts)
    # as late as possible: a signal in the middle of a step ends the run after this step, not after
    # the next one
    stop = device.scalar_tensor(signal(), torch.int64, mesh.device)
    stop = collectives.reduce_scalar(stop, mesh.world, "max")
    means, tallies = _reduce_over_world(local_sums, counts, mesh)
    sequences = sum(len(term.batch.tokens) for term in terms) * mesh.dp.size
    router = balance.router_metrics(state.model.spec, tallies, sequences)
    losses = combine_losses(terms, means)
    numbers = _read_back(tokens, counts.amin(), norm, stop, losses, router)
    if numbers.divisor == 0:
        state.model.zero_grad(set_to_none=True)  # gradients of a division by 0
        raise ValueError(f"step {state.step}: no token of the global batch has a loss")
    offset = state.lr_step_offset
    lr = learning_rate(state.config, state.step + offset, state.steps + offset, state.warmup)
    # these are the world's numbers, so every rank decides the same
    finite = math.isfinite(numbers.norm) and math.isfinite(numbers.loss)
    allowed = finite and state.spike.allow(numbers.norm)
    learns = allowed and state.step >= state.critic_warmup_steps
    if learns:
        with profiling.record_range("optimizer", "update"):
            _update(state, parameters, norm, lr)
    balance.update_router_bias(state.model, tallies, update=learns)
    quantized_product.end_step(
        state.model.delayed_scaling().values(), mesh, state.updates if learns else None
    )
    state.optimizer.zero_grad(set_to_none=True)
    state.scale.update(finite)
    updates = state.updates  # made before the loss of this step was computed
    state.step += 1
    state.updates += learns
    state.tokens += numbers.tokens
    meaningful = (*meaningful_metrics(state.objective, updates), PRETRAINING)
    names = [*state.objective.names, *([PRETRAINING] if state.pretraining is not None else [])]
    return StepMetrics(
        loss=numbers.loss,
        grad_norm=numbers.norm,
        lr=lr,
        tokens=numbers.tokens,
        skipped=not allowed,
        router=numbers.router,
        objective={
            name if "/" in name else f"objective/{name}": value
            for name, value in zip(names, numbers.metrics, strict=True)
            if name in meaningful
        },
        signal=numbers.signal,
        tallies=tallies,
    )


def _loss_terms(state: TrainState, batch: Batch) -> list[LossTerm]:
    """Return the terms of the step's loss: the objective on `batch`, and, with a pretraining mix
    (PPO-ptx), the cross-entropy of this step's batch of text with its coefficient.
    """
    terms = [LossTerm(state.objective, batch)]
    if state.pretraining is not None:
        mix = state.pretraining
        text = mix.batch(state.step)
        terms.append(LossTerm(mix.objective, text, mix.coefficient, " of text"))
    return terms


def _global_counts(state: TrainState, terms: list[LossTerm], mesh: Mesh) -> tuple[Tensor, Tensor]:
    """Return, summed over dp (one all-reduce), the number of tokens of the global batch [] and the
    divisor of each term's loss [terms], in fp64. Both stay on the device: reading them would let
    the host wait before the first forward.
    """
    # [tokens, count] of each term, one after the other, in one all-reduce
    numbers = [count for term in terms for count in count_term(term, state)]
    numbers = [device.scalar_tensor(n, torch.float64, mesh.device) for n in numbers]
    read, counts = collectives.reduce_scalar(torch.stack(numbers), mesh.dp).view(-1, 2).unbind(1)
    return read.sum(), counts


def _reduce_over_world(
    local_sums: list[tuple[Tensor, Tensor]], counts: Tensor, mesh: Mesh
) -> tuple[list[Tensor], Tensor]:
    """Sum this rank's results of `forward_backward` for all terms over the world, in one
    all-reduce. Return, for each term, its loss and metrics divided by its count in `counts` [1 +
    names], and the expert tallies of all layers.
    """
    tallies = torch.stack([sums for _, sums in local_sums]).sum(0)
    sizes = [len(sums) for sums, _ in local_sums]
    # one collective for all sums: latency, not bytes, is what it costs
    parts = torch.cat([*(sums for sums, _ in local_sums), tallies.flatten()])
    # every rank of tp computed the same losses and counted the same tokens
    parts = collectives.reduce_scalar(parts, mesh.world) / mesh.tp.size
    *global_sums, global_tallies = parts.split([*sizes, tallies.numel()])
    means = [sums / count for sums, count in zip(global_sums, counts, strict=True)]
    return means, global_tallies.view_as(tallies)


def _reduce_gradients(state: TrainState, mesh: Mesh, counts: Tensor) -> tuple[list[Any], Tensor]:
    """Complete the gradients, in place: sum those of a tied weight over its two stages, mask those
    of frozen rows, and with exact numerics divide them by the count of the loss. Return the trained
    parameters, and the global L2 norm [] without the loss scale. `counts`: divisors of the terms of
    the loss.
    """
    parameters = [p for p in state.model.parameters() if p.requires_grad]
    tied = state.model.tied_across_ranks
    if tied is not None and tied.requires_grad:
        data.sum_over(tied, mesh.ends)
    if state.frozen_phase is not None:
        state.frozen_phase.mask_gradients(state.model)
    with profiling.record_range("optimizer", "norm"):
        leaves = state.model.split.kernels.exact
        if leaves is not None:
            (count,) = counts
            data.scale_gradients(parameters, count.reciprocal())
            once = [p for p in parameters if p is not tied or mesh.ends.rank == 0]
            return parameters, exact.gradient_norm(once, mesh, leaves)
        squares = state.model.split.kernels.squares
        # the tied weight is on two stages: its gradient counts once in the norm
        norm = data.gradient_norm(parameters, mesh, tied, squares) / state.scale.value
    return parameters, norm


class StepNumbers(NamedTuple):
    """The numbers of a step that the host reads, the same on every rank."""

    tokens: int
    divisor: float
    """The smallest count of a term; 0: no token carries a loss."""
    norm: float
    signal: int
    loss: float
    metrics: list[float]
    router: dict[str, float]


def _read_back(
    tokens: Tensor, count: Tensor, norm: Tensor, signal: Tensor, losses: Tensor, router: Tensor
) -> StepNumbers:
    """Return all numbers of a step on the host, copied from the device in one transfer, for which
    the host waits; as fp64, which is exact for counts up to 2^53. `losses`: the loss, then the
    metrics (`combine_losses`).
    """
    first = torch.stack([t.double() for t in (tokens, count, norm, signal)])
    values = device.read_back(torch.cat([first, losses, router]))
    read_tokens, divisor, grad_norm, stop, loss = values[:5]
    end = 4 + len(losses)
    metrics, router_values = values[5:end], values[end:]
    router_metrics: dict[str, float] = {}
    if router_values:
        router_metrics = dict(zip(balance.NAMES, router_values, strict=True))
    return StepNumbers(
        int(read_tokens), divisor, grad_norm, int(stop), loss, metrics, router_metrics
    )


def _update(state: TrainState, parameters: list[Any], norm: Tensor, lr: float) -> None:
    """Update the parameters: divide their gradients by the loss scale and clip them so that the
    global `norm` is at most config.clip (0: no clipping), set the learning rate `lr`, and step the
    optimizer, without weight decay while only rows of new tokens are trained.
    """
    # one factor for both, so that gradients are read and written once
    factor = torch.full_like(norm, 1 / state.scale.value)
    if state.config.clip > 0:
        # as torch.nn.utils.clip_grad_norm_; no host read, the norm stays on the device
        factor = factor * (state.config.clip / (norm + 1e-6)).clamp(max=1.0)
    data.scale_gradients(parameters, factor)
    for group in state.optimizer.param_groups:
        group["lr"] = lr
    if state.frozen_phase is not None:
        step_without_decay(state.optimizer)
    else:
        state.optimizer.step()


def count_term(term: LossTerm, state: TrainState) -> tuple[float, float]:
    """Return two numbers of this rank's rows of a term's batch: the tokens that it reads, for
    throughput (all for encoders and scalar heads, else the real ones), and its part of the count
    that divides the term's loss.
    """
    micros = term.batch.microbatches(len(term.batch.tokens) // state.schedule.micros)
    # encoders and scalar heads read all tokens, though only a few have a label
    reads_all = state.model.spec.both_ways or isinstance(state.model.spec.head, ScalarHeadSpec)
    read = term.batch.tokens.numel() if reads_all else term.batch.real_tokens
    return read, sum(term.objective.count(micro) for micro in micros)


def combine_losses(terms: Sequence[LossTerm], means: Sequence[Tensor]) -> Tensor:
    """Return one tensor: the weighted sum of the terms' losses, the metrics of the first term, and
    the loss of each further term. `means`: of each term its mean loss, then its mean metrics.
    """
    losses = [mean[:1] * term.weight for term, mean in zip(terms, means, strict=True)]
    return torch.cat([torch.stack(losses).sum(0), means[0][1:], *(mean[:1] for mean in means[1:])])


def forward_backward(
    state: TrainState,
    term: LossTerm,
    mesh: Mesh,
    count: Tensor,
    observe: Callable[[Action], None],
) -> tuple[Tensor, Tensor]:
    """Run forward and backward of all microbatches of a term by the pipeline schedule, and add the
    gradients of loss / `count`, its divisor [] over the global batch, to those of the model.

    Return this rank's fp64 sums of loss and metrics [1 + names], 0 on ranks without the last stage,
    and the tallies of its experts (balance.local_tallies). Auxiliary losses of routers are part of
    the gradients, with their own coefficients; `term.weight` does not scale them.
    """
    model, micros, batch = state.model, state.schedule.micros, term.batch
    objective, rows = term.objective, len(batch.tokens)
    size, scale = rows // micros, state.scale.value
    # a dropout mask follows from seed, step and row number: no layout or microbatch changes it
    key = seed_of(state.seed, f"dropout{term.noise}", state.step)
    key = device.scalar_tensor(key, torch.int64, mesh.device)
    sums = torch.zeros(1 + len(objective.names), dtype=torch.float64, device=mesh.device)
    parts = batch.to(mesh.device).microbatches(size)
    # auxiliary losses are means over the sequences of the global batch
    share = device.scalar_tensor(scale / (rows * mesh.dp.size), torch.float64, mesh.device)
    # divides the loss before backward: gradients are sums over dp, never means
    factor = scale * term.weight / count
    leaves = model.split.kernels.exact
    if leaves is not None:
        # 1 / count joins complete gradients: a sum would be rounded twice
        factor, share = torch.ones_like(count), share * count
    losses = balance.open_tallies(model, share)

    def forward(chunk: int, micro: int, x: Tensor | None) -> Tensor:
        """Run the forward of microbatch `micro` through this rank's pipeline stage `chunk`, from
        the activations `x` of the stage before (None: from the tokens). Return its activations, or
        on the last stage the scaled loss [], after adding loss and metrics to this rank's sums.
        """
        # number of the row in the global batch
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
            else replay_routes(model.spec, model.split, part.experts),
        )
        if not model.split.parts[chunk].last:
            return y
        for i, metric in enumerate((y.total.detach(), *y.metrics)):
            sums[i].add_(metric)
        return y.total * factor.to(y.total.dtype)

    splits = state.schedule.splits_backward
    reduction = (
        data.Reduction(model, state.zero, splits)
        if leaves is None
        else exact.ExactReduction(
            model, state.zero, splits, micros, mesh, model.partial(), model.tp.copies
        )
    )
    chunks = [model.blocks(chunk) for chunk in range(state.schedule.chunks)]

    def boundary() -> Tensor:
        """Return an empty tensor of the shape of the activations that pipeline stages send to each
        other for a microbatch.
        """
        return model.boundary(size, batch.tokens.shape[1])

    pipeline.execute(
        state.schedule,
        mesh,
        StepWork(forward, boundary, reduction, chunks, model.tp.later, observe),
    )
    return sums, balance.local_tallies(model, losses)
