"""How often a step makes the host wait for the device. `host.read_back` is counted, and so are the
operators that wait without it: those that give the host a number, and those whose result is as
large as values say. On a CPU nothing waits, but the operators are the same.
"""

from collections import Counter
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from functools import partial

import flash_kernel
import pytest
import tiny_models
import torch
from spawning import Row
from tiny_models import Flat
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from dolmen.core import collectives, device
from dolmen.core import mesh as meshes
from dolmen.core import state as states
from dolmen.core.mesh import SINGLE
from dolmen.data.batch import Batch
from dolmen.model.layout import Layout
from dolmen.objectives.objective import CrossEntropy, Objective
from dolmen.objectives.preference import DPO, REFERENCE
from dolmen.ops.kernels import H100, Hardware, Kernels
from dolmen.optim.optimizer import LossScale, OptimizerConfig, adamw
from dolmen.parallel.simulation import make_schedule
from dolmen.training.state import TrainState
from dolmen.training.step import StepMetrics, optimizer_step

aten = torch.ops.aten
WAITS = {
    aten._local_scalar_dense.default,
    aten.is_nonzero.default,
    aten.nonzero.default,
    aten.masked_select.default,
    aten.bincount.default,
    aten.equal.default,
    aten._unique2.default,
    aten.unique_consecutive.default,
}


class Watch(TorchDispatchMode):
    """What waits, by name."""

    def __init__(self):
        super().__init__()
        self.found = Counter()

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if function in WAITS or self.sized_by_values(function, args, kwargs):
            self.found[str(function)] += 1
        return function(*args, **kwargs)

    def sized_by_values(self, function, args, kwargs) -> bool:
        if function is aten.repeat_interleave.Tensor:
            return kwargs.get("output_size") is None
        if function in (aten.index.Tensor, aten.index_put.default, aten.index_put_.default):
            return any(i is not None and i.dtype == torch.bool for i in args[1])
        return False


CONFIG = Flat(
    vocab_size=32,
    hidden_size=16,
    intermediate_size=24,
    num_hidden_layers=3,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=4,
    initializer_range=0.3,
)
SPARSE = replace(
    CONFIG, num_experts=4, num_experts_per_tok=2, dense_layers=(0,), moe_intermediate_size=16
)
KERNEL = Kernels(grouped="grouped_mm")
LARGER = replace(SPARSE, head_dim=8, hidden_size=32, moe_intermediate_size=32)  # flash's rows


@dataclass(frozen=True)
class Case:
    reads: int
    config: Flat = CONFIG
    layout: Layout = Layout()
    kernels: Kernels = Kernels()
    micros: int = 2
    scaled: bool = False
    hardware: Hardware | None = None
    """What kernels are chosen for, in bf16; None: they are `kernels`."""
    objective: Objective = field(default_factory=CrossEntropy)


CASES = {
    "dense": Case(1),
    "dropout": Case(1, replace(CONFIG, dropout=0.1)),
    "many microbatches, recomputed": Case(1, layout=Layout(recompute="full"), micros=4),
    "a loss scale": Case(1, scaled=True),
    "zero 3": Case(1, layout=Layout(zero=3)),
    "preferences over another model": Case(1, objective=DPO()),
    "experts in one kernel": Case(1, SPARSE, kernels=KERNEL),
    "experts in one kernel, balanced by a bias": Case(
        1, replace(SPARSE, router_balance="bias"), kernels=KERNEL
    ),
    # two sparse layers, two microbatches, forward and again
    "experts in a loop, recomputed": Case(9, SPARSE, Layout(recompute="full")),
    # flash, the fused norm and one kernel for experts: tests/flash_kernel.py stands in
    "as on an H100": Case(1, LARGER, hardware=H100),
}
EP = Layout(dp=2, ep=2, zero=1)
# one at the end, and of each sparse layer and microbatch: how many rows come and go
OVER_RANKS = {
    "ep 2": Case(5, SPARSE, EP),
    "ep 2, recomputed, zero 3": Case(9, SPARSE, replace(EP, zero=3, recompute="full")),
    "ep 2, as on an H100, recomputed": Case(
        9, LARGER, replace(EP, recompute="full"), hardware=H100
    ),
}


def batch(seed: int = 0) -> Batch:
    made = torch.Generator().manual_seed(seed)
    whole = Batch.from_windows(torch.randint(32, (4, 17), generator=made).numpy())
    return replace(whole, numbers={REFERENCE: torch.zeros(4, 16)})


def made(case: Case, mesh, monkeypatch) -> TrainState:
    options = {}
    if case.hardware is None:
        monkeypatch.setattr(tiny_models.building, "choose_kernels", lambda *_: case.kernels)
    else:
        options = dict(hardware=case.hardware, compute=torch.bfloat16)
    schedule = make_schedule("1f1b", 1, case.micros)
    model = tiny_models.build(case.config, mesh, case.layout, schedule, **options)
    tiny_models.initialize(model, 0)
    config = OptimizerConfig()
    state = TrainState(model, adamw(model, config), config, 9, case.layout.zero, schedule)
    state.objective = case.objective
    if case.scaled:
        state.scale = LossScale(True, 2.0**8)
    return state


def hold_reads(case: Case, monkeypatch, join: AbstractContextManager) -> None:
    """Two steps in the group that `join` enters read as often as the case says, and wait nowhere
    else.
    """
    reads, read, region = [], device.read_back, states.region

    def unwatched(p):  # torch works out the offsets of a DTensor with tensors of the CPU
        with _disable_current_modes():
            return region(p)

    monkeypatch.setattr(states, "region", unwatched)
    monkeypatch.setattr(
        device, "read_back", lambda x, *rows: reads.append(x.shape) or read(x, *rows)
    )
    with join, flash_kernel.on_cpu() as attended:
        mesh = case.layout.mesh(torch.device("cpu"))
        state = made(case, mesh, monkeypatch)
        for step in range(2):  # the second begins with what the first has left
            reads.clear()
            with Watch() as watch:
                optimizer_step(state, batch(2 * step + mesh.dp.rank), mesh)
            assert len(reads) == case.reads and watch.found == {}, (reads, watch.found)
        assert bool(attended) == (case.hardware is H100)


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_reads_of_a_step(name, monkeypatch):
    hold_reads(CASES[name], monkeypatch, meshes.process_group_context(None, torch.device("cpu")))


def over_ranks(name: str) -> None:
    with pytest.MonkeyPatch.context() as patch:
        hold_reads(OVER_RANKS[name], patch, nullcontext())


@pytest.mark.parametrize(
    "row", [Row(name, 2, partial(over_ranks, name)).parameter for name in OVER_RANKS]
)
def test_reads_of_a_step_over_ranks(row, result):
    result(row)


def test_the_watch_sees_what_waits():
    x = torch.arange(4)
    with Watch() as watch:
        _ = float(x.sum()), x[x > 1], x.bincount(), bool(x[1]), x.repeat_interleave(x)
        x.repeat_interleave(x, output_size=6)
    assert watch.found.total() == 5, watch.found


def test_a_signal_is_told_with_the_other_numbers(monkeypatch):
    state = made(Case(1), SINGLE, monkeypatch)
    done = []
    metrics = optimizer_step(
        state, batch(), SINGLE, lambda: 15 if len(done) == 4 else 2, done.append
    )  # F0 B0 F1 B1: asked when all is queued
    assert metrics.signal == 15 and optimizer_step(state, batch(), SINGLE).signal == 0


def test_the_signal_is_the_largest_of_all_ranks(monkeypatch):
    """A rank that stopped for its own would leave the others waiting in the next step."""
    reduce_scalar = collectives.reduce_scalar

    def reduce(x, axis, kind="sum"):
        return x + 15 if kind == "max" else reduce_scalar(x, axis, kind)

    monkeypatch.setattr(collectives, "reduce_scalar", reduce)
    state = made(Case(1), SINGLE, monkeypatch)
    assert optimizer_step(state, batch(), SINGLE).signal == 15


def test_one_kernel_and_a_loop_are_the_same_step(monkeypatch):
    """fp32, to the rounding of a product: grouped_mm adds in another order."""

    def reported(kernels: Kernels) -> list[StepMetrics]:
        state = made(Case(1, SPARSE, kernels=kernels), SINGLE, monkeypatch)
        return [optimizer_step(state, batch(i), SINGLE) for i in range(3)]

    for one, other in zip(reported(Kernels()), reported(KERNEL), strict=True):
        assert one.loss == pytest.approx(other.loss, rel=1e-6)
        assert one.grad_norm == pytest.approx(other.grad_norm, rel=1e-5)
        assert one.router == pytest.approx(other.router, rel=1e-5)
