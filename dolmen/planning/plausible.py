"""Which numbers of hardware can be: a file that says others is in another unit, and would be
planned for a machine that nobody has. Bounds lie an order of magnitude beside what there is, from
one core of a CPU to a rack of GB200; what two numbers say together is held closer.
"""

from pathlib import Path
from typing import Any, NamedTuple

from dolmen.files import gate


class Bound(NamedTuple):
    """`least` to `most`, both included."""

    least: float
    most: float
    unit: str
    known: str
    """What there is."""


DEVICE = {
    "peak_tflops": Bound(0.001, 20_000, "TFLOP/s", "a core of a CPU 0.05, a GB200 4,900 in fp8"),
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


def check_device(file: Path, found: dict[str, Any]) -> None:
    """Raises Refused, with both numbers where two do not go together."""
    for dtype, peak in found["peak_tflops"].items():
        _check(file, f"peak_tflops.{dtype}", peak, DEVICE["peak_tflops"])
    _check_all(file, found, DEVICE)
    fastest, rate = max(found["peak_tflops"].values()), found["memory_gb_s"]
    # a V100 multiplies 132 numbers for each byte that it reads, a GB200 612 in fp8, a CPU 5 to 50
    per_byte = 1000 * fastest / rate
    if not 0.5 <= per_byte <= 10_000:
        raise gate.refuse(
            file,
            f"peak_tflops {fastest:,} and memory_gb_s {rate:,} are {per_byte:.3g} FLOPs per byte, "
            "and 0.5 to 10,000 can be: one of them is in another unit",
        )
    # an A100 reads all its memory in 0.04 s, a V100 in 0.035
    sweep = found["memory_gib"] * 1.073741824 / rate
    if sweep < 0.002:
        raise gate.refuse(
            file,
            f"memory_gib {found['memory_gib']:,} at memory_gb_s {rate:,} is read in {sweep:.3g} s, "
            "and 0.002 and more can be: one of them is in another unit",
        )
    if found["reserved_gib"] >= found["memory_gib"]:
        raise gate.refuse(
            file,
            f"reserved_gib is {found['reserved_gib']:,} of memory_gib {found['memory_gib']:,}: "
            "nothing is left for a model",
        )


def check_cluster(
    file: Path, found: dict[str, Any], memory_rate: float, watts: float | None
) -> None:
    """The same, of nodes of a device that reads so many bytes per second and takes so much."""
    _check_all(file, found, CLUSTER)
    inside = found["inside"]["gb_s"]
    if found["gpus_per_node"] > 1 and inside * 1e9 > memory_rate:
        raise gate.refuse(
            file,
            f"inside.gb_s is {inside:,}, and the device's memory has {memory_rate / 1e9:,.0f}: no "
            "link is faster than the memory that it reads; bits are an eighth of bytes",
        )
    gpus, kilowatts = found["gpus_per_node"], found.get("node_kw")
    if kilowatts is not None and watts is not None:
        share = 1000 * kilowatts / (gpus * watts)
        if not 0.5 <= share <= 20:  # 0.97 of a DGX-1, 2.0 of a DGX A100
            raise gate.refuse(
                file,
                f"node_kw is {kilowatts:,}, {share:.3g} times what its {gpus} GPUs of {watts:,} W "
                "take, and 0.5 to 20 times can be",
            )


def _check_all(file: Path, found: dict[str, Any], bounds: dict[str, Bound]) -> None:
    for name, bound in bounds.items():
        section, _, number = name.rpartition(".")
        value = (found.get(section) or {}).get(number) if section else found.get(number)
        if isinstance(value, (int, float)):
            _check(file, name, value, bound)


def _check(file: Path, name: str, value: float, bound: Bound) -> None:
    if not bound.least <= value <= bound.most:
        raise gate.refuse(
            file,
            f"{name} is {value:,g}, and {bound.least:,g} to {bound.most:,g} {bound.unit} can be "
            f"({bound.known})",
        )
