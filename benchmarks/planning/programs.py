"""What published frameworks compute, and what of it is hidden: from a row's framework, device and
options. Where a row does not say enough there are several, and the interval spans them.
"""

import re
from dataclasses import dataclass, replace

from benchmarks.planning.published import Published, is_gated
from dolmen.planning.cost import Overlap
from dolmen.planning.operations import Program

NONE = Overlap("nothing", "nothing", "nothing", "nothing")
GRADIENTS = Overlap("nothing", "nothing", "nothing", "action")
"""Sums over dp behind backward (torch's DistributedDataParallel)."""
INPUTS = Overlap("products", "nothing", "nothing", "nothing")
"""Sums of the inputs' gradients behind the weights' (Megatron of 2022)."""
ALL = Overlap("products", "action", "nothing", "action")


@dataclass(frozen=True)
class Ways:
    """One way in which a framework may have run."""

    name: str
    program: Program
    overlap: Overlap
    waits: bool
    zero: int


# Attention over scores, a kernel for each operation (1909.08053). PyTorch of that year kept 816 kB
# of random state on the GPU, and each block with dropout and a checkpoint copied it six times.
STATE = 6 * 816_016
V1 = Ways("Megatron-LM of 2019", Program("scores", "no", True, 2, False, STATE), GRADIENTS, True, 0)
# fused by hand (2104.04473, section 4.2); gradients in half precision, added in a pass of their own
V2 = Ways("Megatron-LM of 2021", Program("scores", "pairs", True, 2, False), NONE, True, 0)
# gradients added by their product, sums over tp behind it (2205.05198)
# the same operations, by programs that sum and send while they compute
DDP = replace(V2, name="data parallel, fused", overlap=GRADIENTS, waits=False)
V3 = Ways("Megatron-LM of 2022", Program("scores", "pairs", True, 2, True), INPUTS, True, 0)
# experts are multiplied one after another, on several streams (TEGroupedMLP)
CORE_PROGRAM = Program("tuned", "pairs", False, 4, True, grouped=False)
CORE = Ways("Megatron-Core", CORE_PROGRAM, ALL, False, 1)
TITAN = Ways("torchtitan", Program("flash", "compiled", False, 4, False), ALL, False, 3)
YEARS = ((1912, V1), (2203, V2), (2212, V3), (9999, CORE))
"""Megatron-LM's, by the last month whose papers had it, as arXiv writes months."""
FLASH = Ways("FSDP, fused attention", Program("flash", "pairs", False, 4, False), ALL, False, 3)


def ways(row: Published) -> list[Ways]:
    """Those that fit a row, the likeliest first."""
    framework = row.framework.lower()
    old = any(name in row.gpu.lower() for name in ("v100", "volta"))
    if "torchtitan" in framework:
        found = _titan(row)
    elif any(name in framework for name in ("core", "nemo", "bridge", "transformer engine")):
        found = [CORE]
    elif "megatron" in framework or "deepspeed" in framework:
        found = _megatron(row, old)
    else:
        found = (
            [DDP] if old else [FLASH, replace(FLASH, program=replace(FLASH.program, fused="no"))]
        )
    return [_stated(row, way) for way in found]


def _titan(row: Published) -> list[Ways]:
    eager = replace(TITAN, program=replace(TITAN.program, fused="no"), name="torchtitan, eager")
    if "eager" in row.text or "no compile" in row.text:
        return [eager]
    return [TITAN] if "compile" in row.text or row.precision == "fp8" else [TITAN, eager]


def _megatron(row: Published, old: bool) -> list[Ways]:
    """By what a year had; of a row without one, by its options and device."""
    hopper = any(name in row.gpu.lower() for name in ("h100", "h200", "b200", "gh200"))
    if hopper or is_gated(row) or row.precision == "fp8" or "flash" in row.text:
        return [CORE]
    if row.sequence_parallel or row.recompute == "selective":
        return [V3]
    if row.month is not None:
        return [next(way for last, way in YEARS if row.month <= last)]
    if not old:
        return [V2, V3]
    return [V2] if "fused" in row.text else [V2, V1]


def _stated(row: Published, way: Ways) -> Ways:
    """With what the row says itself."""
    program = replace(way.program, fp8=row.precision == "fp8")
    if re.search(r"async ?tp|tp.comm.overlap", row.text):
        way = replace(way, overlap=replace(way.overlap, tp="action"))
    if "nemo" in row.framework.lower() and row.precision == "fp8":
        # as its recipes of fp8 say (NeMo-Framework-Launcher): optim.grad_sync_dtype=bf16
        program = replace(program, gradient=2)
    if program.gradient == 2 and row.precision == "bf16":
        # DeepSpeed's BF16_Optimizer adds `grad.to(float32)` to its sum
        program = replace(program, gradient=4, converts="deepspeed" in row.framework.lower())
    return replace(way, program=program, zero=way.zero if row.zero is None else row.zero)
