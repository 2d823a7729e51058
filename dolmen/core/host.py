"""The two ways between the host and the device in compute. The host runs ahead of a GPU and fills
its queue; to `read_back` it waits until the queue is empty, and the queue is empty until it is
back. A step reads once, when it must be known whether to update, and once more per layer of experts
where ep > 1. Nothing else in compute reads (tests/test_house.py, tests/training/test_reads.py).
"""

from typing import Any

import torch
from jaxtyping import Shaped
from torch import Tensor


def read_back(x: Shaped[Tensor, "..."]) -> Any:
    """The values of x as (nested) lists, or a number; the host waits for the device."""
    return x.tolist()


def number(value: int | float, dtype: torch.dtype, device: torch.device) -> Shaped[Tensor, ""]:
    """A number that the host knows, written by a kernel. `torch.tensor` would copy it, and wait
    until all that is queued before the copy is done.
    """
    return torch.full((), value, dtype=dtype, device=device)


def send(x: Shaped[Tensor, "*shape"], device: torch.device) -> Shaped[Tensor, "*shape"]:
    """x of the CPU on `device`, copied while the host and the device go on; x itself, where it is
    there.
    """
    if x.device.type == device.type:
        return x.to(device)
    return x.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else x.to(device)
