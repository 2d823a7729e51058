"""This machine as a device and a cluster (`dolmen plan --measure`): the rate of products, of sweeps
through memory, of the host, and of collectives between its processes, each timed for a moment.

    measure(folder)  ->  folder/local.yaml and folder/local-device.yaml, which `read_cluster` takes

A process is a device: where several are to run, each measures while all do, so that what they
share is shared here too.
"""

import os
import socket
import time
from collections.abc import Callable, Generator
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
import torch.distributed as dist

from dolmen.files import write
from dolmen.launch.side_by_side import Group
from dolmen.planning.hardware import GIB
from dolmen.training.mfu import matmul_peak

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
SECONDS = 0.25
LONG, SHORT = 16 * 2**20, 4096
"""Bytes of a collective that is bound by its bytes, and of one by its steps."""
SWEPT = 2**26
"""Elements of fp32, four times what the caches of a CPU hold."""
PATIENCE = timedelta(seconds=60)


@dataclass(frozen=True)
class Measured:
    """Of one process; rates are per second."""

    products: dict[str, float]
    """FLOPs, by dtype: of large squares."""
    share: float
    """Of that, products of a block's shape."""
    bandwidth: float
    operator: float
    """Seconds of an operator on next to nothing."""
    wire: float
    """Bytes that a ring passes on; 0 of a lone process."""
    step: float
    """Seconds of a step of a ring; 0 of a lone process."""


def fastest(call: Callable[[], object], seconds: float = SECONDS) -> float:
    """Seconds of the quickest of calls that take about `seconds` together: the others waited."""
    call()
    best, end = float("inf"), time.perf_counter() + seconds
    while time.perf_counter() < end or best == float("inf"):
        start = time.perf_counter()
        call()
        best = min(best, time.perf_counter() - start)
    return best


def work(rank: int, processes: int, rendezvous: str) -> Generator[int, None, Measured]:
    """Of a process, side by side with the others."""
    device = torch.device("cpu")
    torch.set_num_threads(max(1, (os.cpu_count() or 1) // processes))
    products = {name: matmul_peak(device, dtype, SECONDS) for name, dtype in DTYPES.items()}
    yield 1
    tokens, weight = torch.randn(512, 768), torch.randn(768, 3072)
    flops = 2 * 512 * 768 * 3072
    share = flops / fastest(lambda: tokens @ weight) / products["fp32"]
    swept, into = torch.zeros(SWEPT), torch.zeros(SWEPT)
    bandwidth = 8 * SWEPT / fastest(lambda: into.copy_(swept))
    one = torch.zeros(1)
    operator = fastest(lambda: one.add_(1))
    yield 1
    wire, step = _collectives(rank, processes, rendezvous) if processes > 1 else (0.0, 0.0)
    yield 1
    return Measured(products, min(1.0, share), bandwidth, operator, wire, step)


def _collectives(rank: int, processes: int, rendezvous: str) -> tuple[float, float]:
    """Bytes per second and seconds per step of a ring, of all-reduces over gloo."""
    dist.init_process_group(
        "gloo",
        init_method=rendezvous,
        rank=rank,
        world_size=processes,
        timeout=PATIENCE,
    )
    try:
        seconds = []
        for size in (LONG, SHORT):
            tensor = torch.zeros(size // 4)
            dist.all_reduce(tensor)
            taken = []
            for _ in range(8):  # as often on each rank
                dist.barrier()
                start = time.perf_counter()
                dist.all_reduce(tensor)
                taken.append(time.perf_counter() - start)
            seconds.append(min(taken))
    finally:
        dist.destroy_process_group()
    steps = 2 * (processes - 1)
    sent = steps / processes * LONG
    return sent / max(1e-9, seconds[0] - seconds[1]), seconds[1] / steps


def measure(folder: Path, processes: int = 1) -> Path:
    """Measures this machine with so many processes, for about two seconds each, and returns the
    file of its cluster. Raises ValueError for none, and Failed where a process dies.
    """
    if processes < 1:
        raise ValueError(f"{processes} processes are to be measured: use 1 or more")
    with TemporaryDirectory() as meeting, Group(processes) as group:
        rendezvous = f"file://{meeting}/meet"
        each = [(rank, processes, rendezvous) for rank in range(processes)]
        found = group.run(work, each, lambda _: None)
    slowest = min(found, key=lambda m: m.products["fp32"])
    folder.mkdir(parents=True, exist_ok=True)
    write.replace(folder / "local-device.yaml", device_text(slowest, processes))
    cluster = folder / "local.yaml"
    write.replace(cluster, cluster_text(slowest, processes))
    return cluster


def device_text(m: Measured, processes: int) -> str:
    peaks = ", ".join(f"{name}: {rate / 1e12:.6g}" for name, rate in m.products.items())
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / processes / GIB
    here = f"measured on {socket.gethostname()}, {processes} at once"
    return f"""# A process of this machine
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


def cluster_text(m: Measured, processes: int) -> str:
    # a lone process has nobody to send to: any link does
    wire, step = (m.wire or 1e9) / 1e9, m.step * 1e6
    return f"""# This machine, {processes} processes
device: local-device.yaml
gpus_per_node: {processes}
nodes: 1
inside: {{gb_s: {wire:.6g}, latency_us: {step:.4g}, share: 1}}
sources:
  inside: "measured: all-reduces of {LONG:,} and {SHORT:,} bytes over gloo"
"""
