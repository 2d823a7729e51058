"""Devices and clusters, read from YAML files that give the source of each number (devices/ and
clusters/; a user's own file has the same fields).

The files have two kinds of numbers: constants of the datasheet (peaks, bytes per second, sizes),
and efficiencies, the shares of these that programs reach (fitted by `python -m
benchmarks.planning.calibrate`).
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

from dolmen.core.messages import did_you_mean
from dolmen.files import gate, kinds

GIB = 2**30
GB = 1e9
DEVICES = Path(__file__).with_name("devices")
CLUSTERS = Path(__file__).with_name("clusters")
LOCAL = "local"
"""The cluster that `dolmen plan --measure` writes."""
DTYPES = ("fp32", "tf32", "fp16", "bf16", "fp8")
ALIASES = {
    "dgx-h100": "hgx-h100",
    "dgx-h200": "hgx-h200",
    "dgx-b200": "b200",
    "hgx-a100": "dgx-a100",
    "hgx-a100-40gb": "dgx-a100-40gb",
    "hgx-b200": "b200",
    "dgx-gb200": "gb200-nvl72",
    "gb200": "gb200-nvl72",
}
"""Other names of the clusters that the package has."""
OF_DEVICE = {
    "v100": "dgx-1",
    "a100": "dgx-a100",
    "a100-80gb": "dgx-a100",
    "a100-40gb": "dgx-a100-40gb",
    "h100": "hgx-h100",
    "h200": "hgx-h200",
    "b200": "b200",
    "gb200": "gb200-nvl72",
}
"""The cluster that so many GPUs of a device are taken from: 8xh100, 64xA100."""


@dataclass(frozen=True, eq=False)
class Device:
    """A device with its datasheet constants and the efficiencies that programs reach. Rates are per
    second. Compared by identity.
    """

    name: str
    peak: Mapping[str, float]
    """FLOPs of dense products, by the dtype that is multiplied."""
    memory: int
    """Bytes."""
    bandwidth: float
    """Bytes to and from memory."""
    multiprocessors: int
    product: float
    """Share of the peak that the products of whole waves of tiles sustain."""
    fp8: float
    """The same share for products in fp8."""
    attention: float
    """Share of the peak that FlashAttention 2 sustains forward; backward is slower (cost.py)."""
    tuned: float
    """The same share for attention kernels written for this device (cuDNN, FlashAttention 3)."""
    streaming: float
    """Share of `bandwidth` that long sweeps through memory reach."""
    variation: float
    """Standard deviation between the speeds of GPUs of one kind, as a share."""
    launch: float
    """Seconds from the end of one kernel to the start of the next."""
    host: float
    """Seconds of the host per operator of an eager program."""
    host_link: float
    """Bytes per second of a blocking copy between the device's and the host's memory."""
    reserved: int
    """Bytes for the context, communicators and workspaces, which no ledger counts."""
    watts: float | None
    """Power of the device; None: not known."""

    def rate(self, dtype: str) -> float:
        """Return the datasheet's peak FLOPs per second of products in `dtype`. Raises ValueError
        for a dtype that the device does not multiply.
        """
        if dtype in self.peak:
            return self.peak[dtype]
        raise ValueError(
            f"{self.name} has no peak rate for {dtype}, only for {', '.join(self.peak)}"
        )


@dataclass(frozen=True)
class Link:
    """The link of one GPU (or node), in each direction."""

    bandwidth: float
    """Bytes per second of the datasheet."""
    latency: float
    """Seconds of a step of a collective."""
    share: float
    """Share of `bandwidth` that a collective reaches."""
    peers: int | None = None
    """GPUs that one is wired to where no switch joins all; None: a switch does."""

    @property
    def rate(self) -> float:
        """Bytes per second that a collective reaches: the datasheet's times the share."""
        return self.bandwidth * self.share


@dataclass(frozen=True)
class Tier:
    """Switches (leaf, spine, core) that join up to `nodes` nodes. `oversubscription`: bytes that
    arrive from below for each that it can pass up. `latency`: seconds.
    """

    name: str
    nodes: int
    oversubscription: float
    latency: float


@dataclass(frozen=True)
class Cluster:
    """Nodes of one kind of device. `inside`: link of a GPU within its node. `between`: link of a
    whole node, all its adapters together; None with one node.
    """

    name: str
    device: Device
    gpus_per_node: int
    nodes: int
    inside: Link
    between: Link | None
    tiers: tuple[Tier, ...]
    storage: float | None
    """Bytes per second of a node to the files: a link of its own."""
    node_watts: float | None
    """Power of a node; None: not known."""

    @property
    def gpus(self) -> int:
        """Number of GPUs of the cluster, on all its nodes."""
        return self.nodes * self.gpus_per_node


def read_device(name: str) -> Device:
    """Read a device by name or from a YAML file. Raises ValueError for an unknown name, a malformed
    file, or numbers out of bounds.
    """
    file = _find_file(name, DEVICES, "device")
    content = gate.read_yaml(file, kinds.DEVICE)
    # a typo would price another dtype's products
    unknown = [dtype for dtype in content["peak_tflops"] if dtype not in DTYPES]
    # without a peak nothing could be priced
    if unknown or not content["peak_tflops"]:
        what = f"has {unknown[0]}" if unknown else "is empty"
        raise gate.refuse(file, f"peak_tflops {what}: it must have some of {', '.join(DTYPES)}")
    check_device(file, content)
    shares = content["efficiency"]
    return Device(
        file.stem,
        {dtype: tera * 1e12 for dtype, tera in content["peak_tflops"].items()},
        # memory is in GiB, as nvidia-smi has it; rates are in GB/s
        round(content["memory_gib"] * GIB),
        content["memory_gb_s"] * GB,
        content["multiprocessors"],
        shares["product"],
        shares.get("fp8", shares["product"]),
        shares["attention"],
        shares.get("tuned", shares["attention"]),
        shares["memory"],
        shares["variation"],
        content["launch_us"] / 1e6,
        content["host_us"] / 1e6,
        content["host_gb_s"] * GB,
        round(content["reserved_gib"] * GIB),
        content.get("watts"),
    )


def read_cluster(name: str) -> Cluster:
    """Read a cluster by name or alias, as a number of GPUs ("8xh100"), or from a YAML file;
    `NAME:NODES` takes so many of its nodes. Raises ValueError for an unknown name, a malformed
    file, or more nodes than there are.
    """
    if counted := re.fullmatch(r"([0-9]{1,7})x([a-z0-9-]+)", name.lower()):
        return _take_gpus(int(counted[1]), counted[2])
    name, nodes = _split_nodes(name)
    file = _find_file(name, CLUSTERS, "cluster")
    content = gate.read_yaml(file, kinds.CLUSTER)
    tiers = tuple(
        Tier(t["name"], t["nodes"], t["oversubscription"], t["latency_us"] / 1e6)
        for t in content.get("tiers", [])
    )
    # strictly rising: each tier joins groups of the one below
    if [t.nodes for t in tiers] != sorted({t.nodes for t in tiers}):
        raise gate.refuse(file, "tiers must be in order of increasing nodes")
    if nodes is None:
        # all of them
        nodes = content["nodes"]
    if nodes > content["nodes"]:
        raise ValueError(
            f"{file.stem} has {content['nodes']:,} nodes, but {nodes:,} are requested: use "
            f"--cluster {name}:{content['nodes']}, or a file of your own"
        )
    # a single node needs no network
    between = _parse_link(content["between"]) if "between" in content else None
    if between is None and nodes > 1:
        raise gate.refuse(
            file, f"has {nodes:,} nodes but no `between`, the network that connects them: add it"
        )
    named = content["device"]
    # a name, or a file next to the cluster's
    is_file = Path(named).suffix in (".yaml", ".yml")
    device = read_device(str(file.parent / named) if is_file else named)
    check_cluster(file, content, device.bandwidth, device.watts)
    return Cluster(
        file.stem,
        device,
        content["gpus_per_node"],
        nodes,
        _parse_link(content["inside"]),
        between,
        tiers,
        content["storage_gb_s"] * GB if "storage_gb_s" in content else None,
        content["node_kw"] * 1000 if "node_kw" in content else None,
    )


def _take_gpus(gpus: int, device: str) -> Cluster:
    """Return the cluster of a device with so many GPUs: whole nodes, or a part of one, with that
    share of its power. Raises ValueError for an unknown device or an incomplete node.
    """
    if device not in OF_DEVICE:
        # names are short, so a low cutoff still finds typos
        hint = did_you_mean(device, OF_DEVICE, cutoff=0.4)
        raise ValueError(
            f"there is no device {device[:80]!r}: {hint}{' ' * bool(hint)}known are "
            f"{', '.join(OF_DEVICE)}, as in 8xh100"
        )
    name = OF_DEVICE[device]
    # for its number of GPUs per node
    node = read_cluster(f"{name}:1")
    if 0 < gpus < node.gpus_per_node:
        watts = node.node_watts
        # power in proportion to the GPUs
        share = None if watts is None else watts * gpus / node.gpus_per_node
        return replace(node, gpus_per_node=gpus, node_watts=share)
    if gpus < 1 or gpus % node.gpus_per_node:
        raise ValueError(
            f"{gpus}x{device} is not a whole number of nodes: a node of {name} has "
            f"{node.gpus_per_node} GPUs, so use a multiple of {node.gpus_per_node}, or fewer"
        )
    return read_cluster(f"{name}:{gpus // node.gpus_per_node}")


def measured_at() -> Path:
    """Return the folder where measurements of this machine are cached."""
    return Path.home() / ".cache" / "dolmen" / "planning"


def _measured_file() -> Path:
    """Return the YAML file of the cluster `local`, which `dolmen plan --measure` writes. Raises
    ValueError if it has not been measured.
    """
    file = measured_at() / f"{LOCAL}.yaml"
    if not file.is_file():
        raise ValueError("the cluster local is not measured yet: run dolmen plan --measure first")
    return file


def known_names(folder: Path) -> list[str]:
    """Return the sorted names of the devices or clusters that the package ships (`folder`: DEVICES
    or CLUSTERS).
    """
    return sorted(file.stem for file in folder.glob("*.yaml"))


def _split_nodes(name: str) -> tuple[str, int | None]:
    """Split NAME:NODES into the name and the number; None without a number. Raises ValueError for 0
    nodes.
    """
    match = re.fullmatch(r"(.+):([0-9]{1,9})", name)
    if not match:
        return name, None
    if int(match[2]) < 1:
        raise ValueError(f"{name} has no nodes: use 1 or more, as in {match[1]}:1")
    return match[1], int(match[2])


def _find_file(name: str, folder: Path, what: str) -> Path:
    """Return the YAML file of a device or cluster (`what`): a path as it is, a known name or alias,
    or the measured cluster. Raises ValueError, which suggests similar names.
    """
    if Path(name).suffix in (".yaml", ".yml"):
        return Path(name)
    if (name, folder) == (LOCAL, CLUSTERS):
        return _measured_file()
    names = known_names(folder)
    name = name.lower()
    if folder == CLUSTERS:
        # vendors' names of the same node
        name = ALIASES.get(name, name)
    if name in names:
        return folder / f"{name}.yaml"
    hint = did_you_mean(name, names, cutoff=0.4)
    raise ValueError(
        f"there is no {what} {name[:80]!r}: {hint}{' ' * bool(hint)}known are {', '.join(names)}, "
        "and a YAML file of your own"
    )


def _parse_link(content: dict) -> Link:
    """Return the link that a section of a cluster file describes, in bytes per second and
    seconds.
    """
    return Link(
        content["gb_s"] * GB, content["latency_us"] / 1e6, content["share"], content.get("peers")
    )


# Bounds of the numbers of a file: one outside is in another unit, and would be planned for a
# machine that nobody has. They lie an order of magnitude around what there is, from one core of a
# CPU to a rack of GB200; two numbers together are held closer.
class Bound(NamedTuple):
    """The range of a number of a device or cluster file, both ends included."""

    least: float
    most: float
    unit: str
    known: str
    """Known values, for messages."""


DEVICE = {
    "peak_tflops": Bound(1e-6, 20_000, "TFLOP/s", "a core of a CPU 0.05, a GB200 4,900 in fp8"),
    "memory_gib": Bound(0.1, 8192, "GiB", "a V100 has 32, a GB200 186"),
    "memory_gb_s": Bound(0.001, 50_000, "GB/s", "a V100 has 981, a GB200 8,000"),
    "multiprocessors": Bound(1, 1024, "multiprocessors", "a V100 has 80, a B200 148"),
    "efficiency.product": Bound(0.02, 1, "of the peak", "cuBLAS reaches 0.54 to 0.79"),
    "efficiency.attention": Bound(0.01, 1, "of the peak", "FlashAttention 2 reaches 0.22 to 0.62"),
    "efficiency.memory": Bound(0.1, 1, "of the rate", "sweeps reach 0.8 to 0.85"),
    "launch_us": Bound(0, 100, "us", "a kernel takes 2 to 4"),
    "host_us": Bound(0, 1000, "us", "an operator of PyTorch takes 6 to 15"),
    "host_gb_s": Bound(0.001, 2000, "GB/s", "PCIe 3.0 has 3, NVLink C2C 40 unpinned"),
    "watts": Bound(1, 5000, "W", "a V100 takes 450, a GB200 1,200"),
}
CLUSTER = {
    "gpus_per_node": Bound(1, 1152, "GPUs", "a GB200 NVL72 has 72"),
    "nodes": Bound(1, 100_000, "nodes", "the largest clusters have 25,000"),
    "inside.gb_s": Bound(0.01, 10_000, "GB/s of a GPU", "NVLink has 150 to 900"),
    "inside.latency_us": Bound(0, 5000, "us", "NVLink takes 6, gloo some hundred"),
    "between.gb_s": Bound(0.01, 100_000, "GB/s of a node", "8 x 200 Gb/s are 200, NVL72 has 3,600"),
    "between.latency_us": Bound(0, 5000, "us", "InfiniBand takes 7"),
    "storage_gb_s": Bound(0.001, 10_000, "GB/s of a node", "a DGX H100 has 100"),
    "node_kw": Bound(0.01, 1000, "kW", "a DGX A100 takes 6.5, a GB200 NVL72 120"),
}


def check_device(file: Path, content: dict[str, Any]) -> None:
    """Raise Refused for a number out of its bounds, and for pairs that cannot be: FLOPs per byte,
    seconds to read all memory, reserved against all memory.
    """
    for dtype, peak in content["peak_tflops"].items():
        _check(file, f"peak_tflops.{dtype}", peak, DEVICE["peak_tflops"])
    _check_all(file, content, DEVICE)
    fastest, rate = max(content["peak_tflops"].values()), content["memory_gb_s"]
    # a V100 multiplies 132 numbers for each byte that it reads, a GB200 612 in fp8, a CPU 5 to 50
    # TFLOP/s over GB/s
    per_byte = 1000 * fastest / rate
    if not 0.5 <= per_byte <= 10_000:
        raise gate.refuse(
            file,
            f"peak_tflops {fastest:,} and memory_gb_s {rate:,} are {per_byte:.3g} FLOPs per byte, "
            "outside of 0.5 to 10,000: check the units",
        )
    # an A100 reads all its memory in 0.04 s, a V100 in 0.035
    # GiB to GB, over GB/s: seconds to read all memory once
    sweep = content["memory_gib"] * 1.073741824 / rate
    if sweep < 0.002:
        raise gate.refuse(
            file,
            f"memory_gib {content['memory_gib']:,} at memory_gb_s {rate:,} is read in {sweep:.3g} "
            "s, less than 0.002: check the units",
        )
    if content["reserved_gib"] >= content["memory_gib"]:
        raise gate.refuse(
            file,
            f"reserved_gib is {content['reserved_gib']:,} of memory_gib {content['memory_gib']:,}, "
            "which leaves no memory for a model",
        )


def check_cluster(
    file: Path, content: dict[str, Any], memory_rate: float, watts: float | None
) -> None:
    """Raise Refused for a number out of its bounds, a link faster than the device's memory
    (`memory_rate`, bytes per second), or a node's power that does not fit its GPUs' (`watts` each;
    None: not known).
    """
    _check_all(file, content, CLUSTER)
    inside = content["inside"]["gb_s"]
    # the usual mistake: gigabits for gigabytes
    if content["gpus_per_node"] > 1 and inside * 1e9 > memory_rate:
        raise gate.refuse(
            file,
            f"inside.gb_s is {inside:,}, and the device's memory has {memory_rate / 1e9:,.0f}: a "
            "link cannot be faster than memory (GB/s are bytes, not bits)",
        )
    gpus, kilowatts = content["gpus_per_node"], content.get("node_kw")
    if kilowatts is not None and watts is not None:
        # a node also has CPUs, fans and adapters
        share = 1000 * kilowatts / (gpus * watts)
        if not 0.5 <= share <= 20:  # 0.97 of a DGX-1, 2.0 of a DGX A100
            raise gate.refuse(
                file,
                f"node_kw is {kilowatts:,}, {share:.3g} times what its {gpus} GPUs of {watts:,} W "
                "take, outside of 0.5 to 20 times: check the units",
            )


def _check_all(file: Path, content: dict[str, Any], bounds: dict[str, Bound]) -> None:
    """Raise Refused for a number of a file outside its bounds (NAME or SECTION.NAME -> Bound);
    numbers that are missing pass.
    """
    for name, bound in bounds.items():
        section, _, number = name.rpartition(".")
        value = (content.get(section) or {}).get(number) if section else content.get(number)
        # numbers that may be left out
        if isinstance(value, (int, float)):
            _check(file, name, value, bound)


def _check(file: Path, name: str, value: float, bound: Bound) -> None:
    """Raise Refused if a number of a file is out of its bounds."""
    if not bound.least <= value <= bound.most:
        raise gate.refuse(
            file,
            f"{name} is {value:,g}: it must be {bound.least:,g} to {bound.most:,g} {bound.unit} "
            f"({bound.known})",
        )
