"""The grid of processes: a frozen `Mesh` of named axes, passed as an argument, and the process
groups behind it. Who is in which group is arithmetic (core/topology.py); here the groups are made.

    default group    all ranks: gloo, and NCCL for GPU tensors; lazily connected over gloo
    background       all ranks once more: for checkpoints that are saved while training continues
    one per axis     its ranks only: gloo, or on GPUs NCCL and nothing else

So a rank of 3,072 has two gloo groups; docs/how-to/clusters.md counts their sockets.
"""

import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from datetime import timedelta
from functools import partial
from typing import Literal

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from dolmen.core.environment import Launch
from dolmen.core.topology import Topology
from dolmen.core.torch_private import processes, strings


@contextmanager
def lazy_gloo() -> Iterator[None]:
    """Context manager: gloo groups made inside connect two ranks at their first message, not all
    pairs at once: each of 3,072 ranks would open 3,071 sockets per group, three times what a
    process may (ulimit -n). Sets an environment variable meanwhile; one that the user has set
    stays.

    For groups of collectives alone: a lazy group's first receive waits on the CPU for its sender,
    which is NCCL's rule and would be one more for point-to-point over gloo.
    """
    # gloo reads the variable as each group is made, and torch has no argument for it
    if strings.LAZY_GLOO in os.environ:
        yield
        return
    os.environ[strings.LAZY_GLOO] = "1"
    try:
        yield
    finally:
        del os.environ[strings.LAZY_GLOO]


def background_group(timeout: timedelta) -> dist.ProcessGroup:
    """Make and return a separate gloo group of all ranks for work in the background, whose
    collectives must not mix with training's. Collective: all ranks call it at the same point.
    """
    with lazy_gloo():
        return _member(dist.new_group(backend="gloo", timeout=timeout))


def process_group(
    ranks: list[int],
    purpose: str = "dolmen",
    device: torch.device = torch.device("cpu"),
    timeout: timedelta | None = None,
) -> dist.ProcessGroup:
    """Return the process group of `ranks` for `purpose` on `device`, made on first use and then
    reused, as each costs threads and descriptors. Only its members meet, so that a rank of
    thousands makes a dozen groups, not all. All ranks make equally many, in one order: torch names
    a group after its ranks and the number of groups before it.

    For a GPU it is NCCL alone, without a full mesh of gloo's sockets, on a stream of high priority:
    whatever an axis sends, some rank's next product waits for it, and its kernel would otherwise
    start only when all blocks of the running product have. It is gloo on a CPU, and where the ranks
    met over gloo alone, as those do that share a GPU, which NCCL refuses. `timeout`: of a
    collective; None: torch's default.
    """
    nccl = device.type == "cuda" and "nccl" in _backends(dist.group.WORLD)
    for group, members in processes.groups():
        known = group.group_desc == purpose and members == ranks
        # ranks and purpose match; a backend from another mesh in this process might not
        if known and ("nccl" in _backends(group)) == nccl:
            return group
    backend = options = None
    if nccl:
        # FSDP's own streams have high priority, too
        backend, options = "nccl", dist.ProcessGroupNCCL.Options(is_high_priority_stream=True)
        if timeout is not None:
            processes.set_timeout(options, timeout)
    return _member(
        dist.new_group(
            ranks,
            timeout=timeout,
            backend=backend,
            pg_options=options,
            use_local_synchronization=True,
            group_desc=purpose,
        )
    )


def _member(group: dist.ProcessGroup | int | None) -> dist.ProcessGroup:
    """Return the group, which this rank must be a member of: torch returns a number for any
    other.
    """
    assert isinstance(group, dist.ProcessGroup)
    return group


def _backends(group: dist.ProcessGroup | None) -> str:
    """Return a group's backend per device type, as "cpu:gloo,cuda:nccl"."""
    assert group is not None
    return processes.backends(group)


ReductionOrder = Literal["fast", "fixed"]
"""How partial sums of several ranks are added: core/transfers.py defines each."""


@dataclass(frozen=True)
class Axis:
    """One dimension of the grid, seen from this process: its size and this rank's coordinate.
    `group` is None where the size is 1 and nothing is ever sent.
    """

    name: str
    size: int = 1
    rank: int = 0
    group: dist.ProcessGroup | None = None
    gloo: bool = False
    """True if the group is gloo, whose reduce-scatter sends all sums to all
    (core/transfers.py).
    """
    reduction: ReductionOrder = "fast"
    """Order in which sums over it are added (core/transfers.py)."""

    @property
    def adds(self) -> bool:
        """True if a reduce-scatter over this axis exchanges parts, of which each rank adds up its
        own (gloo, or a fixed order of sums); False if the backend adds.
        """
        return self.gloo or self.reduction == "fixed"


@dataclass(frozen=True)
class Mesh:
    """This process's place in the grid. `grid` is None in a process that joined no group
    (`SINGLE`).
    """

    pp: Axis = Axis("pp")
    dp: Axis = Axis("dp")
    cp: Axis = Axis("cp")
    tp: Axis = Axis("tp")
    fsdp: Axis = Axis("fsdp")
    """dp x cp: the ranks that share a parameter."""
    ep: Axis = Axis("ep")
    """Ranks of fsdp that hold different experts."""
    edp: Axis = Axis("edp")
    """Ranks of fsdp that share an expert: fsdp = edp x ep."""
    ends: Axis = Axis("ends")
    """The first and the last stage, seen from either of them: the two owners of a tied embedding.
    """
    world: Axis = Axis("world")
    """All ranks."""
    up: Axis = Axis("up")
    """pp again, for sends to a higher stage alone: nothing sent one way waits for anything sent the
    other.
    """
    down: Axis = Axis("down")
    """pp again, for sends to a lower stage."""
    device: torch.device = torch.device("cpu")
    grid: DeviceMesh | None = None
    """(fsdp, tp) of this stage: where parameters lie."""
    expert_grid: DeviceMesh | None = None
    """(edp, ep, tp) of this stage: where experts lie."""

    @property
    def size(self) -> int:
        """Number of ranks in the world."""
        return self.world.size

    @property
    def rank(self) -> int:
        """This process's rank in the world."""
        return self.world.rank

    @property
    def first(self) -> bool:
        """True on rank 0 of the world."""
        return self.rank == 0


SINGLE = Mesh()
GroupFactory = Callable[..., dist.ProcessGroup]  # process_group, of one device and timeout


def join_world(
    launch: Launch | None, device: torch.device, timeout: timedelta | None = None
) -> None:
    """Initialise the default process group: gloo for CPU tensors, NCCL for GPU tensors; a process
    without `launch`, or alone in it, needs no network. `timeout`: the longest a collective may
    take; None: torch's default, 30 minutes, and 10 on the axes of a mesh of GPUs.

    Without torch's `device_id`, which makes communicators at once: then all groups are split off
    the world's, in which every rank must take part for every group (ours are made by their members
    alone), and sends of a group share its one communicator and wait for each other. What it would
    save the pipeline from, `connect` does.
    """
    # gloo too on GPUs: objects and flags on the host travel without touching the device
    backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
    if device.type == "cuda":
        _prepare(device)
    if launch is None or launch.world_size == 1:
        dist.init_process_group(
            backend,
            # in memory: no port is opened
            store=dist.HashStore(),  # pyright: ignore[reportPrivateImportUsage]  # torch documents it
            rank=0,
            world_size=1,
            timeout=timeout,
        )
        return
    with lazy_gloo():
        dist.init_process_group(
            backend,
            init_method=launch.rendezvous,
            rank=launch.rank,
            world_size=launch.world_size,
            timeout=timeout,
        )


def _prepare(device: torch.device) -> None:
    """Make `device`, a GPU, the current one of this process, and have its products of half
    precision summed in fp32. By default cuBLAS may add the parts of a long sum in half precision,
    as wrong as 2^-9 each.
    """
    torch.cuda.set_device(device)
    products = torch.backends.cuda.matmul
    products.allow_bf16_reduced_precision_reduction = False
    products.allow_fp16_reduced_precision_reduction = False


@contextmanager
def process_group_context(
    launch: Launch | None, device: torch.device, timeout: timedelta | None = None
) -> Iterator[None]:
    """Context manager: join the default group, and leave it at the end; a group that this process
    is in already is used, and stays. After an exception a rank of several does not leave:
    destroying a group in which another rank waits can block. Raises ValueError for an existing
    group without gloo, or on GPUs without NCCL. Arguments are those of `join_world`.
    """
    if dist.is_initialized():
        _require_backends(device)
        yield
        return
    hook = sys.excepthook
    join_world(launch, device, timeout)
    # nobody can wait for a lone process
    alone = dist.get_world_size() == 1
    try:
        yield
    except BaseException:
        if alone:
            leave_world(hook)
        raise
    leave_world(hook)


def _require_backends(device: torch.device) -> None:
    """Raise ValueError unless the default group has gloo for CPU tensors, and NCCL for those of
    `device` if it is a GPU; a GPU is then made the current device.
    """
    backends = _backends(dist.group.WORLD)
    if "gloo" not in backends or device.type == "cuda" and "nccl" not in backends:
        needed = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
        raise ValueError(
            f"the process group has the backends {backends}, but {needed} is needed: initialise it "
            f'with init_process_group("{needed}"), or leave that to dolmen'
        )
    if device.type == "cuda":
        _prepare(device)


def leave_world(hook: Callable[..., object]) -> None:
    """Destroy the default group and set sys.excepthook to `hook`, what it was before the group:
    torch wraps it per group, to say which rank a traceback is of.
    """
    dist.destroy_process_group()
    sys.excepthook = hook


def build_mesh(
    dp: int,
    tp: int,
    device: torch.device,
    *,
    pp: int = 1,
    cp: int = 1,
    ep: int = 1,
    timeout: timedelta | None = None,
    reduction: ReductionOrder = "fast",
) -> Mesh:
    """Build and return the mesh of axes over the joined process group, with the process groups of
    each axis. Collective: all ranks call it with the same arguments. `reduction`: order in which
    sums over ranks are added; `timeout`: the longest a collective may take, None: torch's default.
    Raises ValueError if the product of its axes is not the number of ranks, or if ep does not
    divide dp x cp.
    """
    topology = Topology(dp=dp, tp=tp, pp=pp, cp=cp, ep=ep)
    topology.require(dist.get_world_size())
    # groups are made in the same order on every rank: the axes as listed below
    me = dist.get_rank()
    make = partial(process_group, device=device, timeout=timeout)

    def axis(name: str, line: str | None = None, purpose: str = "dolmen") -> Axis:
        """Return the axis called `name`: the ranks along the grid's dimension `line` (None: `name`)
        through this rank, with their process group if they are several. `purpose` tells groups of
        the same ranks apart.
        """
        members = topology.group(line or name, me)
        # an axis of size 1 sends nothing: no group, no threads
        group = make(list(members), purpose) if len(members) > 1 else None
        gloo = group is not None and dist.get_backend(group) == "gloo"
        return Axis(name, len(members), members.index(me), group, gloo, reduction)

    axes = {name: axis(name) for name in ("pp", "dp", "cp", "tp", "fsdp", "edp", "ep")}
    # same ranks as pp, a group per direction: sends of one never queue behind the other's
    axes |= {name: axis(name, "pp", f"dolmen {name}") for name in ("up", "down")}
    if pp > 1:
        axes["ends"] = replace(_boundary_axis(topology, me, make), reduction=reduction)
    world = dist.group.WORLD if topology.size > 1 else None
    stage = torch.tensor(topology.stage(me))
    dense = axes["fsdp"], axes["tp"]
    sparse = axes["edp"], axes["ep"], axes["tp"]
    return Mesh(
        **axes,
        world=Axis("world", topology.size, me, world, reduction=reduction),
        device=device,
        grid=_device_mesh(stage, dense, device, make),
        expert_grid=_device_mesh(stage, sparse, device, make),
    )


def _boundary_axis(topology: Topology, me: int, make: GroupFactory) -> Axis:
    """Return the axis `ends` of the first and the last pipeline stage, seen from rank `me`; of size
    1 on a rank of any other stage, which still makes a group (of itself) so that all ranks make
    equally many.
    """
    ends = list(topology.ends(me))
    # torch counts groups: a rank that made fewer would name the next ones differently
    group = make(ends if me in ends else [me], "dolmen ends")
    return Axis("ends", 2, ends.index(me), group) if me in ends else Axis("ends")


def _device_mesh(
    stage: torch.Tensor, axes: tuple[Axis, ...], device: torch.device, make: GroupFactory
) -> DeviceMesh:
    """Return torch's DeviceMesh over the ranks `stage`, with `axes` and their groups as its
    dims.
    """
    # DeviceMesh needs a group for each dim, also of size 1
    alone = make([dist.get_rank()])
    return DeviceMesh.from_group(
        [a.group or alone for a in axes],
        device.type,
        mesh=stage.view([a.size for a in axes]),
        mesh_dim_names=tuple(a.name for a in axes),
    )
