"""Files of torch.save: what torch itself has written is read to the bit, without running it, and
what we write torch loads.
"""

import argparse
import builtins
import collections
import enum
import io
import os
import pickle
import random
import sys
import types
import zipfile

import numpy as np
import pytest
import torch

from dolmen.files import pickles, torch_files
from dolmen.files.gate import Refused
from dolmen.files.safetensors import Spec
from dolmen.files.torch_files import Namespace, TorchFileWriter, load, tensors


class Call:
    """Pickles as a call."""

    def __init__(self, function, *args):
        self.function, self.args = function, args

    def __reduce__(self):
        return self.function, self.args


def content() -> dict:
    """Tensors in every way that they lie in a storage, and what training leaves beside them."""
    torch.manual_seed(0)
    shared = torch.randn(8, 4)
    return {
        "args": argparse.Namespace(dtype=torch.bfloat16, rank=3, name="x"),
        "model": {
            "encoder": collections.OrderedDict(
                plain=torch.randn(3, 4),
                turned=torch.randn(3, 4).t(),
                part=shared[2:5, 1:3],
                whole=shared,
                parameter=torch.nn.Parameter(torch.randn(2)),
                none=None,
            ),
            "half": torch.randn(5).bfloat16(),
            "ints": torch.arange(7),
            "empty": torch.empty(0, 3),
            "number": torch.tensor(2.5),
        },
        "rng": [random.getstate(), np.random.get_state(), torch.get_rng_state()],
        "extra": io.BytesIO(b"abc"),
        "iteration": 12,
    }


def flat(value, name="") -> dict:
    if isinstance(value, dict):
        return {
            n: t for key, inner in value.items() for n, t in flat(inner, f"{name}.{key}").items()
        }
    return {name[1:]: value} if isinstance(value, torch.Tensor) else {}


@pytest.mark.parametrize("archive", [True, False])
def test_what_torch_wrote(tmp_path, archive):
    file, said = tmp_path / "a.pt", content()
    torch.save(said, file, _use_new_zipfile_serialization=archive)
    got = load(file)
    assert got["args"] == Namespace({"dtype": torch.bfloat16, "rank": 3, "name": "x"})
    assert got["iteration"] == 12 and got["extra"].content == b"abc"
    found, expected = tensors(got, file), flat(said)
    assert list(found) == list(expected)
    for name, stored in found.items():
        assert torch.equal(stored.read(), expected[name]), name
        assert stored.spec == Spec(tuple(expected[name].shape), expected[name].dtype)
        numbers = expected[name].detach().contiguous().reshape(-1).view(torch.uint8).numpy()
        assert b"".join(stored.chunks(7)) == numbers.tobytes(), name


def test_enums_of_megatron_are_not_imported(tmp_path):
    """Options as core 0.16.1 writes them, with enums of modules that are not here."""
    kinds = ("megatron.core.enums.ModelType", "megatron.core.transformer.enums.AttnBackend")
    modules = {
        ".".join(full.split(".")[:i]) for full in kinds for i in range(1, full.count(".") + 1)
    }
    with pytest.MonkeyPatch.context() as patch:
        for name in modules:
            patch.setitem(sys.modules, name, types.ModuleType(name))
        values = {}
        for full in kinds:
            module, name = full.rsplit(".", 1)
            kind = enum.Enum(name, ["one", "two"], module=module)
            patch.setattr(sys.modules[module], name, kind, raising=False)
            values[name] = kind.two
        torch.save({"args": argparse.Namespace(**values)}, tmp_path / "m.pt")
    found = load(tmp_path / "m.pt")["args"].values
    assert {n: v.made_of for n, v in found.items()} == {"ModelType": (2,), "AttnBackend": (2,)}
    assert not any(name.startswith("megatron") for name in sys.modules)


@pytest.mark.parametrize("archive", [True, False])
@pytest.mark.parametrize(
    "attack", ["os.system", "eval", "getattr", "torch.load", "numpy", "dotted"]
)
def test_nothing_is_run(tmp_path, attack, archive):
    mark = tmp_path / "mark"
    call, name = {
        "os.system": (Call(os.system, f"touch {mark}"), "posix.system"),
        "eval": (Call(builtins.eval, f"open({str(mark)!r}, 'w')"), "__builtin__.eval"),
        "getattr": (Call(getattr, torch.Size, "mro"), "__builtin__.getattr"),
        "torch.load": (Call(torch.load, str(mark)), "torch.serialization.load"),
        "numpy": (Call(np.load, str(mark)), "numpy.load"),
        "dotted": (Call(collections.OrderedDict.fromkeys, "a"), "__builtin__.getattr"),
    }[attack]
    torch.save(
        {"w": torch.ones(2), "x": call}, tmp_path / "a.pt", _use_new_zipfile_serialization=archive
    )
    with pytest.raises(
        Refused, match=rf"a.pt: cannot be read: it names {name}, which is not allowed"
    ):
        load(tmp_path / "a.pt")
    assert not mark.exists()


@pytest.mark.parametrize("archive", [True, False])
def test_a_file_that_is_cut(tmp_path, archive):
    file = tmp_path / "a.pt"
    torch.save(content(), file, _use_new_zipfile_serialization=archive)
    whole = file.read_bytes()
    for kept in (0, 3, 100, len(whole) // 2, len(whole) - 1):
        file.write_bytes(whole[:kept])
        with pytest.raises(Refused, match="a.pt: cannot be read"):
            load(file)


def archived(file, pickled: bytes, compression=zipfile.ZIP_STORED):
    with zipfile.ZipFile(file, "w", compression) as archive:
        archive.writestr("a/data.pkl", pickled)
        archive.writestr("a/data/0", bytes(64))
    return file


def tensor(offset: int, shape: tuple, strides: tuple, elements: int = 16) -> bytes:
    """A pickle of one tensor, which says this of itself."""

    class Pickler(pickle.Pickler):
        def persistent_id(self, obj):
            return ("storage", torch.FloatStorage, "0", "cpu", elements) if obj == "s" else None

    stream = io.BytesIO()
    Pickler(stream, 2).dump(
        {"w": Call(torch._utils._rebuild_tensor_v2, "s", offset, shape, strides, False, None)}
    )
    return stream.getvalue()


@pytest.mark.parametrize(
    ("pickled", "said"),
    [
        (tensor(0, (17,), (1,)), "reaches over the 16 numbers"),
        (tensor(9, (2, 4), (4, 1)), "reaches over the 16 numbers"),
        (tensor(0, (2**40,), (0,)), "reaches over the 16 numbers"),  # expanded: small on disk
        (tensor(-4, (2,), (1,)), "-4 is not a number of elements"),
        (tensor(0, (2, 2), (1,)), "has strides"),
        (tensor(0, (4,), (1,), 17), "storage 0 is missing, or has fewer than 68 bytes"),
        (b"\x80\x02" + b"r\xff\xff\xff\x7f" + b".", "0x72, an opcode"),  # a memo of gigabytes
        (b"\x80\x04\x96\xff\xff\xff\xff\xff\x00\x00\x00.", "0x96, an opcode"),
        (b"\x80\x02}q\x00", "has no end"),
    ],
)
def test_a_pickle_that_is_no_file_of_tensors(tmp_path, pickled, said):
    with pytest.raises(Refused, match=said):
        load(archived(tmp_path / "a.pt", pickled))


def test_what_would_unpack_to_more_than_the_file(tmp_path, monkeypatch):
    file = archived(tmp_path / "a.pt", tensor(0, (2,), (1,)), zipfile.ZIP_DEFLATED)
    with pytest.raises(Refused, match="it is compressed"):
        load(file)
    monkeypatch.setattr(pickles, "VALUES", 1000)
    mappings, lists = {"w": torch.ones(1)}, [1]
    for _ in range(40):
        mappings, lists = {"a": mappings, "b": mappings}, [lists, lists]
    written = list(range(2000))  # each value takes a byte or more of the file
    for many in (mappings, {"rng": lists}, {"rng": [lists, written]}):
        torch.save(many, file)
        with pytest.raises(Refused, match=r"more than \d,\d{3} values"):
            load(file)
    torch.save({"rng": written, "w": torch.ones(1)}, file)
    assert load(file)["rng"] == written


def test_what_is_written_torch_loads(tmp_path):
    """Tensors in another order than they stand in, two of one Spec apart; checksums are right."""
    spec, file = Spec((3, 4), torch.bfloat16), tmp_path / "a.pt"
    said = {"args": argparse.Namespace(a=1), "model": {"x": {"w": spec}, "y": spec}, "n": 3}
    x, y = torch.randn(3, 4).bfloat16(), torch.randn(4, 3).t()
    out = TorchFileWriter(file, said)
    out.write("model.y", y)
    with pytest.raises(KeyError, match="model.y"):
        out.write("model.y", y)
    with pytest.raises(ValueError, match="is \\(4, 3\\), to be stored as \\(3, 4\\)"):
        TorchFileWriter(tmp_path / "b.pt", said).write("model.y", y.t())
    out.write("model.x.w", x)
    out.close()
    for mapped in (False, True):
        got = torch.load(file, weights_only=False, mmap=mapped)
        assert got["args"] == said["args"] and got["n"] == 3
        assert torch.equal(got["model"]["x"]["w"], x)
        assert torch.equal(got["model"]["y"], y.bfloat16())
    assert {name: s.offset % 64 for name, s in tensors(load(file), file).items()} == {
        "model.x.w": 0,
        "model.y": 0,
    }
    with zipfile.ZipFile(file) as archive:
        assert archive.testzip() is None
    short = TorchFileWriter(tmp_path / "c.pt", said)
    with pytest.raises(KeyError, match="2 tensors were not written, e.g. .'model.x.w'"):
        short.close()


def test_what_is_large_has_long_sizes(tmp_path, monkeypatch):
    """As of 2 GiB: the header of the entry grows, and the numbers stay aligned."""
    monkeypatch.setattr(torch_files, "LARGE", 8)
    file, value = tmp_path / "a.pt", torch.randn(5)
    out = TorchFileWriter(file, {"w": Spec((5,), torch.float32)})
    out.write("w", value)
    out.close()
    assert torch.equal(torch.load(file)["w"], value)
    stored = tensors(load(file), file)["w"]
    assert stored.offset % 64 == 0 and torch.equal(stored.read(), value)


def test_two_meanings_of_one_name_are_refused(tmp_path):
    """Of a tensor, in nested mappings; of a storage, in a pickle."""
    view = torch_files.StoredView(
        torch_files.Storage("0", torch.float32, 4), 0, (4,), (1,), torch.float32
    )
    with pytest.raises(Refused, match="holds a.b twice"):
        tensors({"a": {"b": view}, "a.b": view}, tmp_path / "x.pt")
    storages: dict[str, torch_files.Storage] = {}
    whole = ("storage", torch.float32, "0", "cpu", 4)
    first = torch_files._resolve_storage(whole, storages)
    assert torch_files._resolve_storage(whole, storages) is first
    for other in ((*whole[:1], torch.float64, *whole[2:]), (*whole[:4], 5)):
        with pytest.raises(pickle.UnpicklingError, match="storage 0 is described in two ways"):
            torch_files._resolve_storage(other, storages)
