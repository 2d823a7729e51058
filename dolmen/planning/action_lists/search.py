"""The shortest schedule that fits: lists with a name, lists by preference, then a proof."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from math import prod

from dolmen.parallel.schedule import SCHEDULES, Schedule
from dolmen.parallel.simulation import Simulation, check_schedule, simulate_stages
from dolmen.planning.action_lists import exact, greedy
from dolmen.planning.action_lists.problem import Costs, ScheduleProblem, bound

MOST = 40_000  # actions, of which a list by preference takes a second
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
        return self.simulation.span <= self.floor * (1 + exact.SAME)


def shortest_of(
    ranks: int, micros: int, widths: Sequence[int], costs: Costs, memory: float
) -> tuple[ShortestSchedule, tuple[int, ...]]:
    """Search with each number of stages per rank in `widths`. Returns the shortest result, with the
    lower bound over all of them, and the numbers that could be searched (a list of costs by stage
    fits only one). Raises ValueError, as `shortest`, if none could.
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
    ranks: int,
    micros: int,
    chunks: int,
    costs: Costs,
    memory: float,
    nodes: int = exact.NODES,
) -> ShortestSchedule:
    """Search the shortest schedule of `micros` microbatches on `ranks` ranks of `chunks` stages
    each. `memory`: microbatches whose activations a rank may hold, in units of `Simulation.peak`.
    `nodes`: most nodes of each proof. Raises ValueError for less memory than any schedule needs,
    for too many actions, and for lists of costs of another length.
    """
    actions = 3 * prod((ranks, micros, chunks))
    if actions > MOST:
        raise ValueError(
            f"{actions:,} actions are too many to search ({MOST:,}): use fewer --microbatches; "
            "beyond a few times --pp, more of them only lengthen the steady state"
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
        for schedule in _first(problem, min(floors))
    ]
    # a good start cuts most branches of the proof
    span, best, problem = min(tried, key=lambda candidate: candidate[0])
    looked = 0
    for i, other in enumerate(problems):
        proof = exact.Search(other, span, nodes)
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


def _first(problem: ScheduleProblem, enough: float) -> Iterator[Schedule]:
    """Yield schedules to begin with: those with a name that fit the problem's shape and memory, and
    a greedy one, which always exists.
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
    yield greedy.search_greedily(problem, enough)
