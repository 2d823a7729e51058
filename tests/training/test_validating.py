"""What is kept of validations while a run trains."""

import math
from dataclasses import replace
from types import SimpleNamespace

import pytest
import tinyrun

from dolmen.core.mesh import SINGLE
from dolmen.evaluation.validate import Losses
from dolmen.objectives.objective import CrossEntropy
from dolmen.training import evaluate
from dolmen.training.evaluate import SourceValidation, Validator

material = tinyrun.material

BEFORE = {"old": 1.25}


@pytest.fixture
def validator(material, tmp_path, monkeypatch):
    """Measures the losses that it is given, one after another."""
    losses = []
    monkeypatch.setattr(
        evaluate, "mean_loss", lambda *_: Losses(loss := losses.pop(0), 64, 64 * loss)
    )
    monkeypatch.setattr(
        evaluate,
        "validate_sources",
        lambda *given: SourceValidation(before=BEFORE if not given[0].step else given[4]),
    )
    run = material.config()
    run = replace(run, log=replace(run.log, validate_sources=True, validation_tokens=0))
    loader = SimpleNamespace(
        validation_batches=lambda *_: [],
        validation_tokens=64,
        validation_bytes=256,
        cloze=None,
        unit="token",
    )
    watch = SimpleNamespace(through=lambda batches, **_: batches)
    made = Validator(run.log, run.sequence_length, "pairs", loader, SINGLE, tmp_path, watch)

    def measure(step: int, loss: float):
        losses.append(loss)
        state = SimpleNamespace(
            step=step,
            steps=9,
            updates=step,
            tokens=0,
            model=None,
            schedule=None,
            objective=CrossEntropy(),
        )
        return made.measure(state)

    return made, measure


def test_what_was_before_the_first_step_outlives_a_loss_that_is_none(validator):
    made, measure = validator
    row, lines = measure(0, 2.0)
    assert row["val_loss"] == 2.0 and lines == ["step 0: validation loss 2.0000 on 64 tokens"]
    assert made.last_finite.bits_per_byte == 2.0 * 64 / 256 / math.log(2)
    measure(3, math.nan)
    assert math.isnan(made.last.loss) and made.last_finite.step == 0
    options = made.config, made.sequence_length, made.title
    resumed = Validator(*options, made.loader, SINGLE, made.out, made.watch)
    resumed.begin(made.last_finite)
    assert resumed.last.sources_before == BEFORE
    measure(6, 1.5)
    assert made.last_finite is made.last and made.last_finite.sources_before == BEFORE
