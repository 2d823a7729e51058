"""The grid of processes: a frozen `Mesh` of named axes, passed as an argument. The only file with
rank arithmetic.

Who talks most is innermost: tp inside a machine, pp, which sends least, across them:

    rank = ((pp_rank * dp + dp_rank) * cp + cp_rank) * tp + tp_rank

    pp=1, dp=2, cp=1, tp=3:     tp ->   0  1  2
                                dp |    3  4  5

Three axes are derived and add no ranks. The dp x cp ranks of a stage share each parameter, so they
are one axis, `fsdp`; for experts the same ranks are cut again, `edp` x `ep` with ep inner: each of
ep holds other experts, which edp shares.
"""

import os
import re
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.distributed_c10d import _world

from dolmen.core.words import counted


@dataclass(frozen=True)
class Axis:
    """One dimension of the grid, seen from this process. `group` is None where the size is 1 and
    nothing is ever sent.
    """

    name: str
    size: int = 1
    rank: int = 0
    group: dist.ProcessGroup | None = None
    gloo: bool = False
    """What is sent goes over gloo, whose reduce-scatter sends all sums to all
    (core/collectives.py).
    """


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
        return self.world.size

    @property
    def rank(self) -> int:
        return self.world.rank

    @property
    def first(self) -> bool:
        return self.rank == 0


SINGLE = Mesh()


@dataclass(frozen=True)
class Launch:
    """What a launcher (torchrun, srun, ours) told this process. Read once, at the entry point."""

    rank: int
    world_size: int
    local_rank: int
    local_world_size: int
    rendezvous: str | None = None
    """Where the ranks meet, tcp://HOST:PORT; None: MASTER_ADDR and MASTER_PORT say."""

    @staticmethod
    def read(env=os.environ) -> "Launch | None":
        """From torchrun's variables, else SLURM's; None where no launcher started this process.
        Raises KeyError if partial.
        """
        if "RANK" in env and "WORLD_SIZE" in env:
            names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
            return Launch(*(int(env.get(n, env[n.removeprefix("LOCAL_")])) for n in names))
        if (
            "SLURM_PROCID" in env
            and "SLURM_STEP_NODELIST" in env
            and int(env.get("SLURM_NTASKS", "1")) > 1
        ):
            local = env[
                "SLURM_STEP_TASKS_PER_NODE"
                if "SLURM_STEP_TASKS_PER_NODE" in env
                else "SLURM_NTASKS_PER_NODE"
            ]
            here = int(re.match(r"\d+", local)[0])  # "4", "4(x2)" or "4,3": tasks of each machine
            return Launch(
                int(env["SLURM_PROCID"]),
                int(env["SLURM_NTASKS"]),
                int(env["SLURM_LOCALID"]),
                here,
                None if "MASTER_ADDR" in env else _slurm_rendezvous(env),
            )
        return None


def _slurm_rendezvous(env: Mapping[str, str]) -> str:
    """The first machine of the step ("n[03-05,9],x1" is n03 and others), and a port that depends on
    the step alone.
    """
    host = re.match(r"([^,\[]+)(?:\[(\d+))?", env["SLURM_STEP_NODELIST"])
    port = (
        20000
        + (int(env.get("SLURM_JOB_ID", "0")) * 31 + int(env.get("SLURM_STEP_ID", "0"))) % 10000
    )
    return f"tcp://{host[1]}{host[2] or ''}:{port}"


def device_for(launch: Launch | None) -> torch.device:
    """The GPU of this process's local rank, or the CPU where no GPU is visible or there are fewer
    than processes.
    """
    local, count = (launch.local_rank, launch.local_world_size) if launch else (0, 1)
    if torch.cuda.is_available() and torch.cuda.device_count() >= count:
        return torch.device("cuda", local)
    return torch.device("cpu")


def join(launch: Launch | None, device: torch.device) -> None:
    """Enter the default process group: gloo for CPU tensors, NCCL for GPU tensors. A lone process
    needs no network.
    """
    backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
    if device.type == "cuda":
        torch.cuda.set_device(device)
    if launch is None or launch.world_size == 1:
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
    else:
        dist.init_process_group(
            backend, init_method=launch.rendezvous, rank=launch.rank, world_size=launch.world_size
        )


@contextmanager
def joined(launch: Launch | None, device: torch.device) -> Iterator[None]:
    """Within, this process is in the default group. An exception leaves it there, unless it is
    alone: to part from a group in which another rank waits can block.
    """
    hook = sys.excepthook
    join(launch, device)
    alone = dist.get_world_size() == 1
    try:
        yield
    except BaseException:
        if alone:
            part(hook)
        raise
    part(hook)


def part(hook: Callable[..., object]) -> None:
    """Leave the default group. torch has wrapped sys.excepthook, to say which rank a traceback is
    of, and would do so once more per group: it is `hook` again.
    """
    dist.destroy_process_group()
    sys.excepthook = hook


def _group(ranks: list[int], purpose: str = "dolmen") -> dist.ProcessGroup:
    """The group of `ranks` for `purpose`, made once in the life of the default group: each costs
    threads and descriptors. Only its members meet, so that a rank of thousands makes a dozen
    groups, not all. All ranks make equally many, in one order: torch names a group after its ranks
    and the number of groups before it.
    """
    for group, members in _world.pg_group_ranks.items():
        if group.group_desc == purpose and list(members) == ranks:
            return group
    return dist.new_group(ranks, use_local_synchronization=True, group_desc=purpose)


def grid(dp: int, tp: int, device: torch.device, *, pp: int = 1, cp: int = 1, ep: int = 1) -> Mesh:
    """The mesh of the joined process group. Raises ValueError if the product of its axes is not its
    size, or if ep does not divide dp x cp.
    """
    me = dist.get_rank()
    if pp * dp * cp * tp != dist.get_world_size():
        raise ValueError(
            f"layout.pp ({pp}) x layout.dp ({dp}) x layout.cp ({cp}) x layout.tp ({tp}) = "
            f"{counted(pp * dp * cp * tp, 'process', 'processes')}, but "
            f"{dist.get_world_size()} were started: set "
            f"--layout.dp {max(1, dist.get_world_size() // (pp * cp * tp))}"
        )
    if dp * cp % ep:
        raise ValueError(
            f"layout.ep ({ep}) does not divide dp x cp ({dp} x {cp}): set --layout.ep to a divisor"
        )
    ranks = torch.arange(pp * dp * cp * tp)

    def axis(name: str, shape: tuple[int, ...], dim: int, purpose: str = "dolmen") -> Axis:
        """The line through this rank along `dim` of the grid of `shape`."""
        where = (ranks.view(shape) == me).nonzero()[0].tolist()
        line = ranks.view(shape)[(*where[:dim], slice(None), *where[dim + 1 :])].tolist()
        group = _group(line, purpose) if len(line) > 1 else None
        return Axis(
            name,
            shape[dim],
            where[dim],
            group,
            group is not None and dist.get_backend(group) == "gloo",
        )

    dense, sparse = (pp, dp, cp, tp), (pp, dp * cp // ep, ep, tp)
    axes = {name: axis(name, dense, dim) for dim, name in enumerate(("pp", "dp", "cp", "tp"))}
    axes |= {
        "fsdp": axis("fsdp", (pp, dp * cp, tp), 1),
        "edp": axis("edp", sparse, 1),
        "ep": axis("ep", sparse, 2),
    }
    axes |= {name: axis(name, dense, 0, f"dolmen {name}") for name in ("up", "down")}
    if pp > 1:
        axes["ends"] = _ends(ranks.view(pp, -1), me)
    stage = ranks.view(pp, -1)[axes["pp"].rank]
    return Mesh(
        **axes,
        world=Axis("world", len(ranks), me, dist.group.WORLD if len(ranks) > 1 else None),
        device=device,
        grid=_device_mesh(stage.view(dp * cp, tp), (axes["fsdp"], axes["tp"]), device),
        expert_grid=_device_mesh(
            stage.view(sparse[1:]), (axes["edp"], axes["ep"], axes["tp"]), device
        ),
    )


def _ends(stages: torch.Tensor, me: int) -> Axis:
    column = int((stages == me).nonzero()[0, 1])
    ends = [int(stages[0, column]), int(stages[-1, column])]
    group = _group(ends if me in ends else [me], "dolmen ends")
    return Axis("ends", 2, ends.index(me), group) if me in ends else Axis("ends")


def _device_mesh(ranks: torch.Tensor, axes: tuple[Axis, ...], device: torch.device) -> DeviceMesh:
    alone = _group([dist.get_rank()])
    return DeviceMesh.from_group(
        [a.group or alone for a in axes],
        device.type,
        mesh=ranks,
        mesh_dim_names=tuple(a.name for a in axes),
    )


def fake(world: int, rank: int = 0) -> None:
    """Join a process group of `world` ranks in which nothing is sent: one process plays any rank of
    any cluster.
    """
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world)
