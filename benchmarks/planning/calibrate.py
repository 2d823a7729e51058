"""The efficiencies of devices, fitted to measured runs, and how wrong a time may be.

A device has few: how fast it computes, sweeps memory, and sends. A run's time is a sum of parts, of
which each is inversely as one of them (what is waited for as all), so factors for the three are
fitted to the logarithms of measured / predicted, held near 1 as far as few rows say little. The
error is that of runs that were not fitted: one paper is left out at a time, all its rows together,
and predicted from the others.
"""

import argparse
import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median

import numpy as np

from benchmarks.planning.predict import Prediction, predict
from benchmarks.planning.published import FOLDER, Published, read_rows
from dolmen.planning.step import ErrorSpread, PredictionErrors

GROUPS = {
    "compute": ("product", "attention"),
    "memory": ("memory", "optimizer", "host"),
    "links": ("tp", "cp", "ep", "dp", "pp"),
}


@dataclass(frozen=True)
class Sample:
    """A measured run: where the time of its prediction went, and how far off that was."""

    row_id: str
    dataset: str
    device: str
    shares: tuple[float, float, float]
    """Of GROUPS, of all that is not waited for."""
    log_ratio: float
    """Of measured over predicted."""


@dataclass(frozen=True)
class Calibration:
    """What measured runs say. `factors`: device -> of each of GROUPS, by what its time is
    multiplied.
    """

    factors: Mapping[str, tuple[float, float, float]]
    errors: PredictionErrors
    """Of each run, predicted with its publication left out."""
    fitted: PredictionErrors = PredictionErrors(())
    """Of each run, predicted with factors that were fitted to it too."""
    warnings: tuple[str, ...] = ()
    """What of its rows was not understood or had to be chosen, each with its row_id."""


def warned(predicted: Prediction) -> Iterator[str]:
    """What was not understood of a row, and why nothing is learnt of it where that is so."""
    yield from predicted.warnings
    if predicted.row.status == "oom":
        yield "it ran out of memory: nothing is learnt of its time"
    elif predicted.measured is None:
        yield "it does not say what was measured: nothing is learnt of it"


def sample_of(predicted: Prediction) -> Sample | None:
    """None where nothing is predicted, or nothing was measured."""
    ran = predicted.row.status != "oom"
    if not ran or predicted.forecast is None or predicted.measured is None:
        return None
    estimate = predicted.forecast.estimate
    sums = [sum(estimate.parts.get(name, 0.0) for name in names) for names in GROUPS.values()]
    whole = sum(sums)
    return Sample(
        predicted.row.row_id,
        predicted.row.dataset,
        predicted.device,
        (sums[0] / whole, sums[1] / whole, sums[2] / whole),
        math.log(predicted.measured / estimate.seconds),
    )


def fit(found: Sequence[Sample]) -> tuple[float, float, float]:
    """Factors of the three groups for one device, by least squares on logarithms; each paper counts
    as much as any other, however many rows it has, and that a factor is 1 as much as a paper.
    """
    counts = Counter(s.dataset for s in found)
    shares = np.array([s.shares for s in found]).reshape(-1, 3)
    wanted = np.array([s.log_ratio for s in found])
    weight = np.array([counts[s.dataset] ** -0.5 for s in found])
    x = np.zeros(3)
    for _ in range(20):  # Gauss and Newton
        terms = shares * np.exp(x)
        slope = terms / terms.sum(1, keepdims=True)
        left = wanted - np.log(terms.sum(1))
        a = np.vstack([slope * weight[:, None], np.eye(3)])
        b = np.concatenate([left * weight, -x])
        x = x + np.linalg.lstsq(a, b, rcond=None)[0]
    first, second, third = np.exp(x)
    return float(first), float(second), float(third)


def applied(sample: Sample, factors: tuple[float, float, float]) -> float:
    """log(measured / predicted) with these factors."""
    pairs = zip(sample.shares, factors, strict=True)
    return sample.log_ratio - math.log(sum(share * factor for share, factor in pairs))


def calibrate(rows: Iterable[Published]) -> Calibration:
    """Raises ValueError where no row can be learnt from."""
    unknown = ErrorSpread(0.0, 0, False)
    predictions = [predict(row, lambda device: unknown) for row in rows]
    found = [sample for one in predictions if (sample := sample_of(one))]
    warnings = tuple(f"{one.row.row_id}: {said}" for one in predictions for said in warned(one))
    if not found:
        raise ValueError(
            "no row says what was measured (step_time_s, tokens_s_gpu or tflops_per_gpu) of a run "
            "that can be predicted: there is nothing to calibrate by"
            + "".join(f"; {said}" for said in warnings[:1])
        )
    devices = sorted({s.device for s in found})
    errors = []
    for left_out in sorted({s.dataset for s in found}):
        kept = [s for s in found if s.dataset != left_out]
        for sample in found:
            if sample.dataset == left_out:
                factors = fit([s for s in kept if s.device == sample.device])
                error = applied(sample, factors)
                errors.append((sample.row_id, sample.dataset, sample.device, error))
    factors = {device: fit([s for s in found if s.device == device]) for device in devices}
    fitted = tuple((s.row_id, s.dataset, s.device, applied(s, factors[s.device])) for s in found)
    return Calibration(factors, PredictionErrors(tuple(errors)), PredictionErrors(fitted), warnings)


def coverage(errors: PredictionErrors) -> tuple[float, float]:
    """Of intervals that are made without a run's own publication: their median high / low, and the
    share of runs inside.
    """
    widths, inside = [], 0
    for _, paper, group, error in errors.rows:
        others = PredictionErrors(tuple(row for row in errors.rows if row[1] != paper))
        half = others.spread(group).log
        widths.append(math.exp(2 * half))
        inside += abs(error) <= half
    return median(widths), inside / len(widths)


def report(calibration: Calibration) -> list[str]:
    """Return the lines that a person reads."""
    lines = [f"warning: {said}" for said in calibration.warnings]
    lines += [
        f"{row_id}: {math.expm1(-error):+.1%} against what was measured, predicted without {paper}"
        for row_id, paper, _, error in calibration.errors.rows
    ]
    for device, factors in calibration.factors.items():
        spread = calibration.errors.spread(device)
        times = ", ".join(f"{n} {f:.3f}" for n, f in zip(GROUPS, factors, strict=True))
        lines.append(f"{device}: times x {times}; divide its efficiencies by them")
        lines.append(f"{device}: {spread.words}: times x / {math.exp(spread.log):.3f}")
    return lines


def errors_yaml(errors: PredictionErrors) -> str:
    """Return the text of errors.yaml, as `read_errors` reads it."""
    lines = [
        "# Written by `python -m benchmarks.planning.accuracy --write`.",
        "errors:",
    ]
    for row_id, dataset, group, error in errors.rows:
        lines.append(f'  - ["{row_id}", "{dataset}", "{group}", {error:.6f}]')
    return "\n".join(lines) + "\n"


def published_rows() -> list[Published]:
    """Read all published runs of benchmarks/planning/runs."""
    return read_rows(sorted(FOLDER.glob("*.csv")))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("rows", type=Path, help="CSV file of measured runs, columns as in runs/")
    try:
        for line in report(calibrate(read_rows([parser.parse_args().rows]))):
            print(line)
    except ValueError as error:
        print(f"error: {error}")
        return 2
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
