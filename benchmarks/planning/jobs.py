"""The jobs that a published run may have been: one for each way to fill its empty cells. What does
not fit together is taken for what is nearest, with a warning.
"""

import math
import re
from collections.abc import Iterable, Iterator
from itertools import product
from typing import NamedTuple

from benchmarks.planning.forecast import Job
from benchmarks.planning.models import experts_of, has_experts, load_of, tree_of
from benchmarks.planning.programs import Ways, ways
from benchmarks.planning.published import Published
from dolmen.core.topology import Topology
from dolmen.planning.cost import Placement
from dolmen.planning.hardware import Cluster

MOST_JOBS = 48
BATCHES = (1, 4, 16)
VIRTUAL = (2, 3, 4, 6, 8)
"""Microbatches per stage of a pipeline, of a run that does not say its batch."""
LENGTHS = (1024, 2048, 4096)
"""Tokens of a sequence, of a run that does not say it."""
MOST_ACTIONS = 1 << 18
"""Microbatches x stages of a pipeline that is simulated: 3,072 sequences through 64 stages pass."""


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
    for empty, tried in (("gbs", BATCHES), ("seq", LENGTHS)):
        if (row.batch if empty == "gbs" else row.count(empty)) is None:
            of = " microbatches per stage" * (empty == "gbs")
            warnings.append(f"{empty} is empty: {', '.join(map(str, tried))}{of} are tried")
    for choice in _thinned(_choices(row, gpus, cluster.gpus_per_node, warnings), warnings):
        if choice.micros * choice.pp * choice.chunks > MOST_ACTIONS:
            words = f"{choice.micros:,} microbatches through {choice.pp * choice.chunks:,} stages"
            warnings.append(f"{words} are too many to simulate")
            continue
        yield choice.words(row), _job(row, cluster, choice, warnings)


class Filled(NamedTuple):
    """A row with a value in each empty cell."""

    way: Ways
    tp: int
    pp: int
    cp: int
    dp: int
    mbs: int
    batch: int
    length: int
    schedule: str
    chunks: int
    recompute: str

    @property
    def micros(self) -> int:
        """Of a replica."""
        return max(1, self.batch // (self.dp * self.mbs))

    def words(self, row: Published) -> str:
        """For a person, with a batch and a length that the row does not say."""
        told = f"{self.way.name}, tp {self.tp} pp {self.pp} cp {self.cp} dp {self.dp} microbatch "
        told += f"{self.mbs}, {self.schedule} x {self.chunks}, recompute {self.recompute}"
        told += f", gbs {self.batch}" * (row.batch is None)
        return told + f", seq {self.length}" * (row.count("seq") is None)


def _choices(row: Published, gpus: int, node: int, warnings: list[str]) -> Iterator[Filled]:
    """What fits its cells; none where they contradict each other."""
    layouts = _layouts(row, gpus, node)
    for way, (tp, pp, cp) in product(ways(row), layouts):
        dp, left = divmod(gpus, tp * pp * cp)
        if left:
            warnings.append(
                f"tp {tp} x pp {pp} x cp {cp} does not divide num_gpus {gpus}: nothing is predicted"
            )
            return
        if (said := row.count("dp") or dp) != dp:
            words = f"tp {tp} x pp {pp} x cp {cp} x dp {said} is not num_gpus {gpus}"
            warnings.append(f"{words}: dp taken as {dp}")
        for mbs, length in product(_microbatches(row, dp), _lengths(row)):
            for batch in _batches(row, dp, pp, mbs):
                for (schedule, chunks), again in product(
                    _schedules(row, pp), _recomputes(row, way)
                ):
                    one = (way, tp, pp, cp, dp, mbs, batch, length, schedule, chunks, again)
                    yield _whole(Filled(*one), warnings)


def _whole(choice: Filled, warnings: list[str]) -> Filled:
    """With a batch of whole microbatches, and a schedule that takes so many."""
    dp, mbs, micros = choice.dp, choice.mbs, choice.micros
    taken = micros * dp * mbs
    if taken != choice.batch:
        warnings.append(
            f"gbs {choice.batch} is not divisible by dp {dp} x mbs {mbs}: taken as {taken}"
        )
    if choice.schedule == "interleaved" and micros % choice.pp:
        warnings.append(
            f"{micros} microbatches are not divisible by pp {choice.pp}, as interleaved needs: "
            "predicted as 1f1b"
        )
        choice = choice._replace(schedule="1f1b", chunks=1)
    return choice._replace(batch=taken)


def _thinned(choices: Iterable[Filled], warnings: list[str]) -> list[Filled]:
    """At most MOST_JOBS, evenly; what differs in recomputation alone stays together."""
    alike: dict[Filled, list[Filled]] = {}
    for choice in dict.fromkeys(choices):
        alike.setdefault(choice._replace(recompute=""), []).append(choice)
    found = list(alike.values())
    most = MOST_JOBS // max(map(len, found), default=1)
    if len(found) > most:
        warnings.append(f"{len(found)} choices fit its empty cells: {most} of them are tried")
        found = [found[number * len(found) // most] for number in range(most)]
    return [choice for some in found for choice in some]


def _job(row: Published, cluster: Cluster, choice: Filled, warnings: list[str]) -> Job:
    way, length = choice.way, choice.length
    world, folded = _world(row, choice.dp, choice.tp, choice.pp, choice.cp, warnings)
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
        choice.schedule,
        choice.chunks,
        choice.micros,
        choice.mbs,
        length,
        sequence_parallel and world.tp > 1,
        choice.recompute,
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


def _batches(row: Published, dp: int, pp: int, mbs: int) -> list[int]:
    return [row.batch] if row.batch else [dp * pp * mbs * times for times in BATCHES]


def _lengths(row: Published) -> list[int]:
    length = row.count("seq")
    return [length] if length else list(LENGTHS)


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
    # stages are alike, or are with the embedding and the head as a layer each (2407.21783, 3.3.2)
    whole = [v for v in VIRTUAL if layers % (pp * v) == 0 or (layers + 2) % (pp * v) == 0]
    several = [("interleaved", v) for v in whole or VIRTUAL if pp * v <= layers + pp]
    if row.schedule == "interleaved":
        return several or [("interleaved", 2)]
    return [("1f1b", 1), *several[:1]]
