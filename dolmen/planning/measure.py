"""This machine as a device and a cluster (`dolmen plan --measure`): the rate of products, of sweeps
through memory, and of the host, each timed for a moment. One process is its one device.

    measure(folder)  ->  folder/local.yaml and folder/local-device.yaml, which `read_cluster` takes
"""

import os
import socket
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch

from dolmen.files import write
from dolmen.planning.hardware import GIB
from dolmen.training.mfu import matmul_peak

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
SECONDS = 0.25
SWEPT = 2**26
"""Elements of fp32, four times what the caches of a CPU hold."""


CLUSTER = """# This machine, one process
device: local-device.yaml
gpus_per_node: 1
nodes: 1
inside: {gb_s: 1, latency_us: 0, share: 1}
sources:
  inside: "one device has nobody to send to: any link does"
"""


@dataclass(frozen=True)
class MeasuredRates:
    """Measured rates of this machine, per second."""

    products: dict[str, float]
    """FLOPs of large square products, by dtype."""
    share: float
    """Share of the peak that products of a block's shape reach."""
    bandwidth: float
    """Bytes read and written by a large copy."""
    operator: float
    """Seconds of an operator on one number: the host's overhead."""


def fastest(call: Callable[[], object], seconds: float = SECONDS) -> float:
    """Return the seconds of the fastest of as many calls of `call` as fit into `seconds` (at least
    one), after one to warm up: slower ones were disturbed.
    """
    call()
    best, end = float("inf"), time.perf_counter() + seconds
    while time.perf_counter() < end or best == float("inf"):
        start = time.perf_counter()
        call()
        best = min(best, time.perf_counter() - start)
    return best


def measure_device() -> MeasuredRates:
    """Measure the rates of this CPU with all cores, for about two seconds."""
    device = torch.device("cpu")
    torch.set_num_threads(os.cpu_count() or 1)
    products = {name: matmul_peak(device, dtype, SECONDS) for name, dtype in DTYPES.items()}
    # the MLP of GPT-2 small
    tokens, weight = torch.randn(512, 768), torch.randn(768, 3072)
    flops = 2 * 512 * 768 * 3072
    share = flops / fastest(lambda: tokens @ weight) / products["fp32"]
    swept, into = torch.zeros(SWEPT), torch.zeros(SWEPT)
    # 4 bytes read and 4 written per element
    bandwidth = 8 * SWEPT / fastest(lambda: into.copy_(swept))
    # no arithmetic: only the dispatch is timed
    element = torch.zeros(1)
    operator = fastest(lambda: element.add_(1))
    return MeasuredRates(products, min(1.0, share), bandwidth, operator)


def measure(folder: Path) -> Path:
    """Measure this machine, write local-device.yaml and local.yaml to `folder`, and return the
    latter, the file of its cluster.
    """
    measured = measure_device()
    folder.mkdir(parents=True, exist_ok=True)
    # first, as the cluster's file names it
    write.replace(folder / "local-device.yaml", device_text(measured))
    cluster = folder / "local.yaml"
    write.replace(cluster, CLUSTER)
    return cluster


def device_text(m: MeasuredRates) -> str:
    """Return the text of a device's YAML file with the measured rates."""
    peaks = ", ".join(f"{name}: {rate / 1e12:.6g}" for name, rate in m.products.items())
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / GIB
    here = f"measured on {socket.gethostname()}"
    return f"""# This machine
peak_tflops: {{{peaks}}}
memory_gib: {memory:.6g}
memory_gb_s: {m.bandwidth / 1e9:.6g}
multiprocessors: 1
efficiency: {{product: {m.share:.4g}, attention: {m.share / 2:.4g}, memory: 1, variation: 0}}
launch_us: 0
host_us: {m.operator * 1e6:.4g}
host_gb_s: {m.bandwidth / 1e9:.6g}
reserved_gib: {min(0.5, memory / 8):.4g}
sources:
  peak_tflops: "{here}: squares of 1,024"
  memory_gb_s: "{here}: a copy of {SWEPT * 4:,} bytes"
  product: "{here}: [512, 768] x [768, 3072]"
  attention: "half of what products reach: our blocks on a CPU (docs/performance.md)"
  memory: "the rate is what was measured"
  host_us: "{here}: an addition to one number"
"""
