"""The shortest pipeline schedule that fits: schedules with a name, greedy ones, then a proof by
branch and bound. schedule_problem.py has times, partial schedules and lower bounds.
"""

import random
from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from math import prod

from dolmen.parallel.schedule import SCHEDULES, Schedule
from dolmen.parallel.simulation import Simulation, check_schedule, simulate_stages
from dolmen.planning.schedule_problem import (
    Costs,
    Partial,
    Paths,
    ScheduleProblem,
    bound,
    remaining,
)

# Greedy schedules, for any size: the rank that can start an action first does, and of those that it
# could start it takes the one that it prefers. Preferences are random, and the best ones are
# changed a little, again and again.

TRIAL_BUDGET = 4_000_000  # actions times works of a rank, over all trials: some ten seconds
MOST_TRIALS = 300
RANDOM_SHARE = 0.3  # of them random; the others are changes of the best


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
    """Return the shortest of many schedules built greedily: 30 % by random preferences among kinds
    of actions, then by random changes of the best one. Stops early at a schedule that is no longer
    than `enough`. The same problem gives the same schedule.
    """
    trials = min(MOST_TRIALS, max(8, TRIAL_BUDGET // (problem.actions * len(problem.by_rank[0]))))
    # a fixed seed: the same question has the same answer
    chance = random.Random(0)
    preferred = first_preference(problem)
    best = build_greedily(problem, preferred)
    for trial in range(1, trials):
        if best.span <= enough * (1 + 1e-9):
            break
        fresh = trial < RANDOM_SHARE * trials
        scale = 0.5 * (1 - trial / trials) + 0.02
        preference = (
            random_preference(problem, chance)
            if fresh
            else perturb_preference(problem, preferred, chance, scale)
        )
        schedule = build_greedily(problem, preference)
        if schedule.span < best.span:
            best, preferred = schedule, preference
    return schedule_of(problem, best)


def first_preference(problem: ScheduleProblem) -> Preference:
    """Return the preference of the first trial: backwards first, then forwards of the chunks that
    are furthest on, then W.
    """
    last = problem.chunks - 1
    late = {(kind, c): 0.0 for kind in problem.kinds for c in range(problem.chunks)}
    late |= {("F", c): 0.1 + 0.5 * (last - c) for c in range(problem.chunks)}
    if problem.splits:
        late |= {("W", c): 0.7 for c in range(problem.chunks)}
    return Preference(late, most_slots(problem))


def most_slots(problem: ScheduleProblem) -> int:
    """Return the most chunks of activations that a rank can ever hold at once."""
    return min(problem.slots, problem.micros * problem.chunks)


def random_preference(problem: ScheduleProblem, chance: random.Random) -> Preference:
    """Return a random preference: waits of each kind of action and chunk, and in half of the cases
    fewer slots for activations.
    """
    late = {}
    for kind, chunk in first_preference(problem).late:
        deeper = chance.choice((0.0, 0.3, 1.0)) * (problem.chunks - 1 - chunk)
        wait = {"F": chance.choice((-0.5, 0.0, 0.5)) + deeper, "W": chance.uniform(0, 1.5)}
        late[kind, chunk] = wait.get(kind, 0.0)
    most = most_slots(problem)
    slots = most if chance.random() < 0.5 else chance.randint(problem.chunks, most)
    return Preference(late, slots)


def perturb_preference(
    problem: ScheduleProblem, preferred: Preference, chance: random.Random, scale: float
) -> Preference:
    """Return a preference near `preferred`: a normal deviate of width `scale` added to each wait,
    and now and then one activation slot more or fewer.
    """
    late = {action: wait + chance.gauss(0, scale) for action, wait in preferred.late.items()}
    slots = preferred.slots + chance.choice((0, 0, 0, -1, 1))
    return Preference(late, max(problem.chunks, min(slots, most_slots(problem))))


def schedule_of(problem: ScheduleProblem, partial: Partial) -> Schedule:
    """Return a partial schedule that is complete as a `Schedule`."""
    return Schedule(
        "search",
        problem.ranks,
        problem.micros,
        problem.chunks,
        partial.actions(),
        problem.placement,
    )


def build_greedily(problem: ScheduleProblem, preference: Preference) -> Partial:
    """Return the complete schedule that one preference leads to: repeatedly, the rank that can
    start earliest takes the action that it prefers. Only actions that cannot lead to a deadlock are
    taken, so it always completes.
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
    """Return (start time, index) of the action that a rank prefers among those it can start now;
    (infinity, -1) if there is none. `late`: wait added to each action's start, by index.
    """
    best = (float("inf"), float("inf"), -1)
    for index in partial.problem.by_rank[rank]:
        start = partial.start(index)
        if start is not None and partial.safe(index):
            best = min(best, (start + late[index], start, index))
    return best[1:]


# Branch and bound over lists, which proves that none is shorter, for small sizes.
#
# A node is a partial schedule, every action as early as its list allows. Of all actions that could
# come next let `first` be the one that would end first, at C, on rank r (Giffler and Thompson
# 1960). The next action of r starts before C, or else `first` fits before it without delaying
# anything; and whatever starts before C is known already, since nothing unknown can begin before C.
# So the branches are the known actions of r that start before C. One thing more: a forward that is
# done earlier is held longer, and may take the place of another; so where a rank could run out of
# places, there is also the branch in which that forward waits until its rank has done something
# else.
#
# A node is left where its bound is no less than the best schedule known, and where another with the
# same counts was no later in anything that is still of use: what follows there can follow here.

NODES = 100_000  # five seconds, and a hundred megabytes of nodes seen
LARGEST = 400  # actions of all lists: with more, so many nodes prove nothing
SAME = 1e-9  # of the time: rounding


class Search:
    """Branch and bound for schedules shorter than `span`, visiting at most `nodes` nodes. After
    `run`, `best` is the shortest one and `span` its length; None, and `span` as it was, if there is
    none.
    """

    def __init__(self, problem: ScheduleProblem, span: float, nodes: int = NODES):
        """Prepare a search from nothing. `span`: length of the best schedule that is known.
        `nodes`: most nodes to visit; 0 if the problem has more than 400 actions.
        """
        self.problem, self.span, self.nodes = problem, span, 0
        self.left = nodes if problem.actions <= LARGEST else 0
        self.paths, self.floor = Paths(problem), bound(problem)
        self.partial = Partial(problem)
        # of each rank, the forwards that wait until it has done something else
        self.waiting: list[frozenset[int]] = [frozenset()] * problem.ranks
        self.seen: dict[tuple[object, ...], list[array]] = {}
        self.best: Schedule | None = None

    @property
    def proven(self) -> float:
        """Lower bound on the length of all schedules that is proved: `span` if the search was
        exhaustive, else the bound from which it began.
        """
        return self.span if self.left > 0 else min(self.span, self.floor)

    def run(self) -> None:
        """Search depth first, until no branch or no node is left, or `best` meets the lower bound.
        Uses a stack of its own, as Python's recursion ends at a thousand calls.
        """
        open_ = [self._branches()]
        # until the nodes are used up, or no schedule can be shorter than `span`
        while open_ and self.left > 0 and self._shorter(self.floor):
            for _ in open_[-1]:
                open_.append(self._branches())
                break
            else:
                open_.pop()

    def _shorter(self, length: float) -> bool:
        """Return whether a length is less than `span` by more than rounding."""
        return length < self.span * (1 - SAME)

    def _branches(self) -> Iterator[None]:
        """Visit the node of the current partial schedule, keep it if it is complete and shorter,
        and yield once with each of its branches applied, taking it back afterwards.
        """
        self.left -= 1
        self.nodes += 1
        partial, works = self.partial, self.problem.works
        if partial.done and self._shorter(partial.span):
            self.span, self.best = partial.span, schedule_of(self.problem, partial)
        if not self._shorter(remaining(partial, self.paths)) or self._is_dominated():
            return
        known = [
            (start, index)
            for index in range(len(works))
            if (start := partial.start(index)) is not None
            and index not in self.waiting[works[index].rank]
        ]
        if not known:
            return
        ends, first = min((start + works[index].seconds, index) for start, index in known)
        rank = works[first].rank
        waiting, self.waiting[rank] = self.waiting[rank], frozenset()
        # W last: most often the best, which cuts the others short
        for start, index in sorted(known, key=lambda item: (works[item[1]].kind == "W", item[0])):
            if works[index].rank == rank and start < ends:
                partial.take(index, start)
                yield
                partial.undo()
        if works[first].kind == "F" and self._could_fill(rank):
            self.waiting[rank] = waiting | {first}
            yield
        self.waiting[rank] = waiting

    def _could_fill(self, rank: int) -> bool:
        """Return whether the rank's slots for activations may run out, so that the order of
        forwards decides what it holds. Never with one chunk per rank: its forwards are all of one
        kind, and take nobody's slot.
        """
        problem, partial = self.problem, self.partial
        forwards = [i for i in problem.by_rank[rank] if problem.works[i].kind == "F"]
        left = sum(problem.micros - partial.count[i] for i in forwards)
        return problem.chunks > 1 and partial.held[rank] + left > problem.slots

    def _is_dominated(self) -> bool:
        """Return whether an earlier node with the same counts of actions is no later in anything;
        if not, record this node and forget those that it dominates.
        """
        now = self._times()
        earlier = self.seen.setdefault((*self.partial.count, *self.waiting), [])
        if any(all(a <= b for a, b in zip(other, now, strict=True)) for other in earlier):
            return True
        earlier[:] = [o for o in earlier if not all(a <= b for a, b in zip(now, o, strict=True))]
        earlier.append(now)
        return False

    def _times(self) -> "array[float]":
        """Return the times on which everything that follows depends: the clock of each rank, and
        arrivals of results that are not used yet.
        """
        partial, works = self.partial, self.problem.works
        times = array("d", partial.clock)
        for index, work in enumerate(works):
            ends = partial.ends[index]
            for user, arriving in work.feeds:
                clock = partial.clock[works[user].rank]
                waited = ends[partial.count[user] :]
                times.extend(max(clock, end + arriving) for end in waited)
        return times


MOST_ACTIONS = 40_000  # actions, of which a list by preference takes a second
LEAST = 1.0
"""Microbatches through all layers of a rank: less than one cannot go forward and back."""


@dataclass(frozen=True)
class ShortestSchedule:
    """The result of a search: the shortest schedule that was found, and what is proved about it."""

    schedule: Schedule
    simulation: Simulation
    floor: float
    """Lower bound on the length of every schedule with so many stages per rank, of any placement,
    with a backward whole or split as the costs allow.
    """
    nodes: int
    """Nodes that the proof looked at; 0 where the bound alone was enough, or there are too many
    actions.
    """
    like: str
    """The name of the schedule whose lists these are, or search."""

    @property
    def optimal(self) -> bool:
        """True if the schedule is proved to be the shortest: its length equals the lower bound
        `floor`.
        """
        return self.simulation.span <= self.floor * (1 + SAME)


def shortest_of(
    ranks: int, micros: int, widths: Sequence[int], costs: Costs, memory: float
) -> tuple[ShortestSchedule, tuple[int, ...]]:
    """Search the shortest schedule with each number of virtual stages per rank in `widths`. Return
    the shortest result, with the lower bound over all of them, and the numbers that could be
    searched (a list of costs by stage fits only one). Raises ValueError, as `shortest`, if none
    could.
    """
    schedules: dict[int, ShortestSchedule] = {}
    problem: ValueError | None = None
    for width in widths:
        try:
            schedules[width] = shortest(ranks, micros, width, costs, memory)
        except ValueError as error:
            problem = problem or error
    if not schedules:
        raise problem or ValueError("no number of stages per rank to search")
    best = min(schedules.values(), key=lambda candidate: candidate.simulation.span)
    floor, nodes = (
        min(candidate.floor for candidate in schedules.values()),
        sum(o.nodes for o in schedules.values()),
    )
    return replace(best, floor=floor, nodes=nodes), tuple(schedules)


def shortest(
    ranks: int, micros: int, chunks: int, costs: Costs, memory: float, nodes: int = NODES
) -> ShortestSchedule:
    """Search the shortest schedule of `micros` microbatches on `ranks` ranks of `chunks` virtual
    stages each, and return it with what is proved about it. `memory`: microbatches whose
    activations a rank may hold, in units of `Simulation.peak`. `nodes`: most nodes of each proof.
    Raises ValueError for less memory than any schedule needs, for too many actions, and for lists
    of costs of another length.
    """
    actions = 3 * prod((ranks, micros, chunks))
    if actions > MOST_ACTIONS:
        raise ValueError(
            f"{actions:,} actions are too many to search ({MOST_ACTIONS:,}): use fewer "
            "--microbatches; beyond a few times --pp, more of them only lengthen the steady state"
        )
    if not memory >= LEAST:
        raise ValueError(
            f"--memory ({memory:g}) must be at least {LEAST:g}: any schedule holds the "
            "activations of one microbatch"
        )
    problems = list(_problems(ranks, micros, chunks, costs, memory))
    floors = [bound(problem) for problem in problems]
    tried = [
        (simulate_stages(schedule, problem.costs).span, schedule, problem)
        for problem in problems
        for schedule in _initial_schedules(problem, min(floors))
    ]
    # a good start cuts most branches of the proof
    span, best, problem = min(tried, key=lambda candidate: candidate[0])
    looked = 0
    for i, other in enumerate(problems):
        proof = Search(other, span, nodes)
        proof.run()
        looked += proof.nodes
        if proof.best:
            span, best, problem = proof.span, proof.best, other
        # an unfinished proof still proves its own start
        floors[i] = max(floors[i], proof.proven)
    # independent of the search's own clocks
    simulation = simulate_stages(best, problem.costs)
    named = replace(best, name="search")
    return ShortestSchedule(check_schedule(named), simulation, min(floors), looked, best.name)


def _problems(
    ranks: int, micros: int, chunks: int, costs: Costs, memory: float
) -> Iterator[ScheduleProblem]:
    """Yield a problem for every placement (loop; v too with two chunks), and every kind of backward
    (whole, split) that the costs have.
    """
    for placement in ("v", "loop") if chunks == 2 else ("loop",):
        shape = Schedule("", ranks, micros, chunks, (), placement)
        for splits in costs.ways:
            yield ScheduleProblem(
                ranks, micros, chunks, placement, splits, costs.stage_costs(shape), memory
            )


def _initial_schedules(problem: ScheduleProblem, enough: float) -> Iterator[Schedule]:
    """Yield schedules to begin the search with: those with a name that fit the problem's shape and
    memory, and a greedy one (no shorter than `enough` is needed), which always exists.
    """
    for name, make in SCHEDULES.items():
        try:
            schedule = make(problem.ranks, problem.micros, problem.chunks)
        except ValueError:  # it is not for these sizes
            continue
        fits = max(simulate_stages(schedule, problem.costs).peak) * problem.chunks <= problem.slots
        same_shape = (schedule.placement, schedule.splits_backward) == (
            problem.placement,
            problem.splits,
        )
        if fits and same_shape:
            yield replace(schedule, name=name)
    yield search_greedily(problem, enough)
