"""Predicts the seconds of a step: simulates the pipeline's lists of actions with the seconds of
each stage, and adds what follows the last action. The 90 % interval comes from the errors of
predictions of measured runs.

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
    """How wrong a predicted time may be: in nine of ten cases its logarithm is off by at most
    `log`, either way.
    """

    log: float
    rows: int
    """Number of measured runs from which it comes."""
    device: bool
    """Some of them are of this device."""

    def around(self, seconds: float, parts: dict[str, float]) -> Estimate:
        """Return an estimate of `seconds` with its 90 % interval."""
        # symmetric in the logarithm, so x / factor to x * factor
        factor = math.exp(self.log)
        return Estimate(seconds, seconds / factor, seconds * factor, parts)

    @property
    def words(self) -> str:
        """Text for a report: the number of runs, and whether some are of this device."""
        of = (
            "some on this device"
            if self.device
            else "none on this device, so the interval is doubled"
        )
        return f"90 % interval from n = {self.rows} measured runs, {of}"


@dataclass(frozen=True)
class Stage:
    """Seconds of a virtual stage for one microbatch."""

    forward: Parts
    backward: Parts
    """The whole backward, recomputation included."""
    inputs: Parts = Parts()
    """The part of a split backward for which earlier stages wait."""
    weights: Parts = Parts()
    """The rest of a split backward."""
    send: float = 0.0
    """Seconds of sending its result to the next stage, or back to the one before."""

    def parts(self, kind: str) -> Parts:
        """Return the seconds, by cause, of a kind of action of this stage: F, B, I or W."""
        return {"F": self.forward, "B": self.backward, "I": self.inputs, "W": self.weights}[kind]

    def cost(self, waits: bool) -> Cost:
        """Return the stage's total seconds per kind of action, as the schedule simulator takes
        them. `waits`: a rank does nothing else while it sends, so that sends count as computation.
        """
        parts = (self.forward, self.backward, self.inputs)
        forward, backward, inputs = (p.total + (self.send if waits else 0) for p in parts)
        return Cost(forward, backward, inputs, self.weights.total, self.send)


def rows_seconds(rows: Operations, machine: Machine) -> Stage:
    """Return the predicted seconds of each kind of action for the operations of a part of a stage;
    its `send` is 0.
    """
    return Stage(
        action_seconds(rows.forward, machine),
        action_seconds(rows.backward, machine),
        action_seconds(rows.inputs, machine),
        action_seconds(rows.weights, machine),
    )


def combine_parts(parts: Sequence[tuple[int, Stage]], send: float) -> Stage:
    """Return the seconds of a stage that consists of (number, part) pairs, each part so often.
    `send`: seconds of sending its result.
    """
    kinds = [[part.parts(kind).times(number) for number, part in parts] for kind in "FBIW"]
    return Stage(*(sum(kind, Parts()) for kind in kinds), send=send)


def step_time(
    stages: Sequence[Stage],
    schedule: Schedule,
    update: Parts,
    spread: ErrorSpread,
    waits: bool = False,
) -> tuple[Estimate, Simulation]:
    """Simulate a step and return its estimate and the simulation. `stages`: seconds of each virtual
    stage in order. `update`: what follows the last action; its `dp` is communication, the rest the
    optimizer. `waits`: a rank does nothing else while it sends.
    """
    simulation = simulate_stages(schedule, [stage.cost(waits) for stage in stages])
    # the parts are those of the rank that computes longest
    rank = max(range(schedule.ranks), key=lambda r: simulation.busy[r])
    busy, sent = Parts(), 0.0
    for action in schedule.actions[rank]:
        stage = stages[schedule.stage_of(rank, action.chunk)]
        # by cause, for the breakdown
        busy += stage.parts(action.kind)
        sent += stage.send if waits and action.kind != "W" else 0.0
    parts = busy.named_seconds()
    parts["dp"] += update.dp
    parts["pp"] = sent
    # whatever of the span that rank does not use
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
    """Return the key of a device's errors, such as "h100" or "h100, experts": models with experts
    are predicted less well.
    """
    return device + EXPERTS * experts


def half_width(errors: Sequence[float]) -> float:
    """Return half the width of the 90 % interval, as a logarithm, from absolute errors: the 90 %
    quantile of 20 or more, the largest x 1.25 of fewer, log 2 of none.
    """
    n = len(errors)
    if n == 0:
        return math.log(2)
    if n < FEW:
        return WIDER * max(errors)
    # conformal quantile: (n + 1) for the run to come
    return sorted(errors)[min(n - 1, math.ceil(0.9 * (n + 1)) - 1)]


@dataclass(frozen=True)
class PredictionErrors:
    """Errors of measured runs, each predicted while its publication was left out of the fit."""

    rows: tuple[tuple[str, str, str, float], ...]
    """row_id, dataset, error group, log(measured / predicted)."""

    def spread(self, group: str) -> ErrorSpread:
        """Return the 90 % interval for a device's group: from its own errors, but no narrower than
        from those of all devices; twice the latter if it has none.
        """
        errors = [abs(e) for _, _, g, e in self.rows if g == group]
        absolute = [
            abs(e) for _, _, g, e in self.rows if g.endswith(EXPERTS) == group.endswith(EXPERTS)
        ]
        if errors:
            return ErrorSpread(max(half_width(errors), half_width(absolute)), len(errors), True)
        # an unknown device is predicted less well: twice as wide
        return ErrorSpread(2 * half_width(absolute), len(absolute), False)


def read_errors(file: Path = FILE) -> PredictionErrors:
    """Read the errors of earlier predictions from a YAML file. Raises Refused."""
    rows = gate.read_yaml(file, kinds.PREDICTION_ERRORS)["errors"]
    return PredictionErrors(tuple((a, b, c, d) for a, b, c, d in rows))
