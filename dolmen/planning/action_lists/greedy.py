"""Lists by rules of preference, for any size: the rank that can begin something first does, and of
what it could begin it takes what it prefers. Preferences are drawn, and the best ones changed a
little, again and again.
"""

import random
from dataclasses import dataclass, replace

from dolmen.parallel.schedule import Schedule
from dolmen.planning.action_lists.problem import Partial, ScheduleProblem

WEIGHED = 4_000_000  # actions times works of a rank, over all trials: some ten seconds
MOST = 300  # trials
DRAWN = 0.3  # of them drawn anew; the others are changes of the best


@dataclass(frozen=True)
class Preference:
    """How much later than another, in times of a chunk's forward, each kind of action may begin and
    still be taken first: that which begins the earliest, when its wait is added, is taken.
    """

    late: dict[tuple[str, int], float]
    """(kind, chunk) -> wait. Of W, which nobody waits for, large: so it fills what would be idle.
    """
    slots: int
    """Chunks that a rank holds: fewer than it may can be faster, as gradients come sooner."""


def search_greedily(problem: ScheduleProblem, enough: float) -> Schedule:
    """Return the shortest of many greedy schedules: 30 % of random preferences, then random changes
    of the best one. Stops early at a schedule that is no longer than `enough`. The same problem
    gives the same schedule.
    """
    trials = min(MOST, max(8, WEIGHED // (problem.actions * len(problem.by_rank[0]))))
    # a fixed seed: the same question has the same answer
    chance = random.Random(0)
    preferred = first(problem)
    best = greedy(problem, preferred)
    for trial in range(1, trials):
        if best.span <= enough * (1 + 1e-9):
            break
        fresh = trial < DRAWN * trials
        scale = 0.5 * (1 - trial / trials) + 0.02
        preference = draw(problem, chance) if fresh else perturb(problem, preferred, chance, scale)
        schedule = greedy(problem, preference)
        if schedule.span < best.span:
            best, preferred = schedule, preference
    return schedule_of(problem, best)


def first(problem: ScheduleProblem) -> Preference:
    """Return the preference of the first trial: gradients first, then the chunks that are furthest
    on, then W.
    """
    last = problem.chunks - 1
    late = {(kind, c): 0.0 for kind in problem.kinds for c in range(problem.chunks)}
    late |= {("F", c): 0.1 + 0.5 * (last - c) for c in range(problem.chunks)}
    if problem.splits:
        late |= {("W", c): 0.7 for c in range(problem.chunks)}
    return Preference(late, most_slots(problem))


def most_slots(problem: ScheduleProblem) -> int:
    """Return the most chunks of activations that a rank can ever hold."""
    return min(problem.slots, problem.micros * problem.chunks)


def draw(problem: ScheduleProblem, chance: random.Random) -> Preference:
    """Sample a random preference: waits of each kind and chunk, and in half of the cases fewer
    slots.
    """
    late = {}
    for kind, chunk in first(problem).late:
        deeper = chance.choice((0.0, 0.3, 1.0)) * (problem.chunks - 1 - chunk)
        wait = {"F": chance.choice((-0.5, 0.0, 0.5)) + deeper, "W": chance.uniform(0, 1.5)}
        late[kind, chunk] = wait.get(kind, 0.0)
    most = most_slots(problem)
    slots = most if chance.random() < 0.5 else chance.randint(problem.chunks, most)
    return Preference(late, slots)


def perturb(
    problem: ScheduleProblem, preferred: Preference, chance: random.Random, scale: float
) -> Preference:
    """Return a preference near `preferred`: a normal deviate of width `scale` added to each wait,
    and now and then one slot more or fewer.
    """
    late = {action: wait + chance.gauss(0, scale) for action, wait in preferred.late.items()}
    slots = preferred.slots + chance.choice((0, 0, 0, -1, 1))
    return Preference(late, max(problem.chunks, min(slots, most_slots(problem))))


def schedule_of(problem: ScheduleProblem, partial: Partial) -> Schedule:
    """Return a complete partial schedule as a `Schedule`."""
    return Schedule(
        "search",
        problem.ranks,
        problem.micros,
        problem.chunks,
        partial.actions(),
        problem.placement,
    )


def greedy(problem: ScheduleProblem, preference: Preference) -> Partial:
    """Build the schedule of one preference: repeatedly, the rank that can start earliest takes the
    action that it prefers. Only safe actions are taken, so it always completes.
    """
    tight = replace(problem, memory=preference.slots / problem.chunks)
    partial = Partial(tight)
    unit = sum(cost.forward for cost in problem.costs) / problem.stages
    late = [unit * preference.late[work.kind, work.chunk] for work in problem.works]
    choices = [_preferred_action(partial, rank, late) for rank in range(problem.ranks)]
    while True:
        rank = min(range(problem.ranks), key=lambda r: choices[r][0])
        start, index = choices[rank]
        if index < 0:
            return partial
        partial.take(index, start)
        fed = {problem.works[user].rank for user, _ in problem.works[index].feeds}
        # only these ranks have new choices; recomputing all would be quadratic in the
        # ranks
        for other in fed | {rank}:
            choices[other] = _preferred_action(partial, other, late)


def _preferred_action(partial: Partial, rank: int, late: list[float]) -> tuple[float, int]:
    """Return (start, index) of the action that a rank prefers among those it can start; (infinity,
    -1) if there is none.
    """
    best = (float("inf"), float("inf"), -1)
    for index in partial.problem.by_rank[rank]:
        start = partial.start(index)
        if start is not None and partial.safe(index):
            best = min(best, (start + late[index], start, index))
    return best[1:]
