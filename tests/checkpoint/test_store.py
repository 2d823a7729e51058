"""One process: what a save keeps, replaces and refuses, and what a load refuses."""

import errno
import json
import shutil
import threading
import time
import warnings
from types import SimpleNamespace

import pytest
import torch
import torch.distributed.checkpoint as dcp

from dolmen.checkpoint import folders
from dolmen.checkpoint.reader import Checkpoint, locate
from dolmen.checkpoint.store import Checkpoints
from dolmen.checkpoint.writer import Writer, explain_write_errors
from dolmen.core.mesh import SINGLE


def tensors(value: float) -> dict:
    value = float(value)
    return {
        "model/w": torch.nn.Parameter(torch.full((64, 32), value)),
        "model/b": torch.full((7,), value).bfloat16(),
        "exp_avg/w": torch.full((64, 32), -value),
        "model/scalar": torch.tensor(value),
    }


def loaded(checkpoints: Checkpoints, step: int) -> float:
    """The value of which the tensors of `step` are full."""
    out = tensors(0.0)
    checkpoints.load(step, out)
    assert all(
        torch.equal(t.detach(), tensors(out["model/scalar"].item())[n].detach())
        for n, t in out.items()
    )
    return out["model/scalar"].item()


@pytest.fixture
def store(tmp_path):
    return Checkpoints(tmp_path / "checkpoints", SINGLE, keep=2)


def test_saves_the_values_of_its_moment(store, monkeypatch):
    """The writing thread is held back until training has changed everything; `save` and `poll` do
    not wait for it.
    """
    go, write_data = threading.Event(), Writer.write_data
    monkeypatch.setattr(Writer, "write_data", lambda *args: go.wait(300) and write_data(*args))
    state, meta = tensors(1.0), {"step": 1, "nested": {"seed": 3, "lr": 0.1}}
    store.save(1, state, meta)
    with torch.no_grad():
        for t in state.values():
            t.add_(5)
    meta["nested"]["seed"] = 4
    assert not store.poll() and store.newest() is None
    go.set()
    store.finish()
    assert store.poll() and store.newest() == 1
    assert loaded(store, 1) == 1.0 and store.meta(1) == {
        "step": 1,
        "nested": {"seed": 3, "lr": 0.1},
    }


def test_whole_without_being_asked(store):
    """The folder gets its name when the last byte is on disk, not at the next call."""
    store.save(1, tensors(1.0), {})
    for _ in range(2000):
        if store.poll():
            break
        time.sleep(0.005)
    assert store.newest() == 1


def test_keeps_the_newest(store, tmp_path):
    for step in (100, 200, 300):
        store.save(step, tensors(step), {"step": step}, wait=True)
    assert store.steps() == [200, 300] and store.newest() == 300 and loaded(store, 200) == 200
    store.save(150, tensors(150.0), {}, wait=True)  # what was just saved stays, older or not
    assert store.steps() == [150, 200, 300]
    everything = Checkpoints(store.folder, SINGLE, keep=0)
    everything.save(400, tensors(4.0), {}, wait=True)
    assert everything.steps() == [150, 200, 300, 400]
    Checkpoints(store.folder, SINGLE, keep=1).save(500, tensors(5.0), {}, wait=True)
    assert [p.name for p in store.folder.iterdir()] == ["step-00000500"]


def test_saves_a_step_again(store):
    store.save(7, tensors(1.0), {"try": 1})
    store.save(7, tensors(2.0), {"try": 2}, wait=True)
    assert store.meta(7) == {"try": 2} and loaded(store, 7) == 2.0 and store.steps() == [7]
    assert len(list(store.folder.iterdir())) == 1


def test_clears_what_a_killed_run_left(store):
    for name in (
        "step-00000001.partial",
        "step-00000009.partial",
        "step-00000003.replaced.partial",
    ):
        (store.folder / name).mkdir(parents=True)
        (store.folder / name / folders.METADATA).write_bytes(b"half")
    (store.folder / "step-8").mkdir()  # not ours to delete, no checkpoint either
    assert store.newest() is None
    store.save(1, tensors(1.0), {}, wait=True)
    assert (
        sorted(p.name for p in store.folder.iterdir()) == ["step-00000001", "step-8"]
        and store.newest() == 1
    )


def test_a_failed_save_harms_nothing(store, tmp_path, monkeypatch):
    """No space left: the same OSError that a full disk raises, in the middle of the tensors, and in
    state.json.
    """
    store.save(1, tensors(1.0), {}, wait=True)
    for method in ("write_data", "finish"):
        monkeypatch.setattr(
            Writer, method, lambda *_, **__: open("/dev/full", "w").write("x" * 100_000)
        )
        store.save(2, tensors(2.0), {})
        with pytest.raises(
            RuntimeError,
            match="step 2 was not saved.*No space left on device.*newest complete .* step 1",
        ):
            store.save(3, tensors(3.0), {})
        monkeypatch.undo()
        assert store.steps() == [1] and loaded(store, 1) == 1.0 and store.poll()
    store.save(3, tensors(3.0), {}, wait=True)
    assert store.steps() == [1, 3] and not list(store.folder.glob("*.partial"))


def chained(*causes: tuple[Exception, bool]) -> Exception:
    """An error with its causes, the nearest first; False: it was only being handled."""
    error = last = RuntimeError("enforce fail")
    for cause, declared in causes:
        last.__context__ = cause
        last.__cause__ = cause if declared else None
        last = cause
    return error


def full() -> OSError:
    return OSError(errno.ENOSPC, "full")


def gone() -> OSError:
    return OSError(errno.ENOENT, "gone")


@pytest.mark.parametrize(
    "causes, message",
    [
        ([(full(), True)], 0),
        ([(full(), False)], 0),
        ([(gone(), True)], 0),
        ([(gone(), False)], None),
        ([(ValueError(), True), (gone(), True)], 1),
        ([(ValueError(), False), (gone(), True)], None),
        ([(ValueError(), False), (full(), True)], 1),
        ([(gone(), False), (full(), False)], 1),
        ([], None),
    ],
)
def test_a_write_error_is_told_by_its_cause(causes, message, tmp_path, monkeypatch):
    """One that was declared, or one that makes writes fail; a full disk by its room; else torch's
    own.
    """
    free = {"more": 2**20, "less": 2**20 - 1}
    for room in free if message is None else ("more",):
        error = chained(*causes)
        monkeypatch.setattr(
            shutil, "disk_usage", lambda _, room=room: SimpleNamespace(free=free[room])
        )
        with pytest.raises((OSError, RuntimeError)) as raised, explain_write_errors(tmp_path):
            raise error
        if message is not None:
            assert raised.value is causes[message][0]
        elif room == "more":
            assert raised.value is error
        else:
            assert isinstance(raised.value, OSError) and raised.value.errno == errno.ENOSPC
            assert raised.value.filename == str(tmp_path)


def test_a_folder_that_cannot_be(tmp_path):
    (tmp_path / "file").touch()
    blocked = Checkpoints(tmp_path / "file" / "checkpoints", SINGLE, 2)
    with pytest.raises(RuntimeError, match="step 1 was not saved.*NotADirectoryError"):
        blocked.save(1, tensors(1.0), {}, wait=True)
    assert blocked.newest() is None


def test_refuses_what_is_no_json(store):
    with pytest.raises(TypeError, match="not JSON serializable"):
        store.save(1, tensors(1.0), {"seed": torch.tensor(1)})
    assert store.poll() and not store.folder.exists()


def test_names_what_does_not_fit(store):
    store.save(1, tensors(1.0), {}, wait=True)
    with pytest.raises(ValueError, match=r"no checkpoint of step 2, only of steps \[1\]"):
        store.load(2, tensors(0.0))
    more = tensors(0.0) | {f"model/{n}": torch.zeros(1) for n in "pqrs"}
    with pytest.raises(
        KeyError, match=r"lacks 4 of 8 tensors, e.g. \['model/p', 'model/q', 'model/r'\]"
    ):
        store.load(1, more)
    fewer = tensors(0.0)
    del fewer["model/b"]
    with pytest.raises(
        KeyError, match=r"holds 1 tensors that the model does not have, e.g. \['model/b'\]"
    ):
        store.load(1, fewer)
    with pytest.raises(ValueError, match=r"model/b \(7,\) for \(8,\)"):
        store.load(1, tensors(0.0) | {"model/b": torch.zeros(8)})
    alone = {n: t for n, t in tensors(0.0).items() if n.startswith("model/")}
    store.load(1, alone)  # the model without the optimizer
    assert alone["model/scalar"] == 1.0


@pytest.mark.parametrize("harm", ["bit", "truncated", "missing", "empty", "length"])
def test_a_damaged_shard_is_named(store, harm):
    store.save(1, tensors(1.0), {}, wait=True)
    (shard,) = store.path(1).glob("*.distcp")
    content = bytearray(shard.read_bytes())
    # in the middle of the numbers of model/w
    at = content.find(torch.full((64,), 1.0).numpy().tobytes())
    if harm == "bit":
        content[at + 1000] ^= 1
    if harm == "truncated":
        del content[at + 1000 :]
    if harm == "empty":
        content.clear()
    if harm == "length":
        content[5:5] = b"?"  # everything after is one byte late
    shard.unlink() if harm == "missing" else shard.write_bytes(content)
    with pytest.raises(ValueError, match=rf"{shard} is missing, damaged or truncated"):
        store.load(1, tensors(0.0))
    with pytest.raises(ValueError, match=str(shard)):
        Checkpoint(store.path(1)).read("model/w")


def test_damaged_descriptions_are_named(store):
    store.save(1, tensors(1.0), {}, wait=True)
    for name in (folders.METADATA, folders.STATE):
        path = store.path(1) / name
        content = path.read_bytes()
        path.write_bytes(content[:-9])
        with pytest.raises(ValueError, match=rf"{path} is .*damaged"):
            Checkpoint(store.path(1))
        path.write_bytes(content)
    Checkpoint(store.path(1))


def test_locates(store, tmp_path):
    for path in (tmp_path, store.folder, tmp_path / "nowhere"):
        with pytest.raises(ValueError, match=f"{path} has no complete checkpoint"):
            locate(path)
    for step in (1, 2):
        store.save(step, tensors(step), {}, wait=True)
    assert (
        locate(tmp_path)
        == locate(store.folder)
        == locate(store.path(2))
        == store.path(2)
        != locate(store.path(1))
    )
    partial = store.path(2).rename(store.folder / "step-00000002.partial")
    assert locate(tmp_path) == store.path(1)
    with pytest.raises(ValueError, match="has no complete checkpoint"):
        locate(partial)


def test_silent_and_plain(store):
    """No warning of DCP's reaches the user, and plain DCP can read what is written."""
    with warnings.catch_warnings(record=True) as seen:
        # Checkpoints does, pytest undoes it
        warnings.filterwarnings("ignore", "torch.distributed is disabled")
        store.save(1, tensors(1.0), {"a": 1}, wait=True)
        loaded(store, 1)
    assert [str(w.message) for w in seen] == []
    out = {n: t.detach() for n, t in tensors(0.0).items()}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.load(out, checkpoint_id=str(store.path(1)))
    assert all(torch.equal(t, tensors(1.0)[n].detach()) for n, t in out.items())
    assert json.loads((store.path(1) / "state.json").read_text()) == {"format": 2, "a": 1}
    # no path of the machine that saved
    assert b"checkpoints" not in (store.path(1) / folders.METADATA).read_bytes()


def test_what_to_remove_and_what_is_before_it_is_told(tmp_path):
    checkpoints = Checkpoints(tmp_path, SINGLE, 0)
    for step in (3, 5):
        checkpoints.save(step, tensors(step), {}, wait=True)
    assert checkpoints.newest() == 5
    reported = str(checkpoints.damage_error(5, ValueError("no end")))
    assert reported.endswith(f"(no end): remove {checkpoints.path(5)} to resume from step 3")
    assert str(checkpoints.damage_error(3, ValueError())).endswith(
        f"{checkpoints.path(3)} to start again"
    )
