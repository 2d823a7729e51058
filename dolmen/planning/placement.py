"""Links that a group of ranks crosses, and how long a collective or a send over them takes.

    rank -> GPU -> node -> leaf -> spine -> core

Ranks fill nodes in order, `used` GPUs of each. A ring visits the members of one node before it goes
to the next, and a group has as many rings as members in a node, each through the adapter of its own
GPU: so g of the `used` GPUs of a node that are one group have g / used of its adapters, and the
other groups of the node the rest.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from dolmen.core.topology import Topology
from dolmen.planning.hardware import Cluster, Tier

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
        """Number of nodes that the group spans."""
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
        """Return the node of a rank."""
        return rank // self.used

    def road(self, ranks: Sequence[int]) -> Road:
        """Return the links between the ranks of a group, given in order."""
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
