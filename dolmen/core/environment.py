"""Environment variables: defaults that torch and CUDA read as they start, set once at the entry
point of launchers and workers alike (what the user has set stays), and the rank and world that a
launcher (torchrun, srun, ours) has set.
"""

import os
import re
from collections.abc import Mapping, MutableMapping
from dataclasses import dataclass
from itertools import accumulate

ALLOCATOR = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_HIP_ALLOC_CONF")
QUEUES = "CUDA_DEVICE_MAX_CONNECTIONS"


def set_defaults(env: MutableMapping[str, str]) -> None:
    """Set in `env`, unless the user has, growing segments for torch's CUDA allocator and 32
    hardware queues for CUDA. Call before CUDA starts.
    """
    # Segments that grow: gathered parameters and activations of many sizes otherwise leave gaps
    # that no later tensor fits. torch 2.11 to 2.15 read the first name; the others are older ones
    # for the same.
    if not any(name in env for name in ALLOCATOR):
        env[ALLOCATOR[0]] = "expandable_segments:True"
    # Hardware queues. Streams that share one wait for each other, so that a receive whose peer has
    # not sent yet would hold up a send, or a product, that the peer waits for. A rank of every axis
    # has some 17 streams: compute, four of FSDP, copies, and one for each of eleven communicators.
    # CUDA's default is 8 queues, its most 32.
    env.setdefault(QUEUES, "32")


@dataclass(frozen=True)
class Launch:
    """This process's rank and world as its launcher set them; read once, at the entry point."""

    rank: int
    world_size: int
    local_rank: int
    local_world_size: int
    rendezvous: str | None = None
    """Rendezvous address tcp://HOST:PORT; None: MASTER_ADDR and MASTER_PORT are set."""

    @staticmethod
    def read(env: Mapping[str, str] = os.environ) -> "Launch | None":
        """Return the launch that torchrun's variables state, else SLURM's; None where no launcher
        started this process, or SLURM started one task. Raises ValueError, with the variable and
        its value, where they are incomplete or out of range.
        """
        if "RANK" in env and "WORLD_SIZE" in env:
            return _torchrun(env)
        if "SLURM_PROCID" not in env or "SLURM_STEP_NODELIST" not in env:
            return None
        return _slurm(env) if "SLURM_NTASKS" in env and _positive(env, "SLURM_NTASKS") > 1 else None


def _torchrun(env: Mapping[str, str]) -> Launch:
    """Return the launch that torchrun's variables state; all ranks are on this machine unless
    LOCAL_RANK or LOCAL_WORLD_SIZE is set. Raises ValueError where one is missing or out of range.
    """
    world = _positive(env, "WORLD_SIZE")
    rank = _index(env, "RANK", world, "WORLD_SIZE")
    if "LOCAL_RANK" not in env and "LOCAL_WORLD_SIZE" not in env:
        local, here = rank, world
    else:
        here = _positive(env, "LOCAL_WORLD_SIZE") if "LOCAL_WORLD_SIZE" in env else world
        local = _index(env, "LOCAL_RANK", here, "LOCAL_WORLD_SIZE")
    _check_address(env, world)
    return Launch(rank, world, local, here)


def _slurm(env: Mapping[str, str]) -> Launch:
    """Return the launch that srun's variables state, with MASTER_ADDR and MASTER_PORT as the
    rendezvous where they are set, else one derived from the job's step. Raises ValueError where a
    variable is missing or out of range.
    """
    world = _positive(env, "SLURM_NTASKS")
    here, name = _tasks_here(env)
    rank = _index(env, "SLURM_PROCID", world, "SLURM_NTASKS")
    local = _index(env, "SLURM_LOCALID", here, name)
    if "MASTER_ADDR" not in env:
        return Launch(rank, world, local, here, _rendezvous(env))
    _check_address(env, world)
    return Launch(rank, world, local, here)


def _tasks_here(env: Mapping[str, str]) -> tuple[int, str]:
    """Return the number of tasks of the job's step on this machine, and the name of the variable it
    is read from: SLURM_STEP_TASKS_PER_NODE, such as "4", "4(x2)" or "4,3" by machines, of which
    this is the one numbered SLURM_NODEID, else SLURM_NTASKS_PER_NODE. Raises ValueError.
    """
    name = "SLURM_STEP_TASKS_PER_NODE"
    if name not in env:
        return _positive(env, "SLURM_NTASKS_PER_NODE"), "SLURM_NTASKS_PER_NODE"
    counts: list[tuple[int, int]] = []  # (tasks, of so many machines)
    for part in env[name].split(","):
        match = re.fullmatch(r"([0-9]{1,9})(?:\(x([0-9]{1,9})\))?", part.strip())
        if not match or not int(match[1]):
            raise ValueError(_error_text(env, name, "it must be like 4, 4(x2) or 4,3"))
        counts.append((int(match[1]), int(match[2] or 1)))
    if len(counts) == 1:
        return counts[0][0], name
    node = _index(env, "SLURM_NODEID", sum(machines for _, machines in counts), name)
    ends = accumulate(machines for _, machines in counts)
    return next(tasks for (tasks, _), end in zip(counts, ends, strict=True) if node < end), name


def _rendezvous(env: Mapping[str, str]) -> str:
    """Return tcp://HOST:PORT: the first machine of the step ("n[03-05,9],x1" is n03 and others),
    and a port in 20000-29999 derived from job and step. Raises ValueError for a list that begins
    with no machine's name.
    """
    host = re.match(r"([^,\[]+)(?:\[([0-9]+))?", env["SLURM_STEP_NODELIST"])
    if not host:
        raise ValueError(
            _error_text(env, "SLURM_STEP_NODELIST", "it must begin with a machine's name")
        )
    job, step = (
        _number(env, name, 0) if name in env else 0 for name in ("SLURM_JOB_ID", "SLURM_STEP_ID")
    )
    return f"tcp://{host[1]}{host[2] or ''}:{20000 + (job * 31 + step) % 10000}"


def _check_address(env: Mapping[str, str], world: int) -> None:
    """Raise ValueError unless MASTER_ADDR and MASTER_PORT are set and valid, or `world` is one
    rank.
    """
    if world == 1:
        return
    if not env.get("MASTER_ADDR"):
        raise ValueError(_error_text(env, "MASTER_ADDR", "it must be the host of rank 0"))
    if _number(env, "MASTER_PORT", 0) > 65535:
        raise ValueError(_error_text(env, "MASTER_PORT", "it must be from 0 to 65535"))


def _positive(env: Mapping[str, str], name: str) -> int:
    """Return the environment variable `name` as a whole number of at least 1. Raises ValueError."""
    return _number(env, name, 1)


def _index(env: Mapping[str, str], name: str, size: int, of: str) -> int:
    """Return the variable as a number from 0 to `size` - 1; `of` names the variable that `size` is
    from, for the message. Raises ValueError.
    """
    index = _number(env, name, 0)
    if index >= size:
        raise ValueError(
            _error_text(env, name, f"it must be from 0 to {size - 1}, as {of} is {size}")
        )
    return index


def _number(env: Mapping[str, str], name: str, least: int) -> int:
    """Return the environment variable `name` as a whole number of at least `least`. Raises
    ValueError, also where it is not set.
    """
    value = env.get(name, "").strip()
    if not re.fullmatch(r"[0-9]{1,18}", value) or int(value) < least:
        raise ValueError(_error_text(env, name, f"it must be a whole number of at least {least}"))
    return int(value)


def _error_text(env: Mapping[str, str], name: str, must: str) -> str:
    """Return the message for a bad variable: its value, what it must be (`must`), the rank variable
    by which this process counts as launched, and the remedy.
    """
    ours = "RANK" if "RANK" in env and "WORLD_SIZE" in env else "SLURM_PROCID"
    start = "torchrun" if ours == "RANK" else "srun"
    stated = f"{name} is {env[name][:80]!r}" if name in env else f"{name} is not set"
    but = "" if name == ours else f", but {ours} is {env[ours][:80]!r}"
    return f"{stated}{but}: {must}; start this with {start}, which sets it, or unset {ours}"
