"""The streaming reader and writer against the safetensors library, and what they refuse."""

import io
import json
import os
import subprocess
import sys

import pytest
import safetensors.torch
import torch

from dolmen.files import safetensors as ours
from dolmen.files.gate import Refused
from dolmen.files.pickles import Window
from dolmen.files.safetensors import INDEX, SINGLE, Spec

DTYPES = [
    torch.float32,
    torch.bfloat16,
    torch.float16,
    torch.float64,
    torch.int64,
    torch.uint8,
    torch.bool,
    torch.float8_e4m3fn,
]


def some(seed=0):
    torch.manual_seed(seed)
    tensors = {
        f"t{i}.{dtype}": (torch.randn(3, 5 + i) * 4).to(dtype) for i, dtype in enumerate(DTYPES)
    }
    return {**tensors, "scalar": torch.tensor(2.5), "empty": torch.zeros(0, 4)}


def specs(tensors):
    return {name: Spec(tuple(t.shape), t.dtype) for name, t in tensors.items()}


def bits(tensor):
    return tensor.dtype, tensor.shape, tensor.contiguous().view(-1).view(torch.uint8).tolist()


def same(a, b):
    return bits(a) == bits(b)


def test_the_library_writes_and_we_read(tmp_path):
    tensors = some()
    safetensors.torch.save_file(tensors, tmp_path / SINGLE)
    index = ours.index(tmp_path)
    assert {name: stored.spec for name, stored in index.items()} == specs(tensors)
    assert all(same(index[name].read(), tensor) for name, tensor in tensors.items())
    assert b"".join(index["scalar"].chunks(3)) == b"\0\0\x20\x40"


@pytest.mark.parametrize("shard_bytes", [10**9, 100, 1])
def test_we_write_and_the_library_reads(tmp_path, shard_bytes):
    tensors = some()
    ours.write_tensors(tmp_path, specs(tensors), reversed(tensors.items()), shard_bytes)
    files = sorted(f for f in os.listdir(tmp_path) if f.endswith(".safetensors"))
    back = {name: t for f in files for name, t in safetensors.torch.load_file(tmp_path / f).items()}
    assert back.keys() == tensors.keys() and all(
        same(back[name], tensor) for name, tensor in tensors.items()
    )
    index = ours.index(tmp_path)
    assert all(same(index[name].read(), tensor) for name, tensor in tensors.items())
    assert all(stored.offset % stored.spec.dtype.itemsize == 0 for stored in index.values())
    assert set(os.listdir(tmp_path)) == ({SINGLE} if shard_bytes == 10**9 else {*files, INDEX})
    for f in files:
        held = [s.spec.nbytes for s in ours.read_header(tmp_path / f).values()]
        assert sum(held) <= shard_bytes or len([n for n in held if n]) == 1


def test_writer_casts_and_takes_views(tmp_path):
    tensor = torch.randn(4, 6)
    ours.write_tensors(tmp_path, {"t": Spec((6, 4), torch.bfloat16)}, [("t", tensor.t())])
    assert torch.equal(ours.index(tmp_path)["t"].read(), tensor.t().bfloat16())


@pytest.mark.parametrize(
    ("given", "error", "match"),
    [
        ([("a", (2,))], KeyError, "1 tensors to store were not written, e.g. .'b'"),
        ([("a", (2,)), ("a", (2,))], ValueError, "a was written twice"),
        ([("a", (2,)), ("b", (4,))], ValueError, r"b is \(4,\), to be stored as \(3,\)"),
        ([("c", (2,))], ValueError, "c is not among"),
    ],
)
def test_writer_leaves_nothing_behind_on_an_error(tmp_path, given, error, match):
    wanted = {"a": Spec((2,), torch.float32), "b": Spec((3,), torch.float32)}
    with pytest.raises(error, match=match):
        ours.write_tensors(tmp_path, wanted, [(name, torch.zeros(shape)) for name, shape in given])
    assert os.listdir(tmp_path) == []


def raw(header, data=b"", size=None):
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return (len(text) if size is None else size).to_bytes(8, "little") + text + data


ENTRY = {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}


@pytest.mark.parametrize(
    ("content", "match"),
    [
        (b"", "truncated"),
        (b"abc", "truncated"),
        (raw({}, size=1 << 40), "truncated"),
        (raw({"a": ENTRY}, b"1234567"), "truncated"),
        (raw({"a": ENTRY}, b"123456789"), "damaged"),
        (raw(b"{not json"), "header"),
        (raw(b"[1]"), "header"),
        (raw({"a": 3}), "header"),
        (raw({"a": ENTRY | {"dtype": "Q4"}}, b"12345678"), "Q4"),
        (raw({"a": ENTRY | {"shape": [3]}}, b"12345678"), "damaged"),
        (raw({"a": ENTRY, "b": ENTRY}, b"12345678"), "damaged"),
        (raw(b'{"a":' * 200_000), "200,000 brackets"),
        (raw({"a": ENTRY | {"shape": "4"}}, b"12345678"), "a.shape is '4': it must be a list"),
        (
            raw({"a": ENTRY | {"shape": [-1]}}, b"12345678"),
            r"is -1: it must be at least 0",
        ),
        (
            raw({"a": ENTRY | {"data_offsets": [8]}}, b"12345678"),
            "1 entry: it must have at least 2",
        ),
        (
            raw({"a": ENTRY | {"data_offsets": [0, 8, 8]}}, b"12345678"),
            "3 entries: it must have at most",
        ),
        (
            raw({"a": ENTRY | {"data_offsets": ["0", "8"]}}, b"12345678"),
            "is '0': it must be a whole number",
        ),
        (
            raw({"a": ENTRY | {"data_offsets": [0, 10**30]}}, b"12345678"),
            "it must be at most 9,223,372,036,854,775,807",
        ),
        (raw({"a": {"shape": [2], "data_offsets": [0, 8]}}, b"12345678"), "a has no dtype"),
        (raw(b'{"a": 1, "a": 2}'), "'a' is given twice"),
    ],
)
def test_damaged_files_are_refused(tmp_path, content, match):
    (tmp_path / SINGLE).write_bytes(content)
    with pytest.raises(Refused, match=f"^{tmp_path / SINGLE}.*{match}"):
        ours.index(tmp_path)


def test_a_file_that_became_shorter_is_refused_as_it_is_read(tmp_path):
    """Another process may still write it, or have replaced it."""
    safetensors.torch.save_file({"x": torch.arange(8.0)}, tmp_path / "a.safetensors")
    with open(tmp_path / "a.safetensors", "r+b") as file:
        size = file.seek(0, 2)
        stored = ours.Stored("x", Spec((8,), torch.float32), tmp_path / "a.safetensors", size - 32)
        assert torch.equal(stored.read(), torch.arange(8.0))
        file.truncate(size - 1)
    with pytest.raises(Refused, match="is truncated: x has 31 of 32 bytes"):
        stored.read()


def test_a_window_of_a_file_is_a_file():
    """Beside Python's own of the same bytes: positions and what is read."""
    window, plain = Window(io.BytesIO(b"0123456789"), 2, 5), io.BytesIO(b"23456")
    moves = ((0, 0, 2), (1, 1, 9), (-2, 2, 1), (-1, 1, 2), (7, 0, 3), (0, 2, 1))
    for offset, whence, count in moves:
        assert window.seek(offset, whence) == plain.seek(offset, whence)
        assert window.read(count) == plain.read(count) and window.tell() == plain.tell()
    with pytest.raises(OSError, match="position -1 of 5 bytes"):
        window.seek(-6, io.SEEK_END)
    assert window.tell() == plain.tell()


def test_damaged_folders_are_refused(tmp_path):
    with pytest.raises(ValueError, match="neither"):
        ours.index(tmp_path)
    with pytest.raises(ValueError, match="not a folder"):
        ours.index(tmp_path / "none")
    (tmp_path / "model.ckpt").write_bytes(b"pickle")
    with pytest.raises(ValueError, match="pickles by names that no model .* has .model.ckpt"):
        ours.index(tmp_path)
    (tmp_path / INDEX).write_text("{}")
    with pytest.raises(ValueError, match="it has no weight_map"):
        ours.index(tmp_path)

    for text, match in (
        ("[" * 200_000, "200,000 brackets open at once"),
        ('{"weight_map": {"x": 3}}', "weight_map.x is 3: it must be text"),
        ('{"weight_map": ["x"]}', "weight_map is a list of 1: it must be a mapping"),
        ('{"weight_map": {"x": "%s"}}' % ("ä" * 255), "that are missing: 1 file, e.g. "),
    ):
        (tmp_path / INDEX).write_text(text)
        with pytest.raises(Refused, match=f"^{tmp_path / INDEX}: .*{match}"):
            ours.index(tmp_path)

    def indexed(**weight_map):
        (tmp_path / INDEX).write_text(json.dumps({"weight_map": weight_map}))

    safetensors.torch.save_file({"x": torch.zeros(2)}, tmp_path / "one.safetensors")
    safetensors.torch.save_file(
        {"x": torch.zeros(2), "y": torch.zeros(2)}, tmp_path / "two.safetensors"
    )
    indexed(x="one.safetensors", y="absent.safetensors")
    with pytest.raises(ValueError, match="absent.safetensors"):
        ours.index(tmp_path)
    indexed(x="../one.safetensors")
    with pytest.raises(ValueError, match="that are missing"):
        ours.index(tmp_path)
    indexed(x="one.safetensors", y="two.safetensors")
    with pytest.raises(ValueError, match="x is stored twice"):
        ours.index(tmp_path)
    indexed(x="one.safetensors", z="one.safetensors")
    with pytest.raises(ValueError, match="lists 1 tensors .*'z'"):
        ours.index(tmp_path)


PEAK = """
import os, resource, sys, torch
from dolmen.conversion import hf_export
from dolmen.conversion.source import load_weights, open_source
from dolmen.families import ModelConfig

def grown(work):        # MiB by which `work` raised the peak
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    work()
    print((resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) // 1024, flush=True)

config = ModelConfig(dict(model_type="llama", vocab_size=4096, hidden_size=1024,
                    intermediate_size=4096, num_hidden_layers=8, num_attention_heads=8,
                    num_key_value_heads=2, head_dim=16))
shapes, folder = config.spec.shapes, sys.argv[1] + "/model"
if os.fork() == 0:      # a process each, since a peak never falls
    grown(lambda: hf_export.save(folder, config, lambda name: torch.ones(shapes[name])))
    os._exit(0)
os.wait()
grown(lambda: load_weights(open_source(folder), lambda name, full: None))
"""


def test_peak_memory(tmp_path):
    """Of a 426 MiB model whose largest tensors are 16 MiB, the writer and the reader each hold
    about one.
    """
    done = subprocess.run(
        [sys.executable, "-c", PEAK, str(tmp_path)], capture_output=True, text=True, check=True
    )
    assert (tmp_path / "model" / SINGLE).stat().st_size > 420 * 2**20
    wrote, read = map(int, done.stdout.split())
    # 11 to 41 when measured: the tensor, sometimes the one before, threads
    assert wrote < 64 and read < 64
