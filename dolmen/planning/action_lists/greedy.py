"""Lists by rules of preference, for any size: the rank that can begin something first does, and of
what it could begin it takes what it prefers. Many preferences are tried, and the shortest kept.
"""

import random
from dataclasses import dataclass, replace
from itertools import product

from dolmen.parallel.actions import Schedule
from dolmen.planning.action_lists.problem import Partial, Problem

WEIGHED = 3_000_000  # actions times works of a rank, over all trials: some ten seconds
MOST = 300  # trials: of a thousand, the best is among them or little better


@dataclass(frozen=True)
class Preference:
    """How much later than another, in times of a chunk's forward, an action may begin and still be
    taken first: `wait` of it. One that begins later by less is preferred.
    """

    forward: float
    weight: float
    """Of W, which nobody waits for: large, so that it fills what would be idle."""
    deeper: float
    """Of each chunk that is not the last: what is further on its way goes first."""
    slots: int
    """Chunks that a rank holds: fewer than it may can be faster, as gradients come sooner."""


def found(problem: Problem, enough: float) -> Schedule:
    """The shortest of many; looks no further when one is no longer than `enough`."""
    per_trial = problem.actions * len(problem.by_rank[0])
    first, *others = _preferences(problem)[: min(MOST, max(8, WEIGHED // per_trial))]
    best = greedy(problem, first)
    for preference in others:
        if best.span <= enough * (1 + 1e-9):
            break
        best = min(best, greedy(problem, preference), key=lambda partial: partial.span)
    return schedule_of(problem, best)


def schedule_of(problem: Problem, partial: Partial) -> Schedule:
    return Schedule(
        "search",
        problem.ranks,
        problem.micros,
        problem.chunks,
        partial.actions(),
        problem.placement,
    )


def _preferences(problem: Problem) -> list[Preference]:
    """A grid in an order drawn once: the first few hundred of it are as good as any."""
    ranks, most = problem.ranks, min(problem.slots, problem.micros * problem.chunks)
    sizes = {most, *(s for s in range(problem.chunks, most + 1) if s % max(1, ranks // 2) == 0)}
    grid = [
        Preference(*values)
        for values in product(
            (-1.0, -0.5, -0.1, 0.0, 0.1, 0.5, 1.0),
            (0.0, 0.5, 0.9, 1.0, 1.5, 2.0, 1000.0),
            (-1.0, -0.3, 0.0, 0.3, 1.0) if problem.chunks > 1 else (0.0,),
            sorted(sizes, reverse=True)[:8],
        )
    ]
    random.Random(0).shuffle(grid)
    return [Preference(0.1, 1000.0, 0.3, most), Preference(-0.1, 1.0, 0.0, most), *grid]


def greedy(problem: Problem, preference: Preference) -> Partial:
    """The lists that one preference makes: every action is safe, so they come to their end."""
    tight = replace(problem, memory=preference.slots / problem.chunks)
    partial = Partial(tight)
    unit = sum(cost.forward for cost in problem.costs) / problem.stages
    late = [
        unit
        * (
            preference.forward * (work.kind == "F")
            + preference.weight * (work.kind == "W")
            + preference.deeper * (problem.chunks - 1 - work.chunk) * (work.kind == "F")
        )
        for work in problem.works
    ]
    choices = [_choice(partial, rank, late) for rank in range(problem.ranks)]
    while True:
        rank = min(range(problem.ranks), key=lambda r: choices[r][0])
        start, index = choices[rank]
        if index < 0:
            return partial
        partial.take(index, start)
        fed = {problem.works[user].rank for user, _ in problem.works[index].feeds}
        for other in fed | {rank}:
            choices[other] = _choice(partial, other, late)


def _choice(partial: Partial, rank: int, late: list[float]) -> tuple[float, int]:
    """(start, index) of what the rank would do next of what is known; (infinity, -1) of nothing."""
    best = (float("inf"), float("inf"), -1)
    for index in partial.problem.by_rank[rank]:
        start = partial.start(index)
        if start is not None and partial.safe(index):
            best = min(best, (start + late[index], start, index))
    return best[1:]
