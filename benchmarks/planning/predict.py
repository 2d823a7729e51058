"""Published runs beside what is predicted of them. An empty cell is filled with what fits: there
are as many jobs as choices, the point is their median and the interval spans them all.
"""

from dataclasses import dataclass, replace
from statistics import median

from benchmarks.planning.clusters import cluster_of
from benchmarks.planning.forecast import Forecast, Job, forecast
from benchmarks.planning.jobs import jobs
from benchmarks.planning.models import experts_of
from benchmarks.planning.published import Published
from dolmen.planning.hardware import GIB, Cluster
from dolmen.planning.step import ErrorSpread, Estimate, error_group


@dataclass(frozen=True)
class Prediction:
    """Of a row. `forecast` is of its median choice; None where no job can be made of it."""

    row: Published
    forecast: Forecast | None
    low: float
    high: float
    chosen: str
    """What empty cells were taken for, and how many choices there were."""
    device: str
    warnings: tuple[str, ...]
    measured: float | None = None
    """Seconds of a step, as the row says or as follows from it."""

    @property
    def known(self) -> Forecast:
        """Raises ValueError where nothing is predicted."""
        if self.forecast is None:
            raise ValueError(f"{self.row.row_id}: nothing is predicted of it")
        return self.forecast


def predict(row: Published, spread_of, cluster: Cluster | None = None) -> Prediction:
    """Predict a row. `spread_of` takes an `error_group`; `cluster` replaces the row's."""
    warnings = list(row.warnings)
    cluster = cluster or cluster_of(row, warnings)
    device = error_group(cluster.device.name, experts_of(row) is not None)
    spread: ErrorSpread = spread_of(device)
    measured = measured_of(row, cluster, warnings)
    found: list[tuple[str, Job, Forecast]] = []
    problems: list[str] = []
    try:  # a model that cannot be made is known as the first job is
        asked = list(jobs(row, cluster, warnings))
    except ValueError as error:
        asked, problems = [], [str(error)]
    for words, job in asked:
        try:
            found.append((words, job, forecast(job, spread)))
        except ValueError as error:
            problems.append(str(error))
    if not found:
        warnings += problems[:1]
        told = tuple(dict.fromkeys(warnings))
        return Prediction(row, None, 0.0, 0.0, "", device, told, measured)
    found = _that_fit(found)
    found.sort(key=lambda item: item[2].estimate.seconds)
    words, _, middle = found[(len(found) - 1) // 2]
    between = median(f.estimate.seconds for _, _, f in found)
    middle = replace(middle, estimate=scaled(middle.estimate, between))
    if len(found) > 1:
        words = f"{words}; the median of {len(found)} that fit"
    return Prediction(
        row,
        middle,
        found[0][2].estimate.low,
        found[-1][2].estimate.high,
        words,
        device,
        tuple(dict.fromkeys(warnings)),
        measured,
    )


def measured_of(row: Published, cluster: Cluster, warnings: list[str]) -> float | None:
    """Seconds of a step; of a row that says a share of the peak alone, of the datasheet's, and of
    FLOPs as its convention counts them.
    """
    found = row.measured()
    if found is not None or row.share_of_peak is None:
        return found
    peak, dtype = cluster.device.peak, row.precision or "bf16"
    found = row.measured(peak.get(dtype, peak.get("fp16", 0.0)))
    if found is None:
        warnings.append(
            "mfu_pct or hfu_pct alone, and flops_convention does not say what is counted: "
            "nothing is measured"
        )
    return found


Found = list[tuple[str, Job, Forecast]]
CLOSE = 1.05
"""Of a device's memory: what is counted over it by less may have fitted."""


def _that_fit(found: Found) -> Found:
    """Of several choices those that fit, or else all; of those that differ in recomputation alone
    the one that recomputes least: nobody computes again what he has room for.
    """
    fit = [item for item in found if item[2].holds <= CLOSE * item[2].memory] or found
    least: dict[Job, tuple[str, Job, Forecast]] = {}
    for item in fit:
        least.setdefault(replace(item[1], recompute=""), item)
    return list(least.values())


def scaled(estimate: Estimate, seconds: float) -> Estimate:
    """The same of another time, with its parts in proportion."""
    by = seconds / estimate.seconds
    parts = {name: part * by for name, part in estimate.parts.items()}
    return Estimate(seconds, estimate.low * by, estimate.high * by, parts)


def gib(prediction: Prediction) -> float | None:
    """What an allocator would count on the fullest rank."""
    return None if prediction.forecast is None else prediction.forecast.tensors / GIB
