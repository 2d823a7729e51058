"""The learning rate of each update against its closed form, written out."""

import math

import pytest

from dolmen.optim.optimizer import OptimizerConfig
from dolmen.optim.schedule import learning_rate

STEPS, WARMUP = 50, 10


def rates(**options) -> list[float]:
    config = OptimizerConfig(**dict(lr=2.0, min_lr=0.5, warmup_steps=WARMUP) | options)
    return [learning_rate(config, step, STEPS) for step in range(STEPS)]


@pytest.mark.parametrize("schedule", ("cosine", "linear", "wsd", "constant"))
def test_warm_up(schedule):
    """Linear, its first update lr / warmup_steps and not 0, its last the peak; then the peak once more, for done = 0."""
    assert rates(schedule=schedule)[: WARMUP + 1] == pytest.approx([2.0 * (i + 1) / WARMUP for i in range(WARMUP)] + [2.0])
    assert rates(schedule=schedule, warmup_steps=0)[0] == 2.0


def test_cosine():
    for step, lr in enumerate(rates(schedule="cosine")[WARMUP:]):
        assert lr == pytest.approx(0.5 + 1.5 * math.cos(math.pi / 2 * step / 40) ** 2)       # (1 + cos x) / 2 = cos^2(x / 2)


def test_linear():
    assert rates(schedule="linear")[WARMUP:] == pytest.approx([2.0 - 1.5 * i / 40 for i in range(40)])


def test_constant(): assert rates(schedule="constant")[WARMUP:] == [2.0] * 40


def test_wsd():
    """Constant until the last fifth, then linear."""
    assert rates(schedule="wsd")[WARMUP:] == pytest.approx([2.0] * 30 + [2.0 - 1.5 * i / 10 for i in range(10)])
    assert rates(schedule="wsd", decay_fraction=0.5)[25:] == pytest.approx([2.0 - 1.5 * i / 25 for i in range(25)])


@pytest.mark.parametrize("schedule", ("cosine", "linear", "wsd"))
def test_ends_at_min_lr(schedule):
    """The last update is one step short of min_lr; an update past the end, as after a resume with fewer steps, gets min_lr."""
    config = OptimizerConfig(lr=2.0, min_lr=0.5, warmup_steps=WARMUP, schedule=schedule)
    assert 0.5 < learning_rate(config, STEPS - 1, STEPS) < 0.7
    assert learning_rate(config, STEPS, STEPS) == learning_rate(config, STEPS + 7, STEPS) == 0.5


@pytest.mark.parametrize("schedule", ("cosine", "linear", "wsd", "constant"))
def test_a_warm_up_longer_than_the_run(schedule):
    config = OptimizerConfig(lr=2.0, warmup_steps=100, schedule=schedule)
    assert [learning_rate(config, step, 5) for step in range(5)] == pytest.approx([0.02 * (i + 1) for i in range(5)])
