"""Time and memory of work on a device. A GPU works on after its call has returned: a clock is read
only after it has finished.
"""

import gc
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def once(work: Callable[[], Any], device: torch.device) -> float:
    """Seconds of one call, all that it starts included."""
    synchronize(device)
    start = time.perf_counter()
    work()
    synchronize(device)
    return time.perf_counter() - start


def spread(times: list[float]) -> dict[str, Any]:
    """What a series of timings is told by."""
    return {
        "median": statistics.median(times),
        "least": min(times),
        "most": max(times),
        "times": len(times),
    }


def timed(
    work: Callable[[], Any], device: torch.device, times: int = 7, warm: int = 2
) -> dict[str, Any]:
    """Seconds of a call: median, least and most of `times`, after `warm` that do not count."""
    for _ in range(warm):
        work()
    return spread([once(work, device) for _ in range(times)])


def rate(work: Callable[[], Any], device: torch.device, calls: int = 10, times: int = 5) -> float:
    """Seconds of a call of a short kernel: the median over `times` of the mean of `calls` in a row,
    between events of the device's own clock where it has one.
    """
    for _ in range(3):
        work()
    found = []
    for _ in range(times):
        if device.type == "cuda":
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            for _ in range(calls):
                work()
            end.record()
            end.synchronize()
            found.append(start.elapsed_time(end) / 1e3 / calls)
        else:
            found.append(once(lambda: [work() for _ in range(calls)], device) / calls)
    return statistics.median(found)


def clean(device: torch.device) -> None:
    """Give back what nobody holds, and count peaks from here. The workspaces of cuBLAS are of
    torch's allocator, 32 MiB for each thread and stream that has made a product, and stay: both
    threads of a step, forward's and backward's, have made one by then.
    """
    gc.collect()
    if device.type == "cuda":
        x = torch.ones(8, 8, device=device, requires_grad=True)
        (x @ x).sum().backward()
        del x
        torch.cuda.synchronize(device)
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(device)


def allocated(device: torch.device) -> int | None:
    """Bytes of live tensors; None where nobody counts them."""
    return torch.cuda.memory_allocated(device) if device.type == "cuda" else None


def peak(device: torch.device) -> int | None:
    """The most bytes of live tensors since `clean`; None where nobody counts them."""
    return torch.cuda.max_memory_allocated(device) if device.type == "cuda" else None
