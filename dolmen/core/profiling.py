"""Names for the parts of a step, for a profile (training/profile.py): what operators are for, and
over which axis bytes move.

    with profiling.record_range("attention"): ...
    with profiling.record_range("tp", "all-reduce"): ...

Where no profile records, entering one costs 0.4 us and leaves nothing; under torch.compile it is
not there at all, and what is compiled is known by the names of its kernels.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import wraps
from typing import ParamSpec, TypeVar

import torch
from torch.autograd import profiler

from dolmen.core.torch_private import compute

P = ParamSpec("P")
T = TypeVar("T")
PREFIX = "dolmen: "


def record_range(kind: str, what: str = "") -> AbstractContextManager:
    """Return a context manager that names what runs inside it in torch's profile; it does nothing
    where no profiler records, and under torch.compile. `kind`: a kind of training/profile_table.py
    or the name of an axis; `what`: detail shown with it. Backward needs none: it is found by the
    forward it belongs to.
    """
    if torch.compiler.is_compiling() or not compute.is_profiling():
        return nullcontext()
    return profiler.record_function(f"{PREFIX}{kind} {what}".rstrip())


def record_function_range(kind: str) -> Callable[[Callable[P, T]], Callable[P, T]]:
    """Return a decorator that records each call of a function as a range of `kind` in the
    profile.
    """

    def decorate(function: Callable[P, T]) -> Callable[P, T]:
        """Return the function, each call of which is recorded."""

        @wraps(function)
        def wrapper(*args: P.args, **kwargs: P.kwargs) -> T:
            """Call the function within a range of the profile."""
            with record_range(kind):
                return function(*args, **kwargs)

        return wrapper

    return decorate
