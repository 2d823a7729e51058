"""The two ways between the host and the device in compute. The host runs ahead of a GPU and fills
its queue; to `read_back` it waits until the queue is empty, and the queue is empty until it is
back. A step reads once, when it must be known whether to update, and once more per layer of experts
where ep > 1. Nothing else in compute reads (tests/test_house.py, tests/training/test_reads.py).
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import torch
from jaxtyping import Shaped
from torch import Tensor

Answer = Callable[[Tensor, int | None], Any]
"""What `read_back` gives of a tensor without values, and of `rows`."""
_answer: ContextVar[Answer | None] = ContextVar("answer", default=None)


def read_back(x: Shaped[Tensor, "..."], rows: int | None = None) -> Any:
    """The values of x as (nested) lists, or a number; the host waits for the device. `rows`: where
    x counts rows, how many there are of each way that it counts them, which is known without it.
    """
    answer = _answer.get()
    return x.tolist() if answer is None else answer(x, rows)


@contextmanager
def answered(answer: Answer) -> Iterator[None]:
    """Within, tensors have no values, and `answer` says what is read."""
    token = _answer.set(answer)
    try:
        yield
    finally:
        _answer.reset(token)


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
