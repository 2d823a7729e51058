"""The layout never changes the answer of any objective, nor that of two models in one run."""

import math
from dataclasses import replace
from functools import partial

import pytest
from objectives import KINDS, OBJECTIVES, batches, compared, half, run, scores_of_all_ranks
from spawning import Row
from table import OPTIMIZER, SEED, SINGLE, Layout, start
from tiny_models import build, initialize

from dolmen.objectives import forward
from dolmen.objectives.preference import REFERENCE
from dolmen.training.step import optimizer_step

# float64: the order of sums. Measured worst over all rows: gradient 6.2e-15, norm 5.6e-16, loss and
# what is told beside it 6.5e-14, a mean of differences
TOLERANCE = {"gradient": 1e-12, "norms": 1e-13, "losses": 1e-12}


@pytest.mark.parametrize("row", [row.parameter for row in OBJECTIVES])
def test_layout_never_changes_the_answer(row, result):
    for kind, (difference, where) in result(row).items():
        assert difference <= TOLERANCE[kind], f"{kind} of {row.name}: {difference:.1e} at {where}"


def test_each_is_another_answer():
    """And has gradients that are felt."""
    runs = {kind: run(kind, SINGLE, Layout()) for kind in KINDS}
    assert len({one.losses[0] for one in runs.values()}) == len(runs)
    assert all(min(one.norms) > OPTIMIZER.clip for one in runs.values())


HALF = [
    Row(f"{words}-{kind}", layout.world, partial(half, kind, layout))
    for kind, words in (
        ("weights", "cp2 zero1"),
        ("dpo", "tp2 sp zero3"),
        ("preferred", "tp2 sp zero1"),
        ("values", "dp2 zero3"),
    )
    for layout in (Layout.of(words),)
]


@pytest.mark.parametrize("row", [row.parameter for row in HALF])
def test_in_half_precision(row, result):
    """Rounded to 8 bits, and what is made of logits and values in fp32: measured worst 2.6e-3 of
    the loss and 8.2e-3 of the norm.
    """
    loss, norm = result(row)
    assert 0 < loss < 2**-7 and 0 < norm < 2**-5, (loss, norm)


EVERYWHERE = [
    Row(words, layout.world, partial(scores_of_all_ranks, layout))
    for words in ("cp2 pp2 acc4", "pp2 dp2 acc4 zero3 zero-bubble-v v2", "cp2 tp2 sp zero3")
    for layout in (Layout.of(words),)
]


@pytest.mark.parametrize("row", [row.parameter for row in EVERYWHERE])
def test_scores_are_everywhere(row, result):
    """On each rank the log-probabilities and values of all tokens of its rows, whichever has the
    last stage or the token.
    """
    assert result(row) < 1e-13


def test_all_tokens_that_an_encoder_reads_are_counted():
    kind = KINDS["filling"]
    train = start(kind.config, SINGLE, Layout(), objective=kind.objective)
    batch = compared(train, SINGLE, Layout())[0]
    metrics = optimizer_step(train, batch, SINGLE)
    assert metrics.tokens == batch.tokens.numel() > batch.real_tokens


def test_a_policy_compared_with_itself():
    """Of another model with the same values: no sequence is preferred, and the loss is log 2. Its
    gradient is the one that tells them apart, and after an update they differ.
    """
    config, layout = KINDS["dpo"].config, Layout()
    objective = replace(KINDS["dpo"].objective, rpo_alpha=0.0)
    train = start(config, SINGLE, layout, objective=objective)
    same = build(config, SINGLE, layout, train.schedule)
    initialize(same, SEED)
    for batch, is_first in zip(batches(SINGLE), (True, False), strict=True):
        numbers = {REFERENCE: forward.log_probabilities(same, batch, SINGLE, train.schedule)}
        metrics = optimizer_step(train, replace(batch, numbers=numbers), SINGLE)
        assert (abs(metrics.loss - math.log(2)) < 1e-7) == is_first
        assert (metrics.objective["rewards/margins"] == 0) == is_first and metrics.grad_norm > 0.1
