"""Seconds of a row of a ledger on a device: a roofline whose roof depends on the shape.

A product is cut into tiles, one for each multiprocessor at a time, so it takes whole waves:

    seconds = waves x (contraction + fill) x 2 x tile / (rate of one multiprocessor)

with `fill` the steps of the contraction that a tile takes to begin and to write what it made. Of
the tiles that libraries have, the one that ends first is taken, and the contraction is cut too
where tiles are few (split-K). Nothing is faster than its bytes; all else is bytes alone.

The host issues one operator after another, and the device waits for it where it is faster. What a
collective takes is hidden as far as `Overlap` allows.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from statistics import NormalDist
from typing import Literal

from dolmen.core.topology import Topology
from dolmen.planning.hardware import Cluster, Device, Tier
from dolmen.planning.ledger import LedgerRow

# Links that a group of ranks crosses, and how long a collective or a send over them takes.
#
#     rank -> GPU -> node -> leaf -> spine -> core
#
# Ranks fill nodes in order, `used` GPUs of each. A ring visits the members of one node before it
# goes to the next, and a group has as many rings as members in a node, each through the adapter of
# its own GPU: so g of the `used` GPUs of a node that are one group have g / used of its adapters,
# and the other groups of the node the rest.

# wire of a tree against that of a ring, which NCCL leaves for it above some megabytes
TREE = 1.5


@dataclass(frozen=True)
class Road:
    """The links between the ranks of a group."""

    ranks: int
    """Ranks of the group."""
    together: int
    """Ranks in one node; where nodes have unlike numbers, the least."""
    rate: float
    """Bytes per second that the slowest link of a ring passes on."""
    alone: float
    """Bytes per second between the two ranks that are farthest from each other."""
    near: float
    """Bytes per second between two ranks of one node."""
    latency: float
    """Seconds of a ring step over the slowest link."""
    step: float
    """Seconds of a ring step inside a node."""
    tier: str
    """The farthest level that it crosses: gpu, node, or the name of a tier of switches."""

    @property
    def nodes(self) -> int:
        """Number of nodes that the group of ranks spans."""
        return -(-self.ranks // self.together)


@dataclass(frozen=True)
class Placement:
    """Ranks on the GPUs of a cluster. Raises ValueError where it has too few."""

    cluster: Cluster
    topology: Topology
    used: int
    """GPUs of each node that have a rank."""

    def __post_init__(self):
        """Raise ValueError where nodes have too few GPUs, or the cluster too few nodes."""
        if not 1 <= self.used <= self.cluster.gpus_per_node:
            raise ValueError(
                f"{self.used} GPUs per node are requested, but {self.cluster.name} has "
                f"{self.cluster.gpus_per_node} in each"
            )
        nodes = -(-self.topology.size // self.used)
        if nodes > self.cluster.nodes:
            raise ValueError(
                f"{self.topology.size:,} ranks take {nodes:,} nodes of {self.used} GPUs, but "
                f"{self.cluster.name} has {self.cluster.nodes:,}"
            )

    def node(self, rank: int) -> int:
        """Return the index of the node that a rank is on."""
        return rank // self.used

    def road(self, ranks: Sequence[int]) -> Road:
        """Return the links (bandwidth, latency, tier) between the ranks of a group, given
        in order.
        """
        inside, between = self.cluster.inside, self.cluster.between
        nodes = [self.node(rank) for rank in ranks]
        first, last = min(nodes), max(nodes)
        if first == last or between is None:
            tier = "gpu" if len(ranks) == 1 else "node"
            rate, latency = inside.rate, inside.latency
            if inside.peers is not None:  # a part of its links goes to the other members
                rate *= min(1.0, max(len(ranks) - 1, 1) / inside.peers)
            return Road(len(ranks), len(ranks), rate, rate, rate, latency, latency, tier)
        together = min(nodes.count(first), nodes.count(last))
        tier, thinner, latency = self._joining_tier(first, last)
        # the adapters are shared by all GPUs in use
        adapter = between.rate / self.used / thinner
        return Road(
            len(ranks),
            together,
            min(inside.rate, together * adapter),
            adapter,
            inside.rate,
            between.latency + latency,
            inside.latency,
            tier.name if tier else "network",
        )

    def _joining_tier(self, first: int, last: int) -> tuple[Tier | None, float, float]:
        """Return the tier of switches that joins two nodes (None without tiers), the product of
        oversubscriptions below it, and the seconds of latency up to it.
        """
        thinner, latency, tier = 1.0, 0.0, None
        for tier in self.cluster.tiers:
            latency += tier.latency
            if first // tier.nodes == last // tier.nodes:
                break
            # what leaves a switch shares its way up
            thinner *= tier.oversubscription
        return tier, thinner, latency


def collective_seconds(op: str, payload: int, road: Road) -> float:
    """Return the seconds of one collective over a group. `payload`: bytes, as `LedgerRow.payload`.

    A ring of n ranks sends (n - 1) / n of the payload, an all-reduce twice that. Small all-reduces
    go by a tree, whose steps are as many as the group has doublings, and whose inner ranks take
    from two and send to one. In an all-to-all only what is for other nodes leaves a node. Raises
    ValueError for an unknown collective.
    """
    n, g = road.ranks, road.together
    if n == 1:
        return 0.0
    share = (n - 1) / n
    # a part goes once around the ring: through every node, and over every link between two of them
    ring = (n - road.nodes) * road.step + (road.nodes - 1) * road.latency
    spec = math.log2(g) * road.step + math.ceil(math.log2(road.nodes)) * road.latency
    if op == "all-reduce":
        wire = 2 * share * payload / road.rate
        return min(wire + 2 * ring, TREE * wire + 2 * spec)
    if op in ("all-gather", "reduce-scatter"):
        return share * payload / road.rate + ring
    if op == "broadcast":
        return payload / road.rate + spec
    if op == "all-to-all":
        # each rank sends to all others at once, and not around a ring
        start = (g - 1) * road.step + (road.nodes - 1) * road.latency
        return max((n - g) / n * payload / road.alone, (g - 1) / n * payload / road.near) + start
    raise ValueError(
        f"there is no collective {op!r}: it must be all-reduce, all-gather, reduce-scatter, "
        "all-to-all or broadcast"
    )


def send_seconds(payload: int, road: Road) -> float:
    """Return the seconds of sending `payload` bytes from one rank of a pair to the other."""
    return payload / road.alone + road.latency


# rows x columns of a tile, and the share of a multiprocessor's rate that it reaches: small ones
# read more for each product (NVIDIA, Matrix Multiplication Background User's Guide, section 3)
TILES = ((256, 128, 1.0), (128, 256, 1.0), (128, 128, 0.92), (128, 64, 0.78), (64, 64, 0.58))
FILL = 128
SPLITS = (1, 2, 4, 8)
# of fused attention against its forward (Dao, 2307.08691, figures 5 and 6: 0.75 to 0.85)
ATTENTION_BACKWARD = 0.80
# what a collective that runs beside compute takes from it: multiprocessors and memory
CONTENTION = 0.25

Hides = Literal["nothing", "products", "action"]


@dataclass(frozen=True)
class Overlap:
    """Computation that hides the collectives of each axis: nothing; the products issued after a
    collective that is not waited for (`LedgerRow.overlapped`); everything that the action computes.
    """

    tp: Hides = "products"
    cp: Hides = "action"
    ep: Hides = "nothing"
    fsdp: Hides = "action"

    def hides_behind(self, axis: str) -> Hides:
        """Return what hides the collectives of a mesh axis: "nothing", the "products" issued after
        them, or the whole "action"; any axis but tp, cp and ep counts as fsdp.
        """
        known: Mapping[str, Hides] = {"tp": self.tp, "cp": self.cp, "ep": self.ep}
        return known.get(axis, self.fsdp)


@dataclass(frozen=True)
class Parts:
    """Seconds of a step or action by cause. They do not overlap: their sum is the time."""

    product: float = 0.0
    attention: float = 0.0
    memory: float = 0.0
    """Kernels bound by bytes."""
    host: float = 0.0
    """Time in which the device waits for the host."""
    tp: float = 0.0
    cp: float = 0.0
    ep: float = 0.0
    dp: float = 0.0
    """Parameters and gradients, over the ranks that share them."""

    @property
    def total(self) -> float:
        """Sum of all parts, in seconds."""
        return sum(self.named_seconds().values())

    @property
    def compute(self) -> float:
        """Seconds of products, attention and memory-bound kernels."""
        return self.product + self.attention + self.memory

    def named_seconds(self) -> dict[str, float]:
        """Return name of the part -> its seconds."""
        return dict(vars(self))

    def __add__(self, other: "Parts") -> "Parts":
        """Return the sum, part by part."""
        theirs = vars(other)
        return Parts(**{name: value + theirs[name] for name, value in vars(self).items()})

    def times(self, factor: float) -> "Parts":
        """Return the parts with each one's seconds multiplied by a factor."""
        return Parts(**{name: value * factor for name, value in vars(self).items()})


@dataclass(frozen=True)
class Machine:
    """One rank of a world placed on a cluster, for which rows are priced."""

    placement: Placement
    rank: int
    dtype: str = "bf16"
    """Dtype of products that do not say theirs."""
    overlap: Overlap = Overlap()
    roads: dict[str, Road] = field(default_factory=dict, compare=False, repr=False)
    """Links by axis, filled as they are needed."""

    @property
    def device(self) -> Device:
        """Device (GPU kind) of the cluster that the rank is placed on."""
        return self.placement.cluster.device

    @cached_property
    def slowest(self) -> float:
        """Ratio (1 or more) of the slowest GPU's time to the mean, since every step waits for it:
        of n normal numbers the largest is about the quantile (n - 3/8) / (n + 1/4) (Blom, 1958).
        """
        n = self.placement.topology.size
        return 1 + self.device.variation * NormalDist().inv_cdf((n - 0.375) / (n + 0.25))

    def road(self, axis: str) -> Road:
        """Return the links between the ranks of the group along the mesh axis `axis` that this rank
        is in; cached.
        """
        if axis not in self.roads:
            group = self.placement.topology.group(axis, self.rank)
            self.roads[axis] = self.placement.road(group)
        return self.roads[axis]

    def hop(self) -> Road:
        """Return the link from this rank to the next pipeline rank (or, of the last, to the first);
        cached.
        """
        if "hop" not in self.roads:
            line = self.placement.topology.group("pp", self.rank)
            at = line.index(self.rank)
            pair = sorted((self.rank, line[(at + 1) % len(line)]))
            self.roads["hop"] = self.placement.road(pair)
        return self.roads["hop"]


@lru_cache(maxsize=65536)
def product_seconds(
    device: Device, shape: tuple[int, int, int, int], dtype: str, moved: int
) -> float:
    """Return the seconds of a product of `shape` (batch, rows, columns, contraction) that reads and
    writes `moved` bytes: the fastest tiling, but no less than its bytes take. Without the kernel
    launch.
    """
    batch, rows, columns, contraction = shape
    share = device.fp8 if dtype == "fp8" else device.product
    rate = device.rate(dtype) * share / device.multiprocessors
    best = math.inf
    for tall, wide, reached in TILES:
        # tiles at the edge take as long as whole ones
        tiles = batch * -(-rows // tall) * -(-columns // wide)
        for split in SPLITS:
            steps = -(-contraction // split)
            # libraries do not split shorter contractions
            if split > 1 and steps < 256:
                break
            waves = _waves(tiles * split / device.multiprocessors)
            seconds = waves * 2 * tall * wide * (steps + FILL) / (rate * reached)
            if split > 1:  # parts are written in fp32 and added up
                seconds += (split + 1) * 4 * batch * rows * columns / device.bandwidth
            best = min(best, seconds)
    return max(best, moved / (device.bandwidth * device.streaming))


def _waves(full: float) -> float:
    """Return how many waves of tiles a product takes, at least 1, for `full` tiles per
    multiprocessor. A last wave that is not whole runs faster, as idle multiprocessors leave it
    power, cache and memory: half of what is missing is lost.
    """
    return max(1.0, 0.5 * full + 0.5 * math.ceil(full))


def row_seconds(row: LedgerRow, machine: Machine) -> float:
    """Return the predicted seconds of one ledger row (operation) by itself, once, whatever its
    `times`, with its kernel launch; for a row of kind host, of the host's read.
    """
    device = machine.device
    moved = row.read + row.written
    if row.kind == "product":
        return device.launch + product_seconds(
            device, _product_shape(row), row.dtype or machine.dtype, moved
        )
    if row.kind == "attention":
        share = device.tuned if "tuned" in row.op else device.attention
        share *= ATTENTION_BACKWARD if "backward" in row.op else 1
        # FLOPs by formula: causal ones only
        computed = row.flops / (device.rate(machine.dtype) * share)
        return device.launch + max(computed, moved / (device.bandwidth * device.streaming))
    if row.kind == "memory":
        return device.launch + moved / (device.bandwidth * device.streaming)
    if row.kind == "collective":
        return collective_seconds(row.op, row.payload, machine.road(row.axis))
    if row.kind == "send":
        return send_seconds(row.payload, machine.hop())
    return device.host + row.read / device.host_link


def _product_shape(row: LedgerRow) -> tuple[int, int, int, int]:
    """Return (batch, rows, columns, contraction) from the row's `shape`, which ends in the last
    three; the dimensions before them are multiplied to one batch, 1 if there are none.
    """
    *batch, rows, columns, contraction = row.shape
    return math.prod(batch), rows, columns, contraction


def action_seconds(rows: Iterable[LedgerRow], machine: Machine) -> Parts:
    """Return the predicted seconds, by cause, of the rows of one schedule action (or of the
    update), in the order in which the host issues them, with communication hidden as `Overlap`
    allows. Sends are left out: they belong to the schedule (step.py).
    """
    spent = {"product": 0.0, "attention": 0.0, "memory": 0.0}
    exposed = {"tp": 0.0, "cp": 0.0, "ep": 0.0, "dp": 0.0}
    behind = {"cp": 0.0, "dp": 0.0, "tp": 0.0, "ep": 0.0}  # to hide behind the whole action
    issued, waited = 0, 0.0
    pending, pending_axis = 0.0, "tp"  # hides behind the products that follow
    for row in rows:
        if row.kind == "send":
            continue
        seconds = row_seconds(row, machine) * row.times
        issued += row.times
        # anything else ends the products behind which it hid
        if row.kind != "product" and pending:
            exposed[pending_axis] += pending
            pending = 0.0
        if row.kind == "host":
            waited += seconds
        elif row.kind in spent:
            spent[row.kind] += seconds
            hidden = min(pending, seconds)
            pending -= hidden
            spent[row.kind] += CONTENTION * hidden
        elif row.kind == "collective":
            axis = row.axis if row.axis in exposed else "dp"
            hides = machine.overlap.hides_behind(row.axis)
            if hides == "products" and row.overlapped:
                pending, pending_axis = seconds, axis
            elif hides == "action":
                behind[axis] += seconds
            else:
                exposed[axis] += seconds
    exposed[pending_axis] += pending
    spent = {name: seconds * machine.slowest for name, seconds in spent.items()}
    computed = sum(spent.values())
    for axis, seconds in behind.items():
        hidden = min(seconds, computed)
        spent["memory"] += CONTENTION * hidden
        exposed[axis] += seconds - hidden
    # the host works at the same time: only its excess shows
    device = sum(spent.values()) + sum(exposed.values())
    return Parts(**spent, **exposed, host=waited + max(0.0, issued * machine.device.host - device))
