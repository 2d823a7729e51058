"""Pipeline schedules: a list of actions per rank, how they are written as text or YAML, and the
five schedules that have a name, for any number of ranks and microbatches. docs/concepts/pipeline.md
draws them and describes when to use each. Needs no torch.

    F3    forward of microbatch 3
    B3    its whole backward
    I3    the part of B3 that earlier stages wait for: the input gradient
    W3    the rest: the weight gradients, needed by nobody before the update
    F3.1  the same on chunk 1 of a rank that holds several virtual stages

GPipe is 1811.06965, 1F1B and its interleaved form 2104.04473; the split of B into I and W and both
zero-bubble schedules are 2401.10241.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from dolmen.files import gate, kinds


class Action(NamedTuple):
    """One thing a rank does with the `chunk`-th of its virtual stages: F, B, I or W of microbatch
    `micro`. Written F3, or F3.1 for a chunk other than 0.
    """

    kind: str
    micro: int
    chunk: int = 0

    def __str__(self) -> str:
        """Return the action as text: F3 or F3.1."""
        return f"{self.kind}{self.micro}" + (f".{self.chunk}" if self.chunk else "")


@dataclass(frozen=True)
class Schedule:
    """The action lists of all ranks.

    `actions[rank]` is in order. `placement`: which stage a chunk is; for ranks = 3, chunks = 2:

        loop   rank 0: stages 0 and 3, rank 1: 1 and 4, rank 2: 2 and 5
        v      rank 0: stages 0 and 5, rank 1: 1 and 4, rank 2: 2 and 3
    """

    name: str
    ranks: int
    micros: int
    chunks: int
    actions: tuple[tuple[Action, ...], ...]
    placement: str = "loop"

    @property
    def stages(self) -> int:
        """Number of stages of the model: ranks times chunks."""
        return self.ranks * self.chunks

    @property
    def splits_backward(self) -> bool:
        """True if any backward is split into I and W."""
        return any(action.kind == "I" for actions in self.actions for action in actions)

    def stage_of(self, rank: int, chunk: int) -> int:
        """Return the index of the stage that is the `chunk`-th of `rank`, by the placement."""
        return (
            self.stages - 1 - rank if self.placement == "v" and chunk else chunk * self.ranks + rank
        )

    def chunk_of(self, stage: int) -> int:
        """Return the index, among the chunks of its rank, of a stage."""
        return stage // self.ranks

    def rank_of(self, stage: int) -> int:
        """Return the rank that holds a stage."""
        return (
            self.stages - 1 - stage
            if self.placement == "v" and stage >= self.ranks
            else stage % self.ranks
        )


def from_file(path: str) -> Schedule:
    """Return the schedule in a .txt file, or a .yaml one (`actions:`, a list with one line of
    actions per rank, and optionally `placement:`), without checking that it can run. Raises
    ValueError for a file that is missing or malformed.
    """
    if not Path(path).is_file():
        raise ValueError(f"there is no schedule file {path}")
    if Path(path).suffix == ".txt":
        return parse_schedule(gate.read_text(path, kinds.SCHEDULE.size), path)
    content = gate.read_yaml(path, kinds.SCHEDULE)
    placement = [f"placement: {content['placement']}"] if "placement" in content else []
    return parse_schedule("\n".join([*content["actions"], *placement]), path)


def parse_schedule(text: str, name: str) -> Schedule:
    """Return the schedule that a text describes, without checking that it can run: one line of
    actions (`F0 F1 B0 B1`) per rank, `#` for comments, and `placement: v` where stages go down the
    ranks and up again. `name` is the schedule's, and begins error messages. Raises ValueError.
    """
    placement, ranks = "loop", []
    for number, line in enumerate(text.splitlines(), 1):
        line = line.split("#")[0].strip()
        if not line:
            continue
        if line.startswith("placement:"):
            placement = line.removeprefix("placement:").strip()
        else:
            ranks.append(
                tuple(_parse_action(word, f"{name}, line {number}") for word in line.split())
            )
    if not ranks:
        raise gate.refuse(name, "has no line of actions")
    all_actions = [action for actions in ranks for action in actions]
    return Schedule(
        name,
        len(ranks),
        max(a.micro for a in all_actions) + 1,
        max(a.chunk for a in all_actions) + 1,
        tuple(ranks),
        placement,
    )


def format_schedule(schedule: Schedule) -> str:
    """Return the schedule as text that `parse_schedule` reads."""
    head = "" if schedule.placement == "loop" else f"placement: {schedule.placement}\n"
    return head + "".join(" ".join(map(str, actions)) + "\n" for actions in schedule.actions)


def format_yaml(schedule: Schedule) -> str:
    """Return the schedule as YAML that `from_file` reads."""
    head = "" if schedule.placement == "loop" else f"placement: {schedule.placement}\n"
    lines = "".join(f"  - {' '.join(map(str, actions))}\n" for actions in schedule.actions)
    return f"{head}actions:\n{lines}"


def _parse_action(word: str, where: str) -> Action:
    """Return the action that a word such as F3 or F3.1 stands for. Raises ValueError that starts
    with `where`.
    """
    # at most 9 digits: a file cannot demand lists of 10^30 entries
    match = re.fullmatch(r"([FBIW])([0-9]{1,9})(?:\.([0-9]{1,9}))?", word)
    if not match:
        raise gate.refuse(
            where,
            f"{ascii(word)[:80]} is not an action: it must be F, B, I or W, a microbatch and "
            "optionally a chunk, such as F3 or F3.1",
        )
    return Action(match[1], int(match[2]), int(match[3] or 0))


def gpipe(ranks: int, micros: int, chunks: int = 1) -> Schedule:
    """Return GPipe's schedule: all forwards, then all backwards, so every rank holds all
    microbatches at once. Raises ValueError for several `chunks`.
    """
    _require_one_chunk("gpipe", chunks)
    actions = tuple(Action(kind, micro) for kind in "FB" for micro in range(micros))
    return Schedule("gpipe", ranks, micros, 1, (actions,) * ranks)


def one_f_one_b(ranks: int, micros: int, chunks: int = 1) -> Schedule:
    """Return the 1F1B schedule: ranks - r - 1 warm-up forwards on rank r, then one forward and one
    backward in turn, so it holds at most ranks - r microbatches. Raises ValueError for several
    `chunks`.
    """
    _require_one_chunk("1f1b", chunks)
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


def interleaved_1f1b(ranks: int, micros: int, chunks: int = 2) -> Schedule:
    """Return the interleaved schedule, 1F1B over `chunks` thin stages per rank: filling and
    draining take 1 / chunks of the time, sends are `chunks` times as many. Units go in groups of
    `ranks` microbatches through chunk 0, then chunk 1, ..., so `micros` must be a multiple of
    `ranks`. Raises ValueError where it is not, and for one chunk.
    """
    if chunks < 2:
        raise ValueError(
            f"interleaved needs several virtual stages per rank, not {chunks}: use "
            "--layout.virtual-stages 2, or 1f1b"
        )
    if micros % ranks:
        raise ValueError(
            f"interleaved takes microbatches in groups of pp ({ranks}), but {micros} is not a "
            "multiple of it: change --train.global-batch-size, --train.microbatch-size or "
            "--layout.pp"
        )
    # groups of `ranks` microbatches visit chunk 0, then chunk 1, ...
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
            # warm-up of 2104.04473: units until the first backward can be back at rank r
            tuple(_alternate(forward, backward, 2 * (ranks - r - 1) + (chunks - 1) * ranks))
            for r in range(ranks)
        ),
    )


def zero_bubble(ranks: int, micros: int, chunks: int = 1) -> Schedule:
    """Return the ZB-H1 schedule: 1F1B whose backward is split into I (input gradients) and W
    (weight gradients), so that earlier stages get input gradients a W sooner. Rank r runs its W r
    microbatches late, and fills its drain with the last ones; every rank holds up to `ranks`
    microbatches, as rank 0 of 1F1B does. Raises ValueError for several `chunks`.
    """
    _require_one_chunk("zero-bubble", chunks)

    # 1F1B's list, its B replaced by I, and the W of the microbatch `rank` places behind after it.
    # While a rank drains it has as many W left as it has places to fill: r of them.
    lists = one_f_one_b(ranks, micros).actions

    def one(rank: int) -> Iterator[Action]:
        """Yield the actions of one rank."""
        for action in lists[rank]:
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
    """Return the ZB-V schedule: two chunks per rank, stages down the ranks and up again, so the
    loss is on rank 0, and every rank waits equally long for its first backward. No bubble except
    the skewed start when F, I and W take the same time; every rank holds at most `ranks`
    microbatches. Raises ValueError for other `chunks`.
    """
    if chunks != 2:
        raise ValueError(
            f"zero-bubble-v needs 2 virtual stages per rank, not {chunks}: use "
            "--layout.virtual-stages 2"
        )
    # the pattern needs that many; leaving some out of it breaks no dependency
    full = max(micros, 2 * ranks - 1)
    return Schedule(
        "zero-bubble-v",
        ranks,
        micros,
        2,
        tuple(
            tuple(a for a in _zero_bubble_v_actions(rank, ranks, full) if a.micro < micros)
            for rank in range(ranks)
        ),
        "v",
    )


def _zero_bubble_v_actions(rank: int, ranks: int, micros: int) -> list[Action]:
    """Return the actions of one rank of ZB-V. Chunk 0 goes down the p ranks, chunk 1 up again:
    microbatch 0 is back at rank r after 2 (p - r) - 1 forwards, and so many of chunk 0 fill the
    time until then. With p = 2, and one unit of time for each of F, I and W:

        rank 0 | F0 F1 F2 F0.1 I0.1 W0.1 F1.1 I1.1 W1.1 F3 I0 W0 ...
        rank 1 |    F0 F0.1 F1 F1.1 I0.1 W0.1 F2 I0 W0 ...

    From then on a rank does as many backwards as forwards, so it holds p microbatches at most.
    `micros` must be at least 2 p - 1, which the caller checks.
    """
    out, next_ = [], {kind + chunk: 0 for kind in "FIW" for chunk in "01"}

    def do(*what: str) -> None:
        """Append the next action of each kind and chunk, such as F0."""
        for name in what:
            out.append(Action(name[0], next_[name], int(name[1])))
            next_[name] += 1

    # filling: until microbatch 0 has gone down to the last rank and come up again
    for _ in range(2 * (ranks - rank) - 1):
        do("F0")
    # both ways in turn, until its gradient has come back from rank 0
    for _ in range(rank):
        do("F1", "F0")
    # nothing new comes in, for p microbatches are held: W at once, to let one go
    for _ in range(ranks - rank):
        do("F1", "I1", "W1")
    # steady: each of the six once per microbatch; F0 ends first
    while next_["F1"] < micros:
        do(*["F0"] * (next_["F0"] < micros), "I0", "W0", "F1", "I1", "W1")
    # draining: input gradients first, as other ranks wait for them, and weights into the gaps
    for _ in range(rank):
        do("I0", "I1")
    for _ in range(ranks - rank):
        do("I0", "W0")
    for chunk in "10":
        do(*["W" + chunk] * (micros - next_["W" + chunk]))
    return out


def _alternate(forward: list[Action], backward: list[Action], warm: int) -> Iterator[Action]:
    """Yield `warm` forwards, then a forward and a backward in turn, then the remaining
    backwards.
    """
    warm = min(warm, len(forward))
    yield from forward[:warm]
    for pair in zip(forward[warm:], backward, strict=False):
        yield from pair
    # forwards that ran ahead leave as many backwards for the end
    yield from backward[len(forward) - warm :]


def _require_one_chunk(name: str, chunks: int) -> None:
    """Raise ValueError if schedule `name` is asked for more than one chunk per rank."""
    if chunks != 1:
        raise ValueError(
            f"{name} needs one stage per rank, not {chunks}: use --layout.virtual-stages 1, or "
            "interleaved"
        )


SCHEDULES = {
    "gpipe": gpipe,
    "1f1b": one_f_one_b,
    "interleaved": interleaved_1f1b,
    "zero-bubble": zero_bubble,
    "zero-bubble-v": zero_bubble_v,
}
