"""Published runs beside what is predicted of them. An empty cell is filled with what fits: there
are as many jobs as choices, the point is their median and the interval spans them all.
"""

import math
import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import product
from statistics import median

from dolmen.core.topology import Topology
from dolmen.planning.forecast import Forecast, Job, forecast
from dolmen.planning.hardware import GIB, Cluster, read_cluster
from dolmen.planning.placement import Placement
from dolmen.planning.programs import Ways, ways
from dolmen.planning.published import Published
from dolmen.planning.published_models import experts_of, has_experts, load_of, tree_of
from dolmen.planning.step import Estimate, Spread

# what a GPU is called -> the cluster that has it; the first that is found
CLUSTERS = (
    (r"gb[23]00|nvl72", "gb200-nvl72"),
    (r"b[23]00", "b200"),
    (r"h200", "hgx-h200"),
    (r"h100.*(500 ?w|hbm2e|96 ?gb)", "grand-teton"),
    (r"h[18]00|gh200|hopper", "hgx-h100"),
    (r"(a100|a800|ampere).*\b40 ?gb", "dgx-a100-40gb"),
    (r"a[18]00|ampere|selene", "dgx-a100"),
    (r"dgx-?2|sxm3", "dgx-2h"),
    (r"v100|volta|dgx-?1", "dgx-1"),
)
EXPERTS = ", experts"
MOST_JOBS = 48
MOST_ACTIONS = 1 << 18
"""Microbatches x stages of a pipeline that is simulated: 3,072 sequences through 64 stages pass."""


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


def known_as(device: str, experts: bool) -> str:
    """What errors are put down under: models with experts are predicted less well."""
    return device + EXPERTS * experts


def predict(row: Published, spread_of, cluster: Cluster | None = None) -> Prediction:
    """`spread_of(known_as(...))` -> Spread. `cluster`: in place of the one that the row names."""
    warnings = list(row.warnings)
    cluster = cluster or cluster_of(row, warnings)
    device = known_as(cluster.device.name, experts_of(row) is not None)
    spread: Spread = spread_of(device)
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


def _that_fit(found: Found) -> Found:
    """Of several choices those that fit, or else all; of those that differ in recomputation alone
    the one that recomputes least: nobody computes again what he has room for.
    """
    fit = [item for item in found if item[2].fits] or found
    least: dict[Job, tuple[str, Job, Forecast]] = {}
    for item in fit:
        least.setdefault(replace(item[1], recompute=""), item)
    return list(least.values())


def scaled(estimate: Estimate, seconds: float) -> Estimate:
    """The same of another time, with its parts in proportion."""
    by = seconds / estimate.seconds
    parts = {name: part * by for name, part in estimate.parts.items()}
    return Estimate(seconds, estimate.low * by, estimate.high * by, parts)


def cluster_of(row: Published, warnings: list[str]) -> Cluster:
    """By the GPU's name, and its network where the row says it."""
    name = row.gpu.lower()
    name += f" {int(row.numbers['gpu_mem_gb'])}gb" if "gpu_mem_gb" in row.numbers else ""
    found = next((to for pattern, to in CLUSTERS if re.search(pattern, name)), None)
    if found is None:
        warnings.append(f"gpu {row.gpu[:40]!r} is not known: taken for an A100")
    cluster = read_cluster(found or "dgx-a100")
    if found is None:  # of which no run is known
        cluster = replace(cluster, device=replace(cluster.device, name=row.gpu[:40] or "unknown"))
    per_node = row.count("gpus_per_node")
    if cluster.name == "dgx-1" and per_node == 16:
        cluster = read_cluster("dgx-2h")
    if per_node and per_node != cluster.gpus_per_node and cluster.between is not None:
        # another board of the same GPUs: as many adapters for each
        scale = per_node / cluster.gpus_per_node
        between = replace(cluster.between, bandwidth=cluster.between.bandwidth * scale)
        cluster = replace(cluster, gpus_per_node=per_node, between=between)
    rate = network(row.text_of_network, cluster.gpus_per_node)
    if rate and cluster.between is not None:
        cluster = replace(cluster, between=replace(cluster.between, bandwidth=rate))
    nodes = -(-(row.count("num_gpus") or 1) // cluster.gpus_per_node)
    return replace(cluster, nodes=max(cluster.nodes, nodes, row.count("num_gpus") or 1))


def network(text: str, gpus: int) -> float | None:
    """Bytes per second of a node's adapters, as people write it; None where they do not. GB are
    bytes, Gb and gb bits.
    """
    unit = r"(GB|[Gg]b)"
    if found := re.search(
        rf"([0-9.]+)\s*{unit}(?:/s|ps|it/s)?\s*(?:\([^)]*\)\s*)?(?:per|/|an?)\s*(?i:gpu)", text
    ):
        before = text[max(0, found.start() - 24) : found.start()].lower()
        if "nvlink" not in before and "nvswitch" not in before:
            return float(found[1]) * _bytes(found[2]) * gpus
    if found := re.search(rf"([0-9]+)\s*[xX]\s*([0-9.]+)\s*{unit}", text):
        return int(found[1]) * float(found[2]) * _bytes(found[3])
    return None


def _bytes(unit: str) -> float:
    return 1e9 if unit == "GB" else 1e9 / 8


def jobs(row: Published, cluster: Cluster, warnings: list[str]) -> Iterator[tuple[str, Job]]:
    """Of a row with its empty cells filled, each with words of how; at most MOST_JOBS."""
    gpus = row.count("num_gpus")
    if not gpus or not row.count("layers") or not row.count("hidden"):
        warnings.append("it does not say num_gpus, layers and hidden: nothing is predicted")
        return
    if has_experts(row) and experts_of(row) is None:
        warnings.append(
            "its name does not say what experts it has, nor does its text ('64 experts, top 2'): "
            "predicted as a model without"
        )
    choices = [
        (way, tp, pp, cp)
        for way in ways(row)
        for tp, pp, cp in _layouts(row, gpus, cluster.gpus_per_node)
    ]
    count = 0
    for way, tp, pp, cp in choices:
        dp, left = divmod(gpus, tp * pp * cp)
        if left:
            warnings.append(
                f"tp {tp} x pp {pp} x cp {cp} does not divide num_gpus {gpus}: nothing is predicted"
            )
            return
        if (said := row.count("dp") or dp) != dp:
            words = f"tp {tp} x pp {pp} x cp {cp} x dp {said} is not num_gpus {gpus}"
            warnings.append(f"{words}: dp taken as {dp}")
        for mbs, recompute, (schedule, chunks) in product(
            _microbatches(row, dp), _recomputes(row, way), _schedules(row, pp)
        ):
            if count == MOST_JOBS:
                return
            count += 1
            micros = (row.batch or 0) // (dp * mbs)
            if micros * pp * chunks > MOST_ACTIONS:
                words = f"{micros:,} microbatches through {pp * chunks:,} stages"
                warnings.append(f"{words} are too many to simulate")
                continue
            words = f"{way.name}, tp {tp} pp {pp} cp {cp} dp {dp} microbatch {mbs}"
            words += f", {schedule} x {chunks}, recompute {recompute}"
            world, folded = _world(row, dp, tp, pp, cp, warnings)
            yield words, _job(row, cluster, way, world, folded, mbs, recompute, schedule, chunks)


def _job(
    row: Published,
    cluster: Cluster,
    way: Ways,
    world: Topology,
    folded: int,
    mbs: int,
    recompute: str,
    schedule: str,
    chunks: int,
) -> Job:
    batch = row.batch or mbs * world.dp * world.pp * 4
    length = row.count("seq") or 2048
    micros = max(1, batch // (world.dp * mbs))
    if schedule == "interleaved" and micros % world.pp:
        schedule, chunks = "1f1b", 1
    sequence_parallel = row.sequence_parallel
    if sequence_parallel is None:
        sequence_parallel = way.name in ("Megatron-Core", "torchtitan") and world.tp > 1
    dtype = row.precision or ("fp16" if "bf16" not in cluster.device.peak else "bf16")
    dtype = "bf16" if dtype == "fp8" else dtype
    dtype = dtype if dtype in cluster.device.peak else "fp16"
    zero = way.zero if world.pp == 1 or way.zero < 3 else 2
    return Job(
        tree_of(row, length),
        Placement(cluster, world, min(_used(row, cluster), world.size)),
        way.program,
        way.overlap,
        schedule,
        chunks,
        micros,
        mbs,
        length,
        sequence_parallel and world.tp > 1,
        recompute,
        zero,
        dtype,
        way.waits,
        row.block_alone,
        folded,
        load_of(row),
        _copies(row, max(world.ep, folded), world.tp if folded == 1 else 1, cluster),
    )


def _copies(row: Published, ep: int, apart: int, cluster: Cluster) -> float | None:
    """Of a token, where experts of a node share one: the nodes that its experts are on, of a router
    that draws them evenly. `apart`: ranks between two of ep.
    """
    known, nodes = experts_of(row), -(-ep * apart // cluster.gpus_per_node)
    if known is None or nodes == 1 or not re.search(r"deepep|hybridep", row.text):
        return None
    return nodes * (1 - (1 - 1 / nodes) ** known.per_token)


def _world(
    row: Published, dp: int, tp: int, pp: int, cp: int, warnings: list[str]
) -> tuple[Topology, int]:
    """The ranks, and ep where those of tp are among it, else 1."""
    ep = row.count("ep") or 1
    known = experts_of(row)
    if ep == 1 or known is None:
        return Topology(dp, tp, pp, cp), 1
    alone = tp > 1 and bool(re.search(r"\betp ?=? ?1\b", row.text))
    if dp * cp % ep == 0 and not alone:
        return Topology(dp, tp, pp, cp, ep), 1
    if dp * cp * tp % ep == 0 and known.number % ep == 0:
        return Topology(dp, tp, pp, cp), ep
    warnings.append(f"ep {ep} divides no {dp * cp * tp} ranks of dp x cp x tp: taken as 1")
    return Topology(dp, tp, pp, cp), 1


def _used(row: Published, cluster: Cluster) -> int:
    """GPUs of each node that a run used, where a note says it."""
    found = re.search(
        r"\b([0-9]{1,2}) (?:of [0-9]+ )?gpus? (?:used )?(?:per|of each) node", row.text
    )
    return min(int(found[1]) if found else cluster.gpus_per_node, cluster.gpus_per_node)


def _layouts(row: Published, gpus: int, node: int) -> list[tuple[int, int, int]]:
    """tp, pp and cp: as said, else as fit: tp within a node, pp over the layers."""
    tp, pp, cp, dp = (row.count(name) for name in ("tp", "pp", "cp", "dp"))
    if tp and pp:
        return [(tp, pp, cp or 1)]
    if row.zero == 3 and not tp and not pp and dp in (None, gpus // (cp or 1)):
        return [(1, 1, cp or 1)]
    tps = [tp] if tp else [t for t in (1, 2, 4, 8) if t <= node]
    pps = [pp] if pp else [p for p in (1, 2, 4, 8, 16) if p <= (row.count("layers") or 1)]
    found = [(t, p, cp or 1) for t in tps for p in pps if gpus % (t * p * (cp or 1)) == 0]
    return [c for c in found if math.prod(c) * (dp or 0) == gpus] or found


def _microbatches(row: Published, dp: int) -> list[int]:
    said = row.count("mbs")
    if said:
        return [said]
    batch = row.batch
    pp = row.count("pp") or 1
    if "torchtitan" in row.framework.lower() and pp > 1 and batch and batch % (dp * pp) == 0:
        return [batch // (dp * pp)]  # its default, a microbatch for each stage
    return [m for m in (1, 2, 4, 8) if batch is None or batch % (dp * m) == 0] or [1]


def _recomputes(row: Published, way: Ways) -> list[str]:
    if row.recompute:
        return [row.recompute]
    return ["selective", "full"] if way.program.attention == "scores" else ["none", "full"]


def _schedules(row: Published, pp: int) -> list[tuple[str, int]]:
    """The name, and virtual stages of a rank."""
    chunks, layers = row.count("vp"), row.count("layers") or 1
    if pp == 1:
        return [("1f1b", 1)]
    if row.schedule in ("1f1b", "gpipe", "zero-bubble"):
        return [(row.schedule, 1)]
    if chunks:
        return [("interleaved", chunks) if chunks > 1 else ("1f1b", 1)]
    several = [("interleaved", v) for v in (2, 3, 4, 6, 8) if pp * v <= layers + pp]
    if row.schedule == "interleaved":
        return several or [("interleaved", 2)]
    return [("1f1b", 1), *several[:1]]


def gib(prediction: Prediction) -> float | None:
    """What an allocator would count on the fullest rank."""
    return None if prediction.forecast is None else prediction.forecast.tensors / GIB
