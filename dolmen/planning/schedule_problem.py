"""The schedule search problem: costs (`Costs`), partial schedules (`Partial`), and lower bounds.

Times of a pipeline's actions, as a JSON file has them:

    {"forward": [1.0, 1.2, 1.2, 1.6], "input": 1.1, "weight": 0.8, "send": 0.05}

A number is of all layers of a rank, as on the command line, and a list as long as there are ranks
has that of each; one as long as there are stages has the time of each stage by itself, from the
first to the last. Without `input` and `weight` a backward is only done whole, and without
`backward` only in parts.

A partial schedule has for each stage and kind of action how many microbatches are done, and when
each ended. Both searches (schedule_search.py) build schedules action by action from it.

Microbatches are alike, so some shortest schedule does them in order at every stage, in each kind:
exchange any two that are not, and nothing starts later, nor is more held. So a list is known by
which stage and kind comes next on each rank, and a partial one by how many of each are done.

The lower bound on the length of a schedule is the largest of several relaxations, each of which
forgets all but one rank or one stage:

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
    """Times of a pipeline's actions (forward, backward, input, weight, send), as a file or the
    command line gives them.
    """

    name: str
    """File or option group that they come from, for messages."""
    times: Mapping[str, Times]
    """Name of a time -> one number, or a list of one per rank or per stage."""

    @property
    def ways(self) -> list[bool]:
        """Kinds of backward that the times allow: split into input and weight (True), whole
        (False).
        """
        return [splits for splits, names in HOW.items() if set(names) <= set(self.times)]

    def stage_costs(self, shape: Schedule) -> tuple[Cost, ...]:
        """Return the costs of each stage in a schedule of this shape. A missing whole backward is
        the sum of its parts, missing parts are half of it each, a missing send is 0. Raises Refused
        for a list of another length.
        """
        by_stage = {name: self._stages(name, times, shape) for name, times in self.times.items()}
        if True not in self.ways:
            # a matrix product has as many FLOPs for its input's gradient as for its weight's
            by_stage |= {part: [time / 2 for time in by_stage["backward"]] for part in HOW[True]}
        if False not in self.ways:
            pairs = zip(by_stage["input"], by_stage["weight"], strict=True)
            by_stage["backward"] = [input_ + weight for input_, weight in pairs]
        by_stage.setdefault("send", [0.0] * shape.stages)
        return tuple(
            Cost(**{name: times[stage] for name, times in by_stage.items()})
            for stage in range(shape.stages)
        )

    def _stages(self, name: str, times: Times, shape: Schedule) -> list[float]:
        """Return one of the times for each stage: a list by stage as it is; a number or a list by
        rank is divided by the chunks per rank, except for a send. Raises Refused for another
        length.
        """
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
                    f"{name} has {plural(len(times), 'time')}, but there are "
                    f"{plural(shape.ranks, 'rank')} and {plural(shape.stages, 'stage')}: give one "
                    f"number, or {' or '.join(map(str, lengths))}",
                )
            case _:
                return [times / share] * shape.stages


def from_file(path: str) -> Costs:
    """Read the times of a pipeline's actions from a JSON file. Raises Refused, also without any
    time of a backward.
    """
    times = gate.read_json(path, kinds.COSTS)
    if not {"backward", "input"} & set(times):
        raise gate.refuse(
            path, "has no backward time: give backward, or input and weight, or all three"
        )
    return Costs(path, times)


LAST = "BW"  # what lets activations go


class StageWork(NamedTuple):
    """One kind of action (F, B, I or W) of one stage, for all microbatches."""

    stage: int
    kind: str
    rank: int
    chunk: int
    seconds: float
    """Duration of one microbatch's action."""
    needs: tuple[tuple[int, float], ...]
    """For each work whose result it waits for: (its index, seconds until that has arrived)."""
    feeds: tuple[tuple[int, float], ...]
    """For each work that waits for its result: (its index, seconds until the result has
    arrived).
    """


@dataclass(frozen=True)
class ScheduleProblem:
    """The problem of ordering all actions of `micros` microbatches on `ranks` ranks. `costs` are
    those of each stage, in any unit of time.
    """

    ranks: int
    micros: int
    chunks: int
    """Virtual stages per rank."""
    placement: str
    """How stages lie on ranks: "loop" or "v" (`Schedule`)."""
    splits: bool
    """A backward is done as I and W."""
    costs: tuple[Cost, ...]
    memory: float
    """Microbatches that a rank may hold activations of, in units of all its layers
    (`Simulation.peak`)."""

    @cached_property
    def slots(self) -> int:
        """Chunks of activations that a rank may hold at once: `memory` in units of one chunk,
        rounded down.
        """
        return int(min(self.memory, self.micros) * self.chunks + 1e-9)

    @property
    def kinds(self) -> str:
        """Letters of the kinds of actions: FIW with a split backward, else FB."""
        return "FIW" if self.splits else "FB"

    @property
    def stages(self) -> int:
        """Number of virtual stages of all ranks."""
        return self.ranks * self.chunks

    @property
    def actions(self) -> int:
        """Number of actions in the lists of all ranks together."""
        return len(self.works) * self.micros

    @cached_property
    def works(self) -> tuple[StageWork, ...]:
        """All kinds of action of all stages (F, B, I, W of each), ordered by stage, then kind;
        `index` gives the place of one.
        """
        return tuple(self._work(stage, kind) for stage in range(self.stages) for kind in self.kinds)

    @cached_property
    def by_rank(self) -> tuple[tuple[int, ...], ...]:
        """For each rank the indices, in `works`, of its stages' kinds of action."""
        return tuple(
            tuple(i for i, work in enumerate(self.works) if work.rank == rank)
            for rank in range(self.ranks)
        )

    def index(self, stage: int, kind: str) -> int:
        """Return the index, in `works`, of a stage's kind of action."""
        return stage * len(self.kinds) + self.kinds.index(kind)

    def send(self, stage: int, to: int) -> float:
        """Return the time until the result of `stage` has arrived at stage `to`: 0 on the same
        rank.
        """
        shape = self._shape
        return self.costs[stage].send if shape.rank_of(stage) != shape.rank_of(to) else 0

    @cached_property
    def _shape(self) -> Schedule:
        """A schedule of these sizes without actions, to look up where stages lie."""
        return Schedule("", self.ranks, self.micros, self.chunks, (), self.placement)

    def _work(self, stage: int, kind: str) -> StageWork:
        """Return one kind of action of a stage, with what it needs and feeds: F follows F of the
        stage before; a backward follows the stage's F and the backward of the stage behind; W
        follows I.
        """
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
            tuple((self.index(*input_), self.send(stage, input_[0])) for input_ in fed[kind]),
        )


class Partial:
    """A partial schedule: the actions so far of each rank, and when they end. It is a stack: `take`
    adds an action, `undo` removes the last one.
    """

    def __init__(self, problem: ScheduleProblem):
        """Start with an empty schedule: nothing done, all clocks at 0."""
        self.problem = problem
        self.count = [0] * len(problem.works)
        self.ends: list[list[float]] = [[] for _ in problem.works]
        self.clock = [0.0] * problem.ranks
        self.held = [0] * problem.ranks  # chunks, ...
        self.returning = [0] * problem.ranks  # ... and those of microbatches through the last one
        self.taken: list[tuple[int, float]] = []  # (work, clock of its rank before)

    @property
    def done(self) -> bool:
        """True if all actions of the problem are in the partial schedule."""
        return len(self.taken) == self.problem.actions

    @property
    def span(self) -> float:
        """Time at which the last action so far ends."""
        return max(self.clock)

    def start(self, index: int) -> float | None:
        """Return the earliest time at which the next microbatch's action of a stage and kind
        (`index` in the problem's `works`) can start; None if all are done, an input of it is not
        known yet, or the rank has no slot for its activations.
        """
        work, k = self.problem.works[index], self.count[index]
        # only a forward takes a slot
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
        """Return whether all ranks can still finish (no deadlock by lack of slots for activations)
        with the action `index` next, if every one before it was safe: after a forward there must be
        a slot for each chunk that its microbatch has yet to go through on the rank, free, or held
        by a microbatch that is on its way back.
        """
        work = self.problem.works[index]
        if work.kind != "F":
            return True
        # after this forward has taken its own
        free = self.problem.slots - self.held[work.rank] - 1
        return free + self.returning[work.rank] >= self.problem.chunks - 1 - work.chunk

    def take(self, index: int, start: float) -> None:
        """Add the next microbatch's action of a stage and kind (`index` in the problem's `works`),
        which starts at time `start` (as the method `start` returned), and advance the rank's clock.
        """
        work = self.problem.works[index]
        self.taken.append((index, self.clock[work.rank]))
        self.clock[work.rank] = start + work.seconds
        self.ends[index].append(start + work.seconds)
        self.count[index] += 1
        self._hold(work, 1)

    def undo(self) -> None:
        """Remove the action that was added last, and restore the rank's clock."""
        index, before = self.taken.pop()
        work = self.problem.works[index]
        self.clock[work.rank] = before
        self.ends[index].pop()
        self.count[index] -= 1
        self._hold(work, -1)

    def _hold(self, work: StageWork, sign: int) -> None:
        """Update the slots in use for an action that is added (`sign` 1) or removed (-1): F takes
        one, B or W frees one.
        """
        last = self.problem.chunks - 1
        if work.kind == "F":
            self.held[work.rank] += sign
            self.returning[work.rank] += sign * self.problem.chunks * (work.chunk == last)
        elif work.kind in LAST:
            self.held[work.rank] -= sign
            self.returning[work.rank] -= sign

    def actions(self) -> tuple[tuple[Action, ...], ...]:
        """Return the list of actions of each rank, numbered by microbatch."""
        actions: list[list[Action]] = [[] for _ in range(self.problem.ranks)]
        counts = [iter(range(self.problem.micros)) for _ in self.problem.works]
        for index, _ in self.taken:
            work = self.problem.works[index]
            actions[work.rank].append(Action(work.kind, next(counts[index]), work.chunk))
        return tuple(map(tuple, actions))


class Paths:
    """Lengths of the chains of dependent actions that a microbatch runs through, by stage, as in
    the head of this file.
    """

    def __init__(self, problem: ScheduleProblem):
        """Compute, for each stage, the lengths of the chains of dependent actions before it
        (`head`), after it (`out`), from forward to gradient (`back`), and how long activations are
        held (`hold`).
        """
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
        """Return the time from the end of an action of this kind at this stage until all that
        follows from it is over.
        """
        if kind == "F":
            return self.back[stage] + self.input[stage] + self.out[stage]
        return 0.0 if kind == "W" else self.out[stage]


def bound(problem: ScheduleProblem) -> float:
    """Return a lower bound on the length of every schedule: the largest of those from each rank's
    work and from each stage's chain of actions. docs/concepts/pipeline.md has the formulas.
    """
    paths = Paths(problem)
    return max(
        *(_rank_bound(problem, paths, rank) for rank in range(problem.ranks)),
        *(_stage_bound(problem, paths, stage) for stage in range(problem.stages)),
    )


def _rank_bound(problem: ScheduleProblem, paths: Paths, rank: int) -> float:
    """Return a lower bound on a schedule's length from the work of one rank: it begins after its
    head; until its first gradient is back it can do only the forwards that it has slots for; and
    its slots, each held for R_s at least, are used one microbatch after another.
    """
    stages = sorted({problem.works[i].stage for i in problem.by_rank[rank]})
    work = problem.micros * sum(problem.works[i].seconds for i in problem.by_rank[rank])
    head = min(paths.head[s] for s in stages)
    first = min(paths.head[s] + problem.costs[s].forward + paths.back[s] for s in stages)
    # the longest ones, so that the bound holds whichever forwards come first
    dearest = sorted((problem.costs[s].forward for s in stages), reverse=True)
    durations = [forward for forward in dearest for _ in range(problem.micros)][: problem.slots]
    busy = problem.micros * sum(paths.hold[s] for s in stages)
    return max(head + work, first + work - sum(durations), head + busy / problem.slots)


def _stage_bound(problem: ScheduleProblem, paths: Paths, stage: int) -> float:
    """Return a lower bound on a schedule's length from one stage: all actions of one kind, one
    after another, then the chain that follows the last. With one chunk per rank also: F of
    microbatch k + slots waits for the backward of k to be over.
    """
    cost, micros, slots = problem.costs[stage], problem.micros, problem.slots
    head = paths.head[stage]
    bounds = [head + micros * cost.forward + paths.tail(stage, "F")]
    first = head + cost.forward + paths.back[stage]
    bounds.append(first + micros * paths.input[stage] + paths.out[stage])
    if problem.chunks == 1:
        # `slots` microbatches overlap; each round of them takes R_s at least
        rounds, over = divmod(micros - 1, slots)
        bounds.append(head + over * cost.forward + (rounds + 1) * paths.hold[stage])
        full = max(0, micros - slots) * (paths.input[stage] + paths.rest[stage])
        bounds.append(head + micros * cost.forward + full + paths.tail(stage, "F"))
    return max(bounds)


def remaining(partial: Partial, paths: Paths) -> float:
    """Return a lower bound on the length of every completion of a partial schedule: each rank has
    its work left to do, and the chain of dependent actions follows the last of a kind at a stage.
    """
    problem = partial.problem
    longest = 0.0
    for rank, indices in enumerate(problem.by_rank):
        clock, left = partial.clock[rank], 0.0
        for index in indices:
            work = problem.works[index]
            todo = (problem.micros - partial.count[index]) * work.seconds
            # a kind without actions left has no chain behind it
            if todo:
                left += todo
                longest = max(longest, clock + todo + paths.tail(work.stage, work.kind))
        longest = max(longest, clock + left)
    return longest
