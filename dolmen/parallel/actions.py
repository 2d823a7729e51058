"""A pipeline schedule, and how people write one: a line of actions per rank, as text or in YAML.
Knows nothing of torch.

    F3    forward of microbatch 3
    B3    its whole backward
    I3    the part of B3 that earlier stages wait for
    W3    the rest: gradients of the weights, needed by nobody before the update
    F3.1  the same on chunk 1, of a rank that holds several virtual stages
"""

import re
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from dolmen.files import gate, kinds


class Action(NamedTuple):
    """One thing a rank does, with the `chunk`-th of its virtual stages; chunk 0 is not
    written out.
    """

    kind: str
    micro: int
    chunk: int = 0

    def __str__(self) -> str:
        return f"{self.kind}{self.micro}" + (f".{self.chunk}" if self.chunk else "")


@dataclass(frozen=True)
class Schedule:
    """What each rank does.

    `actions[rank]` is in order. `placement` says which stage a chunk is; for ranks = 3, chunks = 2:

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
        return self.ranks * self.chunks

    @property
    def splits_backward(self) -> bool:
        return any(action.kind == "I" for actions in self.actions for action in actions)

    def stage_of(self, rank: int, chunk: int) -> int:
        return (
            self.stages - 1 - rank if self.placement == "v" and chunk else chunk * self.ranks + rank
        )

    def chunk_of(self, stage: int) -> int:
        return stage // self.ranks

    def rank_of(self, stage: int) -> int:
        return (
            self.stages - 1 - stage
            if self.placement == "v" and stage >= self.ranks
            else stage % self.ranks
        )


def from_file(path: str) -> Schedule:
    """The schedule of a .txt or .yaml file (`actions:`, a list with one line of actions per rank,
    and maybe `placement:`), unchecked. Raises ValueError.
    """
    if not Path(path).is_file():
        raise ValueError(f"there is no schedule file {path}")
    if Path(path).suffix == ".txt":
        return parse_schedule(gate.read_text(path, kinds.SCHEDULE.size), path)
    found = gate.read_yaml(path, kinds.SCHEDULE)
    placement = [f"placement: {found['placement']}"] if "placement" in found else []
    return parse_schedule("\n".join([*found["actions"], *placement]), path)


def parse_schedule(text: str, name: str) -> Schedule:
    """The schedule of a text: a line of actions (`F0 F1 B0 B1`) for every rank, `#` for comments,
    and `placement: v` where the stages go down the ranks and up again. Raises ValueError.
    """
    placement, ranks = "loop", []
    for number, line in enumerate(text.splitlines(), 1):
        line = line.split("#")[0].strip()
        if not line:
            continue
        if line.startswith("placement:"):
            placement = line.removeprefix("placement:").strip()
        else:
            ranks.append(tuple(_action(word, f"{name}, line {number}") for word in line.split()))
    if not ranks:
        raise gate.refuse(name, "has no line of actions")
    every = [action for actions in ranks for action in actions]
    return Schedule(
        name,
        len(ranks),
        max(a.micro for a in every) + 1,
        max(a.chunk for a in every) + 1,
        tuple(ranks),
        placement,
    )


def format_schedule(schedule: Schedule) -> str:
    """The text that `parse_schedule` reads."""
    head = "" if schedule.placement == "loop" else f"placement: {schedule.placement}\n"
    return head + "".join(" ".join(map(str, actions)) + "\n" for actions in schedule.actions)


def format_yaml(schedule: Schedule) -> str:
    """The YAML that `from_file` reads."""
    head = "" if schedule.placement == "loop" else f"placement: {schedule.placement}\n"
    lines = "".join(f"  - {' '.join(map(str, actions))}\n" for actions in schedule.actions)
    return f"{head}actions:\n{lines}"


def _action(word: str, where: str) -> Action:
    found = re.fullmatch(r"([FBIW])([0-9]{1,9})(?:\.([0-9]{1,9}))?", word)
    if not found:
        raise gate.refuse(
            where,
            f"{ascii(word)[:80]} is no action; those are F, B, I or W, a microbatch and maybe a "
            f"chunk, as in F3 or F3.1",
        )
    return Action(found[1], int(found[2]), int(found[3] or 0))
