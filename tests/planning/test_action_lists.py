"""The shortest lists: against all that there are, against their bound, and against those with a
name.
"""

import itertools
import random
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from dolmen.parallel.schedule import Action, Schedule, format_schedule, from_file
from dolmen.parallel.simulation import Cost, check_schedule, make_schedule, simulate_stages
from dolmen.planning import schedule_search
from dolmen.planning.schedule_problem import Costs, ScheduleProblem, bound

GOLDEN = Path(__file__).parents[1] / "golden" / "searched.txt"
UNEVEN = Costs("uneven", {"forward": 1.0, "input": 1.4, "weight": 0.6, "send": 0.5})


def every_list(problem: ScheduleProblem) -> list[tuple[Action, ...]]:
    """All lists of a rank that keep the order of a microbatch and the memory; microbatches in any
    order but that of their forwards, which only names them.
    """
    found: list[tuple[Action, ...]] = []
    whole = problem.chunks * problem.micros * len(problem.kinds)

    def may(action: Action, done: list[Action], held: int) -> bool:
        kind, micro, chunk = action
        at, last = problem.kinds.index(kind), problem.chunks - 1
        before = [Action(problem.kinds[at - 1], micro, chunk)] if at else []
        if kind == "F":
            before += [Action("F", micro, chunk - 1)] * (chunk > 0)
            before += [Action("F", micro - 1, chunk)] * (micro > 0)
        if at == 1 and chunk < last:
            before.append(Action(kind, micro, chunk + 1))
        return set(before) <= set(done) and (kind != "F" or held < problem.slots)

    def go(done: list[Action], held: int) -> None:
        if len(done) == whole:
            found.append(tuple(done))
        for kind in problem.kinds:
            for micro, chunk in itertools.product(range(problem.micros), range(problem.chunks)):
                action = Action(kind, micro, chunk)
                if action not in done and may(action, done, held):
                    go([*done, action], held + (kind == "F") - (kind in "BW"))

    go([], 0)
    return found


def brute(problem: ScheduleProblem) -> float:
    """The shortest of all combinations of lists."""

    def spans() -> Iterator[float]:
        for each in itertools.product(every_list(problem), repeat=problem.ranks):
            shape = (problem.ranks, problem.micros, problem.chunks)
            try:
                made = Schedule("one of all", *shape, each, problem.placement)
                yield simulate_stages(made, problem.costs).span
            except ValueError:  # deadlocks
                continue

    return min(spans())


def random_costs(chance: random.Random, stages: int) -> tuple[Cost, ...]:
    def one() -> Cost:
        forward, backward, input_, weight = chance.choices((1.0, 1.5, 2.0, 3.0), k=4)
        return Cost(forward, backward, input_, weight, chance.choice((0.0, 0.5, 1.0)))

    return tuple(one() for _ in range(stages))


@pytest.mark.parametrize(
    "ranks, micros, chunks, placement, splits, memory",
    (
        (2, 2, 1, "loop", True, 1),
        (2, 2, 1, "loop", True, 2),
        (3, 2, 1, "loop", True, 2),
        (2, 3, 1, "loop", True, 2),
        (2, 3, 1, "loop", False, 3),
        (2, 2, 2, "v", False, 1.5),
        (2, 2, 2, "loop", False, 1.5),
        (2, 2, 2, "loop", False, 2),
        (2, 2, 2, "v", True, 1),
    ),
)
def test_nothing_is_shorter(ranks, micros, chunks, placement, splits, memory):
    """The proof ends at what trying all lists finds, from no schedule at all."""
    chance = random.Random(f"{ranks}{micros}{chunks}{placement}{splits}")
    for _ in range(2):
        costs = random_costs(chance, ranks * chunks)
        problem = ScheduleProblem(ranks, micros, chunks, placement, splits, costs, memory)
        proof, want = schedule_search.Search(problem, float("inf")), brute(problem)
        proof.run()
        assert proof.span == proof.proven == pytest.approx(want, rel=1e-12), costs
        assert proof.best and simulate_stages(proof.best, costs).span == pytest.approx(want)
        assert bound(problem) <= want * (1 + 1e-12)


def test_an_early_forward_may_take_the_place_of_another():
    """With room for three chunks, waiting on purpose is shorter than doing what can be done: the
    branch in which a forward waits is needed.
    """
    chance, shorter = random.Random(0), 0
    for _ in range(40):
        problem = ScheduleProblem(2, 3, 2, "v", False, random_costs(chance, 4), 1.5)
        eager = Eager(problem, float("inf"))
        proof = schedule_search.Search(problem, float("inf"))
        eager.run()
        proof.run()
        assert proof.span <= eager.span
        shorter += proof.span < eager.span
    assert shorter


class Eager(schedule_search.Search):
    """Without that branch."""

    def _could_fill(self, rank: int) -> bool:
        return False


@pytest.mark.parametrize("chunks", (1, 2, 3))
@pytest.mark.slow
def test_what_is_found_is_what_is_said(chunks):
    """A whole schedule of the span that is claimed, in the memory that is allowed, no shorter than
    the bound; every placement, costs and memory.
    """
    for costs, memory in itertools.product((UNEVEN, Costs("", {"backward": 2.0})), (1, 2.5)):
        times = Costs("", {"forward": 1.0, **costs.times})
        found = schedule_search.shortest(3, 4, chunks, times, memory, nodes=50)
        check_schedule(found.schedule)
        again = simulate_stages(found.schedule, times.stage_costs(found.schedule))
        assert again.span == found.simulation.span >= found.floor * (1 - 1e-12)
        assert max(again.peak) <= memory
        assert found.schedule.splits_backward == ("input" in times.times)


def test_the_golden_row_is_a_find():
    """tests/golden trains on what this search writes, and no schedule with a name is as short."""
    found = schedule_search.shortest(2, 4, 2, UNEVEN, 3, nodes=5000)
    assert found.like == "search"
    assert format_schedule(found.schedule) == GOLDEN.read_text()
    assert replace(from_file(str(GOLDEN)), name="search") == found.schedule
    named = make_schedule("zero-bubble-v", 2, 4, 2)
    assert found.simulation.span == pytest.approx(13.2)
    assert simulate_stages(named, UNEVEN.stage_costs(named)).span == pytest.approx(15.5)


def test_with_room_it_is_shorter_than_zero_bubble_v():
    """4 ranks, 8 microbatches: half as much memory again, and times that are not equal. Branches
    are not even needed.
    """
    times = Costs("", {"forward": 1.0, "input": 1.4, "weight": 0.9})
    found = schedule_search.shortest(4, 8, 2, times, 6, nodes=0)
    named = make_schedule("zero-bubble-v", 4, 8, 2)
    theirs = simulate_stages(named, times.stage_costs(named))
    assert max(theirs.peak) == 4 and max(found.simulation.peak) <= 6
    assert found.simulation.span < theirs.span == pytest.approx(28.5)


def test_lists_by_preference_never_lock():
    """Whatever is preferred, and however little memory there is."""
    for chunks, memory in ((1, 1), (2, 1), (2, 1.5), (3, 1), (3, 4 / 3), (3, 2), (4, 1.25)):
        for placement in ("loop", "v")[: 1 + (chunks == 2)]:
            costs = random_costs(random.Random(chunks), 3 * chunks)
            problem = ScheduleProblem(3, 7, chunks, placement, True, costs, memory)
            chance = random.Random(0)
            for _ in range(40):
                assert schedule_search.build_greedily(
                    problem, schedule_search.random_preference(problem, chance)
                ).done


def test_costs_of_ranks_and_of_stages():
    """A number and a list of ranks are of all layers of a rank, a list of stages of each."""
    shape = Schedule("", 2, 1, 2, (), "v")
    times = {"forward": [2.0, 4.0], "backward": [1.0, 2.0, 3.0, 4.0], "send": 0.5}
    assert Costs("", times).stage_costs(shape) == (
        Cost(1, 1, 0.5, 0.5, 0.5),
        Cost(2, 2, 1, 1, 0.5),
        Cost(2, 3, 1.5, 1.5, 0.5),
        Cost(1, 4, 2, 2, 0.5),
    )
    split = Costs("", {"forward": 2.0, "input": 3.0, "weight": 1.0})
    assert split.stage_costs(shape) == (Cost(1, 2, 1.5, 0.5),) * 4 and split.ways == [True]


def test_a_rank_prefers_what_starts_first_with_its_wait():
    """Of those that may start: the least start and wait, then the least start, then the first."""
    starts = {0: 5.0, 1: 3.0, 2: None, 3: 1.0, 4: 4.0, 5: 4.0}
    partial = SimpleNamespace(
        problem=SimpleNamespace(by_rank=[[*starts], [2]]),
        start=starts.__getitem__,
        safe=lambda index: index != 3,
    )
    preferred = schedule_search._preferred_action
    assert preferred(partial, 0, [0.0] * 6) == (3.0, 1)
    assert preferred(partial, 0, [0.0, 2.5, 0.0, 0.0, 1.0, 1.0]) == (4.0, 4)
    assert preferred(partial, 0, [0.0, 3.0, 0.0, 0.0, 1.5, 2.0]) == (5.0, 0)
    assert preferred(partial, 1, [0.0] * 6) == (float("inf"), -1)
