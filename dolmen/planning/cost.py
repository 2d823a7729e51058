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
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from statistics import NormalDist
from typing import Literal

from dolmen.planning.hardware import Device
from dolmen.planning.ledger import LedgerRow
from dolmen.planning.placement import Placement, Road, collective_seconds, send_seconds

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
        """Return behind what collectives of a mesh axis hide; any axis but tp, cp and ep counts as
        fsdp.
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
        """Return name -> seconds."""
        return dict(vars(self))

    def __add__(self, other: "Parts") -> "Parts":
        """Add part by part."""
        theirs = vars(other)
        return Parts(**{name: value + theirs[name] for name, value in vars(self).items()})

    def times(self, factor: float) -> "Parts":
        """Return all parts multiplied by a factor."""
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
        """Device of the cluster."""
        return self.placement.cluster.device

    @cached_property
    def slowest(self) -> float:
        """Time of the slowest of all GPUs over the mean, since every step waits for it: of n normal
        numbers the largest is about the quantile (n - 3/8) / (n + 1/4) (Blom, 1958).
        """
        n = self.placement.topology.size
        return 1 + self.device.variation * NormalDist().inv_cdf((n - 0.375) / (n + 0.25))

    def road(self, axis: str) -> Road:
        """Return the links between the ranks of the group along `axis` that this rank is in."""
        if axis not in self.roads:
            group = self.placement.topology.group(axis, self.rank)
            self.roads[axis] = self.placement.road(group)
        return self.roads[axis]

    def hop(self) -> Road:
        """Return the link from this rank's stage to the next (or, of the last, to the first)."""
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
    """Return how many waves the tiles take, for `full` tiles per multiprocessor. A last wave that
    is not whole runs faster, as idle multiprocessors leave it power, cache and memory: half of what
    is missing is lost.
    """
    return max(1.0, 0.5 * full + 0.5 * math.ceil(full))


def row_seconds(row: LedgerRow, machine: Machine) -> float:
    """Return the seconds of one row by itself (once, whatever its `times`), with its kernel
    launch.
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
    """Return a product's shape (batch, rows, columns, contraction), with leading dimensions joined
    to one batch.
    """
    *batch, rows, columns, contraction = row.shape
    return math.prod(batch), rows, columns, contraction


def action_seconds(rows: Iterable[LedgerRow], machine: Machine) -> Parts:
    """Return the seconds of the rows of one action, in the order in which the host issues them,
    with communication hidden as `Overlap` allows. Sends are left out: they belong to the schedule
    (step.py).
    """
    spent = {"product": 0.0, "attention": 0.0, "memory": 0.0}
    shown = {"tp": 0.0, "cp": 0.0, "ep": 0.0, "dp": 0.0}
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
            shown[pending_axis] += pending
            pending = 0.0
        if row.kind == "host":
            waited += seconds
        elif row.kind in spent:
            spent[row.kind] += seconds
            hidden = min(pending, seconds)
            pending -= hidden
            spent[row.kind] += CONTENTION * hidden
        elif row.kind == "collective":
            axis = row.axis if row.axis in shown else "dp"
            hides = machine.overlap.hides_behind(row.axis)
            if hides == "products" and row.overlapped:
                pending, pending_axis = seconds, axis
            elif hides == "action":
                behind[axis] += seconds
            else:
                shown[axis] += seconds
    shown[pending_axis] += pending
    spent = {name: seconds * machine.slowest for name, seconds in spent.items()}
    computed = sum(spent.values())
    for axis, seconds in behind.items():
        hidden = min(seconds, computed)
        spent["memory"] += CONTENTION * hidden
        shown[axis] += seconds - hidden
    # the host works at the same time: only its excess shows
    device = sum(spent.values()) + sum(shown.values())
    return Parts(**spent, **shown, host=waited + max(0.0, issued * machine.device.host - device))
