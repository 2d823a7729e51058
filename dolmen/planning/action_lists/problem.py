"""The schedule search problem: costs, partial solutions and lower bounds.

Times of a pipeline's actions, as a file has them:

    {"forward": [1.0, 1.2, 1.2, 1.6], "input": 1.1, "weight": 0.8, "send": 0.05}

A number is of all layers of a rank, as on the command line, and a list as long as there are ranks
has that of each; one as long as there are stages has the time of each stage by itself, from the
first to the last. Without `input` and `weight` a backward is only done whole, and without
`backward` only in parts.

The problem that a schedule solves, and a partial solution of it: what of each stage and kind has
been done, and when. Both searches (greedy.py, exact.py) build lists out of these.

Microbatches are alike, so some shortest schedule does them in order at every stage, in each kind:
exchange any two that are not, and nothing starts later, nor is more held. So a list is known by
which stage and kind comes next on each rank, and a partial one by how many of each are done.

How short no schedule can be: the largest of several relaxations, each of which forgets all but
one rank or one stage.

    f_s, i_s, w_s   times of stage s; down(s) from the start of F at s to the end of F at the last
    head(s)         until a first microbatch is at s: all F before, and their sends
    back(s)         from the end of F at s until its gradient is at s, at the earliest
    R_s             f_s + back(s) + i_s + w_s: how long a microbatch is held at s, at least
"""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from typing import NamedTuple

from dolmen.core.messages import plural
from dolmen.files import gate, kinds
from dolmen.parallel.schedule import Action, Schedule
from dolmen.parallel.simulation import Cost

Times = float | list[float]
HOW = {True: ("input", "weight"), False: ("backward",)}


@dataclass(frozen=True)
class Costs:
    name: str
    """Whence they are, for messages."""
    times: Mapping[str, Times]

    @property
    def ways(self) -> list[bool]:
        """Return the ways to go backward that the times allow: split (True), whole (False)."""
        return [splits for splits, names in HOW.items() if set(names) <= set(self.times)]

    def stage_costs(self, shape: Schedule) -> tuple[Cost, ...]:
        """Return the times of each stage by itself; what is missing of a backward is the sum of its
        parts, or the half of it. Raises ValueError for a list of another length.
        """
        found = {name: self._stages(name, times, shape) for name, times in self.times.items()}
        if True not in self.ways:
            found |= {part: [time / 2 for time in found["backward"]] for part in HOW[True]}
        if False not in self.ways:
            pairs = zip(found["input"], found["weight"], strict=True)
            found["backward"] = [input_ + weight for input_, weight in pairs]
        found.setdefault("send", [0.0] * shape.stages)
        return tuple(
            Cost(**{name: times[stage] for name, times in found.items()})
            for stage in range(shape.stages)
        )

    def _stages(self, name: str, times: Times, shape: Schedule) -> list[float]:
        share = 1 if name == "send" else shape.chunks  # a send is as long from any chunk
        match times:
            case list() if len(times) == shape.stages:
                return times
            case list() if len(times) == shape.ranks:
                return [times[shape.rank_of(stage)] / share for stage in range(shape.stages)]
            case list():
                lengths = sorted({shape.ranks, shape.stages})
                raise gate.refuse(
                    self.name,
                    f"{name} has {plural(len(times), 'time')}, and there are "
                    f"{plural(shape.ranks, 'rank')} and {plural(shape.stages, 'stage')}: give "
                    f"one number, or {' or '.join(map(str, lengths))}",
                )
            case _:
                return [times / share] * shape.stages


def from_file(path: str) -> Costs:
    """The times of a JSON file. Raises Refused."""
    times = gate.read_json(path, kinds.COSTS)
    if not {"backward", "input"} & set(times):
        raise gate.refuse(
            path, "has no time of a backward: give backward, or input and weight, or all three"
        )
    return Costs(path, times)


LAST = "BW"  # what lets activations go


class StageWork(NamedTuple):
    """All microbatches of one stage and kind."""

    stage: int
    kind: str
    rank: int
    chunk: int
    seconds: float
    """Duration of one microbatch's action."""
    needs: tuple[tuple[int, float], ...]
    """(index of the work whose result it waits for, what that takes to arrive)"""
    feeds: tuple[tuple[int, float], ...]
    """The same of those that wait for it."""


@dataclass(frozen=True)
class ScheduleProblem:
    """Find `ranks` lists; `costs` are of each stage by itself, in any unit."""

    ranks: int
    micros: int
    chunks: int
    placement: str
    splits: bool
    """A backward is done as I and W."""
    costs: tuple[Cost, ...]
    memory: float
    """Microbatches that a rank may hold activations of, in units of all its layers
    (`Simulation.peak`)."""

    @cached_property
    def slots(self) -> int:
        """The same in chunks, which are held whole."""
        return int(min(self.memory, self.micros) * self.chunks + 1e-9)

    @property
    def kinds(self) -> str:
        return "FIW" if self.splits else "FB"

    @property
    def stages(self) -> int:
        return self.ranks * self.chunks

    @property
    def actions(self) -> int:
        """How many all lists have together."""
        return len(self.works) * self.micros

    @cached_property
    def works(self) -> tuple[StageWork, ...]:
        return tuple(self._work(stage, kind) for stage in range(self.stages) for kind in self.kinds)

    @cached_property
    def by_rank(self) -> tuple[tuple[int, ...], ...]:
        """Indices of the works of each rank."""
        return tuple(
            tuple(i for i, work in enumerate(self.works) if work.rank == rank)
            for rank in range(self.ranks)
        )

    def index(self, stage: int, kind: str) -> int:
        return stage * len(self.kinds) + self.kinds.index(kind)

    def send(self, stage: int, to: int) -> float:
        """Time until what `stage` makes is at the stage `to`."""
        shape = self._shape
        return self.costs[stage].send if shape.rank_of(stage) != shape.rank_of(to) else 0

    @cached_property
    def _shape(self) -> Schedule:
        return Schedule("", self.ranks, self.micros, self.chunks, (), self.placement)

    def _work(self, stage: int, kind: str) -> StageWork:
        shape, back, last = self._shape, self.kinds[1], self.stages - 1
        fed = {"F": [(stage, back)] if stage == last else [(stage + 1, "F"), (stage, back)]}
        fed |= {back: [(stage - 1, back)] if stage else [], "W": []}
        if self.splits:
            fed["I"].append((stage, "W"))
        needs = {"F": [(stage - 1, "F")] if stage else [], "W": [(stage, "I")]}
        needs[back] = [(stage, "F")] if stage == last else [(stage, "F"), (stage + 1, back)]
        return StageWork(
            stage,
            kind,
            shape.rank_of(stage),
            shape.chunk_of(stage),
            dict(zip("FBIW", self.costs[stage], strict=False))[kind],
            tuple((self.index(*need), self.send(need[0], stage)) for need in needs[kind]),
            tuple((self.index(*one), self.send(stage, one[0])) for one in fed[kind]),
        )


class Partial:
    """Lists as far as they have been made; a stack: `take` adds an action, `undo` takes it off."""

    def __init__(self, problem: ScheduleProblem):
        self.problem = problem
        self.count = [0] * len(problem.works)
        self.ends: list[list[float]] = [[] for _ in problem.works]
        self.clock = [0.0] * problem.ranks
        self.held = [0] * problem.ranks  # chunks, ...
        self.returning = [0] * problem.ranks  # ... and those of microbatches through the last one
        self.taken: list[tuple[int, float]] = []  # (work, clock of its rank before)

    @property
    def done(self) -> bool:
        return len(self.taken) == self.problem.actions

    @property
    def span(self) -> float:
        return max(self.clock)

    def start(self, index: int) -> float | None:
        """When the next of a work could start; None where it is not known, or there is no room."""
        work, k = self.problem.works[index], self.count[index]
        full = work.kind == "F" and self.held[work.rank] == self.problem.slots
        if k == self.problem.micros or full:
            return None
        start = self.clock[work.rank]
        for need, arriving in work.needs:
            ends = self.ends[need]
            if k >= len(ends):
                return None
            start = max(start, ends[k] + arriving)
        return start

    def safe(self, index: int) -> bool:
        """Return whether all lists can still come to their end with this action next, if every one
        before it was safe: after a forward there is a place for each chunk that its microbatch has
        yet to go through on the rank, free or held by one that has been through the last and goes
        back.
        """
        work = self.problem.works[index]
        if work.kind != "F":
            return True
        free = self.problem.slots - self.held[work.rank] - 1
        return free + self.returning[work.rank] >= self.problem.chunks - 1 - work.chunk

    def take(self, index: int, start: float) -> None:
        work = self.problem.works[index]
        self.taken.append((index, self.clock[work.rank]))
        self.clock[work.rank] = start + work.seconds
        self.ends[index].append(start + work.seconds)
        self.count[index] += 1
        self._hold(work, 1)

    def undo(self) -> None:
        index, before = self.taken.pop()
        work = self.problem.works[index]
        self.clock[work.rank] = before
        self.ends[index].pop()
        self.count[index] -= 1
        self._hold(work, -1)

    def _hold(self, work: StageWork, sign: int) -> None:
        last = self.problem.chunks - 1
        if work.kind == "F":
            self.held[work.rank] += sign
            self.returning[work.rank] += sign * self.problem.chunks * (work.chunk == last)
        elif work.kind in LAST:
            self.held[work.rank] -= sign
            self.returning[work.rank] -= sign

    def actions(self) -> tuple[tuple[Action, ...], ...]:
        """The list of each rank."""
        made: list[list[Action]] = [[] for _ in range(self.problem.ranks)]
        counts = [iter(range(self.problem.micros)) for _ in self.problem.works]
        for index, _ in self.taken:
            work = self.problem.works[index]
            made[work.rank].append(Action(work.kind, next(counts[index]), work.chunk))
        return tuple(map(tuple, made))


class Paths:
    """Lengths of the chains that a microbatch runs through, by stage."""

    def __init__(self, problem: ScheduleProblem):
        costs, last = problem.costs, problem.stages - 1
        input_ = [cost.input if problem.splits else cost.backward for cost in costs]
        up = [cost.forward + problem.send(s, min(s + 1, last)) for s, cost in enumerate(costs)]
        self.head = [0.0, *accumulate(up)][: problem.stages]
        # from the end of I at s until all is over: the I of every stage before, then the last W
        rest = [costs[s].weight if problem.splits else 0.0 for s in range(problem.stages)]
        self.out = [rest[0]]
        for s in range(1, problem.stages):
            self.out.append(max(rest[s], problem.send(s, s - 1) + input_[s - 1] + self.out[s - 1]))
        # from the end of F at s until its gradient is there
        self.back = [0.0] * problem.stages
        for s in range(last - 1, -1, -1):
            there = problem.send(s, s + 1) + costs[s + 1].forward + self.back[s + 1]
            self.back[s] = there + input_[s + 1] + problem.send(s + 1, s)
        self.input, self.rest = input_, rest
        self.hold = [
            cost.forward + self.back[s] + input_[s] + rest[s] for s, cost in enumerate(costs)
        ]

    def tail(self, stage: int, kind: str) -> float:
        """Return the time from the end of an action until all that follows from it is over."""
        if kind == "F":
            return self.back[stage] + self.input[stage] + self.out[stage]
        return 0.0 if kind == "W" else self.out[stage]


def bound(problem: ScheduleProblem) -> float:
    """No schedule is shorter. The formulas are in docs/concepts/pipeline.md."""
    paths = Paths(problem)
    return max(
        *(_rank(problem, paths, rank) for rank in range(problem.ranks)),
        *(_chains(problem, paths, stage) for stage in range(problem.stages)),
    )


def _rank(problem: ScheduleProblem, paths: Paths, rank: int) -> float:
    """A rank works from its head on; until its first gradient is back it has only as many forwards
    to do as it may hold; and no rank holds more at once than its slots.
    """
    stages = sorted({problem.works[i].stage for i in problem.by_rank[rank]})
    work = problem.micros * sum(problem.works[i].seconds for i in problem.by_rank[rank])
    head = min(paths.head[s] for s in stages)
    first = min(paths.head[s] + problem.costs[s].forward + paths.back[s] for s in stages)
    dearest = sorted((problem.costs[s].forward for s in stages), reverse=True)
    each = [forward for forward in dearest for _ in range(problem.micros)][: problem.slots]
    held = problem.micros * sum(paths.hold[s] for s in stages)
    return max(head + work, first + work - sum(each), head + held / problem.slots)


def _chains(problem: ScheduleProblem, paths: Paths, stage: int) -> float:
    """All of one kind at a stage, one after another, then what follows from the last. With one
    chunk per rank, F of microbatch k + M waits for W of k; and M before the last must be whole.
    """
    cost, micros, slots = problem.costs[stage], problem.micros, problem.slots
    head = paths.head[stage]
    found = [head + micros * cost.forward + paths.tail(stage, "F")]
    first = head + cost.forward + paths.back[stage]
    found.append(first + micros * paths.input[stage] + paths.out[stage])
    if problem.chunks == 1:
        rounds, over = divmod(micros - 1, slots)
        found.append(head + over * cost.forward + (rounds + 1) * paths.hold[stage])
        whole = max(0, micros - slots) * (paths.input[stage] + paths.rest[stage])
        found.append(head + micros * cost.forward + whole + paths.tail(stage, "F"))
    return max(found)


def remaining(partial: Partial, paths: Paths) -> float:
    """No completion of a partial schedule is shorter: each rank has its work left to do, and after
    the last of a kind at a stage comes what follows from it.
    """
    problem = partial.problem
    longest = 0.0
    for rank, indices in enumerate(problem.by_rank):
        clock, left = partial.clock[rank], 0.0
        for index in indices:
            work = problem.works[index]
            todo = (problem.micros - partial.count[index]) * work.seconds
            if todo:
                left += todo
                longest = max(longest, clock + todo + paths.tail(work.stage, work.kind))
        longest = max(longest, clock + left)
    return longest
