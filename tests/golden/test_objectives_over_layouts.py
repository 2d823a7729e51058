"""The layout never changes the answer of any objective, nor that of two models in one run."""

import pytest
import torch
from models import build, initialize
from objectives import KINDS, OBJECTIVES, REFERENCE_MODEL, batches, run
from table import OPTIMIZER, SINGLE, Layout

from dolmen.objectives import score

# float64: the order of sums. Measured worst over all rows: gradient 0, norm 0, loss 0
TOLERANCE = {"gradient": 1e-11, "norms": 1e-12, "losses": 1e-12}


@pytest.mark.parametrize("row", [row.parameter for row in OBJECTIVES])
def test_layout_never_changes_the_answer(row, result):
    for kind, (difference, where) in result(row).items():
        assert difference <= TOLERANCE[kind], f"{kind} of {row.name}: {difference:.1e} at {where}"


def test_each_is_another_answer():
    """And has gradients that are felt."""
    runs = {kind: run(kind, SINGLE, Layout()) for kind in KINDS}
    assert len({one.losses[0] for one in runs.values()}) == len(runs)
    assert all(min(one.norms) > OPTIMIZER.clip for one in runs.values())


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
