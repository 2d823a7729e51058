"""What machine this is, and the most it does: rates of matrix products and of copies, to which all
else is compared.
"""

import subprocess
from collections.abc import Iterator
from functools import partial

import torch

from benchmarks.gpu import clock
from benchmarks.gpu.case import Case, Context, Record
from dolmen.training import mfu

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
NVIDIA_SMI = "name,driver_version,memory.total,clocks.sm,clocks.mem,power.limit,pcie.link.gen.max"


def cases(context: Context) -> Iterator[Case]:
    yield Case("facts", 5, partial(facts, context))
    yield Case("copy", 5, partial(copy, context))
    for name in DTYPES:
        yield Case(f"matmul {name}", 6, partial(matmul, context, name))


def facts(context: Context, record: Record) -> None:
    record.tell(torch=torch.__version__, cuda=torch.version.cuda, threads=torch.get_num_threads())
    if not context.cuda:
        return
    found = torch.cuda.get_device_properties(0)
    record.tell(
        device=found.name,
        capability=f"{found.major}.{found.minor}",
        memory=found.total_memory,
        multiprocessors=found.multi_processor_count,
        count=torch.cuda.device_count(),
        driver=nvidia_smi(),
        nccl=".".join(map(str, torch.cuda.nccl.version())),
        cudnn=torch.backends.cudnn.version(),
        flash=torch.backends.cuda.is_flash_attention_available(),
        tf32=torch.backends.cuda.matmul.allow_tf32,
    )
    record.check("matrix products of fp32 use TF32", float(record.values["tf32"]), 0, "fp32 is")


def nvidia_smi() -> str:
    """What it says of the driver and of clocks, or that it is not there."""
    words = ["nvidia-smi", f"--query-gpu={NVIDIA_SMI}", "--format=csv,noheader"]
    try:
        asked = subprocess.run(words, capture_output=True, text=True, timeout=20)
    except (OSError, subprocess.TimeoutExpired) as error:
        return str(error)
    return asked.stdout.strip() or asked.stderr.strip()


def copy(context: Context, record: Record) -> None:
    """A copy within the device, of more than its cache holds; bytes read and written count."""
    device = torch.device(context.place)
    elements = (1 << 30 if context.full else 1 << 20) // 4
    source = torch.randn(elements, device=device)
    to = torch.empty_like(source)
    seconds = clock.rate(lambda: to.copy_(source), device)
    record.tell(bytes_per_second=2 * source.nbytes / seconds, seconds=seconds)
    record.check("elements not copied", float((to != source).sum()), 0, "a copy is exact")


def matmul(context: Context, name: str, record: Record) -> None:
    """The best rate of square products, on random values, and the datasheet's."""
    device, dtype = torch.device(context.place), DTYPES[name]
    seconds = 1.5 if context.full else 0.05
    measured = mfu.matmul_peak(device, dtype, seconds)
    told = mfu.datasheet(torch.cuda.get_device_name(0), dtype) if context.cuda else None
    record.tell(flops_per_second=measured, datasheet=told)
