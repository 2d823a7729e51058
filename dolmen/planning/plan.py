"""The result of a plan, as data: `dolmen plan` makes it; its table and `--report` (report.py) read
it. Seconds, bytes, watts; money in one currency, whichever the prices are in.
"""

import shlex
from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

from dolmen.core.log import gib
from dolmen.parallel.schedule import Schedule
from dolmen.parallel.simulation import Simulation
from dolmen.planning.hardware import Cluster
from dolmen.planning.ledger import Live
from dolmen.planning.step import Estimate


@dataclass(frozen=True)
class Prices:
    """Prices of GPUs. A price that is not known is 0, and no curve of it is drawn."""

    rent: float = 0
    """Per GPU and hour."""
    node: float = 0
    """Price of a node with its share of the network, bought."""
    years: float = 4
    """Over which what was bought is written off."""
    kilowatt_hour: float = 0


@dataclass(frozen=True)
class StageMemory:
    """Memory of the fullest rank of a pipeline rank."""

    live: Live
    """Bytes by kind at its peak."""
    other: int
    """Context, communicators and workspace, as stated."""

    @property
    def total(self) -> int:
        """Bytes of the rank at its peak: the tensors, and `other` (context, workspace)."""
        return self.live.total + self.other


class Traffic(NamedTuple):
    """Bytes that a GPU sends in a step over a tier, for an axis of the mesh."""

    tier: str
    """node, or the name of a tier of switches (placement.Road)."""
    axis: str
    sent: float
    """Bytes."""
    seconds: float
    """Seconds in which the link is busy, hidden behind compute or not."""


def words(layout: Mapping[str, int | str | bool]) -> str:
    """Format layout options without their sections and without those that are False: "tp 8
    pp 16".
    """
    return " ".join(
        name.rpartition(".")[2] if value is True else f"{name.rpartition('.')[2]} {value}"
        for name, value in layout.items()
        if value is not False
    )


def command_options(options: Mapping[str, object]) -> str:
    """Format options (section.name -> value) for a command line, quoted for a shell: --layout.tp 8;
    False is --SECTION.no-NAME.
    """
    words = []
    for name, value in options.items():
        section, _, option = name.rpartition(".")
        if isinstance(value, bool):
            # as the command line switches a bool off
            words.append(f"--{name}" if value else f"--{section}.no-{option}")
        else:
            words.append(f"--{name} {shlex.quote(str(value))}")
    return " ".join(words)


class Change(NamedTuple):
    """A change of a layout in one thing, and what it would gain."""

    words: str
    """ "recompute none" """
    seconds: float
    """Seconds of a step with it, simulated as the layout itself is."""
    held: int
    """Bytes of its fullest rank."""
    fits: bool
    """True if it fits the device's memory."""


@dataclass(frozen=True)
class Candidate:
    """A layout that fits, with what it is thought to do."""

    layout: dict[str, int | str | bool]
    """Options as `dolmen train` takes them, without dashes: {"layout.tp": 8, ...}."""
    estimate: Estimate
    """Predicted time of a step."""
    memory: tuple[StageMemory, ...]
    """Memory of each pipeline rank."""
    bound: str
    """Bottleneck of the step: compute, tp, bubble, dp, memory or host."""
    mfu: float = 0
    """Floating-point operations of the model alone, over the peak of the datasheet."""
    hfu: float = 0
    """The same with what backward computes again."""
    traffic: tuple[Traffic, ...] = ()
    changes: tuple[Change, ...] = ()
    """Changes of one thing each, the fastest first; empty where they were not requested."""

    @property
    def words(self) -> str:
        """The layout in words: "tp 8 pp 16"."""
        return words(self.layout)

    @property
    def fullest(self) -> int:
        """Peak bytes of the rank that holds most."""
        return max(stage.total for stage in self.memory)


class Timeline(NamedTuple):
    """The pipeline of the best candidate, with the costs of its own stages."""

    schedule: Schedule
    simulation: Simulation

    def chunks_held(self, rank: int) -> list[int]:
        """Return how many chunks of activations the rank holds after each of its actions."""
        count, counts = 0, []
        for action in self.schedule.actions[rank]:
            # an I keeps the activations that W needs
            count += (action.kind == "F") - (action.kind in "BW")
            counts.append(count)
        return counts


class Fleet(NamedTuple):
    """The best layout of so many GPUs."""

    gpus: int
    estimate: Estimate
    words: str


class Compared(NamedTuple):
    """A number of bytes, as a dry run counts it and in closed form."""

    name: str
    counted: int
    """Bytes of the dry run."""
    closed_form: int
    """Bytes of the closed form."""
    seconds: float = 0.0
    """For bytes that are sent: seconds that their links take for `closed_form`, hidden behind
    compute or not.
    """

    @property
    def more_seconds(self) -> float:
        """Seconds by which the links are busy longer with the bytes that the dry run counted than
        with those of the closed form; negative if shorter, 0 where the closed form has no bytes.
        """
        # time is proportional to bytes
        return self.seconds * (self.counted / self.closed_form - 1) if self.closed_form else 0.0

    @property
    def off(self) -> float:
        """Relative error of the closed form: closed_form / counted - 1 (nothing counted: 1 if
        something is predicted, else 0).
        """
        # 100 % where nothing was counted
        return self.closed_form / self.counted - 1 if self.counted else float(self.closed_form > 0)


class RankRun(NamedTuple):
    """The result of a rank's dry run."""

    rank: int
    peak: Compared
    held: tuple[Compared, ...]
    """At the peak, by kind."""
    sent: tuple[Compared, ...]
    """Bytes that leave it in a step, by axis."""


@dataclass(frozen=True)
class DryRun:
    """Result of dry-running the first layout."""

    ranks: tuple[RankRun, ...]
    rejected: tuple[str, ...] = ()
    """Faster layouts that the dry run rejected, and why."""
    left_out: str = ""
    """Why nothing was dry-run; "" if it was."""


def describe_usable(memory: int, headroom: float) -> str:
    """Return as text the memory in bytes that layouts may use, less the share `headroom`."""
    return gib(memory) + (f" less a headroom of {100 * headroom:.3g}%" if headroom else "")


@dataclass(frozen=True)
class Plan:
    """The result of `dolmen plan`."""

    model: str
    parameters: int
    sequence_length: int
    global_batch_size: int
    cluster: Cluster
    gpus: int
    """GPUs that the candidates use."""
    ranked: tuple[Candidate, ...]
    """The fastest first; at least one."""
    timeline: Timeline
    fleets: tuple[Fleet, ...] = ()
    """These GPUs and other numbers of them, for the front of time against cost."""
    considered: int = 0
    """Layouts that were looked at, those that do not fit included."""
    fitting: int = 0
    """Layouts that fit, of those considered."""
    dtype: str = "bf16"
    """Dtype of products, as the device's file has it."""
    interval: str = ""
    """The errors that the intervals are made from."""
    tokens: float = 0
    """To train on; 0: 20 for each parameter, as 2203.15556 found best."""
    prices: Prices = Prices()
    dry: DryRun | None = None
    """None where it was not requested."""
    assumed: tuple[str, ...] = ()
    """Options that are not set, so that defaults are planned: train.sequence-length."""
    command: str = ""
    """Command that runs the first layout's step as some of its ranks."""
    headroom: float = 0.0
    """Share of a device's memory that the layouts leave free."""

    @property
    def step_tokens(self) -> int:
        """Tokens of one training step: sequences of the global batch times their length."""
        return self.sequence_length * self.global_batch_size

    @property
    def budget(self) -> float:
        """Tokens to train on: --tokens, else 20 per parameter."""
        # 2203.15556 (Chinchilla): about 20 tokens per parameter
        return self.tokens or 20.0 * self.parameters

    def days(self, estimate: Estimate) -> Estimate:
        """Return the days (in place of seconds) that training on the budget takes at an estimated
        step time, with their interval.
        """
        # steps over the seconds of a day
        steps = self.budget / self.step_tokens / 86400
        return Estimate(estimate.seconds * steps, estimate.low * steps, estimate.high * steps, {})

    def rent_cost(self, fleet: Fleet) -> float:
        """Return the cost of training on the budget's tokens on rented GPUs."""
        return fleet.gpus * 24 * self.days(fleet.estimate).seconds * self.prices.rent

    def owning_cost(self, fleet: Fleet) -> float:
        """Return the cost of training on the budget's tokens on owned nodes: the share of their
        price that is written off in that time, and power.
        """
        # `seconds` holds days here
        days = self.days(fleet.estimate).seconds
        # whole nodes are bought
        nodes = -(-fleet.gpus // self.cluster.gpus_per_node)
        # linear depreciation
        worn = nodes * self.prices.node * days / (365.25 * self.prices.years)
        # at full power
        kilowatts = nodes * (self.cluster.node_watts or 0) / 1000
        return worn + kilowatts * 24 * days * self.prices.kilowatt_hour

    @property
    def ties(self) -> tuple[int, ...]:
        """Group number of each layout of `ranked`, from 1: the order within a group is not certain,
        as each is within the 90 % interval of the fastest of its group.
        """
        numbers: list[int] = []
        most = 0.0
        for candidate in self.ranked:
            seconds = candidate.estimate.seconds
            # beyond the interval of the group's fastest
            if seconds > most:
                most = candidate.estimate.high
                # a new group: its interval decides from here
                numbers.append(numbers[-1] + 1 if numbers else 1)
            else:
                numbers.append(numbers[-1])
        return tuple(numbers)

    @property
    def front(self) -> tuple[Fleet, ...]:
        """The fleets on the front of GPUs against time, smallest first: no fleet with fewer GPUs is
        as fast.
        """
        fleets: list[Fleet] = []
        for fleet in sorted(self.fleets, key=lambda f: (f.gpus, f.estimate.seconds)):
            # each larger fleet must be faster
            if not fleets or fleet.estimate.seconds < fleets[-1].estimate.seconds:
                fleets.append(fleet)
        return tuple(fleets)
