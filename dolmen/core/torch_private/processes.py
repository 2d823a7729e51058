"""Private names of torch for what processes send each other, and for their groups."""

from collections.abc import Iterator
from datetime import timedelta

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as _functional

_RENAMED = "all_gather_single" in vars(_functional)
_SUFFIX = "single" if _RENAMED else "tensor"

all_reduce = _functional.all_reduce
"""(x, op, group): asynchronous, a new tensor. Of the public collectives none traces under
torch.compile. 2.11 to 2.13."""

all_gather = vars(_functional)[f"all_gather_{_SUFFIX}"]
"""(x, dim, group). 2.13; `all_gather_tensor` in 2.11."""

reduce_scatter = vars(_functional)[f"reduce_scatter_{_SUFFIX}"]
"""(x, op, dim, group). 2.13; `reduce_scatter_tensor` in 2.11."""

all_to_all = _functional.all_to_all_single
"""(x, rows to receive, rows to send, group); None: equally many. 2.11 to 2.13."""

wait = _functional.wait_tensor
"""Wait for the result of one of these. 2.11 to 2.13."""

all_reduce_ = torch.ops._c10d_functional.all_reduce_
"""(x, op, name of the group): in x's memory, asynchronous. 2.11 to 2.13."""


def groups() -> Iterator[tuple[dist.ProcessGroup, list[int]]]:
    """Yield every process group that this process is in, and its ranks in the world.
    2.11 to 2.13.
    """
    for group, members in dist.distributed_c10d._world.pg_group_ranks.items():
        yield group, list(members)


Store = dist.Store  # pyright: ignore[reportPrivateImportUsage]
"""Words that ranks leave for each other. torch documents it, and does not list it. 2.11 to 2.13."""


def store(name: str) -> Store:
    """Return the default group's rendezvous store, in which ranks leave values for each other, with
    keys prefixed by `name`. Public stores are created by their user, and need an address. 2.11 to
    2.13.
    """
    met = dist.distributed_c10d._get_default_store()
    return dist.PrefixStore(name, met)  # pyright: ignore[reportPrivateImportUsage]


def backends(group: dist.ProcessGroup) -> str:
    """Return which backend a group uses per device type, as "cpu:gloo,cuda:nccl";
    `dist.get_backend` returns that of one device type. 2.11 to 2.13.
    """
    return dist.distributed_c10d._world.pg_backend_config[group]


def set_timeout(options: "dist.ProcessGroupNCCL.Options", timeout: timedelta) -> None:
    """Set the timeout in a group's NCCL options: where they have none, torch warns that the
    argument of `new_group` wins. 2.11 to 2.13.
    """
    options._timeout = timeout
