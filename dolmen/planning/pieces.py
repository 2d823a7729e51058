"""What a small run did, by action: bytes as differences, of a row to the one before, so that they
add up in any order of actions. Kept on disk under a hash of the code and of what made it.
"""

import json
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from dolmen.files import gate, kinds, write
from dolmen.model.tree import Tree
from dolmen.ops.kernels import Hardware
from dolmen.parallel.actions import Schedule
from dolmen.planning.contexts import contexts, text_of
from dolmen.planning.dryrun import Trace, traced
from dolmen.planning.fingerprint import of_step
from dolmen.planning.ledger import Live, Row
from dolmen.planning.steady import Steps
from dolmen.training.config import RunConfig

UPDATE = "optimizer"
"""What follows the last action."""


class Step(NamedTuple):
    """A row, what it adds to what is held, and what it adds at its most."""

    row: Row
    live: Live
    high: Live


class Part(NamedTuple):
    """What an action does."""

    steps: tuple[Step, ...]
    end: Live
    """What is added after its last row."""


@dataclass(frozen=True)
class Piece:
    """Of one small run."""

    rest: Live
    parts: dict[str, Part]
    """By context, as text, and of the update."""


def plus(a: Live, b: Live, times: int = 1) -> Live:
    """a + times x b, by kind."""
    return Live(*(x + times * y for x, y in zip(a, b, strict=True)))


def piece_of(trace: Trace, schedule: Schedule, rank: int) -> Piece:
    """What was seen, as differences."""
    names = [*map(str, schedule.actions[rank]), UPDATE]
    known = [*map(text_of, contexts(schedule, rank)), UPDATE]
    rows = list(zip(trace.ledger.rows, trace.highs, strict=True))
    parts: dict[str, Part] = {}
    at, live = 0, trace.ledger.rest
    for name, context, end in zip(names, known, trace.ends, strict=True):
        steps = []
        while at < len(rows) and rows[at][0].action == name:
            row, high = rows[at]
            steps.append(Step(row, plus(row.live, live, -1), plus(high, live, -1)))
            at, live = at + 1, row.live
        parts.setdefault(context, Part(tuple(steps), plus(end, live, -1)))
        live = end
    return Piece(trace.ledger.rest, parts)


@dataclass(frozen=True)
class Small:
    """What is run in place of a rank's step."""

    run: RunConfig
    rank: int
    schedule: Schedule
    tree: Tree
    stages: tuple[range, ...]
    hardware: Hardware
    max_load: float

    @property
    def pp_rank(self) -> int:
        return self.rank // (self.run.layout.world // self.run.layout.pp)

    def start(self, chunk: int) -> int:
        """The number of the first layer of a chunk."""
        return self.stages[self.schedule.stage_of(self.pp_rank, chunk)].start

    @property
    def key(self) -> str:
        """A hash of the code and of all that this depends on."""
        more = (self.tree, self.rank, self.stages, self.hardware, self.max_load)
        return of_step(self.run, *more)

    def piece(self, folder: Path) -> Piece:
        """As it is kept in `folder`, or made and kept there. A file that is not one of ours is made
        anew. Raises OSError where it cannot be written.
        """
        file = folder / f"{self.key}.json"
        with suppress(gate.Refused, OSError):
            found = _from_plain(gate.read_json(file, kinds.PIECE))
            if set(found.parts) == {*map(text_of, contexts(self.schedule, self.pp_rank)), UPDATE}:
                return found
        steps = Steps(self.schedule, {})
        trace = traced(
            self.run,
            self.rank,
            self.tree,
            steps,
            self.hardware,
            self.max_load,
            stages=self.stages,
        )
        found = piece_of(trace, self.schedule, self.pp_rank)
        folder.mkdir(parents=True, exist_ok=True)
        write.replace(file, json.dumps(_plain(found)), lasting=False)
        return found


FIELDS = ("module", "kind", "op", "flops", "read", "written", "shape", "dtype")
FIELDS += ("axis", "payload", "beside")
"""Of a row, those that its action does not change."""


def _plain(piece: Piece) -> dict[str, Any]:
    def step(one: Step) -> list[Any]:
        fields = vars(one.row)
        return [*(fields[name] for name in FIELDS), one.live, one.high]

    parts = {name: [[*map(step, part.steps)], part.end] for name, part in piece.parts.items()}
    return {"rest": piece.rest, "parts": parts}


def _from_plain(found: dict[str, Any]) -> Piece:
    def step(values: list[Any]) -> Step:
        *fields, live, high = values
        named = dict(zip(FIELDS, fields, strict=True))
        named["shape"] = tuple(named["shape"])
        return Step(Row("", **named), Live(*live), Live(*high))

    parts = {
        name: Part(tuple(map(step, steps)), Live(*end))
        for name, (steps, end) in found["parts"].items()
    }
    return Piece(Live(*found["rest"]), parts)
