"""How wrong a predicted step time may be, from the errors of published runs (errors.yaml).

`python -m benchmarks.planning.accuracy --write` writes that file: each publication is left out in
turn, and its runs are predicted with efficiencies fitted to the others.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from dolmen.files import gate, kinds
from dolmen.planning.step import Spread

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

    def spread(self, group: str) -> Spread:
        """Return half the width of the 90 % interval of a time in `group`; twice that of all rows
        together where the group has none, and never less than that of all rows.
        """
        own = [abs(e) for _, _, g, e in self.rows if g == group]
        everything = [
            abs(e) for _, _, g, e in self.rows if g.endswith(EXPERTS) == group.endswith(EXPERTS)
        ]
        if own:
            return Spread(max(half_width(own), half_width(everything)), len(own), True)
        return Spread(2 * half_width(everything), len(everything), False)


def read_errors(file: Path = FILE) -> PredictionErrors:
    """Read errors.yaml. Raises Refused."""
    rows = gate.read_yaml(file, kinds.PREDICTION_ERRORS)["errors"]
    return PredictionErrors(tuple((a, b, c, d) for a, b, c, d in rows))
