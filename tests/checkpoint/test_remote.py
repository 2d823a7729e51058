"""Checkpoints at a URL: whatever request a save is killed at, and whatever fails, another machine
loads the newest complete checkpoint bitwise, or damage is found by the seal.
"""

import os
from pathlib import Path
from types import SimpleNamespace

import faulty
import pytest
import torch
import torch.distributed as dist
from faulty import Faulty
from torch.distributed.tensor import Shard, distribute_tensor

from dolmen.checkpoint.folders import Damaged
from dolmen.checkpoint.remote import RemoteCheckpoints, Superseded, pin_url, pull_model
from dolmen.checkpoint.store import Checkpoints, NotSaved
from dolmen.core import mesh as meshes
from dolmen.core.mesh import SINGLE
from dolmen.files import storage

RUN = "faulty://bucket/run"
URL = f"{RUN}/checkpoints"


@pytest.fixture
def system(monkeypatch, tmp_path):
    return faulty.install(monkeypatch, tmp_path)


def tensors(value: float) -> dict:
    # one is so large that the byte in the middle of the file is one of its numbers
    return {"model/w": torch.full((8, 64), value), "exp_avg/w": torch.full((80, 64), -value)}


def open_store(folder: Path, keep: int = 0, url: str = URL) -> Checkpoints:
    return Checkpoints(folder, SINGLE, keep, remote=RemoteCheckpoints(url, folder))


def save(store: Checkpoints, step: int, value: float) -> None:
    store.save(step, tensors(value), {"step": step, "value": value}, wait=True)


def open_elsewhere(folder: Path) -> Checkpoints:
    """The checkpoints on a machine that has nothing of the run."""
    store = open_store(folder)
    assert store.remote is not None
    for step in store.remote.list_complete():
        store.remote.pull_step(step)
    return store


def load_newest(folder: Path) -> tuple[int, float]:
    """What a machine loads that has nothing of the run: (step, value) of the newest checkpoint.
    Every complete one holds the values that its own state.json says.
    """
    store, value = open_elsewhere(folder), 0.0
    for step in store.steps():
        out, value = tensors(0.0), store.meta(step)["value"]
        store.load(step, out)
        assert all(torch.equal(tensor, tensors(value)[name]) for name, tensor in out.items())
    return store.steps()[-1], value


def test_another_machine_loads_it(system, tmp_path):
    store = open_store(tmp_path / "here", keep=2)
    for step in (1, 2, 3):
        save(store, step, step / 2)
    there = open_elsewhere(tmp_path / "there")
    assert there.steps() == [2, 3] == store.steps()
    there.load(3, tensors(0.0))
    # tensors of the one that was read alone
    assert [p.parent.name for p in (tmp_path / "there").rglob("*.distcp")] == ["step-00000003"]
    assert load_newest(tmp_path / "third") == (3, 1.5)


def test_killed_at_every_request_of_a_save(system, tmp_path):
    """Two saves of which the second deletes the first, and one more of the same step."""
    request, killed = 1, True
    while killed:
        system.store.clear()
        store = open_store(tmp_path / f"here-{request}", keep=1)
        save(store, 1, 1.0)
        with faulty.killed_at(request) as ended:
            try:
                save(store, 2, 2.0)
            except NotSaved as error:
                ended.killed = "Killed" in str(error)
        killed = ended.killed
        newest = load_newest(tmp_path / f"there-{request}")
        assert newest in ((1, 1.0), (2, 2.0)), (request, newest)
        if not killed:
            assert newest == (2, 2.0)
        # the next save works, and deletes what the killed one left
        save(open_store(tmp_path / f"here-{request}", keep=1), 3, 3.0)
        left = {name.split("/")[4] for name in system.find("/bucket/run/checkpoints")}
        assert left == {"step-00000003"}
        request += 1
    assert request > 15


def claimed(folder, job: str, restarted: bool = False) -> Checkpoints:
    """The checkpoints of a run that has just started, on a machine of its own."""
    store = open_store(folder)
    assert store.remote is not None
    store.remote.claim(job, restarted)
    return store


def test_of_two_machines_at_one_url_the_first_stops(system, tmp_path):
    first = claimed(tmp_path / "here", "host-a 12 345")
    save(first, 1, 1.0)
    second = claimed(tmp_path / "there", "host-b\n678 \x1b[2J")
    with pytest.raises(Superseded, match=r"another run \(host-b 678 .*\) has started to write to"):
        save(first, 2, 2.0)
    save(second, 2, 2.5)
    with pytest.raises(Superseded):  # before it deletes a seal
        save(first, 2, 2.0)
    assert load_newest(tmp_path / "third") == (2, 2.5)
    # a restart of it does not come back, that of the other does, and a person may
    with pytest.raises(Superseded):
        claimed(tmp_path / "here", "host-a 12 345", restarted=True)
    save(claimed(tmp_path / "there", "host-b\n678 \x1b[2J", restarted=True), 3, 3.0)
    save(claimed(tmp_path / "new", "host-c 9 9", restarted=True), 4, 4.0)  # killed before its claim
    save(claimed(tmp_path / "here", "host-a 12 345"), 5, 5.0)


def test_a_run_that_is_superseded_within_a_save_writes_no_seal(system, tmp_path, monkeypatch):
    first = claimed(tmp_path / "here", "a")
    assert first.remote is not None
    monkeypatch.setattr(first.remote, "push_run", lambda: claimed(tmp_path / "there", "b") and None)
    with pytest.raises(Superseded):
        save(first, 1, 1.0)
    assert not RemoteCheckpoints(URL, tmp_path / "third").list_complete()


def test_a_superseded_run_puts_no_checkpoint_aside(system, tmp_path):
    first = claimed(tmp_path / "here", "a")
    save(first, 1, 1.0)
    claimed(tmp_path / "there", "b")
    before = system.find("/bucket/run")
    with pytest.raises(Superseded):
        first.put_aside(1)
    assert system.find("/bucket/run") == before and first.steps() == [1]


def test_a_checkpoint_is_put_aside_with_one_look_at_the_claim(system, tmp_path, monkeypatch):
    first, read = claimed(tmp_path / "here", "a"), []
    save(first, 1, 1.0)
    cat_file = Faulty.cat_file

    def record(self, path, *args, **kwargs):
        read.append(path.rpartition("/")[2])
        return cat_file(self, path, *args, **kwargs)

    monkeypatch.setattr(Faulty, "cat_file", record)
    first.put_aside(1)
    assert read == ["writers", "seal", "seal.damaged"]


def test_a_claim_that_makes_the_list_of_writers_shorter_is_seen(system, tmp_path, monkeypatch):
    """Another run claims the URL between the two requests that read the list."""
    first, cat_file, claims = claimed(tmp_path / "here", "a" * 100), Faulty.cat_file, iter("b")

    def claim_first(self, path, *args, **kwargs):
        for _ in claims:
            system.pipe_file(path, b"id b")
        return cat_file(self, path, *args, **kwargs)

    monkeypatch.setattr(Faulty, "cat_file", claim_first)
    assert first.remote is not None
    with pytest.raises(Superseded, match=r"another run \(b\) has started"):
        first.remote.check_claim()


@pytest.mark.parametrize("kind", [Superseded, storage.StorageError, Damaged, ValueError])
def test_an_error_of_a_rank_is_raised_alike_on_the_others(kind, tmp_path, monkeypatch):
    """What rank 0 sends is what rank 1 gets, in place of a second process."""
    store, sent = Checkpoints(tmp_path, SINGLE, 0), []

    def gather(gathered, mine, group):
        sent.append(mine)
        gathered[:] = sent

    store._group = SimpleNamespace()
    monkeypatch.setattr(dist, "get_world_size", lambda group: len(sent) + 1)
    monkeypatch.setattr(dist, "all_gather_object", gather)

    def fail():
        raise kind("x")

    with pytest.raises(kind, match="^x$"):
        store.together(1, fail)
    with pytest.raises(kind, match="^rank 0: x$") as caught:
        store.together(1, lambda: None)
    assert type(caught.value) is kind


def test_the_list_of_writers_stays_short(system, tmp_path):
    for number in range(103):
        claimed(tmp_path / "here", f"job-{number}")
    lines = system.cat_file("/bucket/run/checkpoints/writers").decode().splitlines()
    assert [line.split()[1] for line in lines] == [f"job-{number}" for number in range(3, 103)]


def test_a_damaged_checkpoint_is_pruned_when_newer_ones_are_complete(system, tmp_path):
    store = open_store(tmp_path / "here", keep=2)
    for step in (1, 2):
        save(store, step, float(step))
    store.put_aside(2)
    left = []
    for step in (3, 4):
        save(store, step, float(step))
        names = system.find("/bucket/run/checkpoints")
        left.append(sorted({int(name.split("/")[4][5:]) for name in names}))
    assert left == [[1, 2, 3], [3, 4]]


def test_every_fault_and_nothing_is_lost(system, tmp_path):
    faults = ["error", "cut", "short", "slow"]
    with faulty.plan(
        put_file=[*faults, *faults], pipe_file=["wrong", *faults], find=["error"], rm_file=["error"]
    ):
        save(open_store(tmp_path / "here"), 1, 1.0)
    wrong = ["wrong", "error", "cut", "wrong"]  # of the seal, then of the other small files
    with faulty.plan(find=["error"], cat_file=[*wrong, *faults]):
        assert load_newest(tmp_path / "there") == (1, 1.0)


def test_wrong_tensors_on_the_way_are_downloaded_again(system, tmp_path):
    save(open_store(tmp_path / "here"), 1, 1.0)
    store, out = open_elsewhere(tmp_path / "there"), tensors(0.0)
    with faulty.plan(cat_file=["wrong", "wrong"]):
        store.load(1, out)
    assert torch.equal(out["model/w"], tensors(1.0)["model/w"])


@pytest.mark.parametrize("name", ["seal", "state.json", ".metadata", "__0_0.distcp"])
@pytest.mark.parametrize("damage", ["wrong", "short", "gone"])
def test_damage_at_the_url_is_found_by_the_seal(system, tmp_path, name, damage):
    """And a restart renames that checkpoint, for people to look at, and loads the one before."""
    store = open_store(tmp_path / "here")
    save(store, 1, 1.0)
    save(store, 2, 2.0)
    path = f"/bucket/run/checkpoints/step-00000002/{name}"
    content = system.cat_file(path)
    system.rm_file(path)
    if damage != "gone":
        system.pipe_file(path, faulty.damaged(content, damage))
    there = tmp_path / "there"
    if (name, damage) == ("seal", "gone"):  # as if it had never been complete
        assert load_newest(there) == (1, 1.0)
        return
    store = open_elsewhere(there)
    assert store.newest() == 2
    with pytest.raises(Damaged):
        store.meta(2)
        store.load(2, tensors(0.0))
    store.put_aside(2)
    assert load_newest(tmp_path / "third") == (1, 1.0)
    assert system.exists("/bucket/run/checkpoints/step-00000002/seal.damaged")
    # neither pruned nor in the way of a new save of that step
    before = system.find("/bucket/run/checkpoints/step-00000002")
    save(open_store(tmp_path / "third", keep=2), 3, 3.0)
    assert system.find("/bucket/run/checkpoints/step-00000002") == before
    save(open_store(tmp_path / "third", keep=2), 2, 2.5)
    assert open_elsewhere(tmp_path / "fourth").meta(2)["value"] == 2.5


def test_nothing_but_what_a_save_writes_is_deleted(system, tmp_path):
    store = open_store(tmp_path / "here", keep=1)
    save(store, 1, 1.0)
    system.pipe_file("/bucket/run/checkpoints/step-00000001/notes.txt", b"mine")
    system.pipe_file("/bucket/run/checkpoints/other", b"mine")
    save(store, 2, 2.0)
    left = {name.partition("checkpoints/")[2] for name in system.find("/bucket/run/checkpoints")}
    assert {name for name in left if "00000002" not in name} == {
        "step-00000001/notes.txt",
        "other",
    }


def test_storage_that_does_not_come_back_loses_one_save(system, tmp_path, monkeypatch):
    monkeypatch.setattr(storage, "PATIENCE", 0.01)
    store = open_store(tmp_path / "here")
    save(store, 1, 1.0)
    Faulty.planned["put_file"] = ["error"] * 50
    with pytest.raises(NotSaved, match=r"step 2 was not saved .*__0_0.distcp cannot be uploaded"):
        save(store, 2, 2.0)
    Faulty.planned.clear()
    assert store.steps() == [1] and load_newest(tmp_path / "there") == (1, 1.0)
    save(store, 2, 2.0)
    assert load_newest(tmp_path / "third") == (2, 2.0)


def test_what_does_not_arrive_is_not_called_damaged(system, tmp_path, monkeypatch):
    """Or a restart would rename a checkpoint because the network was down."""
    monkeypatch.setattr(storage, "PATIENCE", 0.01)
    save(open_store(tmp_path / "here"), 1, 1.0)
    store = open_elsewhere(tmp_path / "there")
    Faulty.planned["cat_file"] = ["error"] * 50
    with pytest.raises(storage.StorageError, match="__0_0.distcp cannot be read"):
        store.load(1, tensors(0.0))


def test_local_checkpoints_of_another_run(system, tmp_path):
    save(open_store(tmp_path / "here"), 1, 1.0)
    other = Checkpoints(tmp_path / "there", SINGLE, 0)
    save(other, 1, 1.5)
    save(other, 7, 7.0)
    remote = RemoteCheckpoints(URL, tmp_path / "there")
    with pytest.raises(ValueError, match="step 1 in .* is not that in faulty.* different runs"):
        remote.drop_others(is_copy=False)
    remote.drop_others(is_copy=True)
    assert other.steps() == []
    # but nothing is deleted for a URL without any
    save(other, 7, 7.0)
    RemoteCheckpoints("faulty://bucket/new", tmp_path / "there").drop_others(is_copy=True)
    assert other.steps() == [7]


def test_the_model_of_a_run(system, tmp_path):
    store = open_store(tmp_path / "here")
    save(store, 1, 1.0)
    save(store, 2, 2.0)
    system.pipe_file("/bucket/run/tokenizer/tokenizer.json", b"{}")
    folder = pull_model(RUN)
    assert folder.name == "step-00000002" and (folder / "__0_0.distcp").exists()
    assert (folder.parents[1] / "tokenizer/tokenizer.json").read_text() == "{}"
    assert pin_url(RUN, folder) == f"{URL}/step-00000002" == pin_url(f"{RUN}/", folder)
    older = pull_model(f"{URL}/step-00000001")
    assert older.name == "step-00000001"
    assert pin_url(f"{URL}/step-00000001", older) == f"{URL}/step-00000001"
    with pytest.raises(ValueError, match=r"step-00000003 is no complete checkpoint.*\[1, 2\]"):
        pull_model(f"{URL}/step-00000003")


def hosts_without_a_shared_folder(url: str, folder: str) -> None:
    """Two ranks with folders of their own: saved twice, and loaded on two new hosts."""
    mesh = meshes.build_mesh(2, 1, torch.device("cpu"))
    rank = dist.get_rank()
    assert mesh.grid is not None

    def split(value: float) -> dict:
        return {
            name: distribute_tensor(tensor, mesh.grid["fsdp"], [Shard(0)])
            for name, tensor in tensors(value).items()
        }

    def open_host(name: str) -> Checkpoints:
        path = Path(folder, f"{name}-{rank}")
        return Checkpoints(path, mesh, 1, remote=RemoteCheckpoints(url, path))

    store = open_host("host")
    for step in (1, 2):
        store.save(step, split(float(step)), {"step": step, "value": step}, wait=True)
    store.finish()
    if rank:  # what it has written before is gone
        assert os.listdir(store.folder) == ["step-00000002.partial"]
    store = open_host("new")
    assert store.remote is not None
    store.remote.list_complete()
    store.remote.pull_step(2)
    out = split(0.0)
    store.load(2, out)
    for name, tensor in out.items():
        assert torch.equal(tensor.full_tensor(), tensors(2.0)[name])
    # each host has downloaded what its rank reads
    assert [p.name for p in store.path(2).glob("*.distcp")] == [f"__{rank}_0.distcp"]


def test_hosts_without_a_shared_folder(spawn, tmp_path):
    url = f"file://{tmp_path}/there"
    spawn(2)(hosts_without_a_shared_folder, url, str(tmp_path))
    assert list(RemoteCheckpoints(url, tmp_path).list_complete()) == [2]
