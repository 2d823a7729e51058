"""Where models wait: the memory under them is gone, and comes back to the bit, under the same
tensors.

A device of its own is not needed for that: what is emptied here is the CPU's memory. That copies to
pinned memory have arrived before what they are of is emptied is seen by a stand-in.
"""

from contextlib import nullcontext

import pytest
import torch
from torch import nn

from dolmen.checkpoint.writer import Pinned
from dolmen.rl.offload import OffloadableMemory, Offloader, offload_parts


def held(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().nbytes()


def test_memory_goes_and_comes_to_the_bit():
    """Of views of one storage once, with what lies between them; whoever holds a tensor holds it
    still.
    """
    whole = torch.randn(10, 6, dtype=torch.float64)
    views, odd, empty = [whole[:3], whole.t()[1]], torch.randn(7).bfloat16(), torch.empty(0)
    wanted, odd_wanted = whole.clone(), odd.clone()
    memory = OffloadableMemory(lambda: [*views, odd, empty])
    memory.offload()
    assert held(whole) == held(odd) == 0 and memory.bytes == 10 * 6 * 8 + 14
    memory.offload()  # it is away already
    memory.reload()
    assert memory.bytes == 0 and not memory.copies
    assert torch.equal(whole, wanted) and torch.equal(odd, odd_wanted)
    views[0].zero_()
    assert not whole[:3].any() and whole[3:].all()
    memory.reload()


def test_what_is_written_anew_is_not_copied():
    p = nn.Parameter(torch.ones(4))
    memory = OffloadableMemory(lambda: [p], keep=False)
    memory.offload()
    assert held(p) == 0 and not memory.copies
    memory.reload()
    with torch.no_grad():
        p.copy_(torch.arange(4.0))
    assert p.tolist() == [0, 1, 2, 3]


def test_nothing_is_emptied_before_its_copy_has_arrived():
    """With pinned memory and a stream."""
    p, seen = torch.arange(300.0), []
    sizes = []

    def allocate(size: int) -> torch.Tensor:
        sizes.append(size)
        return torch.full((size,), 255, dtype=torch.uint8)

    memory = OffloadableMemory(
        lambda: [p], Pinned(allocate, nullcontext, lambda: seen.append(held(p)))
    )
    memory.offload()
    assert seen == [1200] and held(p) == 0 and sum(sizes) >= 1200
    memory.reload()
    assert torch.equal(p, torch.arange(300.0))


@pytest.fixture
def models():
    """A policy, a critic, one that draws, a reference and a reward model."""
    return {name: nn.Linear(4, 4) for name in ("policy", "critic", "drawing", "other", "reward")}


def test_only_what_is_read_is_here(models):
    trained = [(models[name], torch.optim.AdamW(models[name].parameters())) for name in models][:2]
    for model, optimizer in trained:
        model(torch.ones(4)).sum().backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
    before = {name: model.weight.clone() for name, model in models.items()}
    arguments = models["other"], models["reward"]
    idle = Offloader(offload_parts(torch.device("cpu"), trained, models["drawing"], arguments))

    def here() -> set[str]:
        found = {name for name, model in models.items() if held(model.weight)}
        for name, (model, optimizer) in zip(models, trained, strict=False):
            moments = [held(optimizer.state[p]["exp_avg"]) for p in model.parameters()]
            found |= {f"{name}'s optimizer"} if all(moments) else set()
        return found

    idle.use_weights(models["policy"], models["drawing"])
    assert here() == {"policy", "drawing"}
    idle.use_weights(models["drawing"])
    assert here() == {"drawing"} and idle.bytes > 0
    idle.use_weights(models["reward"])
    assert here() == {"reward"}
    idle.use_weights()
    assert here() == set()
    idle.use_for_updates()
    assert here() == {"policy", "critic", "policy's optimizer", "critic's optimizer"}
    idle.use_weights(*models.values())
    for name in models.keys() - {"drawing"}:
        assert torch.equal(models[name].weight, before[name])


def test_of_no_parts_all_stays(models):
    idle = Offloader()
    idle.use_weights(models["reward"])
    idle.use_for_updates()
    assert all(held(model.weight) for model in models.values()) and idle.bytes == 0
