"""A step of few microbatches that stands for one of many, for the dry run.

In its steady state a schedule repeats itself: every microbatch (every pp of them where a rank has
several chunks in a loop) does the same actions. So the fewest microbatches are run with which the
schedule has such a period, and the period counts for those left out. The first and the last
microbatch are never in it: they gather weights, set gradients and reduce them. 1F1B at pp 16 needs
18 microbatches, interleaved at pp 32 with 4 chunks 128. Nothing here imports torch.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from dolmen.model.layout import balance
from dolmen.parallel.schedule import Action, Schedule
from dolmen.planning.config import DryrunConfig, DryrunRequest, ranks_of
from dolmen.training.config import RunConfig


@dataclass(frozen=True)
class DryRunSteps:
    """The schedule that is run, with as many microbatches as needed."""

    schedule: Schedule
    times: Mapping[Action, int]
    """How many actions of the whole step each repeated action counts for."""


def shorten_step(run: RunConfig, rank: int, exact: bool = False) -> DryRunSteps:
    """Return the schedule that a dry run of `rank` executes: as few microbatches as have a whole
    period of the steady state, with how often that period counts; all of them if `exact`, for
    schedules of a file, or if no period is found. Raises ValueError for a rank outside the layout.
    """
    layout, size = run.layout, run.microbatch_size
    if not 0 <= rank < layout.world:
        raise ValueError(f"rank {rank} is none of the {layout.world} of this layout")
    full = layout.make_schedule(run.train.global_batch_size, size)
    if exact or layout.schedule.endswith((".txt", ".yaml")):
        return DryRunSteps(full, {})
    pp_rank = rank // (layout.world // layout.pp)
    period = layout.pp if full.chunks > 1 and full.placement == "loop" else 1
    # the first and the last microbatch are never part of the period
    first = period + 2
    first += (full.micros - first) % period  # what is left out are whole periods
    last = min(full.micros, 2 * layout.pp * full.chunks + 3 * period)
    for micros in range(first, last, period):
        short = layout.make_schedule((layout.dp or 1) * micros * size, size)
        repeated = find_period(short, pp_rank, period)
        if repeated:  # as many microbatches are in flight in it as in the whole step
            return DryRunSteps(short, dict.fromkeys(repeated, 1 + (full.micros - micros) // period))
    return DryRunSteps(full, {})


def find_period(schedule: Schedule, pp_rank: int, period: int) -> Sequence[Action]:
    """Return consecutive actions of a pipeline rank, the nearest to the middle, that do the forward
    and the backward of `period` microbatches in every chunk, and none of the first or the last
    microbatch; empty where there are none.
    """
    actions, edges = schedule.actions[pp_rank], (0, schedule.micros - 1)
    # how often each part of a microbatch is done before each place; a B is an I and a W
    done = np.zeros((len(actions) + 1, schedule.chunks, 3), dtype=np.int64)
    edge = np.zeros(len(actions) + 1, dtype=np.int64)
    for at, action in enumerate(actions):
        for part in "IW" if action.kind == "B" else action.kind:
            done[at + 1, action.chunk, "FIW".index(part)] += 1
        edge[at + 1] = action.micro in edges
    done, edge = done.cumsum(0), edge.cumsum(0)
    # a period has two actions for each microbatch and chunk, or three where backward is split
    for length in range(2 * period * schedule.chunks, 3 * period * schedule.chunks + 1):
        full = (done[length:] - done[:-length] == period).all((1, 2))
        starts = np.flatnonzero(full & (edge[length:] == edge[:-length]))
        if len(starts):
            start = starts[np.abs(2 * starts + length - len(actions)).argmin()]
            return actions[start : start + length]
    return ()


def check_layout(request: DryrunRequest) -> None:
    """Check the parts of a dry run's request that need neither torch nor weights: the requested
    ranks, the layout against the model and the batch, and the schedule. Does nothing for a run
    without a model. Raises ValueError.
    """
    run = request.run
    if run.model is None:  # explained where the whole run is checked
        return
    layout = run.layout.resolve(None)
    layout.check(run.spec, run.sequence_length, run.train.global_batch_size, run.microbatch_size)
    layout.make_schedule(run.train.global_batch_size, run.microbatch_size)
    ranks_of(request.options.ranks, layout.world)


def uneven_stages(run: RunConfig) -> str:
    """Return a line with the least and most layers of a stage, where the stages (pp x virtual
    stages) do not divide the layers; "" where they do.
    """
    stages = run.layout.pp * run.layout.virtual_stages
    sizes = [len(stage) for stage in balance(run.spec.layers, stages)]
    if min(sizes) == max(sizes):
        return ""
    return (
        f"{run.spec.layers} layers are not divisible by {stages} stages: each has {min(sizes)} to "
        f"{max(sizes)}"
    )


def blocks_run(run: RunConfig, options: DryrunConfig) -> int:
    """Return how many blocks the dry run executes in all, forward and backward, over the ranks of
    `options`.
    """
    total = 0
    for rank in ranks_of(options.ranks, run.layout.world):
        schedule = shorten_step(run, rank, options.exact).schedule
        pp_rank = rank // (run.layout.world // run.layout.pp)
        layers = balance(run.spec.layers, schedule.stages)
        actions = schedule.actions[pp_rank]
        total += sum(len(layers[schedule.stage_of(pp_rank, a.chunk)]) for a in actions)
    return total
