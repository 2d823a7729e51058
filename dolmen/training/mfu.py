"""Peak FLOP/s of a device, the denominator of MFU: the measured rate of matrix products, and the
datasheet's.
"""

import re
import time
from dataclasses import dataclass, replace

import torch

# TFLOP/s without sparsity, by the start of what torch.cuda.get_device_name says: (bf16, fp16, both
# with fp32 sums, and fp32 without TF32); None where the maker gives none that we are sure of. Where
# a datasheet gives the rate with 2:4 sparsity, that is twice this.
DATASHEET: dict[str, tuple[float | None, float, float | None]] = {
    # NVIDIA H100 datasheet: SXM 1,979 sparse and 67, PCIe 1,513 and 51, NVL 1,671 and 60
    "NVIDIA H100 80GB HBM3": (989.4, 989.4, 67.0),
    "NVIDIA H100 PCIe": (756.5, 756.5, 51.0),
    "NVIDIA H100 NVL": (835.5, 835.5, 60.0),
    # NVIDIA H200 datasheet: SXM as H100, NVL 1,671 sparse and 60
    "NVIDIA H200": (989.4, 989.4, 67.0),
    "NVIDIA H200 NVL": (835.5, 835.5, 60.0),
    # NVIDIA Blackwell architecture brief: HGX B200 4,500 sparse, GB200 5,000 sparse; of fp32 there
    # are two figures
    "NVIDIA B200": (2250.0, 2250.0, None),
    "NVIDIA GB200": (2500.0, 2500.0, None),
    # NVIDIA A100 datasheet: the same for SXM and PCIe, 40 and 80 GB
    "NVIDIA A100": (312.0, 312.0, 19.5),
    # NVIDIA A10 datasheet: 125 and 250 sparse, 31.2 (the A10G is another)
    "NVIDIA A10": (125.0, 125.0, 31.2),
    # NVIDIA L40S datasheet: 733 sparse and 91.6
    "NVIDIA L40S": (362.05, 362.05, 91.6),
    # NVIDIA L4 datasheet: 242 sparse and 30.3
    "NVIDIA L4": (121.0, 121.0, 30.3),
    # NVIDIA Ada architecture whitepaper, appendix: 165.2 with fp32 sums, 82.6
    "NVIDIA GeForce RTX 4090": (165.2, 165.2, 82.6),
    # NVIDIA RTX Blackwell architecture whitepaper, appendix: 209.5 with fp32 sums, 104.8
    "NVIDIA GeForce RTX 5090": (209.5, 209.5, 104.8),
    # NVIDIA V100 datasheet: SXM2 125 and 15.7, PCIe 112 and 14; no bf16
    "Tesla V100-SXM2": (None, 125.0, 15.7),
    "Tesla V100-PCIE": (None, 112.0, 14.0),
    # AMD Instinct MI300X data sheet: 1,307.4 and 163.4
    "AMD Instinct MI300X": (1307.4, 1307.4, 163.4),
}
# A part of a GPU; others of the same name: for laptops, and the 4090 D and 5090 D.
ANOTHER = re.compile(r"MIG|Laptop|\bD\b")


@dataclass(frozen=True)
class Peak:
    """FLOP/s of matrix products of one device."""

    measured: float
    datasheet: float | None
    """None where no maker promises one: a CPU, a part of a GPU, a device that is not in the
    table.
    """

    def raise_to(self, flops: float) -> "Peak":
        """Return this peak, or one of `flops` FLOP/s if a step has reached more: it was measured
        while other programs used the device.
        """
        return replace(self, measured=max(self.measured, flops))

    def utilization(self, flops: float, ranks: int) -> dict[str, float]:
        """Return the model FLOPs utilization of `ranks` devices that compute `flops` FLOP/s
        together, as a share of their peak: {"mfu_measured": of the measured peak, "mfu_datasheet":
        of the datasheet's, if there is one}.
        """
        out = {"mfu_measured": flops / (self.measured * ranks)}
        if self.datasheet is not None:
            out["mfu_datasheet"] = flops / (self.datasheet * ranks)
        return out

    def __str__(self) -> str:
        """Return the measured and the datasheet's peak in TFLOP/s, as text."""
        datasheet = (
            "no datasheet figure for this device"
            if self.datasheet is None
            else f"datasheet {self.datasheet / 1e12:.4g}"
        )
        return f"measured matmul peak {self.measured / 1e12:.3g} TFLOP/s, {datasheet}"


def peak(device: torch.device, dtype: torch.dtype) -> Peak:
    """Return the peak FLOP/s of matrix products on this device in `dtype`: measured now, which
    takes a quarter of a second, and from its datasheet, if known.
    """
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else ""
    return Peak(matmul_peak(device, dtype), datasheet(name, dtype))


def datasheet(name: str, dtype: torch.dtype) -> float | None:
    """Return the FLOP/s of dense matrix products in `dtype` that the manufacturer specifies for the
    GPU of that name (as torch.cuda.get_device_name returns it); None if none is known.
    """
    known = [start for start in DATASHEET if re.match(rf"{start}\b", name)]
    if not known or ANOTHER.search(name):
        return None
    # "NVIDIA H200 NVL" starts with "NVIDIA H200" too: the longest name is meant
    rates = DATASHEET[max(known, key=len)]
    peak = dict(zip((torch.bfloat16, torch.float16, torch.float32), rates, strict=True)).get(dtype)
    return None if peak is None else 1e12 * peak


def matmul_peak(device: torch.device, dtype: torch.dtype, seconds: float = 0.25) -> float:
    """Measure and return the FLOP/s of square matrix products in `dtype` on the device, those of
    the fastest of all that fit into about `seconds`. Ranks measure at the same time, so those that
    share a device share its rate.
    """
    # 2 size^3 FLOP: 1.1 TFLOP, about 2 ms on an H100; 2.1 GFLOP on a CPU
    size = 8192 if device.type == "cuda" else 1024
    a, b = (torch.randn(size, size, device=device).to(dtype) for _ in range(2))
    best, end = float("inf"), time.perf_counter() + seconds
    torch.matmul(a, b)
    while time.perf_counter() < end or best == float("inf"):
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        start = time.perf_counter()
        torch.matmul(a, b)
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        best = min(best, time.perf_counter() - start)
    return 2 * size**3 / best
