"""Which device each process takes, on machines whose GPUs are made up: the commands themselves run,
up to where the first CUDA call would come.
"""

from types import SimpleNamespace

import pytest
import tinyrun
import torch
from tinyrun import dolmen

from dolmen.core import consensus
from dolmen.core import device as devices
from dolmen.core import mesh as meshes
from dolmen.core.device import CPU
from dolmen.launch import launcher, process
from dolmen.training import worker as job

material, one_thread = tinyrun.material, tinyrun.one_thread


@pytest.fixture
def machine(monkeypatch):
    """A machine, as one process sees it: `gpus` visible of those named by CUDA_VISIBLE_DEVICES, and
    the local rank that a launcher of `ranks` gave it (None: nobody launched it).
    """

    def make(gpus: int, ranks: int | None = None, rank: int = 0, named: str | None = None):
        monkeypatch.setattr(torch.cuda, "is_available", lambda: gpus > 0)
        monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA H100")
        monkeypatch.setattr(torch.cuda, "get_device_properties", properties)
        monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
        if named is not None:
            monkeypatch.setenv("CUDA_VISIBLE_DEVICES", named)
        if ranks is not None:
            for name, value in (("RANK", rank), ("WORLD_SIZE", ranks)):
                monkeypatch.setenv(name, str(value))
                monkeypatch.setenv(f"LOCAL_{name}", str(value))
            monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
            monkeypatch.setenv("MASTER_PORT", "29500")

    def properties(device: torch.device) -> SimpleNamespace:
        return SimpleNamespace(uuid=f"0000-{device.index}")

    return make


class Reached(Exception):
    """As far as a test goes: with what a worker would begin."""


@pytest.fixture
def began(monkeypatch, material, tmp_path):
    """What a worker of `dolmen train ... *words` begins with: (device, its refusal)."""

    def worker(request, started, device, prepared=None, refusal=None, *more):
        raise Reached(device, refusal)

    def train(*words: object) -> tuple[torch.device, str | None]:
        monkeypatch.setattr(job, "worker", worker)
        monkeypatch.setattr(process, "run_worker", lambda work: work())
        with pytest.raises(Reached) as found:
            dolmen("train", material.file, "--out", tmp_path / "run", *words)
        return found.value.args

    return train


@pytest.mark.parametrize(
    "gpus, ranks, rank, device",
    [
        (8, 8, 3, "cuda:3"),
        (1, 8, 3, "cuda:0"),  # one each: srun --gpus-per-task=1
        (8, 2, 1, "cuda:1"),
        (0, 8, 3, "cpu"),
        (1, 1, 0, "cuda:0"),
    ],
)
def test_each_rank_takes_a_gpu(machine, began, gpus, ranks, rank, device):
    machine(gpus, ranks, rank)
    assert began("--train.global-batch-size", 8) == (torch.device(device), None)


def test_no_rank_takes_a_gpu_that_is_not_there(machine):
    """Whoever says how many ranks are here."""
    machine(4)
    with pytest.raises(ValueError, match="6 processes on this machine, but 4 GPUs are visible"):
        devices.choose_device("auto", meshes.Launch(5, 8, 5, 2), "device")


def test_too_few_gpus_are_refused_by_every_rank(machine, began, tmp_path):
    """4 GPUs, 8 ranks. The rank joins those of other hosts, on the CPU, to tell them."""
    machine(4, 8, 5, named="0,1,2,3")
    device, refusal = began("--train.global-batch-size", 8)
    assert device == CPU and refusal == (
        "8 processes on this machine, but 4 GPUs are visible (CUDA_VISIBLE_DEVICES=0,1,2,3): start "
        "4, make 8 visible, or use --train.device cpu"
    )
    assert not (tmp_path / "run").exists()


def test_the_cpu_where_it_is_asked_for(machine, began):
    machine(4, 8, 5)
    words = ("--train.device", "cpu", "--train.global-batch-size", 8)
    assert began(*words) == (CPU, None)


def test_no_gpu_where_one_is_asked_for(machine, began):
    machine(0, 8, 5, named="")
    device, refusal = began("--train.device", "cuda")
    assert device == CPU and "--train.device is cuda, but " in refusal
    mend = "install one with CUDA" if torch.version.cuda is None else "make one visible"
    assert f"(CUDA_VISIBLE_DEVICES=): {mend}, or use --train.device cpu" in refusal


TWO = "2 processes on this machine, but 1 GPU is visible: start 1, make 2 visible, or use --"


def test_train_starts_nothing_on_too_few_gpus(machine, material, tmp_path, monkeypatch):
    machine(1)
    monkeypatch.setattr(launcher, "launch", lambda *_: pytest.fail("it started processes"))
    words = ("train", material.file, "--out", tmp_path / "run", "--data.cache", tmp_path / "cache")
    result = dolmen(*words, "--layout.tp", 2)
    assert result.code == 2 and TWO + "train.device cpu" in result.words
    result = dolmen(*words, "--nproc", 2)
    assert result.code == 2 and TWO + "train.device cpu" in result.words
    assert not (tmp_path / "run").exists() and not (tmp_path / "cache").exists()


@pytest.mark.parametrize("gpus, device, processes", [(4, "auto", 4), (4, "cpu", 1), (0, "auto", 1)])
def test_a_run_starts_a_process_per_gpu(machine, material, gpus, device, processes):
    machine(gpus)
    config = material.config(train={"device": device})
    assert (job.count_processes(config, None) or 1) == processes


@pytest.mark.parametrize("verb", ("verify", "generate", "evaluate"))
def test_other_verbs_refuse_too(machine, material, monkeypatch, verb):
    words = {"generate": ("--prompt", "a"), "evaluate": ("--data.path", material.docs)}
    monkeypatch.setattr(launcher, "launch", lambda *_, **__: 7)
    machine(1)
    all_words = (verb, material.model, *words.get(verb, ()), "--layout.tp", 2)
    result = dolmen(*all_words)
    assert result.code == 2 and TWO + "device cpu" in result.words
    assert dolmen(*all_words, "--device", "cpu").code == 7
    machine(0)
    assert dolmen(*all_words).code == 7
    result = dolmen(*all_words, "--device", "cuda")
    assert result.code == 2 and "--device is cuda, but " in result.words


@pytest.fixture
def joining(monkeypatch, material, tmp_path):
    """`dolmen train` as one of the ranks that `others` brings, over gloo."""

    def train(others):
        gathered = consensus.gather_objects
        monkeypatch.setattr(meshes, "join_world", lambda launch, *_: JOIN(launch, CPU))
        monkeypatch.setattr(
            consensus,
            "gather_objects",
            lambda mine: (
                others(mine)
                if isinstance(mine, tuple) and "GPU-" in str(mine[1])
                else gathered(mine)
            ),
        )
        return dolmen("train", material.file, "--out", tmp_path / "run")

    JOIN = meshes.join_world
    return train


def test_two_ranks_with_one_gpu_are_refused(machine, joining, tmp_path):
    machine(1, 1)
    reported = joining(lambda mine: [mine, ("host-b", mine[1]), mine])

    assert reported.code == 2 and "ranks 0, 2 on " in reported.words
    assert "share one GPU, GPU-0000-0: give each rank its own" in reported.words
    assert "start 2 ranks, one per GPU; --train.device cpu uses none" in reported.words
    assert not (tmp_path / "run").exists()


def test_a_rank_without_a_gpu_is_refused(machine, joining, tmp_path):
    machine(1, 1)
    reported = joining(lambda mine: [mine, ("host-b", "")])
    assert (
        reported.code == 2
        and "1 of 2 ranks have no GPU, such as rank 1 on host-b" in reported.words
    )
    assert not (tmp_path / "run").exists()


def test_parts_of_a_gpu_are_told_apart(machine):
    """MIG: CUDA gives both the UUID of the whole."""
    names = []
    for named in ("MIG-1a", " MIG-1b", "0"):
        machine(1, 2, named=named)
        names.append(devices.gpu_id(torch.device("cuda", 0)))
    assert names == ["MIG-1a", "MIG-1b", "GPU-0000-0"]


def test_the_header_says_which_and_why(machine, material, tmp_path):
    machine(8)
    assert devices.describe_device(torch.device("cuda", 3), "auto") == (
        "NVIDIA H100 (cuda:3 of 8 GPUs visible per process)"
    )
    machine(0)  # a build with CUDA would look for the made-up ones
    run = dolmen("train", material.file, "--out", tmp_path / "run", "--train.device", "cpu")
    assert "1 process on CPU, 1 thread each (as asked)" in " ".join(run.out.split())
    assert devices.describe_device(CPU, "auto").startswith("CPU, 1 thread each (")
    assert "as asked" not in devices.describe_device(CPU, "auto")
