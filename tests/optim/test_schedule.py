"""The learning rate of every update, against the papers' formulas."""

import math

import pytest

from dolmen.optim.config import learning_rate
from dolmen.optim.optimizer import OptimizerConfig

STEPS = 100


def rates(steps: int = STEPS, **options) -> list[float]:
    return [learning_rate(OptimizerConfig(lr=2.0, **options), step, steps) for step in range(steps)]


@pytest.mark.parametrize("schedule", ("cosine", "linear", "wsd", "constant"))
def test_warmup_is_linear_and_wastes_no_update(schedule):
    assert rates(schedule=schedule, warmup_steps=4)[:5] == pytest.approx([0.5, 1.0, 1.5, 2.0, 2.0])
    assert rates(schedule=schedule)[0] == 2.0
    assert rates(schedule=schedule, warmup_steps=STEPS * 2) == pytest.approx(
        [(step + 1) / 100 for step in range(STEPS)]
    )


@pytest.mark.parametrize(
    "options", ({}, {"min_lr": 0.5}, {"warmup_steps": 10, "min_lr": 0.5}), ids=str
)
def test_cosine(options):
    """min + (max - min) (1 + cos(pi t)) / 2, t from 0 after warm-up to 1 after the last update."""
    low, warm = options.get("min_lr", 0.0), options.get("warmup_steps", 0)
    for step, rate in enumerate(rates(schedule="cosine", **options)):
        if step >= warm:
            assert rate == pytest.approx(
                low + (2 - low) * (1 + math.cos(math.pi * (step - warm) / (STEPS - warm))) / 2
            )
    assert 0 < rates(schedule="cosine", **options)[-1] - low < 2e-3


def test_linear():
    assert rates(schedule="linear", min_lr=1.0, warmup_steps=20)[20::20] == pytest.approx(
        [2.0, 1.75, 1.5, 1.25]
    )
    assert rates(schedule="linear")[-1] == pytest.approx(0.02)


def test_wsd():
    """Constant, then linear over the last fifth."""
    found = rates(schedule="wsd", warmup_steps=10, min_lr=1.0)
    assert (
        found[9:81] == [2.0] * 72
        and found[90] == pytest.approx(1.5)
        and found[99] == pytest.approx(1.05)
    )
    assert rates(schedule="wsd", decay_fraction=1.0)[50] == pytest.approx(1.0)


def test_constant():
    assert set(rates(schedule="constant", min_lr=1.0)) == {2.0}


@pytest.mark.parametrize("schedule", ("cosine", "linear", "wsd"))
def test_a_run_that_goes_on_past_its_end_stays_at_the_end(schedule):
    config = OptimizerConfig(lr=2.0, schedule=schedule, min_lr=0.25)
    assert [learning_rate(config, step, STEPS) for step in (100, 150)] == pytest.approx(
        [0.25, 0.25]
    )
    assert learning_rate(config, 0, 1) > 0


@pytest.mark.parametrize(
    "options, said",
    [
        ({"lr": -1.0}, "optimizer.lr is -1.0"),
        ({"lr": math.nan}, "optimizer.lr is nan"),
        ({"lr": math.inf}, "optimizer.lr is inf"),
        ({"clip": -1.0}, "optimizer.clip"),
        ({"warmup_steps": -1}, "optimizer.warmup-steps is -1"),
        ({"beta2": 1.0}, "optimizer.beta2 is 1.0"),
        ({"decay_fraction": 0.0}, "optimizer.decay-fraction is 0.0"),
    ],
    ids=str,
)
def test_refused(options, said):
    with pytest.raises(ValueError, match=said):
        OptimizerConfig(**options)
