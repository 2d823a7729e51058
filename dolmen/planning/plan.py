"""What a plan says, as data: `dolmen plan` makes it, its table and `--report` (report.py) read it.
Seconds, bytes, watts; money in one currency, whichever the prices are in. Nothing here knows of
torch.
"""

from dataclasses import dataclass
from typing import NamedTuple

from dolmen.parallel.actions import Schedule
from dolmen.parallel.schedule import Simulation
from dolmen.planning.ledger import Live


class Interval(NamedTuple):
    """A number and the ends of its 90 % interval."""

    low: float
    point: float
    high: float


@dataclass(frozen=True)
class Tier:
    """One kind of link, from the inside out: within a node, within a leaf, a spine, the core."""

    name: str
    gpus: int
    """GPUs under one switch of it: two of them talk over the first tier that holds both."""
    bandwidth: float
    """Bytes a second of a GPU, one way, oversubscription included."""


@dataclass(frozen=True)
class Prices:
    """What a cluster costs. A price that is not known is 0, and no curve of it is drawn."""

    rent: float = 0
    """Per GPU and hour."""
    node: float = 0
    """Of a node with its share of the network, bought."""
    years: float = 4
    """Over which what was bought is written off."""
    watts: float = 0
    """Per GPU under load, with its share of host, network and cooling."""
    kilowatt_hour: float = 0


@dataclass(frozen=True)
class Cluster:
    name: str
    gpu: str
    nodes: int
    gpus_per_node: int
    memory: float
    """Bytes of a GPU."""
    tiers: tuple[Tier, ...]
    prices: Prices = Prices()

    @property
    def gpus(self) -> int:
        return self.nodes * self.gpus_per_node


@dataclass(frozen=True)
class StageMemory:
    """What the fullest rank of a pipeline rank holds."""

    live: Live
    """At its peak."""
    other: int
    """Context, communicators and workspace, as stated."""
    along: tuple[int, ...] = ()
    """Total bytes after each action of its list, `other` included; empty where not simulated."""

    @property
    def total(self) -> int:
        return self.live.total + self.other


class Traffic(NamedTuple):
    """What a GPU sends in a step over a tier, for an axis of the mesh."""

    tier: str
    axis: str
    sent: float
    """Bytes."""
    seconds: float
    """That the link is busy, hidden behind compute or not."""


@dataclass(frozen=True)
class Candidate:
    """A layout that fits, with what it is thought to do."""

    layout: dict[str, int | str | bool]
    """Options as `dolmen train` takes them, without dashes: {"layout.tp": 8, ...}."""
    seconds: Interval
    """Of a step."""
    parts: dict[str, float]
    """Name -> seconds; their sum is the point of `seconds`."""
    memory: tuple[StageMemory, ...]
    """Of each pipeline rank."""
    bound: str
    """What bounds it: compute, tp, bubble, dp, memory, host."""
    mfu: float = 0
    """Floating-point operations of the model alone, over the peak of the datasheet."""
    traffic: tuple[Traffic, ...] = ()

    @property
    def words(self) -> str:
        """The layout as a person says it: "tp 8 pp 16"."""
        return " ".join(
            name.rpartition(".")[2] if value is True else f"{name.rpartition('.')[2]} {value}"
            for name, value in self.layout.items()
            if value is not False
        )


class Timeline(NamedTuple):
    """The pipeline of the best candidate, with the costs of its own stages."""

    schedule: Schedule
    simulation: Simulation


class Fleet(NamedTuple):
    """The best layout of so many GPUs."""

    gpus: int
    seconds: Interval
    words: str


@dataclass(frozen=True)
class Plan:
    model: str
    parameters: int
    sequence_length: int
    global_batch_size: int
    cluster: Cluster
    ranked: tuple[Candidate, ...]
    """The fastest first; at least one."""
    timeline: Timeline
    fleets: tuple[Fleet, ...] = ()
    """Other numbers of GPUs of this kind, for the front of time against cost."""
    considered: int = 0
    """Layouts that were looked at, those that do not fit included."""

    @property
    def step_tokens(self) -> int:
        return self.sequence_length * self.global_batch_size
