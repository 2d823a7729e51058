"""A module of one's own, updated and kept: five steps at any layout are those of one process, and
what one layout saves another reads, to the bit.
"""

import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from owned import MODELS
from spawning import Row
from torch import Tensor, nn

import dolmen
from dolmen.core import state
from dolmen.core.mesh import SINGLE, Mesh, build_mesh
from dolmen.optim.config import OptimizerConfig
from dolmen.training import modules

CPU, STEPS, CLIP = torch.device("cpu"), 5, 0.05
OPTIMIZERS: dict[str, Callable[[nn.Module], torch.optim.Optimizer]] = {
    "adamw": lambda m: torch.optim.AdamW(m.parameters(), lr=1e-2),
    "sgd": lambda m: torch.optim.SGD(m.parameters(), lr=1e-1, momentum=0.9, dampening=0.5),
    "ours": lambda m: modules.adamw(m, OptimizerConfig(lr=1e-2)),
}


class Trained:
    """One of owned.MODELS in float64, and its optimizer, on a mesh."""

    def __init__(self, name: str, mesh: Mesh, zero: int, optimizer: str, micros: int = 1):
        make, plan, sampled = MODELS[name]
        torch.manual_seed(0)
        module, given = make().double(), sampled()
        self.given = given.double() if given.is_floating_point() else given
        self.mesh, self.micros = mesh, micros
        self.module = dolmen.parallelize(module, plan, mesh, zero=zero)
        self.optimizer = OPTIMIZERS[optimizer](self.module)

    def steps(self, count: int) -> list[float]:
        """Loss and norm of each."""
        mesh, metrics = self.mesh, []
        mine = self.given.chunk(mesh.dp.size)[mesh.dp.rank]
        for _ in range(count):
            parts = (self.loss(part) for part in mine.chunk(self.micros))
            loss = self.loss(mine) if self.micros == 1 else parts
            metrics += dolmen.step(self.module, self.optimizer, loss, mesh, clip=CLIP)
        return metrics

    def loss(self, rows: Tensor) -> Tensor:
        return self.module(rows).square().sum() / len(self.given)

    def kept(self) -> dict[str, Tensor]:
        """All that a checkpoint has, whole."""
        tensors, _ = modules._checkpoint_state(self.module, self.optimizer)
        return {name: state.gather_full(t).clone() for name, t in tensors.items()}


def difference(got: dict[str, Tensor], want: dict[str, Tensor]) -> float:
    """The largest, relative to the largest number of its tensor."""
    assert got.keys() == want.keys()
    return max(float((got[n] - want[n]).abs().max() / (want[n].abs().max() + 1e-12)) for n in want)


def alone(name: str, optimizer: str) -> tuple[list[float], dict[str, Tensor]]:
    one = Trained(name, SINGLE, 0, optimizer)
    return one.steps(STEPS), one.kept()


def compare(name: str, dp: int, tp: int, zero: int, optimizer: str, micros: int) -> float:
    """The largest difference from one process: losses, norms, weights, the optimizer's state."""
    split = Trained(name, build_mesh(dp, tp, CPU), zero, optimizer, micros)
    metrics, (want, weights) = split.steps(STEPS), alone(name, optimizer)
    assert min(want[1::2]) > CLIP
    off = max(abs(a / b - 1) for a, b in zip(metrics, want, strict=True))
    return max(off, difference(split.kept(), weights))


def resharded(name: str, optimizer: str) -> tuple[bool, float]:
    """Two steps at tp 2, the rest at dp 2: whether what was read is what was saved, to the bit, and
    how far the end is from one process.
    """
    folder = [tempfile.mkdtemp()]
    dist.broadcast_object_list(folder)
    before = Trained(name, build_mesh(1, 2, CPU), 0, optimizer)
    before.steps(2)
    before.loss(before.given)  # gathered, and no backward after it
    dolmen.save(folder[0], before.module, before.optimizer, before.mesh, step=2)
    after = Trained(name, build_mesh(2, 1, CPU), 3, optimizer)
    after.steps(1)  # somewhere else
    assert dolmen.restore(folder[0], after.module, after.optimizer, after.mesh) == 2
    saved, read = before.kept(), after.kept()
    same = saved.keys() == read.keys() and all(torch.equal(saved[n], read[n]) for n in saved)
    after.steps(STEPS - 2)
    return same, difference(after.kept(), alone(name, optimizer)[1])


LAYOUTS = [
    Row(f"{name}-dp{dp} tp{tp} zero{zero} acc{micros}-{optimizer}", dp * tp, call, full)
    for name, dp, tp, zero, optimizer, micros, full in (
        ("toy", 1, 2, 0, "sgd", 1, False),
        ("toy", 2, 1, 1, "adamw", 2, False),
        ("llama", 1, 2, 1, "adamw", 1, False),
        ("llama", 2, 1, 2, "sgd", 1, False),
        ("toy", 2, 2, 3, "sgd", 1, True),
        ("llama", 2, 2, 0, "ours", 2, True),
        ("llama", 2, 2, 3, "adamw", 2, False),
    )
    for call in [partial(compare, name, dp, tp, zero, optimizer, micros)]
]


@pytest.mark.parametrize("row", [row.parameter for row in LAYOUTS])
def test_five_steps_are_those_of_one_process(row, result):
    """float64: the order of sums."""
    assert result(row) < 1e-10


KEPT = [Row(f"{name}-{by}", 2, partial(resharded, name, by)) for name, by in (("llama", "adamw"),)]
KEPT += [Row("toy-sgd", 2, partial(resharded, "toy", "sgd"), full=True)]


@pytest.mark.parametrize("row", [row.parameter for row in KEPT])
def test_what_tp_has_saved_dp_goes_on_with(row, result):
    same, off = result(row)
    assert same and off < 1e-10, off


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_a_checkpoint_of_one_process_goes_on_to_the_bit(optimizer, tmp_path):
    whole = Trained("toy", SINGLE, 0, optimizer)
    reported = whole.steps(STEPS)
    first = Trained("toy", SINGLE, 0, optimizer)
    assert first.steps(2) == reported[:4]
    dolmen.save(tmp_path, first.module, first.optimizer, SINGLE, step=2)
    second = Trained("toy", SINGLE, 0, optimizer)
    second.given = first.given
    assert dolmen.restore(tmp_path, second.module, second.optimizer, SINGLE) == 2
    assert second.steps(STEPS - 2) == reported[4:]


def test_what_has_made_no_step_is_kept_as_that(tmp_path):
    """Without the optimizer's state: one made by a step of zeros would count as a step."""
    new = Trained("toy", SINGLE, 0, "adamw")
    dolmen.save(tmp_path, new.module, new.optimizer, SINGLE, step=0)
    other = Trained("toy", SINGLE, 0, "adamw")
    other.steps(2)
    assert dolmen.restore(tmp_path, other.module, other.optimizer, SINGLE) == 0
    assert not other.optimizer.state and other.kept().keys() == new.kept().keys()
    assert other.steps(STEPS) == new.steps(STEPS)


def test_where_nothing_is_saved_nothing_changes(tmp_path):
    one = Trained("toy", SINGLE, 0, "adamw")
    want = one.kept()
    assert dolmen.restore(tmp_path / "none", one.module, one.optimizer, SINGLE) == 0
    assert difference(one.kept(), want) == 0 and not (tmp_path / "none").exists()


def test_buffers_and_numbers_are_kept_and_the_rate_is_not(tmp_path):
    class Counting(torch.optim.SGD):
        """Keeps a number of each parameter."""

        @torch.no_grad()
        def step(self, closure=None):
            super().step()
            for group in self.param_groups:
                for p in group["params"]:
                    self.state[p]["seen"] = self.state[p].get("seen", 0) + 1

    def made(rate: float) -> tuple[nn.Module, Counting]:
        module = dolmen.parallelize(nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)), {}, SINGLE)
        return module, Counting(module.parameters(), lr=rate)

    module, optimizer = made(0.1)
    for _ in range(3):
        dolmen.step(module, optimizer, module(torch.randn(8, 4)).square().mean(), SINGLE)
    dolmen.save(tmp_path, module, optimizer, SINGLE, step=3, keep=1)
    dolmen.save(tmp_path, module, optimizer, SINGLE, step=4, keep=1)
    assert len([*tmp_path.iterdir()]) == 1
    other, by = made(0.3)
    assert dolmen.restore(tmp_path, other, by, SINGLE) == 4
    assert all(torch.equal(b, dict(module.named_buffers())[n]) for n, b in other.named_buffers())
    assert {s["seen"] for s in by.state.values()} == {3} and by.param_groups[0]["lr"] == 0.3


def test_what_is_not_finite_changes_nothing():
    one = Trained("toy", SINGLE, 0, "sgd")
    want = one.kept()
    reported = dolmen.step(one.module, one.optimizer, one.loss(one.given) * float("nan"), SINGLE)
    assert reported.loss != reported.loss and one.kept().keys() == want.keys()
    assert difference(one.kept(), want) == 0
    assert all(p.grad is None for p in one.module.parameters())


def test_what_is_refused(tmp_path):
    one = Trained("toy", SINGLE, 0, "adamw")
    with pytest.raises(ValueError, match="clip is -1: it must be at least 0"):
        dolmen.step(one.module, one.optimizer, one.loss(one.given), SINGLE, clip=-1)
    with pytest.raises(ValueError, match="needs at least one loss"):
        dolmen.step(one.module, one.optimizer, iter(()), SINGLE)
    one.steps(1)
    dolmen.save(tmp_path, one.module, one.optimizer, SINGLE, step=1)
    other = Trained("toy", SINGLE, 0, "sgd")
    with pytest.raises(ValueError, match="keeps .'exp_avg'.* and SGD keeps .'momentum_buffer'"):
        dolmen.restore(tmp_path, other.module, other.optimizer, SINGLE)
    wide = Trained("wide", SINGLE, 0, "adamw")
    with pytest.raises(ValueError, match="tensors of other shapes: model/net1.weight"):
        dolmen.restore(tmp_path, wide.module, wide.optimizer, SINGLE)
    # no state that was begun to be read into, which would count as a step
    assert not other.optimizer.state and not wide.optimizer.state
    with pytest.raises(
        ValueError, match="2 of 2 parameters .* create the optimizer after dolmen.parallelize"
    ):
        dolmen.save(
            tmp_path, one.module, torch.optim.SGD(nn.Linear(2, 2).parameters()), SINGLE, step=1
        )
    next(iter(one.optimizer.state.values()))["history"] = [1, 2]
    with pytest.raises(ValueError, match="AdamW keeps a list as history of net1.weight"):
        dolmen.save(tmp_path / "no", one.module, one.optimizer, SINGLE, step=1)
    assert not Path(tmp_path / "no").exists()
