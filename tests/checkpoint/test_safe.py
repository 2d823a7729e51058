"""A checkpoint of somebody else's: nothing in it is executed, and nothing outside it is read."""

import builtins
import os
import pickle

import pytest
import torch
from seals import describe, edit, seal_again
from torch.distributed.checkpoint.metadata import BytesStorageMetadata

from dolmen.checkpoint import folders
from dolmen.checkpoint import metadata as descriptions
from dolmen.checkpoint.reader import Checkpoint
from dolmen.checkpoint.store import Checkpoints
from dolmen.core.mesh import SINGLE


class Call:
    """Pickles as a call."""

    def __init__(self, function, *args):
        self.function, self.args = function, args

    def __reduce__(self):
        return self.function, self.args


@pytest.fixture
def saved(tmp_path):
    store = Checkpoints(tmp_path / "checkpoints", SINGLE, 0)
    store.save(1, {"model/w": torch.arange(6.0).reshape(2, 3)}, {}, wait=True)
    return store.path(1)


def attacks(mark) -> dict:
    return {
        "os.system": Call(os.system, f"touch {mark}"),
        "eval": Call(builtins.eval, f"open({str(mark)!r}, 'w')"),
        "getattr": Call(getattr, torch.Size, "mro"),
        "torch.load": Call(torch.load, str(mark)),
        "hub": Call(torch.hub.load, str(mark), "x"),
        "dotted": Call(torch.Tensor.numpy, 1),
    }


@pytest.mark.parametrize("attack", attacks(""))
@pytest.mark.parametrize("where", ["alone", "in planner_data", "as a tensor"])
def test_metadata_executes_nothing(saved, tmp_path, attack, where):
    call = attacks(tmp_path / "mark")[attack]
    if where == "alone":
        describe(saved, call)
    if where == "in planner_data":
        edit(saved, lambda m: setattr(m, "planner_data", {"a": call}))
    if where == "as a tensor":
        edit(saved, lambda m: m.state_dict_metadata.update({"model/w": call}))
    with pytest.raises(
        ValueError,
        match=r"\.metadata is missing, damaged or not safe to read: it names [\w.]+, which",
    ):
        Checkpoint(saved)
    assert not (tmp_path / "mark").exists()


def test_plain_dcp_would_have_executed_it(saved, tmp_path):
    """The attack is real."""
    (saved / folders.METADATA).write_bytes(pickle.dumps(attacks(tmp_path / "mark")["os.system"]))
    with open(saved / folders.METADATA, "rb") as file:
        pickle.load(file)
    assert (tmp_path / "mark").exists()


def test_tensors_only(saved):
    edit(saved, lambda m: m.state_dict_metadata.update({"model/w": BytesStorageMetadata()}))
    with pytest.raises(
        ValueError, match="names torch.distributed.checkpoint.metadata.BytesStorageMetadata"
    ):
        Checkpoint(saved)


def test_numbers_are_no_tensors(saved):
    edit(saved, lambda m: m.state_dict_metadata.update({"model/v": 3}))
    with pytest.raises(ValueError, match=r"\['model/v'\] are not tensors"):
        Checkpoint(saved)


@pytest.mark.parametrize("content", [[1, 2], {"model/w": 3}, None])
def test_no_metadata_at_all(saved, content):
    describe(saved, content)
    with pytest.raises(ValueError, match="it is a"):
        Checkpoint(saved)


def test_a_part_that_is_nowhere(saved):
    edit(saved, lambda m: m.storage_data.clear())
    with pytest.raises(ValueError, match=r"describes only parts of 1 tensors, e.g. \['model/w'\]"):
        Checkpoint(saved).read("model/w")


@pytest.mark.parametrize("name", ["/etc/passwd", "../outside", ".."])
def test_nothing_outside_is_read(saved, name):
    (saved.parent / "outside").write_bytes(next(saved.glob("*.distcp")).read_bytes())
    edit(
        saved,
        lambda m: [setattr(place, "relative_path", name) for place in m.storage_data.values()],
    )
    with pytest.raises(ValueError, match="a file outside the checkpoint|is missing, damaged"):
        Checkpoint(saved).read("model/w")


@pytest.mark.parametrize("attack", ["os.system", "eval"])
def test_shards_execute_nothing(saved, tmp_path, attack):
    """A shard is a pickle beside numbers: of this one only numbers are looked at, and it
    has none.
    """
    (shard,) = saved.glob("*.distcp")
    refused = f"{shard} is missing, damaged or truncated"
    torch.save({"x": attacks(tmp_path / "mark")[attack]}, shard)
    edit(
        saved,
        lambda m: [
            setattr(place, "length", shard.stat().st_size) for place in m.storage_data.values()
        ],
    )
    with pytest.raises(ValueError, match=refused):
        Checkpoint(saved).read("model/w")
    shard.write_bytes(pickle.dumps(attacks(tmp_path / "mark")[attack]))
    seal_again(saved)  # or it would be refused for its size alone
    with pytest.raises(ValueError, match=refused):
        Checkpoint(saved).read("model/w")
    assert not (tmp_path / "mark").exists()


def test_the_allowed_names_exist():
    """Each pair is found on this torch, and is a class, a dtype or `_get_layout`: no dotted way to
    anything else.
    """
    for (_, name), found in descriptions.OWN.items():
        assert isinstance(found, type | torch.dtype) or name == "_get_layout"
        assert "." not in name
