"""Pipeline schedules by name or from a file, checked and timed.

A schedule (schedule.py) is data with three readers: `pipeline.py` executes it, `simulate` here
times it, and `planning/draw.py` draws the simulation. `check_schedule` finds a list that misses an
action or deadlocks before any process starts. Needs neither torch nor processes.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import NamedTuple

from dolmen.core.messages import brief, plural
from dolmen.parallel.schedule import SCHEDULES, Action, Schedule, from_file


def make_schedule(name: str, ranks: int, micros: int, chunks: int = 1) -> Schedule:
    """Return the schedule called `name`, or read and check the one in the file of that name, for
    `micros` microbatches a step on `ranks` pipeline ranks of `chunks` virtual stages, all of them 1
    or more. Raises ValueError for an unknown name, numbers that the schedule does not allow, or a
    file that is invalid or for other numbers.
    """
    if name in SCHEDULES:
        return SCHEDULES[name](ranks, micros, chunks)
    schedule = _file(name)
    if (schedule.ranks, schedule.micros, schedule.chunks) != (ranks, micros, chunks):
        raise ValueError(
            f"{name} is for pp {schedule.ranks}, "
            f"{plural(schedule.micros, 'microbatch', 'microbatches')} and "
            f"{plural(schedule.chunks, 'virtual stage')}, but the run has {ranks}, {micros} and "
            f"{chunks}: change --layout.pp, --train.global-batch-size, --train.microbatch-size or "
            "--layout.virtual-stages"
        )
    return check_schedule(schedule)


def read_schedule(path: str) -> Schedule:
    """Return the schedule in a .txt or .yaml file, checked to run without deadlock. Raises
    ValueError.
    """
    return check_schedule(_file(path))


def _file(path: str) -> Schedule:
    """Return the schedule in a .txt or .yaml file, unchecked. Raises ValueError for a malformed
    file, and one that lists the known names for any other `path`.
    """
    if Path(path).suffix not in (".txt", ".yaml", ".yml"):
        raise ValueError(
            f"there is no schedule {brief(path)}: use {', '.join(SCHEDULES)}, or a .txt or .yaml "
            f"file with one line of actions per rank"
        )
    return from_file(path)


class Cost(NamedTuple):
    """Time of each action of a whole rank (a chunk takes its share), and of a send between ranks,
    during which both may compute.
    """

    forward: float = 1
    backward: float = 2
    input: float = 1
    weight: float = 1
    send: float = 0

    def chunk_cost(self, chunks: int) -> "Cost":
        """Return the times of one of `chunks` equal chunks of a rank: those of its actions divided
        by `chunks`, that of a send unchanged.
        """
        f, b, i, w, send = self
        return Cost(f / chunks, b / chunks, i / chunks, w / chunks, send)


@dataclass(frozen=True)
class Simulation:
    """When everything happens: `span` from the first start to the last end, `busy` time of each
    rank, and in `times` (start, end) of `schedule.actions[rank][i]`. `peak` is the most
    microbatches that a rank holds activations of, in units of the activations of all its layers:
    from the start of F to the end of B, or of W where B is split, because W reads the inputs of the
    products.
    """

    span: float
    busy: tuple[float, ...]
    peak: tuple[float, ...]
    times: tuple[tuple[tuple[float, float], ...], ...]

    @property
    def bubble(self) -> float:
        """Share of the span in which a rank idles, mean over ranks, from 0 to 1."""
        return 1 - sum(self.busy) / len(self.busy) / self.span

    @property
    def ratio(self) -> float:
        """The bubble as papers give it: idle time over working time, of all ranks together."""
        return self.span * len(self.busy) / sum(self.busy) - 1


def closed_form(schedule: Schedule, cost: Cost = Cost()) -> float | None:
    """Return a rank's idle time by its paper's formula where that is exact, else None: for a
    schedule from a file, where sends take time, for zero-bubble where W takes longer than F or I,
    for zero-bubble-v where F, I and W differ or there are fewer than 2 pp microbatches.
    """
    # the bubble: the skew of pp - 1 ranks, paid once at the start and once at the end
    (f, b, i, w, send), hops = cost, schedule.ranks - 1
    if send:
        return None
    if schedule.name in ("gpipe", "1f1b"):
        return hops * (f + b)
    if schedule.name == "interleaved":
        return hops * (f + b) / schedule.chunks
    if schedule.name == "zero-bubble" and w <= min(f, i):
        # W that a rank has delayed fill its drain (2401.10241)
        return hops * (f + i) - min(schedule.micros - 1, hops) * w
    if schedule.name == "zero-bubble-v" and f == i == w and schedule.micros >= 2 * schedule.ranks:
        return hops * f / 2
    return None


WHOLE, IN_PARTS = {"F", "B"}, {"F", "I", "W"}
"""Actions required per microbatch and stage, with the backward whole or split."""


def check_schedule(schedule: Schedule) -> Schedule:
    """Return the schedule if it does F and B (or I and W) exactly once per microbatch and stage,
    and does not deadlock. Raises ValueError with the rank and the action.
    """
    s, name = schedule, schedule.name
    if len(s.actions) != s.ranks:
        raise ValueError(f"{name} has {len(s.actions)} lists of actions for {s.ranks} ranks")
    if s.placement != "loop" and (s.placement, s.chunks) != ("v", 2):
        raise ValueError(
            f"{name} has placement {s.placement!r} and {s.chunks} chunks per rank: use loop, or v "
            f"with 2 chunks"
        )
    for rank in range(s.ranks):
        _check_rank(s, rank)
    simulate(schedule)
    return schedule


def _check_rank(s: Schedule, rank: int) -> None:
    """Raise ValueError for an action of `rank` that is unknown, out of range, repeated
    or missing.
    """
    seen: set[Action] = set()
    for action in s.actions[rank]:
        known = action.kind in ("F", "B", "I", "W")
        if not known or not (0 <= action.micro < s.micros and 0 <= action.chunk < s.chunks):
            raise ValueError(
                f"{s.name}: rank {rank} has {action}, which is outside of {s.micros} microbatches "
                f"and {s.chunks} chunks"
            )
        if action in seen:
            raise ValueError(f"{s.name}: rank {rank} has {action} twice")
        seen.add(action)
    # ends at the first that misses: a file may say F999999999
    for micro, chunk in ((m, c) for m in range(s.micros) for c in range(s.chunks)):
        has = {kind for kind in "FBIW" if (kind, micro, chunk) in seen}
        if has in (WHOLE, IN_PARTS):
            continue
        parts = has & {"I", "W"}
        if parts and "B" in has:
            raise ValueError(
                f"{s.name}: rank {rank} has {Action('B', micro, chunk)} both as a whole and "
                "in parts (I, W)"
            )
        kinds = IN_PARTS if parts else WHOLE
        missing = next(kind for kind in "FBIW" if kind in kinds - has)
        raise ValueError(f"{s.name}: rank {rank} is missing {Action(missing, micro, chunk)}")


Result = tuple[str, int, int]
"""A result that others wait for: (F or I, microbatch, stage). A whole B gives what its I would."""


def _needs(schedule: Schedule, action: Action, stage: int) -> list[Result]:
    """Return the results that an action at `stage` waits for: F, the F of the stage before; B or I,
    its own F and the gradient from the stage after; W, its own I.
    """
    kind, micro, _ = action
    if kind == "F":
        return [("F", micro, stage - 1)] if stage else []
    if kind == "W":
        return [("I", micro, stage)]
    if stage < schedule.stages - 1:
        return [("F", micro, stage), ("I", micro, stage + 1)]
    return [("F", micro, stage)]


def simulate(schedule: Schedule, cost: Cost = Cost()) -> Simulation:
    """Return the simulation of a schedule whose stages all take the same time: `cost` is a rank's,
    of which a chunk takes its share. Raises ValueError where the schedule deadlocks.
    """
    return simulate_stages(schedule, (cost.chunk_cost(schedule.chunks),) * schedule.stages)


def simulate_stages(schedule: Schedule, costs: Sequence[Cost]) -> Simulation:
    """Return the simulation of the lists under their true dependencies: F after F of the stage
    before; B or I after F of its stage and B or I of the stage after; W after I. An action starts
    as soon as its rank is free and what it waits for has arrived. `costs`: of each stage; `send` is
    the time of its results' messages to another rank. Raises ValueError where the lists deadlock.
    """
    takes = [dict(zip("FBIW", cost, strict=False)) for cost in costs]
    rank_of = [schedule.rank_of(stage) for stage in range(schedule.stages)]
    done: dict[Result, float] = {}  # -> when
    waiting: dict[Result, int] = {}  # what a rank waits for -> the rank
    clock = [0.0] * schedule.ranks
    times: list[list[tuple[float, float]]] = [[] for _ in clock]
    ready = list(range(schedule.ranks))
    # A rank runs on until something is missing, and is called again by what it waits for. So an
    # action is looked at once, and once more for each wait, in whatever order ranks are called: its
    # start follows from its own rank's clock and from when its needs were done, and from no other.
    while ready:
        rank = ready.pop()
        for i in range(len(times[rank]), len(schedule.actions[rank])):
            action = schedule.actions[rank][i]
            stage = schedule.stage_of(rank, action.chunk)
            needs = _needs(schedule, action, stage)
            # a result has one reader on another rank; who waits for its own never goes on
            missing = next((need for need in needs if need not in done), None)
            if missing is not None:
                waiting[missing] = rank
                break
            arrived = (
                done[need] + (costs[need[2]].send if rank_of[need[2]] != rank else 0)
                for need in needs
            )
            start = max([clock[rank], *arrived])
            clock[rank] = end = start + takes[stage][action.kind]
            times[rank].append((start, end))
            # a W gives nothing that anyone waits for, and is noted like the others
            result = ("I" if action.kind == "B" else action.kind, action.micro, stage)
            done[result] = end
            if result in waiting:
                ready.append(waiting.pop(result))
    # no rank can run, and some stand before the end of their list
    if waiting:
        raise ValueError(
            _deadlock(
                schedule, [len(t) for t in times], {rank: need for need, rank in waiting.items()}
            )
        )
    return Simulation(
        max(clock),
        tuple(
            sum(takes[schedule.stage_of(rank, a.chunk)][a.kind] for a in actions)
            for rank, actions in enumerate(schedule.actions)
        ),
        tuple(_peak(actions) / schedule.chunks for actions in schedule.actions),
        tuple(map(tuple, times)),
    )


def _peak(actions: tuple[Action, ...]) -> int:
    """Return the most chunks' activations held at once: F adds one, B or W frees one."""
    return max(accumulate((kind == "F") - (kind in "BW") for kind, _, _ in actions))


def _deadlock(schedule: Schedule, at: list[int], needs: dict[int, tuple[str, int, int]]) -> str:
    """Return the error message: up to four ranks that are stuck, at which action, and what for.
    `at`: index of the action each rank stands at; `needs`: the missing result by rank.
    """
    stuck = []
    for rank, (kind, micro, stage) in sorted(needs.items())[:4]:
        other, kinds = schedule.rank_of(stage), "F" if kind == "F" else "BI"
        action = next(
            (
                a
                for a in schedule.actions[other]
                if a.kind in kinds and a[1:] == (micro, schedule.chunk_of(stage))
            ),
            None,
        )
        stuck.append(
            f"rank {rank} is blocked at {schedule.actions[rank][at[rank]]}, waiting for {action} "
            f"of rank {other}"
        )
    return f"{schedule.name} deadlocks: " + "; ".join(stuck)
