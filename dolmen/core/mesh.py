"""The grid of processes: a frozen `Mesh` of named axes, passed as an argument. The only file with rank arithmetic.

`tp` talks most, so it is innermost and stays inside a machine:

    rank = dp_rank * tp + tp_rank          dp=2, tp=3:     tp ->   0  1  2
                                                           dp |    3  4  5
"""

import os
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

AXES = ("dp", "tp")                                        # outermost first


@dataclass(frozen=True)
class Axis:
    """One dimension of the grid, seen from this process. `group` is None where the size is 1 and nothing is ever sent."""

    name: str
    size: int
    rank: int
    group: dist.ProcessGroup | None = None


@dataclass(frozen=True)
class Mesh:
    """This process's place in the grid. `grid` is None in a process that joined no group (`SINGLE`)."""

    dp: Axis
    tp: Axis
    device: torch.device
    grid: DeviceMesh | None = None

    @property
    def size(self) -> int: return self.dp.size * self.tp.size

    @property
    def rank(self) -> int: return self.dp.rank * self.tp.size + self.tp.rank

    @property
    def first(self) -> bool: return self.rank == 0


SINGLE = Mesh(Axis("dp", 1, 0), Axis("tp", 1, 0), torch.device("cpu"))


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
        """From torchrun's variables, else SLURM's; None where no launcher started this process. Raises KeyError if partial."""
        if "RANK" in env and "WORLD_SIZE" in env:
            names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
            return Launch(*(int(env.get(n, env[n.removeprefix("LOCAL_")])) for n in names))
        if "SLURM_PROCID" in env and "SLURM_STEP_NODELIST" in env and int(env.get("SLURM_NTASKS", "1")) > 1:
            local = env["SLURM_STEP_TASKS_PER_NODE" if "SLURM_STEP_TASKS_PER_NODE" in env else "SLURM_NTASKS_PER_NODE"]
            here = int(re.match(r"\d+", local)[0])         # "4", "4(x2)" or "4,3": tasks of each machine
            return Launch(int(env["SLURM_PROCID"]), int(env["SLURM_NTASKS"]), int(env["SLURM_LOCALID"]), here,
                          None if "MASTER_ADDR" in env else _slurm_rendezvous(env))
        return None


def _slurm_rendezvous(env: Mapping[str, str]) -> str:
    """The first machine of the step ("n[03-05,9],x1" is n03 and others), and a port that depends on the step alone."""
    host = re.match(r"([^,\[]+)(?:\[(\d+))?", env["SLURM_STEP_NODELIST"])
    port = 20000 + (int(env.get("SLURM_JOB_ID", "0")) * 31 + int(env.get("SLURM_STEP_ID", "0"))) % 10000
    return f"tcp://{host[1]}{host[2] or ''}:{port}"


def device_for(launch: Launch | None) -> torch.device:
    """The GPU of this process's local rank, or the CPU where no GPU is visible or there are fewer than processes."""
    local, count = (launch.local_rank, launch.local_world_size) if launch else (0, 1)
    if torch.cuda.is_available() and torch.cuda.device_count() >= count:
        return torch.device("cuda", local)
    return torch.device("cpu")


def join(launch: Launch | None, device: torch.device) -> None:
    """Enter the default process group: gloo for CPU tensors, NCCL for GPU tensors. A lone process needs no network."""
    backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
    if device.type == "cuda": torch.cuda.set_device(device)
    if launch is None or launch.world_size == 1:
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
    else:
        dist.init_process_group(backend, init_method=launch.rendezvous, rank=launch.rank, world_size=launch.world_size)


@contextmanager
def joined(launch: Launch | None, device: torch.device) -> Iterator[None]:
    """Within, this process is in the default group. An exception leaves it there, unless it is alone: to part from a group
    in which another rank waits can block."""
    join(launch, device)
    alone = dist.get_world_size() == 1
    try: yield
    except BaseException:
        if alone: dist.destroy_process_group()
        raise
    dist.destroy_process_group()


def grid(dp: int, tp: int, device: torch.device) -> Mesh:
    """The mesh of the joined process group. Raises ValueError if dp x tp is not its size."""
    if dp * tp != dist.get_world_size():
        raise ValueError(f"layout.dp ({dp}) x layout.tp ({tp}) = {dp * tp} processes, but {dist.get_world_size()} were started: "
                         f"set --layout.dp {max(1, dist.get_world_size() // tp)}")
    device_mesh = init_device_mesh(device.type, (dp, tp), mesh_dim_names=AXES)
    axes = (Axis(n, s, device_mesh.get_local_rank(n), device_mesh.get_group(n) if s > 1 else None) for n, s in zip(AXES, (dp, tp), strict=True))
    return Mesh(*axes, device, device_mesh)


def fake(world: int, rank: int = 0) -> None:
    """Join a process group of `world` ranks in which nothing is sent: one process plays any rank of any cluster."""
    from torch.testing._internal.distributed.fake_pg import FakeStore
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world)
