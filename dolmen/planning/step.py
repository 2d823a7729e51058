"""Seconds of a step: the pipeline's own list of actions, simulated with what each stage takes, and
what follows the last of them.

    rows -> rows_seconds -> Stage, one per virtual stage -> simulate_stages -> Estimate
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from dolmen.files import gate, kinds
from dolmen.parallel.schedule import Schedule
from dolmen.parallel.simulation import Cost, Simulation, simulate_stages
from dolmen.planning.cost import Machine, Parts, action_seconds
from dolmen.planning.operations import Operations


class Estimate(NamedTuple):
    """A time, its 90 % interval, and what it is made of: name -> seconds, whose sum is `seconds`.

    product, attention, memory: compute. host: the device waits for the host. tp, cp, ep, dp, pp:
    communication that nothing hides. bubble: a rank waits for others. optimizer: the update.
    """

    seconds: float
    low: float
    high: float
    parts: dict[str, float]


class ErrorSpread(NamedTuple):
    """How wrong a time may be: its logarithm by this much either way, in nine of ten."""

    log: float
    rows: int
    """Measured runs that it is made from."""
    device: bool
    """Some of them are of this device."""

    def around(self, seconds: float, parts: dict[str, float]) -> Estimate:
        factor = math.exp(self.log)
        return Estimate(seconds, seconds / factor, seconds * factor, parts)

    @property
    def words(self) -> str:
        of = "with this device" if self.device else "none of this device, so twice as wide"
        return f"90 % interval from n = {self.rows} measured runs, {of}"


@dataclass(frozen=True)
class Stage:
    """Seconds of a virtual stage for one microbatch."""

    forward: Parts
    backward: Parts
    """Whole, with what is computed again."""
    inputs: Parts = Parts()
    """The part of a split backward that earlier stages wait for; ..."""
    weights: Parts = Parts()
    """... and the rest."""
    send: float = 0.0
    """Seconds of sending its result to the next stage, or back to the one before."""

    def parts(self, kind: str) -> Parts:
        return {"F": self.forward, "B": self.backward, "I": self.inputs, "W": self.weights}[kind]

    def cost(self, waits: bool) -> Cost:
        """For the simulator. `waits`: a rank does nothing else while it sends."""
        every = (self.forward, self.backward, self.inputs)
        forward, backward, inputs = (p.total + (self.send if waits else 0) for p in every)
        return Cost(forward, backward, inputs, self.weights.total, self.send)


def rows_seconds(rows: Operations, machine: Machine) -> Stage:
    """Return the seconds of the rows of a part of a stage."""
    return Stage(
        action_seconds(rows.forward, machine),
        action_seconds(rows.backward, machine),
        action_seconds(rows.inputs, machine),
        action_seconds(rows.weights, machine),
    )


def together(parts: Sequence[tuple[int, Stage]], send: float) -> Stage:
    """One stage of several parts, each so often."""
    kinds = [[part.parts(kind).times(number) for number, part in parts] for kind in "FBIW"]
    return Stage(*(sum(each, Parts()) for each in kinds), send=send)


def step_time(
    stages: Sequence[Stage],
    schedule: Schedule,
    update: Parts,
    spread: ErrorSpread,
    waits: bool = False,
) -> tuple[Estimate, Simulation]:
    """Return the seconds of a step whose virtual stages take `stages`, one each in order
    (`schedule.stage_of`), and `update` after the last action: its `dp` is communication, the rest
    the optimizer. `waits`: a rank does nothing else while it sends.
    """
    simulation = simulate_stages(schedule, [stage.cost(waits) for stage in stages])
    rank = max(range(schedule.ranks), key=lambda r: simulation.busy[r])
    busy, sent = Parts(), 0.0
    for action in schedule.actions[rank]:
        stage = stages[schedule.stage_of(rank, action.chunk)]
        busy += stage.parts(action.kind)
        sent += stage.send if waits and action.kind != "W" else 0.0
    parts = busy.named_seconds()
    parts["dp"] += update.dp
    parts["pp"] = sent
    parts["bubble"] = max(0.0, simulation.span - busy.total - sent)
    parts["optimizer"] = update.total - update.dp
    return spread.around(sum(parts.values()), parts), simulation


# Errors of predicted step times: each publication was left out in turn, and its runs predicted with
# efficiencies fitted to the others (`python -m benchmarks.planning.accuracy --write`).
FILE = Path(__file__).with_name("errors.yaml")
EXPERTS = ", experts"
FEW = 20
"""Rows below which the interval comes from the largest error, not from a quantile."""
WIDER = 1.25


def error_group(device: str, experts: bool) -> str:
    """Return the key of a device's errors; models with experts, predicted less well, have their
    own.
    """
    return device + EXPERTS * experts


def half_width(errors: Sequence[float]) -> float:
    """Return half the width of the 90 % interval, a logarithm: of 20 errors and more the 90 %
    quantile of their absolute values, else the largest x 1.25.
    """
    n = len(errors)
    if n == 0:
        return math.log(2)
    if n < FEW:
        return WIDER * max(errors)
    return sorted(errors)[min(n - 1, math.ceil(0.9 * (n + 1)) - 1)]


@dataclass(frozen=True)
class PredictionErrors:
    """Errors of runs predicted while their publication was left out."""

    rows: tuple[tuple[str, str, str, float], ...]
    """row_id, dataset, error group, log(measured / predicted)."""

    def spread(self, group: str) -> ErrorSpread:
        """Return half the width of the 90 % interval of a time in `group`; twice that of all rows
        together where the group has none, and never less than that of all rows.
        """
        own = [abs(e) for _, _, g, e in self.rows if g == group]
        everything = [
            abs(e) for _, _, g, e in self.rows if g.endswith(EXPERTS) == group.endswith(EXPERTS)
        ]
        if own:
            return ErrorSpread(max(half_width(own), half_width(everything)), len(own), True)
        return ErrorSpread(2 * half_width(everything), len(everything), False)


def read_errors(file: Path = FILE) -> PredictionErrors:
    """Read errors.yaml. Raises Refused."""
    rows = gate.read_yaml(file, kinds.PREDICTION_ERRORS)["errors"]
    return PredictionErrors(tuple((a, b, c, d) for a, b, c, d in rows))
