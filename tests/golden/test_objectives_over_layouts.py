"""The layout never changes the answer of any objective, nor that of two models in one run."""

from functools import partial

import pytest
import torch
from models import build, initialize
from objectives import KINDS, OBJECTIVES, REFERENCE_MODEL, batches, half, run, scores_of_all_ranks
from spawning import Row
from table import OPTIMIZER, SINGLE, Layout

from dolmen.objectives import score

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
    """Rounded to 8 bits, and what is made of logits and values in fp32."""
    loss, norm = result(row)
    assert 0 < loss < 2**-6 and 0 < norm < 2**-4, (loss, norm)


EVERYWHERE = [
    Row(words, layout.world, partial(scores_of_all_ranks, layout))
    for words in ("cp2 pp2 acc4", "pp2 dp2 acc4 zero3 zero-bubble-v v2", "dp2 tp2 sp zero3")
    for layout in (Layout.of(words),)
]


@pytest.mark.parametrize("row", [row.parameter for row in EVERYWHERE])
def test_log_probabilities_are_everywhere(row, result):
    """On each rank those of all tokens of its rows, whichever has the last stage or the token."""
    assert result(row) < 1e-13


def test_a_policy_compared_with_itself():
    """Of two models with the same values no sequence is preferred: log 2, and no margin."""
    layout = Layout()
    schedule = layout.make_schedule(16, 16)
    first, second = (build(REFERENCE_MODEL, SINGLE, layout, schedule) for _ in range(2))
    for model in (first, second):
        initialize(model, 3)
    (one, *_) = batches(SINGLE)
    a, b = (score.log_probabilities(model, one, SINGLE, schedule) for model in (first, second))
    assert torch.equal(a, b) and a.dtype == torch.float32 and float(a.max()) == 0.0
