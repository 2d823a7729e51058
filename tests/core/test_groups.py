"""Process groups: which backend, over how many connections, how long they wait. NCCL, which the CPU
build of torch does not have, is a class that keeps what it is given.
"""

import os
import sys
from contextlib import suppress
from datetime import timedelta
from types import SimpleNamespace

import pytest
import tinyrun
import torch
import torch.distributed as dist
from fakes import join_fake
from spawning import run_spawned
from tinyrun import dolmen

from dolmen.core import environment, mesh
from dolmen.core import mesh as meshes
from dolmen.core.torch_private.strings import LAZY_GLOO
from dolmen.launch.watchdog import PATIENT, network_limit

material, one_thread = tinyrun.material, tinyrun.one_thread
CUDA, HOUR = torch.device("cuda", 0), timedelta(hours=1)


@pytest.mark.parametrize("error", [None, KeyError("a bug")])
def test_a_lone_process_leaves_its_group(error):
    """After an error too: nobody waits for it, and the next run in this process joins anew."""
    hook = sys.excepthook
    with suppress(KeyError), mesh.process_group_context(None, torch.device("cpu")):
        assert dist.get_world_size() == 1
        if error is not None:
            raise error
    assert not dist.is_initialized() and sys.excepthook is hook


@pytest.fixture
def made(monkeypatch):
    """What new groups are made with."""
    out = []

    class Options:
        _timeout = timedelta(minutes=10)

        def __init__(self, is_high_priority_stream: bool = False):
            self.is_high_priority_stream = is_high_priority_stream

    def new_group(ranks, **how):
        out.append((ranks, how))
        return dist.ProcessGroup(0, 1)

    nccl = SimpleNamespace(Options=Options)
    monkeypatch.setattr(dist, "ProcessGroupNCCL", nccl, raising=False)
    monkeypatch.setattr(dist, "new_group", new_group)
    monkeypatch.setattr(meshes, "_backends", lambda group: "cpu:gloo,cuda:nccl")
    return out


def test_a_group_of_gpus_is_nccl_alone_and_urgent(made):
    mesh.process_group([0, 2], "dolmen up", CUDA, HOUR)
    (ranks, how), options = made[0], made[0][1]["pg_options"]
    assert ranks == [0, 2] and how["backend"] == "nccl" and how["group_desc"] == "dolmen up"
    assert options.is_high_priority_stream and how["timeout"] == options._timeout == HOUR
    mesh.process_group([0, 2], device=CUDA)
    assert made[1][1]["timeout"] is None
    assert made[1][1]["pg_options"]._timeout == timedelta(minutes=10)


def test_a_group_of_cpus_takes_the_default_backend(made):
    mesh.process_group([0, 2])
    assert made[0][1]["backend"] is None and made[0][1]["pg_options"] is None


def test_ranks_that_met_over_gloo_stay_with_it(monkeypatch, made):
    """As those do that share a GPU."""
    monkeypatch.setattr(meshes, "_backends", lambda group: "cpu:gloo,cuda:gloo")
    mesh.process_group([0, 2], device=CUDA)
    assert made[0][1]["backend"] is None and made[0][1]["pg_options"] is None


def test_a_group_of_another_backend_is_another(monkeypatch, made):
    class Known:
        group_desc = "dolmen"

    known, both = Known(), "cpu:gloo,cuda:nccl"
    backends = {known: "cuda:nccl"}
    monkeypatch.setattr(meshes, "_backends", lambda group: backends.get(group, both))
    monkeypatch.setattr(mesh.processes, "groups", lambda: iter([(known, [0, 2])]))
    assert mesh.process_group([0, 2], device=CUDA) is known and not made
    assert mesh.process_group([0, 2]) is not known and len(made) == 1


def test_a_group_knows_its_backends():
    join_fake(2)
    assert "fake" in mesh._backends(dist.group.WORLD)
    dist.destroy_process_group()


@pytest.mark.parametrize("user", (None, "0"))
def test_all_ranks_are_joined_lazily(monkeypatch, user):
    """What the user has set stays; other groups are made as torch makes them."""
    seen = []
    monkeypatch.delenv(LAZY_GLOO, raising=False)
    if user is not None:
        monkeypatch.setenv(LAZY_GLOO, user)
    monkeypatch.setattr(
        dist,
        "init_process_group",
        lambda *_, **how: seen.append((os.environ[LAZY_GLOO], how["timeout"])),
    )
    meshes.join_world(meshes.Launch(0, 2, 0, 2), torch.device("cpu"), HOUR)
    assert seen == [(user or "1", HOUR)] and os.environ.get(LAZY_GLOO) == user


def sockets() -> int:
    files = (f"/proc/self/fd/{name}" for name in os.listdir("/proc/self/fd"))
    return sum(os.readlink(f).startswith("socket:") for f in files if os.path.islink(f))


def counted() -> list[tuple[int, int, int]]:
    """Sockets of each rank that a usual group of all brings, a lazy one, and that after its ranks
    have agreed.
    """
    os.environ.pop(LAZY_GLOO, None)
    counts = [sockets()]
    everyone: list = [None] * dist.get_world_size()
    for make in (lambda: dist.new_group(backend="gloo"), lambda: mesh.background_group(HOUR)):
        group = make()
        dist.barrier()  # by another group
        counts.append(sockets())
        dist.barrier()  # nobody connects to one that still counts
    dist.all_gather_object(everyone, 0, group=group)
    dist.barrier()
    counts.append(sockets())
    dist.all_gather_object(everyone, tuple(b - a for a, b in zip(counts, counts[1:], strict=False)))
    return everyone


def test_a_lazy_group_has_few_sockets():
    """Of 4 ranks: a usual group has one to each other, and one that listens. A lazy one has that
    alone at first; to gather from all takes a ring, two neighbours.
    """
    for usual, lazy, agreeing in run_spawned(4, counted):
        assert usual == 4 and lazy <= 2 and lazy + agreeing <= 4, (usual, lazy, agreeing)


@pytest.mark.parametrize("seconds", (0.5, 2, 60, 600, 1e4))
def test_the_network_waits_longer_than_the_watch(seconds):
    """The watch looks every quarter, at most every 30 s, and takes up to four looks to name one."""
    named = PATIENT * seconds + 5 * min(seconds / 4, 30)
    assert network_limit(seconds).total_seconds() >= max(named, 1800)
    assert network_limit(None) is None


def test_a_run_gives_its_groups_that_long(monkeypatch, material, tmp_path):
    given, of, join = [], mesh.process_group, meshes.join_world
    monkeypatch.setattr(
        meshes, "join_world", lambda a, b, timeout: given.append(timeout) or join(a, b, timeout)
    )
    monkeypatch.setattr(
        meshes,
        "process_group",
        lambda *a, timeout, **b: given.append(timeout) or of(*a, timeout=timeout, **b),
    )
    words = ("--train.hang-seconds", 600, "--train.steps", 1)
    assert dolmen("train", material.file, "--out", tmp_path / "run", *words).code == 0
    assert len(given) > 1 and set(given) == {timedelta(seconds=7500)}


def test_the_environment_of_cuda():
    env: dict[str, str] = {}
    environment.set_defaults(env)
    assert env == {
        "PYTORCH_ALLOC_CONF": "expandable_segments:True",
        "CUDA_DEVICE_MAX_CONNECTIONS": "32",
    }


@pytest.mark.parametrize("name", (*environment.ALLOCATOR, environment.QUEUES))
def test_what_the_user_has_set_stays(name):
    env = {name: "1"}
    environment.set_defaults(env)
    assert env[name] == "1"
    assert sum(other in env for other in environment.ALLOCATOR) == 1


def test_the_entry_point_sets_it(monkeypatch):
    for name in (*environment.ALLOCATOR, environment.QUEUES):
        monkeypatch.delenv(name, raising=False)
    assert dolmen("--version").code == 0
    assert os.environ["PYTORCH_ALLOC_CONF"] == "expandable_segments:True"
    assert os.environ["CUDA_DEVICE_MAX_CONNECTIONS"] == "32"
