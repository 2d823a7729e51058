"""What this device can do at most, the denominator of MFU: the rate of matrix products that is
measured here, and the one its maker promises.
"""

import time
from dataclasses import dataclass

import torch

# TFLOP/s without sparsity: (bf16 and fp16 with fp32 sums, fp32 without TF32), by the start of what
# torch.cuda.get_device_name says. A datasheet gives the rate with 2:4 sparsity, twice this.
DATASHEET = {
    # NVIDIA H100 datasheet: SXM 1,979 sparse and 67, PCIe 1,513 and 51, NVL 1,671 and 60
    "NVIDIA H100 80GB HBM3": (989.4, 67.0),
    "NVIDIA H100 PCIe": (756.5, 51.0),
    "NVIDIA H100 NVL": (835.5, 60.0),
    # NVIDIA H200 datasheet: SXM as H100, NVL 1,671 sparse and 60
    "NVIDIA H200": (989.4, 67.0),
    "NVIDIA H200 NVL": (835.5, 60.0),
    # NVIDIA A100 datasheet: the same for SXM and PCIe, 40 and 80 GB
    "NVIDIA A100": (312.0, 19.5),
    # NVIDIA L40S datasheet: 733 sparse and 91.6
    "NVIDIA L40S": (362.05, 91.6),
}


@dataclass(frozen=True)
class Peak:
    """FLOP/s of matrix products, of one device; times ranks it is a run's."""

    measured: float
    datasheet: float | None
    """None where no maker promises one: a CPU, a part of a GPU, a device that is not in the
    table.
    """

    def utilization(self, flops: float, ranks: int) -> dict[str, float]:
        """Model FLOPs utilization of `ranks` devices that do `flops` a second together, as a share
        of either peak: {"mfu_measured", and "mfu_datasheet" where there is one}.
        """
        out = {"mfu_measured": flops / (self.measured * ranks)}
        if self.datasheet is not None:
            out["mfu_datasheet"] = flops / (self.datasheet * ranks)
        return out

    def __str__(self) -> str:
        """For a person."""
        told = (
            "no datasheet figure for this device"
            if self.datasheet is None
            else f"datasheet {self.datasheet / 1e12:.4g}"
        )
        return f"measured matmul peak {self.measured / 1e12:.3g} TFLOP/s, {told}"


def peak(device: torch.device, dtype: torch.dtype) -> Peak:
    """Of this device, in the dtype that a step computes in. Measures for a quarter of a second."""
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else ""
    return Peak(matmul_peak(device, dtype), datasheet(name, dtype))


def datasheet(name: str, dtype: torch.dtype) -> float | None:
    """FLOP/s that the maker promises of the device of that name; None where DATASHEET has none,
    and for float64.
    """
    known = [start for start in DATASHEET if name.startswith(start)]
    if not known or "MIG" in name:
        return None
    half, single = DATASHEET[max(known, key=len)]
    rates = {torch.bfloat16: half, torch.float16: half, torch.float32: single}
    return 1e12 * rates[dtype] if dtype in rates else None


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
