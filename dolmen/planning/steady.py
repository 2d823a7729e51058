"""A step of few microbatches that stands for one of many. In its steady state a schedule repeats
itself: of m microbatches min(m, 2 pp v) are run, 3 at least, where more of them hold no more, and
the actions in the middle stand for those that were left out.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from dolmen.parallel.actions import Action, Schedule
from dolmen.training.config import RunConfig


@dataclass(frozen=True)
class Steps:
    """The schedule that is run in place of one of more microbatches."""

    schedule: Schedule
    times: Mapping[Action, int]
    """How often the step does an action that stands for others too."""


def shortened(run: RunConfig, rank: int, exact: bool = False) -> Steps:
    """The steps of a dry run. Raises ValueError for a rank that there is not."""
    layout, size = run.layout, run.microbatch_size
    if not 0 <= rank < layout.world:
        raise ValueError(f"rank {rank} is none of the {layout.world} of this layout")
    whole = layout.make_schedule(run.train.global_batch_size, size)
    few = min(whole.micros, max(3, 2 * layout.pp * layout.virtual_stages))
    if exact or few == whole.micros or layout.schedule.endswith((".txt", ".yaml")):
        return Steps(whole, {})
    short = layout.make_schedule((layout.dp or 1) * few * size, size)
    mine = rank // (layout.world // layout.pp)
    several = layout.pp if short.chunks > 1 and short.placement == "loop" else 1
    repeated = steady(short.actions[mine], several)
    left_out, rest = divmod(whole.micros - few, several)
    if not repeated or rest or most_under_way(short, mine) < most_under_way(whole, mine):
        return Steps(whole, {})
    return Steps(short, dict.fromkeys(repeated, 1 + left_out))


def steady(actions: Sequence[Action], micros: int) -> Sequence[Action]:
    """Those nearest to the middle that stand one after the other and do, of every chunk, the
    forward and the backward of `micros` microbatches: what a schedule of more would repeat. None
    where there are none.
    """
    chunks = 1 + max(action.chunk for action in actions)
    whole = {(part, chunk): micros for part in "FIW" for chunk in range(chunks)}
    windows = (
        actions[first : first + length]
        for length in range(2 * micros * chunks, 3 * micros * chunks + 1)
        for first in sorted(
            range(len(actions) - length + 1),
            key=lambda first, length=length: abs(2 * first + length - len(actions)),
        )
    )
    return next((window for window in windows if _parts(window) == whole), ())


def _parts(actions: Sequence[Action]) -> Counter[tuple[str, int]]:
    """How often they do each part of a microbatch, by chunk: a B is an I and a W."""
    parts = ((part, a.chunk) for a in actions for part in ("IW" if a.kind == "B" else a.kind))
    return Counter(parts)


def most_under_way(schedule: Schedule, rank: int) -> int:
    """Microbatches whose forward is done and of whose backward something is left, the most at
    once.
    """
    now = most = 0
    for action in schedule.actions[rank]:
        now += (action.kind == "F") - (action.kind in "BW")
        most = max(most, now)
    return most
