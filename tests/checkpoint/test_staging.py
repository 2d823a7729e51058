"""How a save is copied out of a GPU, with stand-ins for pinned memory and the stream: a copy
arrives when it is waited for.
"""

import math
import random
from contextlib import contextmanager

import pytest
import torch
import torch.distributed as dist
from fakes import join_fake
from tiny_models import Flat, build, initialize

from dolmen.checkpoint import writer
from dolmen.checkpoint.store import Checkpoints
from dolmen.checkpoint.writer import Pinned
from dolmen.core import mesh as meshes
from dolmen.core import state
from dolmen.core.mesh import SINGLE
from dolmen.model.layout import Layout
from dolmen.recipes import RECIPES


class Gpu:
    """Counts what is allocated and waited for; `copy_` of its tensors is done when waited for."""

    def __init__(self, monkeypatch):
        self.sizes, self.waits, self.inside, self.begun = [], 0, False, []
        copy = torch.Tensor.copy_

        def later(to, source, non_blocking=False):
            assert self.inside and non_blocking and to.is_contiguous()
            self.begun.append(lambda: copy(to, source))
            return to

        def arrived():
            self.waits += 1
            while self.begun:
                self.begun.pop()()
            monkeypatch.setattr(torch.Tensor, "copy_", copy)

        @contextmanager
        def extra():
            self.inside = True
            monkeypatch.setattr(torch.Tensor, "copy_", later)
            yield
            self.inside = False

        self.pinned = Pinned(self.allocate, extra, arrived)

    def allocate(self, size: int) -> torch.Tensor:
        self.sizes.append(size)
        return torch.full((size,), 255, dtype=torch.uint8)


@pytest.fixture
def gpu(monkeypatch):
    return Gpu(monkeypatch)


def tensors() -> dict[str, torch.Tensor]:
    """Of all kinds: odd sizes, none, a scalar, one that is not contiguous, one larger than a
    chunk.
    """
    chance = torch.Generator().manual_seed(0)
    return {
        **{f"odd {n}": torch.randn(n, 7, generator=chance).bfloat16() for n in range(40)},
        "scalar": torch.tensor(3.0),
        "double": torch.randn(5, generator=chance, dtype=torch.float64),
        "across": torch.randn(9, 5, generator=chance).t(),
        "large": torch.nn.Parameter(torch.randn(2000, generator=chance)),
        "after": torch.arange(3.0),
    }


def test_one_wait_and_little_more_pinned_memory_than_numbers(gpu):
    """Copies are bitwise, and each is a storage of its own size."""
    given = tensors()
    made = writer.copy_to_cpu(given, gpu.pinned)
    assert gpu.waits == 1 and not gpu.inside
    for name, t in given.items():
        copy = made[name]
        assert copy.dtype == t.dtype and copy.is_contiguous() and torch.equal(copy, t.detach())
        assert copy.untyped_storage().nbytes() == t.nbytes
    # a tensor begins at a multiple of 256 bytes
    assert sum(gpu.sizes) <= 1.02 * sum(-(-t.nbytes // 256) * 256 for t in given.values())


MODELS = [name for name, recipe in RECIPES.items() if recipe().model]
FEW = ("quickstart", "llama-8b", "llama-405b", "gpt3-175b", "mixtral-8x7b", "bert")


@pytest.mark.parametrize(
    "name", [*FEW, *(pytest.param(n, marks=pytest.mark.full) for n in MODELS if n not in FEW)]
)
def test_pinned_memory_is_little_more_than_what_is_written(name):
    """Of weights in fp32 and two averages, cut for so many ranks; the allocator rounds up to powers
    of 2.
    """
    shapes = RECIPES[name]().model.spec.shapes.values()
    for ranks in (1, 2, 8, 64, 256):
        parts = [-(-shape[0] // ranks) * math.prod(shape[1:]) * 4 for shape in shapes]
        if not 2**20 < sum(parts) * 3 <= 192 * 2**30:
            continue  # more than any GPU has, or too little to tell
        chunks, _ = writer.plan_chunks(tuple(parts * 3))
        assert all(size & (size - 1) == 0 for size in chunks)
        assert sum(parts) * 3 <= sum(chunks) <= 1.05 * sum(parts) * 3, ranks


def test_no_two_tensors_lie_in_one_place():
    chance = random.Random(0)
    for _ in range(50):
        wanted = tuple(chance.choice((0, 1, 255, 256, 257, 9999)) for _ in range(30))
        chunks, places = writer.plan_chunks(wanted)
        ends = [0] * len(chunks)
        for (chunk, begin), size in sorted(zip(places, wanted, strict=True)):
            assert begin >= ends[chunk] and begin % 256 == 0
            ends[chunk] = begin + size
        assert all(end <= size for end, size in zip(ends, chunks, strict=True))
    assert writer.plan_chunks(()) == ([], []) and len(writer.plan_chunks((0,))[0]) == 1


def test_shards_stay_shards(gpu):
    """The copy of a DTensor lies as it does, which a checkpoint's plan reads."""
    join_fake(4, 0)
    try:
        config = Flat(
            vocab_size=71,
            hidden_size=16,
            intermediate_size=24,
            num_hidden_layers=1,
            num_attention_heads=2,
            num_key_value_heads=2,
            head_dim=8,
        )
        model = build(config, meshes.build_mesh(2, 2, torch.device("cpu")), Layout(zero=1))
        initialize(model, 0)
        given = dict(model.named_parameters())
        made = writer.copy_to_cpu(given, gpu.pinned)
        for name, p in given.items():
            assert made[name].placements == p.placements and made[name].shape == p.shape
            assert state.region(made[name]) == state.region(p)
            assert torch.equal(state.local_view(made[name]), state.local_view(p))
            assert state.local_view(made[name]).data_ptr() != state.local_view(p).data_ptr()
    finally:
        dist.destroy_process_group()


def test_the_files_are_the_same(gpu, tmp_path):
    """Byte for byte, whether or not memory is pinned on the way."""
    given = {f"model/{n}": t for n, t in tensors().items() if t.numel()}
    found = []
    for name in ("plain", "pinned"):
        store = Checkpoints(tmp_path / name, SINGLE, keep=2)
        assert store.pinned is None
        if name == "pinned":
            store.pinned = gpu.pinned
        store.save(1, given, {"step": 1}, wait=True)
        files = sorted(p for p in (tmp_path / name).rglob("*") if p.is_file())
        found.append({p.relative_to(tmp_path / name): p.read_bytes() for p in files})
    assert gpu.waits == 1 and found[0].keys() == found[1].keys()
    assert [n for n in found[0] if found[0][n] != found[1][n]] == []
