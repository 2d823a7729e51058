"""The layout does not change the answer with a sliding window, dropout, packed documents or another
seed either, nor a validation's loss and count of tokens.
"""

from functools import partial

import pytest
from controls import VALIDATIONS, compare_damaged_validation
from spawning import Row
from table import FAMILIES, SEED, SINGLE, TOLERANCE, Layout, batches, hold, run, start
from variations import (
    DROPPING,
    NEW_ROWS,
    OTHER_SEED,
    PACKED,
    SEEDED,
    VALIDATED,
    WINDOW,
    WINDOWED,
    validated,
)

from dolmen.data.batch import IGNORED
from dolmen.evaluation.validate import mean_loss


@pytest.mark.parametrize("row", [row.parameter for row in PACKED])
def test_documents(row, result):
    """Attention that stays inside documents, also where a document lies on several ranks of cp."""
    hold(result(row), row.name)


@pytest.mark.parametrize("row", [row.parameter for row in NEW_ROWS])
def test_new_rows_first(row, result):
    """Rows of new tokens alone, then all."""
    hold(result(row), row.name)


@pytest.mark.parametrize("row", [row.parameter for row in DROPPING])
def test_dropout(row, result):
    """What falls out is a matter of seed, step and place in the logical tensor."""
    hold(result(row), row.name)


@pytest.mark.parametrize("row", [row.parameter for row in WINDOWED])
def test_a_sliding_window(row, result):
    """Three tokens in the first and last layer, over pieces of two to four tokens of a rank."""
    hold(result(row), row.name)


@pytest.mark.parametrize("row", [row.parameter for row in SEEDED])
def test_another_seed(row, result):
    """Of weights, data and dropout."""
    hold(result(row), row.name)


@pytest.mark.parametrize("row", [row.parameter for row in VALIDATED])
def test_validation(row, result):
    """Each token counted once, on whichever rank."""
    found = result(row)
    assert found["tokens"][0] == 0
    assert found["losses"][0] <= TOLERANCE["losses"] and found["nats"][0] <= TOLERANCE["losses"]


@pytest.mark.parametrize(
    "row",
    [
        Row(
            name,
            Layout.of(words).world,
            partial(compare_damaged_validation, name),
            full=name != "tokens of one rank of dp",
        ).parameter
        for name, (words, _) in VALIDATIONS.items()
    ],
)
def test_a_wrong_validation_is_seen(row, result):
    found = result(row)
    assert found["tokens"][0] >= 1 or found["losses"][0] >= 10 * TOLERANCE["losses"], found


def test_each_is_another_answer():
    """The rows would prove little if window, documents or seed did nothing."""

    def loss(config=FAMILIES["llama"], **options):
        return run(config, SINGLE, Layout(), steps=1, **options).losses[0]

    free = loss()
    assert OTHER_SEED != SEED
    for other in (loss(documents=True), loss(WINDOW), loss(seed=OTHER_SEED)):
        assert abs(other / free - 1) > 1e-3


def test_validation_of_one_process_counts_every_label():
    """And its sum is its mean times that."""
    found = validated(FAMILIES["llama"], SINGLE, Layout())
    assert found.tokens == sum(int((b.labels != IGNORED).sum()) for b in batches(SINGLE))
    assert found.nats == pytest.approx(found.loss * found.tokens, rel=1e-12)


def test_validation_gives_the_loss_that_training_gives():
    """Of the same weights and batch, documents included."""
    first = batches(SINGLE, documents=True)[:1]
    for family in ("llama", "gpt2"):
        train = start(FAMILIES[family], SINGLE, Layout())
        want = run(FAMILIES[family], SINGLE, Layout(), steps=1, documents=True).losses[0]
        assert mean_loss(train.model, first, SINGLE).loss == pytest.approx(want, rel=1e-6)
