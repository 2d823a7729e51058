"""The device of a process: which one it computes on, and when the host waits for it.

On a CPU, memory that a step frees is kept for the next one (`keep_freed_memory`). glibc takes every
block over 32 MiB from the kernel and gives it back when it is freed, and the top of the heap too: a
training step then touches gigabytes of fresh pages, each a fault and a page of zeros. Kept, they
cost nothing the second time.

Between the host and the device there are two ways (`to_device`, `read_back`). The host runs ahead
of a GPU and fills its queue; to `read_back` it waits until the queue is empty, and the queue is
empty until it is back. A step reads once, when it must be known whether to update, and once more
per layer of experts where ep > 1. Nothing else in compute reads (tests/test_house.py,
tests/training/test_reads.py).

The device is chosen once at the entry point (`choose_device`):

GPUs visible to a process         what each local rank takes
none                              the CPU
as many as local ranks, or more   cuda:LOCAL_RANK
one (srun --gpus-per-task=1)      cuda:0; when all have joined, no two may have the same GPU
any other number                  refused
"""

import contextlib
import ctypes
import os
import socket
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, Literal

import torch
from jaxtyping import Shaped
from torch import Tensor

from dolmen.core import consensus
from dolmen.core.environment import Launch
from dolmen.core.messages import plural

M_TRIM_THRESHOLD, M_TOP_PAD, M_MMAP_MAX = -1, -2, -4  # <malloc.h>
PAD = 64 << 20  # bytes by which the heap grows at least


def keep_freed_memory() -> None:
    """Tune glibc's allocator so that this process keeps memory it frees instead of returning it to
    the kernel. Does nothing where the C library is not glibc.
    """
    with contextlib.suppress(AttributeError):
        mallopt = ctypes.CDLL(None).mallopt
        # never mmap, trim the top of the heap only over 2 GiB, and grow it by 64 MiB at a time
        for what, value in ((M_MMAP_MAX, 0), (M_TRIM_THRESHOLD, 2**31 - 1), (M_TOP_PAD, PAD)):
            mallopt(what, value)


ReadBack = Callable[[Tensor, int | None], Any]
"""(tensor without values, rows) -> the result of `read_back`."""
_read_back: ContextVar[ReadBack | None] = ContextVar("answer", default=None)


def read_back(x: Shaped[Tensor, "..."], rows: int | None = None) -> Any:
    """Return the values of x as (nested) lists, or a number for a scalar; the host waits for the
    device. Within `replace_read_back` its function answers instead, given x and `rows`: if x counts
    rows per group, the total that each such count adds up to.
    """
    answer = _read_back.get()
    return x.tolist() if answer is None else answer(x, rows)


@contextmanager
def replace_read_back(answer: ReadBack) -> Iterator[None]:
    """Context manager: inside, `read_back(x, rows)` returns `answer(x, rows)` and reads nothing:
    for fake tensors, which have no values.
    """
    token = _read_back.set(answer)
    try:
        yield
    finally:
        _read_back.reset(token)


def scalar_tensor(
    value: int | float, dtype: torch.dtype, device: torch.device
) -> Shaped[Tensor, ""]:
    """Return a scalar tensor of a number known on the host, written by a kernel. `torch.tensor`
    would copy it, and wait until all that is queued before the copy is done.
    """
    return torch.full((), value, dtype=dtype, device=device)


def to_device(x: Shaped[Tensor, "*shape"], device: torch.device) -> Shaped[Tensor, "*shape"]:
    """Copy a CPU tensor to `device` asynchronously, through pinned memory on CUDA: the host does
    not wait. Returns x itself if it is there already.
    """
    if x.device.type == device.type:
        return x.to(device)
    # a copy from pageable memory would be synchronous
    return x.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else x.to(device)


DeviceChoice = Literal["auto", "cpu", "cuda"]
"""auto: the GPUs, where any are visible; cpu: never; cuda: refused where there is none."""
CPU = torch.device("cpu")
VISIBLE = "CUDA_VISIBLE_DEVICES"


def visible_gpus(choice: DeviceChoice = "auto") -> int:
    """Return how many GPUs this process may use: 0 if `choice` is cpu or CUDA is not available."""
    return torch.cuda.device_count() if choice != "cpu" and torch.cuda.is_available() else 0


def choose_device(
    choice: DeviceChoice, launch: Launch | None, option: str, env: Mapping[str, str] = os.environ
) -> torch.device:
    """Return the device that this process computes on: the CPU where `choice` is cpu or no GPU is
    visible; cuda:LOCAL_RANK where at least as many GPUs are visible as the launch has ranks on this
    machine; cuda:0 where one is. Raises ValueError, which names `option` and the numbers, for any
    other number of GPUs, and where cuda is requested and none is visible. `launch` None: a process
    by itself.
    """
    local, here = (launch.local_rank, launch.local_world_size) if launch else (0, 1)
    here = max(here, local + 1)
    count = visible_gpus(choice)
    if count == 0 and choice == "cuda":
        mend = "install one with CUDA" if torch.version.cuda is None else "make one visible"
        raise ValueError(
            f"--{option} is cuda, but {_no_gpu_reason()}{_visibility(env)}: {mend}, or use "
            f"--{option} cpu"
        )
    if count == 0:
        return CPU
    # row 2 of the table: one GPU per local rank
    if count >= here:
        return torch.device("cuda", local)
    if count == 1:
        return torch.device("cuda", 0)
    raise ValueError(_too_few(here, count, option, env))


def require_gpus(
    choice: DeviceChoice, processes: int, option: str, env: Mapping[str, str] = os.environ
) -> None:
    """Check that the visible GPUs suffice before starting `processes` workers, which will see the
    same ones; to see none is fine, unless `choice` is cuda. Raises ValueError that names `option`.
    """
    choose_device(choice, None, option, env)
    count = visible_gpus(choice)
    if 0 < count < processes:
        raise ValueError(_too_few(processes, count, option, env))


def _too_few(processes: int, count: int, option: str, env: Mapping[str, str]) -> str:
    """Return the error message for fewer visible GPUs (`count`) than `processes`, with what to
    change.
    """
    are = "is" if count == 1 else "are"
    return (
        f"{plural(processes, 'process', 'processes')} on this machine, but "
        f"{plural(count, 'GPU')} {are} visible{_visibility(env)}: start {count}, make {processes} "
        f"visible, or use --{option} cpu"
    )


def _visibility(env: Mapping[str, str]) -> str:
    """Return ` (CUDA_VISIBLE_DEVICES=...)` for a message, empty where the variable is not set."""
    return f" ({VISIBLE}={env[VISIBLE]})" if VISIBLE in env else ""


def _no_gpu_reason() -> str:
    """Return the reason why there is no GPU: torch is built without CUDA, or none is visible."""
    if torch.version.cuda is None:
        return f"torch {torch.__version__} is built without CUDA"
    return "no GPU is visible"


def describe_device(device: torch.device, choice: DeviceChoice) -> str:
    """Return this process's device as text for the run's header: a GPU's name, index and how many
    are visible, or the CPU with its number of threads and why it is the CPU.
    """
    if device.type == "cuda":
        seen = plural(visible_gpus(), "GPU")
        return f"{torch.cuda.get_device_name(device)} ({device} of {seen} visible per process)"
    threads = f"CPU, {plural(torch.get_num_threads(), 'thread')} each"
    return f"{threads} ({'as asked' if choice == 'cpu' else _no_gpu_reason()})"


def gpu_id(device: torch.device, env: Mapping[str, str] = os.environ) -> str:
    """Return an id unique to this GPU on its machine (its UUID), or to this MIG part of one; empty
    for the CPU.
    """
    if device.type == "cpu":
        return ""
    named = env.get(VISIBLE, "").split(",")[0].strip()
    if named.startswith("MIG-"):
        return named  # a process sees one part at most; CUDA may report the UUID of the whole
    return f"GPU-{torch.cuda.get_device_properties(device).uuid}"


def refuse_shared_gpus(device: torch.device, option: str) -> None:
    """Raise ValueError, the same on every rank, if two ranks share one GPU, or some have a GPU and
    others none; ranks that are all on CPUs pass. `option` names the device's option in the message.
    Collective: called by all ranks once they have joined.
    """
    gathered = consensus.gather_objects((socket.gethostname(), gpu_id(device)))
    without = [rank for rank, (_, name) in enumerate(gathered) if not name]
    if len(without) == len(gathered):
        return
    if without:
        rank = without[0]
        raise ValueError(
            f"{len(without)} of {plural(len(gathered), 'rank')} have no GPU, such as rank {rank} "
            f"on {gathered[rank][0]}: make one visible to each, or use --{option} cpu for all"
        )
    # host and id together: ids are unique on one machine alone
    ranks: dict[tuple[str, str], list[int]] = {}
    for rank, where in enumerate(gathered):
        ranks.setdefault(where, []).append(rank)
    for (host, name), sharing in ranks.items():
        if len(sharing) > 1:
            raise ValueError(
                f"ranks {', '.join(map(str, sharing[:8]))}{' ...' * (len(sharing) > 8)} on {host} "
                f"share one GPU, {name}: give each rank its own (srun --gpus-per-task=1), or "
                f"start {plural(len(ranks), 'rank')}, one per GPU; --{option} cpu uses none"
            )
