"""How far a result is from a reference of higher precision, and how far it may be."""

import torch
from torch import Tensor

# ||out - ref|| / ||ref|| of one operator: one rounding of its result, 2^-24 or 2^-9 and 2^-12 at
# most, and as much again from what it rounds within; sums of thousands of terms in fp32 lose a few
# bits more. TF32 would show 3e-4 in place of the first.
BOUND = {torch.float32: 1e-5, torch.bfloat16: 1e-2, torch.float16: 2e-3}
WHY = "one operator: a few roundings in its dtype"


def relative(out: Tensor, ref: Tensor) -> float:
    """||out - ref|| / ||ref|| in float64, NaN where a number of `out` is not finite, infinite where
    the shapes differ or the reference is zero and `out` is not.
    """
    if out.shape != ref.shape:
        return float("inf")
    out, ref = out.detach().double().cpu(), ref.detach().double().cpu()
    if not bool(out.isfinite().all()):
        return float("nan")
    size, off = float(ref.norm()), float((out - ref).norm())
    return off / size if size else (0.0 if off == 0.0 else float("inf"))


def unequal(out: Tensor, ref: Tensor) -> float:
    """The share of elements that are not equal bit for bit; infinite where shapes or dtypes
    differ.
    """
    if out.shape != ref.shape or out.dtype != ref.dtype:
        return float("inf")
    return float((out.detach().cpu() != ref.detach().cpu()).double().mean())


def apart(out: list[float], ref: list[float]) -> float:
    """Largest relative difference of two series; infinite where their lengths differ, NaN where one
    is NaN.
    """
    if len(out) != len(ref):
        return float("inf")
    pair = torch.tensor([out, ref], dtype=torch.float64)
    return float(((pair[0] - pair[1]).abs() / pair[1].abs().clamp(min=1e-300)).max())
