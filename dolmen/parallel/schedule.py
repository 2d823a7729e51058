"""Pipeline schedules as data: a list of actions for every rank (actions.py), with two readers,
`pipeline.py`, which carries it out, and `simulate`, which times it (and `plan/draw.py`, which draws
what that says). Nothing here knows of torch or of processes.

GPipe is 1811.06965, 1F1B and its interleaved form 2104.04473, the split of B into I and W and both
zero-bubble schedules 2401.10241.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import NamedTuple

from dolmen.core.words import counted
from dolmen.parallel.actions import Action, Schedule, from_file


def gpipe(ranks: int, micros: int, chunks: int = 1) -> Schedule:
    """All forwards, then all backwards: every microbatch is held at once."""
    _single("gpipe", chunks)
    one = tuple(Action(kind, micro) for kind in "FB" for micro in range(micros))
    return Schedule("gpipe", ranks, micros, 1, (one,) * ranks)


def one_f_one_b(ranks: int, micros: int, chunks: int = 1) -> Schedule:
    """As many forwards as it takes for the first to come back, then one forward, one backward: rank
    r holds ranks - r microbatches.
    """
    _single("1f1b", chunks)
    return Schedule(
        "1f1b",
        ranks,
        micros,
        1,
        tuple(
            tuple(
                _alternate(
                    [Action("F", m) for m in range(micros)],
                    [Action("B", m) for m in range(micros)],
                    ranks - r - 1,
                )
            )
            for r in range(ranks)
        ),
    )


def interleaved(ranks: int, micros: int, chunks: int = 2) -> Schedule:
    """1F1B over `chunks` thin stages per rank: filling and draining take 1 / chunks of the time,
    sends are `chunks` times as many. Units go in groups of `ranks` microbatches through chunk 0,
    then chunk 1, ..., so `micros` must be a multiple of `ranks`.
    """
    if chunks < 2:
        raise ValueError(
            f"interleaved has several virtual stages per rank, not {chunks}: use "
            f"--layout.virtual-stages 2, or 1f1b"
        )
    if micros % ranks:
        raise ValueError(
            f"interleaved takes microbatches in groups of pp ({ranks}), and {micros} is not a "
            "multiple: change --train.global-batch-size, --train.microbatch-size or --layout.pp"
        )
    order = [
        (group + m, c)
        for group in range(0, micros, ranks)
        for c in range(chunks)
        for m in range(ranks)
    ]
    forward = [Action("F", m, c) for m, c in order]
    backward = [Action("B", m, chunks - 1 - c) for m, c in order]
    return Schedule(
        "interleaved",
        ranks,
        micros,
        chunks,
        tuple(
            tuple(_alternate(forward, backward, 2 * (ranks - r - 1) + (chunks - 1) * ranks))
            for r in range(ranks)
        ),
    )


def zero_bubble(ranks: int, micros: int, chunks: int = 1) -> Schedule:
    """ZB-H1: 1F1B whose backward is split. Earlier stages get I a W sooner, and rank r is r weights
    behind, which it does while it drains: so every rank holds `ranks` microbatches until their W,
    what the first rank of 1F1B holds.
    """
    _single("zero-bubble", chunks)

    def one(rank: int) -> Iterator[Action]:
        for action in one_f_one_b(ranks, micros).actions[rank]:
            if action.kind == "F":
                yield action
            else:
                yield Action("I", action.micro)
                if action.micro >= rank:
                    yield Action("W", action.micro - rank)
        for micro in range(max(0, micros - rank), micros):
            yield Action("W", micro)

    return Schedule("zero-bubble", ranks, micros, 1, tuple(tuple(one(r)) for r in range(ranks)))


def zero_bubble_v(ranks: int, micros: int, chunks: int = 2) -> Schedule:
    """ZB-V: two chunks per rank, down the ranks and up again, so the loss is on rank 0 and no rank
    waits for its first backward longer than another. No bubble but the skewed start when F, I and W
    take the same time; every rank holds at most `ranks` microbatches.
    """
    if chunks != 2:
        raise ValueError(
            f"zero-bubble-v has 2 virtual stages per rank, not {chunks}: use "
            f"--layout.virtual-stages 2"
        )
    # the pattern needs that many; leaving some out of it breaks no dependency
    whole = max(micros, 2 * ranks - 1)
    return Schedule(
        "zero-bubble-v",
        ranks,
        micros,
        2,
        tuple(
            tuple(a for a in _v_shape(rank, ranks, whole) if a.micro < micros)
            for rank in range(ranks)
        ),
        "v",
    )


def _v_shape(rank: int, ranks: int, micros: int) -> list[Action]:
    out, next_ = [], {kind + chunk: 0 for kind in "FIW" for chunk in "01"}

    def do(*what: str) -> None:
        for name in what:
            out.append(Action(name[0], next_[name], int(name[1])))
            next_[name] += 1

    for _ in range(2 * (ranks - rank) - 1):
        do("F0")
    for _ in range(rank):
        do("F1", "F0")
    for _ in range(ranks - rank):
        do("F1", "I1", "W1")
    while next_["F1"] < micros:
        do(*["F0"] * (next_["F0"] < micros), "I0", "W0", "F1", "I1", "W1")
    for _ in range(rank):
        do("I0", "I1")
    for _ in range(ranks - rank):
        do("I0", "W0")
    for chunk in "10":
        do(*["W" + chunk] * (micros - next_["W" + chunk]))
    return out


def _alternate(forward: list[Action], backward: list[Action], warm: int) -> Iterator[Action]:
    """`warm` forwards, then a forward and a backward in turn, then what is left of the
    backwards.
    """
    warm = min(warm, len(forward))
    yield from forward[:warm]
    for pair in zip(forward[warm:], backward, strict=False):
        yield from pair
    yield from backward[len(forward) - warm :]


def _single(name: str, chunks: int) -> None:
    if chunks != 1:
        raise ValueError(
            f"{name} has one stage per rank, not {chunks}: use --layout.virtual-stages 1, or "
            f"interleaved"
        )


SCHEDULES = {
    "gpipe": gpipe,
    "1f1b": one_f_one_b,
    "interleaved": interleaved,
    "zero-bubble": zero_bubble,
    "zero-bubble-v": zero_bubble_v,
}


def make(name: str, ranks: int, micros: int, chunks: int = 1) -> Schedule:
    """The schedule of that name, or the one in the file of that name, for `micros` microbatches a
    step on `ranks` pipeline ranks of `chunks` virtual stages. Raises ValueError.
    """
    for knob, value in (
        ("layout.pp", ranks),
        ("layout.virtual-stages", chunks),
        ("microbatches per step", micros),
    ):
        if value < 1:
            raise ValueError(f"{knob} ({value}) must be at least 1")
    if name in SCHEDULES:
        return SCHEDULES[name](ranks, micros, chunks)
    schedule = _file(name)
    if (schedule.ranks, schedule.micros, schedule.chunks) != (ranks, micros, chunks):
        raise ValueError(
            f"{name} is for pp {schedule.ranks}, "
            f"{counted(schedule.micros, 'microbatch', 'microbatches')} and "
            f"{counted(schedule.chunks, 'virtual stage')}, but the run has {ranks}, {micros} and "
            f"{chunks}: change --layout.pp, --train.global-batch-size, --train.microbatch-size or "
            "--layout.virtual-stages"
        )
    return check(schedule)


def read(path: str) -> Schedule:
    """A checked schedule from a .txt or .yaml file. Raises ValueError."""
    return check(_file(path))


def _file(path: str) -> Schedule:
    if Path(path).suffix not in (".txt", ".yaml", ".yml"):
        raise ValueError(
            f"there is no schedule {path!r}: use {', '.join(SCHEDULES)}, or a .txt or .yaml file "
            f"with one line of actions per rank"
        )
    return from_file(path)


class Cost(NamedTuple):
    """Time of an action of a whole rank (a chunk takes its share), and of a send between ranks,
    which keeps neither of them busy.
    """

    forward: float = 1
    backward: float = 2
    input: float = 1
    weight: float = 1
    send: float = 0


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
        """Share of the span in which a rank idles, mean over ranks."""
        return 1 - sum(self.busy) / len(self.busy) / self.span

    @property
    def ratio(self) -> float:
        """The papers' number: idle time over working time."""
        return self.span * len(self.busy) / sum(self.busy) - 1


def closed_form(schedule: Schedule, cost: Cost = Cost()) -> float | None:
    """Idle time of a rank by its paper's formula, where that is exact, else None: for a file, where
    sends take time, for zero-bubble where W takes longer than F or I, for zero-bubble-v where F, I
    and W differ or there are fewer than 2 pp microbatches.
    """
    (f, b, i, w, send), hops = cost, schedule.ranks - 1
    if send:
        return None
    if schedule.name in ("gpipe", "1f1b"):
        return hops * (f + b)
    if schedule.name == "interleaved":
        return hops * (f + b) / schedule.chunks
    if schedule.name == "zero-bubble" and w <= min(f, i):
        return hops * (f + i) - min(schedule.micros - 1, hops) * w
    if schedule.name == "zero-bubble-v" and f == i == w and schedule.micros >= 2 * schedule.ranks:
        return hops * f / 2
    return None


def check(schedule: Schedule) -> Schedule:
    """The schedule itself, if it does F and B (or I and W) once for every microbatch and stage, and
    its lists run to their end. Raises ValueError with the rank and the action.
    """
    s, name = schedule, schedule.name
    if len(s.actions) != s.ranks:
        raise ValueError(f"{name} has {len(s.actions)} lists of actions for {s.ranks} ranks")
    if (s.placement, s.placement == "v" and s.chunks) not in (("loop", False), ("v", 2)):
        raise ValueError(
            f"{name} has placement {s.placement!r} and {s.chunks} chunks per rank: use loop, or v "
            f"with 2 chunks"
        )
    for rank, actions in enumerate(s.actions):
        seen: set[Action] = set()
        for action in actions:
            if action.kind not in ("F", "B", "I", "W") or not (
                0 <= action.micro < s.micros and 0 <= action.chunk < s.chunks
            ):
                raise ValueError(
                    f"{name}: rank {rank} has {action}, which is not of {s.micros} microbatches "
                    f"and {s.chunks} chunks"
                )
            if action in seen:
                raise ValueError(f"{name}: rank {rank} does {action} twice")
            seen.add(action)
        for micro, chunk in (
            (m, c) for m in range(s.micros) for c in range(s.chunks)
        ):  # ends at the first that misses: a file may say F999999999
            has = "".join(kind for kind in "FBIW" if (kind, micro, chunk) in seen)
            if has in ("FB", "FIW"):
                continue
            if "BI" in has or "BW" in has:
                raise ValueError(
                    f"{name}: rank {rank} does {Action('B', micro, chunk)} whole and in parts "
                    f"(I, W)"
                )
            missing = {"F": "B", "FI": "W", "FW": "I"}.get(has, "F")
            raise ValueError(f"{name}: rank {rank} never does {Action(missing, micro, chunk)}")
    simulate(schedule)
    return schedule


def simulate(schedule: Schedule, cost: Cost = Cost()) -> Simulation:
    """Run the lists under their true dependencies: F after F of the stage before; B or I after F of
    its stage and B or I of the stage after; W after I. An action starts as soon as its rank is free
    and what it waits for has arrived. Raises ValueError where the lists deadlock.
    """
    ranks, last = range(schedule.ranks), schedule.stages - 1
    takes = {kind: time / schedule.chunks for kind, time in zip("FBIW", cost, strict=False)}
    rank_of = [schedule.rank_of(stage) for stage in range(schedule.stages)]
    done: dict[tuple[str, int, int], float] = {}  # (kind, micro, stage) -> end; B counts as I
    waiting: dict[tuple[str, int, int], int] = {}  # what a rank waits for -> the rank
    clock, times, ready = [0.0] * schedule.ranks, [[] for _ in ranks], list(ranks)
    while ready:
        actions = schedule.actions[rank := ready.pop()]
        for at in range(len(times[rank]), len(actions)):
            kind, micro, chunk = actions[at]
            stage = schedule.stage_of(rank, chunk)
            needs = (
                ([("F", micro, stage - 1)] if stage else [])
                if kind == "F"
                else [("I", micro, stage)]
                if kind == "W"
                else [("F", micro, stage), ("I", micro, stage + 1)]
                if stage < last
                else [("F", micro, stage)]
            )
            missing = [need for need in needs if need not in done]
            if missing:
                waiting[missing[0]] = rank
                break
            start = max(
                [
                    clock[rank],
                    *(
                        done[need] + (cost.send if rank_of[need[2]] != rank else 0)
                        for need in needs
                    ),
                ]
            )
            clock[rank] = end = start + takes[kind]
            times[rank].append((start, end))
            key = ("I" if kind == "B" else kind, micro, stage)
            done[key] = end
            if key in waiting:
                ready.append(waiting.pop(key))
    if waiting:
        raise ValueError(
            _deadlock(
                schedule, [len(t) for t in times], {rank: need for need, rank in waiting.items()}
            )
        )
    return Simulation(
        max(clock),
        tuple(sum(takes[a.kind] for a in actions) for actions in schedule.actions),
        tuple(_peak(actions) / schedule.chunks for actions in schedule.actions),
        tuple(map(tuple, times)),
    )


def _peak(actions: tuple[Action, ...]) -> int:
    return max(accumulate((kind == "F") - (kind in "BW") for kind, _, _ in actions))


def _deadlock(schedule: Schedule, at: list[int], needs: dict[int, tuple[str, int, int]]) -> str:
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
            f"rank {rank} stands at {schedule.actions[rank][at[rank]]} and waits for {action} of "
            f"rank {other}"
        )
    return f"{schedule.name} deadlocks: " + "; ".join(stuck)
