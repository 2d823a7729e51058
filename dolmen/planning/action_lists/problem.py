"""The problem that a schedule solves, and a partial solution of it: what of each stage and kind has
been done, and when. Both searches (greedy.py, exact.py) build lists out of these.

Microbatches are alike, so some shortest schedule does them in order at every stage, in each kind:
exchange any two that are not, and nothing starts later, nor is more held. So a list is known by
which stage and kind comes next on each rank, and a partial one by how many of each are done.
"""

from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from dolmen.parallel.actions import Action, Schedule
from dolmen.parallel.schedule import Cost

LAST = "BW"  # what lets activations go


class Work(NamedTuple):
    """All microbatches of one stage and kind."""

    stage: int
    kind: str
    rank: int
    chunk: int
    seconds: float
    """Of one of them."""
    needs: tuple[tuple[int, float], ...]
    """(index of the work whose result it waits for, what that takes to arrive)"""
    feeds: tuple[tuple[int, float], ...]
    """The same of those that wait for it."""


@dataclass(frozen=True)
class Problem:
    """Find `ranks` lists; `costs` are of each stage by itself, in any unit."""

    ranks: int
    micros: int
    chunks: int
    placement: str
    splits: bool
    """Whether a backward is done as I and W."""
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
    def works(self) -> tuple[Work, ...]:
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

    def _work(self, stage: int, kind: str) -> Work:
        shape, back, last = self._shape, self.kinds[1], self.stages - 1
        fed = {"F": [(stage, back)] if stage == last else [(stage + 1, "F"), (stage, back)]}
        fed |= {back: [(stage - 1, back)] if stage else [], "W": []}
        if self.splits:
            fed["I"].append((stage, "W"))
        needs = {"F": [(stage - 1, "F")] if stage else [], "W": [(stage, "I")]}
        needs[back] = [(stage, "F")] if stage == last else [(stage, "F"), (stage + 1, back)]
        return Work(
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

    def __init__(self, problem: Problem):
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
        """Whether all lists can still come to their end with this action next, if every one before
        it was safe: after a forward there is a place for each chunk that its microbatch has yet to
        go through on the rank, free or held by one that has been through the last and goes back.
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

    def _hold(self, work: Work, sign: int) -> None:
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
