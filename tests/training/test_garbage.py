"""Python's garbage: collected at known steps, none of it tensors, and the collector given back."""

import gc
from dataclasses import replace
from itertools import pairwise

import pytest
import tinyrun
import torch
from rich.console import Console
from tiny_models import Flat, build, initialize

from dolmen.core.mesh import SINGLE
from dolmen.data.batch import Batch
from dolmen.model.layout import Layout
from dolmen.optim import optimizer as optim
from dolmen.optim.config import OptimizerConfig
from dolmen.training import hooks, loop
from dolmen.training.run import run_training
from dolmen.training.state import TrainState
from dolmen.training.step import optimizer_step

material, one_thread = tinyrun.material, tinyrun.one_thread

EXPERTS = dict(num_experts=4, num_experts_per_tok=2, moe_intermediate_size=16)


def state_of(layout: Layout, at_once: int = 1, **changes) -> TrainState:
    layout = layout.resolve(1)
    config = Flat(**{**tinyrun.MODEL, **changes})
    schedule = layout.make_schedule(4, at_once)
    model = build(config, SINGLE, layout, schedule)
    initialize(model, 0)
    optimizer = optim.adamw(model, OptimizerConfig())
    optim.prime(optimizer)
    return TrainState(model, optimizer, OptimizerConfig(), 1000, layout.zero, schedule)


def batch() -> Batch:
    tokens = torch.randint(0, 300, (4, 17), generator=torch.Generator().manual_seed(0))
    return Batch(tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous())


def left_by(work) -> list:
    """Objects made by `work` that only the collector would free. What was there before is frozen:
    the collector neither looks at it, which would take a second of each test, nor lets go of what a
    cache of the compiler holds.
    """
    gc.collect()
    gc.freeze()
    gc.set_debug(gc.DEBUG_SAVEALL)
    try:
        with loop.manual_gc():
            work()
            gc.collect()
        return gc.garbage.copy()
    finally:
        gc.set_debug(0)
        gc.garbage.clear()


@pytest.mark.slow
@pytest.mark.parametrize(
    "layout, changes",
    [
        (Layout(), {}),
        (Layout(recompute="full"), {"dropout": 0.1}),
        (Layout(recompute="selective"), EXPERTS),
    ],
)
def test_a_step_leaves_no_tensor_in_a_cycle(layout, changes):
    """Or its memory would wait for 50 steps."""
    state, data = state_of(layout, **changes), batch()
    optimizer_step(state, data, SINGLE)
    left = left_by(lambda: optimizer_step(state, data, SINGLE))
    assert not [x for x in left if isinstance(x, torch.Tensor)]
    assert len(left) <= 2 * 28 * 4  # by layer and microbatch


@pytest.mark.slow
def test_a_cycle_with_a_tensor_is_seen():
    """What the test above would see."""

    def work():
        held = [torch.ones(2)]
        held.append(held)

    assert any(isinstance(x, torch.Tensor) for x in left_by(work))


@pytest.mark.slow
def test_memory_does_not_grow_over_300_steps():
    """Nothing is collected but at the 50th, 100th ... step; between those, objects that the
    collector knows are as many as after the ones before.
    """
    state = state_of(Layout(recompute="full"), at_once=4, num_hidden_layers=1)
    data, counts = batch(), []
    with loop.manual_gc():
        for _ in range(300):
            optimizer_step(state, data, SINGLE)
            loop.collect_garbage(state.step)
            if state.step % 50 == 0:
                counts.append(len(gc.get_objects()))
    assert len(counts) == 6 and max(b - a for a, b in pairwise(counts[1:])) < 100, counts


def test_what_is_collected_when(monkeypatch):
    calls = []
    monkeypatch.setattr(loop.gc, "collect", lambda generation=2: calls.append(generation))
    found = {}
    for step in range(1, 2001):
        loop.collect_garbage(step)
        if calls:
            found[step] = calls.pop()
    assert found == {s: 2 if s % 1000 == 0 else 1 for s in range(50, 2001, 50)}


@pytest.mark.parametrize("was", [True, False])
def test_a_run_leaves_the_collector_as_it_was(was, material, tmp_path, monkeypatch):
    """Also one that fails; and it is off while it trains."""
    seen = []

    def log(self, state, m):
        seen.append(gc.isenabled())
        if state.step == 2:
            raise ZeroDivisionError

    monkeypatch.setattr(hooks.TrainingHooks, "log", log)
    thresholds, before = gc.get_threshold(), gc.isenabled()
    try:
        (gc.enable if was else gc.disable)()
        with pytest.raises(ZeroDivisionError):
            run_training(material.config(), tmp_path / "run", SINGLE, Console(quiet=True))
        assert gc.isenabled() == was and gc.get_threshold() == thresholds
    finally:
        (gc.enable if before else gc.disable)()
    assert seen == [False, False]


def test_a_run_collects_after_every_step_that_asks_for_it(material, tmp_path, monkeypatch):
    steps = []
    monkeypatch.setattr(loop, "collect_garbage", steps.append)
    run = material.config()
    run = replace(run, train=replace(run.train, steps=3))
    run_training(run, tmp_path / "run", SINGLE, Console(quiet=True))
    assert steps == [1, 2, 3]
