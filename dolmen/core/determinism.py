"""The same bits every time on a GPU (--train.deterministic). docs/concepts/numerics.md lists what
is bitwise where.

On a CPU all of a run is, with or without. A GPU's atomic additions come in any order: those of
FlashAttention's backward, of `index_put`, `index_add` and `scatter_add`, of cuBLAS's shared
workspaces, and of a switch that adds up for NCCL (NVLS). Each has another way, which torch takes
where its flag is set: NCCL's if that is so before the process group is made.

Random streams are derived from names (`seed_of`), never consumed: what is drawn for (seed, name,
step) is the same in any order, on any rank, and after a resume.
"""

import hashlib
import re
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch.utils import deterministic

# cuBLAS: eight workspaces of 4 MiB, one per stream, so that products on two streams share none.
# torch refuses products without it; it must be in the environment before the first of them.
ENVIRONMENT = {"CUBLAS_WORKSPACE_CONFIG": ":4096:8"}
NONE = re.compile(r"(\w+) does not have a deterministic implementation")


class NotDeterministic(ValueError):
    """An operator has no deterministic implementation, or CUBLAS_WORKSPACE_CONFIG rules out that of
    cuBLAS; the message names it and the option.
    """


@contextmanager
def deterministic_mode(enabled: bool) -> Iterator[None]:
    """Context manager: if `enabled`, torch uses deterministic algorithms only, and its previous
    settings are restored afterwards; else it does nothing. Raises NotDeterministic where an
    operator has no deterministic algorithm, or CUBLAS_WORKSPACE_CONFIG rules it out.
    """
    if not enabled:
        yield
        return
    cudnn = torch.backends.cudnn
    before = (
        torch.are_deterministic_algorithms_enabled(),
        torch.is_deterministic_algorithms_warn_only_enabled(),
        # a property of the class of the module
        deterministic.fill_uninitialized_memory,  # pyright: ignore[reportAttributeAccessIssue]
        cudnn.deterministic,
        cudnn.benchmark,
    )
    try:
        _set_flags(True, False, False, True, False)
        yield
    except RuntimeError as error:
        if explanation := _explain(str(error)):
            raise NotDeterministic(explanation) from error
        raise
    finally:
        _set_flags(*before)


def _set_flags(
    on: bool, warn_only: bool, fill: bool, cudnn_deterministic: bool, cudnn_benchmark: bool
) -> None:
    """Set torch's determinism switches: deterministic algorithms alone (`on`), a warning in place
    of an error, filling of uninitialised memory, and cuDNN's `deterministic` and `benchmark`.
    """
    torch.use_deterministic_algorithms(on, warn_only=warn_only)  # the compiler's flag too
    # fills what `empty` gives, against those who read it: a pass over memory that nobody here
    # needs; a property of the class of the module
    deterministic.fill_uninitialized_memory = fill  # pyright: ignore[reportAttributeAccessIssue]
    torch.backends.cudnn.deterministic = cudnn_deterministic
    torch.backends.cudnn.benchmark = cudnn_benchmark


def _explain(text: str) -> str | None:
    """Return torch's determinism error as a message that names the option to change; None for any
    other error.
    """
    if match := NONE.search(text):
        return (
            f"train.deterministic: {match[1]} has no deterministic implementation on this device: "
            "use --train.no-deterministic"
        )
    if "CUBLAS_WORKSPACE_CONFIG" in text:
        return (
            "train.deterministic: CUBLAS_WORKSPACE_CONFIG must be :4096:8 or :16:8: unset it, or "
            "use --train.no-deterministic"
        )
    return None


def seed_of(*names: int | str) -> int:
    """Return a seed of 63 bits, the hash of `names` joined by slashes: a run's seed, and what it is
    for. Equal names give equal seeds in any process; those of different names are unrelated.
    """
    return (
        int.from_bytes(
            hashlib.blake2b("/".join(map(str, names)).encode(), digest_size=8).digest(), "little"
        )
        >> 1
    )
