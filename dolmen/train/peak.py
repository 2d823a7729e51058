"""What this device can do at most: its measured rate of matrix products, the denominator of MFU."""

import time

import torch


def matmul_peak(device: torch.device, dtype: torch.dtype, seconds: float = 0.25) -> float:
    """FLOP/s of the best of several square products in `dtype`; takes about `seconds`. Every rank
    measures at once, so ranks that share a machine share what they find.
    """
    size = 8192 if device.type == "cuda" else 1024
    a, b = (torch.randn(size, size, device=device).to(dtype) for _ in range(2))
    best, end = float("inf"), time.perf_counter() + seconds
    a @ b
    while time.perf_counter() < end or best == float("inf"):
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        start = time.perf_counter()
        a @ b
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        best = min(best, time.perf_counter() - start)
    return 2 * size**3 / best
