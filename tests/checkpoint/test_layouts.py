"""Saved at one layout, loaded at any other, bitwise; resumed at the same one as if it had never
stopped. One spawn.
"""

from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from worlds import Layout, Run, differing

from dolmen.checkpoint.reader import Checkpoint, locate
from dolmen.checkpoint.store import Checkpoints
from dolmen.checkpoint.writer import Writer
from dolmen.core.mesh import SINGLE
from dolmen.files.safetensors import Spec

SAVED = Layout(2, 2, zero=1)
OTHERS = (Layout(1, 4, zero=1), Layout(4, 1, zero=3), Layout(2, 2, zero=0, sequence=True))
RESUMED = (Layout(2, 2, zero=1, sequence=True), Layout(4, 1, zero=3))


def raised(fn, *args) -> str:
    try:
        fn(*args)
    except (KeyError, ValueError, RuntimeError) as error:
        return f"{type(error).__name__}: {error}"
    return "nothing"


def everyone(value) -> list:
    out = [None] * dist.get_world_size()
    dist.all_gather_object(out, value)
    return out


def resumed(layout: Layout, folder: Path) -> list[str]:
    mesh = layout.mesh()
    checkpoints = Checkpoints(folder, mesh, 0)
    straight = Run(layout, mesh).train(2)
    checkpoints.save(2, straight.tensors(), {"step": 2})
    straight.train(2)  # while the save is in progress
    checkpoints.finish()
    again = Run(layout, mesh, seed=7).load(checkpoints, 2).train(2)
    return differing(straight.whole(), again.whole())


def failures(folder: Path) -> dict:
    """What every rank sees when one rank cannot write, when nobody can, and when ranks disagree on
    what to load.
    """
    mesh, out = SAVED.mesh(), {}
    checkpoints = Checkpoints(folder, mesh, 0)
    tensors = {"model/w": distribute_tensor(torch.ones(8, 8), mesh.grid, [Shard(0), Shard(1)])}
    checkpoints.save(1, tensors, {}, wait=True)
    write_data = Writer.write_data
    if dist.get_rank() == 2:
        Writer.write_data = lambda *_: open("/dev/full", "w").write("x" * 100_000)
    checkpoints.save(2, tensors, {})
    out["one rank"] = everyone(raised(checkpoints.save, 3, tensors, {}))
    out["nothing left of it"] = everyone(raised(checkpoints.finish))
    Writer.write_data = write_data
    out["steps"] = checkpoints.steps()
    checkpoints.save(4, tensors, {}, wait=True)
    out["steps after"] = checkpoints.steps()
    out["partials"] = [p.name for p in folder.glob("*.partial")]
    blocked = Checkpoints(folder / "file" / "checkpoints", mesh, 0)
    if dist.get_rank() == 0:
        (folder / "file").touch()
    blocked.save(1, tensors, {})
    out["no folder"] = everyone(raised(blocked.finish))
    named = {"model/w" if dist.get_rank() else "model/v": tensors["model/w"]}
    out["names"] = everyone(raised(checkpoints.load, 1, named))
    out["other steps"] = everyone(raised(checkpoints.load, (1, 4)[dist.get_rank() % 2], tensors))
    return out


def uneven(folder: Path) -> dict:
    """Fewer rows than ranks, odd columns, replicas; saved whole and read in parts."""
    mesh = SAVED.mesh()
    checkpoints, rows = Checkpoints(folder, mesh, 0), Layout(4, 1, zero=1).mesh()
    tensors = {
        "model/few": torch.randn(3),
        "model/odd": torch.randn(7, 5),
        "model/bf16": torch.randn(9, 3).bfloat16(),
        "model/large": torch.randn(4096, 512),
    }
    for t in tensors.values():
        dist.broadcast(t, 0)
    line, columns, wrong = rows.grid["fsdp"], {1: Replicate(), 2: Shard(1)}, []
    for step, place in ((1, Shard(0)), (2, Replicate())):
        checkpoints.save(
            step,
            {n: distribute_tensor(t, line, [place]) for n, t in tensors.items()},
            {},
            wait=True,
        )
        for at, places in (
            (line, [Shard(0)]),
            (line, [Replicate()]),
            (mesh.grid, [Shard(0), None]),
            (mesh.grid, [None, Shard(0)]),
        ):
            out = {
                n: distribute_tensor(
                    torch.zeros_like(t), at, [p or columns[t.ndim] for p in places]
                )
                for n, t in tensors.items()
            }
            before = characters_read()
            checkpoints.load(step, out)
            read = characters_read() - before
            wrong += [
                (step, places, n)
                for n, t in tensors.items()
                if not torch.equal(out[n].full_tensor(), t)
            ]
            if step == 2 and places == [Shard(0)]:
                share = read / tensors["model/large"].nbytes
    stored = sum(p.stat().st_size for p in checkpoints.path(2).glob("*.distcp"))
    return {
        "wrong": wrong,
        "read of a whole tensor": everyone(share),
        "stored of replicas": stored / sum(t.nbytes for t in tensors.values()),
    }


def characters_read() -> int:
    with open("/proc/self/io") as file:
        return int(file.readline().split()[1])


def in_world(folder: Path) -> dict:
    run = Run(SAVED, SAVED.mesh()).train(2)
    checkpoints = Checkpoints(folder / "run" / "checkpoints", run.mesh, 0)
    checkpoints.save(2, run.tensors(), {"step": 2, "layout": "dp2 tp2"})
    expected, out = run.whole(), {}  # while the save is in progress: `load` finishes it
    if run.mesh.first:
        torch.save(expected, folder / "expected.pt")
    for layout in OTHERS:
        out[str(layout)] = differing(
            Run(layout, layout.mesh(), seed=5).load(checkpoints, 2).whole(), expected
        )
    alone = torch.load(folder / "alone.pt", weights_only=True)
    at = Run(SAVED, run.mesh).load(Checkpoints(folder / "alone", run.mesh, 0), 3)
    out["from one process"] = differing(at.whole(), alone)
    for layout in RESUMED:
        out[f"resumed {layout}"] = resumed(layout, folder / f"resumed {layout}")
    return out | {"failures": failures(folder / "failures"), "uneven": uneven(folder / "uneven")}


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    from spawning import run_spawned

    folder = tmp_path_factory.mktemp("world")
    run = Run(Layout(), SINGLE).train(3)
    Checkpoints(folder / "alone", SINGLE, 0).save(3, run.tensors(), {}, wait=True)
    torch.save(run.whole(), folder / "alone.pt")
    return folder, run_spawned(4, in_world, folder)


@pytest.mark.parametrize(
    "case", [*map(str, OTHERS), "from one process", *(f"resumed {layout}" for layout in RESUMED)]
)
def test_bitwise(world, case):
    assert world[1][case] == []


def test_loads_in_one_process(world):
    folder, expected = world[0], torch.load(world[0] / "expected.pt", weights_only=True)
    run = Run(Layout(), SINGLE, seed=3).load(
        Checkpoints(folder / "run" / "checkpoints", SINGLE, 0), 2
    )
    assert differing(run.whole(), expected) == []
    assert any(t.abs().sum() > 0 for n, t in expected.items() if n.startswith("exp_avg_sq/"))


def test_streams_whole_tensors(world):
    expected = torch.load(world[0] / "expected.pt", weights_only=True)
    checkpoint = Checkpoint(locate(world[0] / "run"))
    assert checkpoint.meta == {"step": 2, "layout": "dp2 tp2"}
    assert checkpoint.specs == {n: Spec(tuple(t.shape), t.dtype) for n, t in expected.items()}
    whole = {n: t for n, t in expected.items() if n.startswith("model/")}
    assert differing({f"model/{n}": t for n, t in checkpoint.stream()}, whole) == []


def test_a_failure_of_one_rank_is_everyones(world):
    seen = world[1]["failures"]
    assert len(set(seen["one rank"])) == 1 and "step 2 was not saved" in seen["one rank"][0]
    assert (
        "No space left on device" in seen["one rank"][0]
        and "newest complete checkpoint is that of step 1" in seen["one rank"][0]
    )
    assert seen["nothing left of it"] == ["nothing"] * 4
    assert (seen["steps"], seen["steps after"], seen["partials"]) == ([1], [1, 4], [])
    assert len(set(seen["no folder"])) == 1 and "NotADirectoryError" in seen["no folder"][0]


def test_ranks_agree_on_what_they_load(world):
    seen = world[1]["failures"]
    assert seen["names"][0].startswith("KeyError") and "model/v" in seen["names"][0]
    assert all(s.startswith("ValueError: rank 0: ") and "model/v" in s for s in seen["names"][1:])
    assert all("loads step" in s for s in seen["other steps"])


def test_uneven_parts(world):
    assert world[1]["uneven"]["wrong"] == []


def test_no_byte_is_written_twice_and_each_rank_reads_its_own(world):
    """Of a tensor stored whole a quarter each; and one rank all of it once more, for its
    checksum.
    """
    assert 1.0 <= world[1]["uneven"]["stored of replicas"] < 1.1
    *shares, most = sorted(world[1]["uneven"]["read of a whole tensor"])
    assert all(0.24 < share < 0.3 for share in (*shares, most - 1)), (shares, most)
