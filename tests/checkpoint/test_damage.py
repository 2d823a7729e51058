"""A checkpoint is what was saved, or it is Damaged: bytes changed, cut, swapped or left out, and
descriptions that somebody has made up.
"""

import math
import os
import pickle
import pickletools
import random
import struct
import tracemalloc

import pytest
import torch
from seals import edit, seal_again
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata

from dolmen.checkpoint import folders
from dolmen.checkpoint.folders import Damaged
from dolmen.checkpoint.reader import Checkpoint, locate
from dolmen.checkpoint.store import Checkpoints
from dolmen.core.mesh import SINGLE
from dolmen.files import pickles

META = {"step": 1, "updates": 16, "norms": [0.25, 3.5], "run": {"model": {"family": "llama"}}}


def tensors(value: float) -> dict[str, torch.Tensor]:
    return {
        "model/w": torch.full((16, 8), value),
        "model/b": torch.full((7,), value).bfloat16(),
        "exp_avg/w": torch.arange(128.0).reshape(16, 8) + value,
        "model/scalar": torch.tensor(value),
    }


@pytest.fixture
def store(tmp_path):
    made = Checkpoints(tmp_path / "checkpoints", SINGLE, 0)
    made.save(1, tensors(1.0), META, wait=True)
    return made


def loads(store) -> bool:
    """Whether the checkpoint is bitwise what was saved; False: it is refused. Anything else
    raises.
    """
    found = tensors(0.0)
    try:
        meta = store.meta(1)
        store.load(1, found)
    except Damaged as error:
        assert "\n" not in str(error) and str(store.path(1)) in str(error)
        return False
    want = tensors(1.0)
    assert meta == META and all(torch.equal(found[n], want[n]) for n in want), "other numbers"
    return True


def harmed(content: bytes, chance: random.Random) -> bytes:
    """The content with a bit flipped, a byte changed, cut short, or with bytes put in."""
    at = chance.randrange(len(content))
    kind = chance.randrange(4)
    if kind == 0:
        return content[:at] + bytes([content[at] ^ 1 << chance.randrange(8)]) + content[at + 1 :]
    if kind == 1:
        other = (content[at] + chance.randrange(1, 256)) % 256
        return content[:at] + bytes([other]) + content[at + 1 :]
    return content[:at] if kind == 2 else content[:at] + chance.randbytes(3) + content[at:]


@pytest.mark.parametrize("name", [folders.METADATA, folders.STATE, folders.SEAL])
def test_any_damage_of_a_small_file_is_seen(store, name):
    path, chance = store.path(1) / name, random.Random(0)
    content = path.read_bytes()
    for _ in range(200):
        path.write_bytes(harmed(content, chance))
        assert not loads(store), "damage was not seen"
    path.write_bytes(content)
    assert loads(store)


def test_damage_of_a_file_of_tensors_gives_no_other_numbers(store):
    (path,) = store.path(1).glob("*.distcp")
    content, chance = path.read_bytes(), random.Random(0)
    seen = 0
    for _ in range(300):
        path.write_bytes(harmed(content, chance))
        seen += not loads(store)
    assert seen > 150  # cuts, insertions, and what hits numbers or heads; not the padding


def test_damage_of_a_description_that_is_sealed_again(store):
    """It is refused, does not fit the model, or gives the same numbers."""
    path, chance, fits = store.path(1) / folders.METADATA, random.Random(0), 0
    content = path.read_bytes()
    for _ in range(400):
        path.write_bytes(harmed(content, chance))
        seal_again(store.path(1))
        try:
            loads(store)
        except (KeyError, ValueError) as error:  # another name, another shape
            fits += 1
            assert "tensors" in str(error), error
    assert fits < 100


def test_a_part_left_out(store):
    for path in list(store.path(1).iterdir()):
        content = path.read_bytes()
        path.unlink()
        with pytest.raises(ValueError, match=r"missing|no checkpoint of step 1"):
            loads(store) or Checkpoint(store.folder / "step-00000001")
        path.write_bytes(content)
    assert loads(store)


def test_a_file_of_another_step_is_not_taken_for_this_ones(store):
    """The same size, its own checksums right."""
    store.save(2, tensors(2.0), META, wait=True)
    (mine,), (other,) = store.path(1).glob("*.distcp"), store.path(2).glob("*.distcp")
    mine.write_bytes(other.read_bytes())
    with pytest.raises(Damaged, match="the file has changed since it was saved"):
        store.load(1, tensors(0.0))
    with pytest.raises(Damaged, match="the file has changed since it was saved"):
        Checkpoint(store.path(1)).read("model/w")


def test_without_its_seal_it_is_damaged(store):
    (store.path(1) / folders.SEAL).unlink()
    assert not loads(store)
    with pytest.raises(Damaged, match="seal: .*missing"):
        Checkpoint(store.path(1))


def test_a_newer_format_is_no_damage(store):
    """Said in both places; in one alone, which a flipped bit can do, it is damage."""
    for name, old, new in (
        (folders.SEAL, b"checkpoint 2, ", b"checkpoint 3, "),
        (folders.STATE, b'"format": 2', b'"format": 3'),
    ):
        path = store.path(1) / name
        before = path.read_bytes()
        path.write_bytes(before.replace(old, new))
        assert path.read_bytes() != before and (name == folders.STATE or not loads(store))
    with pytest.raises(
        ValueError, match="by a newer dolmen: it has format 3, .* up to 2;"
    ) as raised:
        store.meta(1)
    assert not isinstance(raised.value, Damaged)


@pytest.mark.parametrize(
    "text",
    ["[" * 200_000, '{"run": ' * 100_000, "[1, 2]", "5", "null", "", "\ud800", "{" + '"a": 1,' * 9],
    ids=["nested", "nested mappings", "list", "number", "null", "empty", "surrogate", "cut"],
)
def test_a_state_that_is_none(store, text):
    (store.path(1) / folders.STATE).write_bytes(text.encode(errors="surrogatepass"))
    for again in (lambda _: None, seal_again, lambda path: (path / folders.SEAL).unlink()):
        again(store.path(1))
        assert not loads(store)


def place(metadata, name="model/w"):
    return next(p for i, p in metadata.storage_data.items() if i.fqn == name)


def stored(metadata, name="model/w"):
    return metadata.state_dict_metadata[name]


MADE_UP = {
    "an int path": lambda m: setattr(place(m), "relative_path", 5),
    "a path of lists": lambda m: setattr(place(m), "relative_path", ["a"]),
    "a text position": lambda m: setattr(place(m), "offset", "5"),
    "a negative position": lambda m: setattr(place(m), "offset", -5),
    "a huge position": lambda m: setattr(place(m), "offset", 2**62),
    "a huge length": lambda m: setattr(place(m), "length", 2**80),
    "no length": lambda m: delattr(place(m), "length"),
    "a huge size": lambda m: setattr(stored(m), "size", torch.Size([2**40, 8])),
    "a huge size and chunk": lambda m: huge(stored(m)),
    "a negative size": lambda m: setattr(stored(m), "size", torch.Size([-16, 8])),
    "a size of lists": lambda m: setattr(stored(m), "size", [16, 8]),
    "no chunks": lambda m: stored(m).chunks.clear(),
    "a chunk twice": lambda m: stored(m).chunks.append(stored(m).chunks[0]),
    "a chunk that is text": lambda m: stored(m).chunks.__setitem__(0, "a"),
    "a chunk outside": lambda m: setattr(stored(m).chunks[0], "offsets", torch.Size([3, 0])),
    "a dtype that is text": lambda m: setattr(stored(m).properties, "dtype", "float32"),
    "another dtype": lambda m: setattr(stored(m).properties, "dtype", torch.float16),
    "names that are numbers": lambda m: m.state_dict_metadata.update({5: stored(m)}),
    "no places": lambda m: setattr(m, "storage_data", None),
    "places of nothing": lambda m: m.state_dict_metadata.pop("model/b"),
    "tensors in a list": lambda m: setattr(m, "state_dict_metadata", [1]),
}


def huge(t) -> None:
    """2^50 elements, and one chunk that says it has them."""
    t.size = torch.Size([2**47, 8])
    t.chunks = [ChunkStorageMetadata(torch.Size([0, 0]), t.size)]


@pytest.mark.parametrize("case", MADE_UP)
def test_made_up_descriptions_are_refused(store, case):
    edit(store.path(1), MADE_UP[case])
    with pytest.raises(Damaged) as raised:
        Checkpoint(store.path(1)).read("model/w")
    assert "\n" not in str(raised.value) and not loads(store)


BOMBS = {
    "a place in the memo": b"N" + pickle.LONG_BINPUT + struct.pack("<I", 2**27) + b".",
    "a place in the memo, as text": b"Np134217728\n.",
    "a byte array": pickle.BYTEARRAY8 + struct.pack("<Q", 2**30) + b".",
    "a number in text": b"I" + b"9" * 100_000 + b"\n.",
}


@pytest.mark.parametrize("case", BOMBS)
def test_a_description_that_takes_gigabytes_is_refused_unread(store, case, monkeypatch):
    monkeypatch.setattr(pickles, "RestrictedUnpickler", None)
    (store.path(1) / folders.METADATA).write_bytes(b"\x80\x04" + BOMBS[case])
    seal_again(store.path(1))
    with pytest.raises(Damaged, match="an opcode that pickles of tensors do not use"):
        store.load(1, tensors(0.0))


def test_every_instruction_of_a_pickle_is_found(store):
    """Where pickletools finds one, cut there, the walk ends; nowhere else."""
    content = (store.path(1) / folders.METADATA).read_bytes()
    begins = [at for _, _, at in pickletools.genops(content)]
    for at in begins:
        assert pickles.scan(content[:at] + pickle.STOP) == at + 1
        with pytest.raises(pickle.UnpicklingError, match=f"byte {at} is 0x96"):
            pickles.scan(content[:at] + pickle.BYTEARRAY8 + content[at:])


def test_chunks_that_overlap_are_seen_without_a_seal(store):
    """A position of a chunk changed: as many elements as before, of which some lie nowhere."""
    from dolmen.checkpoint.metadata import overlap

    boxes = [((0, 0), (8, 8)), ((8, 0), (8, 8)), ((0, 0), (0, 8))]
    chunks = [ChunkStorageMetadata(torch.Size(a), torch.Size(b)) for a, b in boxes]
    assert not overlap(chunks)
    chunks[1].offsets = torch.Size([7, 0])
    assert overlap(chunks) and math.prod(chunks[1].sizes) == 64


# ---- nothing of somebody else's is deleted


def test_what_others_put_into_a_checkpoint_outlives_it(store, tmp_path):
    (store.path(1) / "notes.txt").write_text("mine")
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "state.json").write_text("mine")
    os.symlink(outside, store.folder / "step-00000000.partial")
    (store.folder / "step-mine.partial").mkdir()
    (store.folder / "step-mine.partial" / "state.json").write_text("mine")
    one = Checkpoints(store.folder, SINGLE, 1)
    for step in (2, 3):
        one.save(step, tensors(1.0), META, wait=True)
    assert one.steps() == [3]
    assert (store.folder / "step-00000001.kept" / "notes.txt").read_text() == "mine"
    assert os.listdir(store.folder / "step-00000001.kept") == ["notes.txt"]
    assert (outside / "state.json").read_text() == "mine"
    assert (store.folder / "step-mine.partial" / "state.json").read_text() == "mine"


def test_a_checkpoint_put_aside_is_never_deleted(store):
    first = store.put_aside(1)
    store.save(1, tensors(2.0), META, wait=True)
    second = store.put_aside(1)
    store.save(2, tensors(2.0), META, wait=True)
    assert first.name == "step-00000001.damaged" and second.name == "step-00000001.damaged-2"
    assert first.is_dir() and second.is_dir() and store.steps() == [2]


@pytest.mark.parametrize("name", [folders.METADATA, folders.STATE])
def test_what_a_small_file_has_grown_by_is_not_read(store, name):
    os.truncate(store.path(1) / name, 2**26 - 1)
    tracemalloc.start()
    assert not loads(store)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 2**22


def _taken(path, by: str) -> None:
    """Put something that is no file in the place of one, or nothing."""
    path.unlink()
    {
        "nothing": lambda: None,
        "a folder": path.mkdir,
        "a pipe": lambda: os.mkfifo(path),
        "a loop": lambda: path.symlink_to(path.name),
    }[by]()


@pytest.mark.parametrize("by", ["nothing", "a folder", "a pipe", "a loop"])
def test_the_newest_checkpoint_without_its_state_is_damaged_and_not_passed_over(store, by):
    store.save(2, tensors(2.0), META, wait=True)
    _taken(store.path(2) / folders.STATE, by)
    assert store.newest() == 2 and locate(store.folder) == store.path(2)
    assert locate(store.path(2)) == store.path(2)
    with pytest.raises(Damaged, match=r"step-00000002/state\.json"):
        store.meta(2)
    with pytest.raises(Damaged, match=r"step-00000002/state\.json"):
        Checkpoint(locate(store.folder))
