"""Lines and pictures of a run's report, read back: shares, bytes and losses worked out by hand."""

import math
from types import SimpleNamespace

import pytest
from matplotlib.figure import Figure

from dolmen.core.log import size
from dolmen.families.adapters import AdapterConfig
from dolmen.families.model import model_from_fields
from dolmen.objectives.reward import BINS, CalibratedRewardLoss, PairwiseRewardLoss
from dolmen.training import evaluate, report
from dolmen.training.config import RunConfig
from dolmen.training.evaluate import (
    NEXT_TOKEN,
    Calibration,
    CrossEntropy,
    SourceValidation,
    describe_source,
    validation_objective,
)


def calibration() -> Calibration:
    """A tenth of all pairs in bin 1, nine in the last, right in half and in two thirds of them."""
    confident, right = [0.0] * BINS, [0.0] * BINS
    confident[1], right[1], confident[-1], right[-1] = 0.1, 0.05, 0.9, 0.6
    metrics = {f"sure {i}": value for i, value in enumerate(confident)}
    return Calibration.from_metrics(metrics | {f"right {i}": v for i, v in enumerate(right)})


def test_bins_divide_confidence_evenly():
    middles = [evaluate.bin_middle(i) for i in range(BINS)]
    assert middles[0] - 0.5 == pytest.approx(1 - middles[-1]) == pytest.approx(0.25 / BINS)
    steps = [after - before for before, after in zip(middles, middles[1:], strict=False)]
    assert steps == pytest.approx([0.5 / BINS] * (BINS - 1))


def test_the_calibration_error_is_the_mean_gap():
    first, last = 0.5 + 0.75 / BINS, 1 - 0.25 / BINS
    gaps = 0.1 * abs(0.5 - first) + 0.9 * abs(2 / 3 - last)
    assert calibration().error == pytest.approx(gaps)


def test_a_diagram_of_calibration_has_a_mark_for_each_bin(monkeypatch):
    drawn: list[Figure] = []
    monkeypatch.setattr(Figure, "savefig", lambda figure, to, **_: drawn.append(figure))
    evaluate.plot_calibration(calibration(), 0.65, "a run")
    (axis,) = drawn[0].axes
    (marks,) = axis.collections
    first, last = marks.get_offsets().tolist()
    assert first == pytest.approx([0.5 + 0.75 / BINS, 0.5])
    assert last == pytest.approx([1 - 0.25 / BINS, 2 / 3])
    small, large = marks.get_sizes().tolist()
    assert large - small == pytest.approx(600 * 0.8) and small == pytest.approx(90)
    (diagonal,) = axis.lines
    assert [*diagonal.get_xdata()] == [*diagonal.get_ydata()] == [0.5, 1]
    low, high = axis.get_xlim()
    bottom, top = axis.get_ylim()
    assert 0.4 < low < 0.5 and 1 < high < 1.1 and -0.1 < bottom < 0 and 1 < top < 1.1
    title = f"a run\naccuracy 0.650, calibration error {calibration().error:.3f}"
    assert axis.get_title("left") == title
    labels = axis.get_xlabel(), axis.get_ylabel()
    assert labels == ("confidence in the preferred completion", "accuracy")
    monkeypatch.undo()
    assert evaluate.plot_calibration(calibration(), 0.65, "").startswith(b"\x89PNG")


def test_losses_of_sources_are_metrics_and_lines():
    found = SourceValidation({"a": 2.5, "b": 1.25}, {"a": 1.1}, {"a": 1.2})
    assert found.row() == {"val_loss/a": 2.5, "val_loss/b": 1.25, "val_bits_per_byte/a": 1.1}
    assert found.lines() == [
        "2.5000 on a, 1.1000 bits per byte (before the first step 1.2000)",
        "1.2500 on b",
    ]
    assert describe_source("c", 3.0, 1.5, 1.5) == "3.0000 on c, 1.5000 bits per byte"
    assert describe_source("c", 3.0, 1.5, None) == "3.0000 on c, 1.5000 bits per byte"


def test_bits_per_byte_are_nats_of_all_tokens_over_their_bytes():
    rows = {"a": SimpleNamespace(tokens=100, bytes=150), "b": SimpleNamespace(tokens=9, bytes=None)}
    losses = {"a": 3 * math.log(2), "b": 1.0}
    assert evaluate.bits_per_byte(losses, rows) == {"a": pytest.approx(2)}


HIDDEN, FFN, VOCABULARY, LAYERS = 32, 48, 300, 2
MATRICES = 4 * HIDDEN * HIDDEN + 3 * HIDDEN * FFN  # of a layer
MODEL = model_from_fields(
    "llama",
    dict(
        vocab_size=VOCABULARY,
        hidden_size=HIDDEN,
        intermediate_size=FFN,
        num_hidden_layers=LAYERS,
        num_attention_heads=4,
        tie_word_embeddings=False,
    ),
)


def test_adapters_are_told_with_their_share_and_what_int8_saves():
    """Of rank 4 beside every linear layer but the head: A has as many columns as the layer has
    inputs, B as many rows as it has outputs.
    """
    adapter = AdapterConfig(rank=4, alpha=8.0, frozen="int8")
    run = RunConfig(model=MODEL, adapter=adapter)
    trained = LAYERS * 4 * (4 * 2 * HIDDEN + 3 * (HIDDEN + FFN))
    whole = 2 * VOCABULARY * HIDDEN + LAYERS * (MATRICES + 2 * HIDDEN) + HIDDEN
    outputs = LAYERS * (4 * HIDDEN + 2 * FFN + HIDDEN)  # a scale of fp32 for each
    full = whole + trained + outputs
    wide = 4 * LAYERS * MATRICES
    assert report.describe_adapters(run) == (
        f"rank 4, alpha 8, on all-linear: {size(trained)} of {size(full)} parameters are trained "
        f"({trained / full:.2%}); {size(wide, 'B')} of the frozen ones are stored in int8 "
        f"({size(wide // 4 + 4 * outputs, 'B')})"
    )
    plain = RunConfig(model=MODEL, adapter=AdapterConfig(rank=4))
    assert report.describe_int8(plain) == ""


def test_warmup_is_told_in_steps_and_in_tokens():
    run = SimpleNamespace(warmup_steps=12.5, optimizer=SimpleNamespace(warmup_tokens=None))
    assert report.describe_warmup(run) == "12.5"
    run.optimizer.warmup_tokens = 5_000_000
    assert report.describe_warmup(run) == "12.5 (5 M tokens)"


def test_of_the_products_those_in_eight_bits_are_told():
    params = {
        "a": SimpleNamespace(products=300, fp8="e4m3"),
        "b": SimpleNamespace(products=100, fp8=None),
        "c": SimpleNamespace(products=0, fp8=None),
    }
    run = SimpleNamespace(
        trained=SimpleNamespace(params=params), train=SimpleNamespace(dtype="bfloat16")
    )
    said = "75% of its matrix multiply-adds, the rest in bfloat16"
    assert report.describe_fp8(run) == said


def test_validation_has_the_loss_of_training_and_of_language_models_that_of_plain_text():
    rewards = validation_objective(PairwiseRewardLoss(0.25, 0.5))
    assert rewards == CalibratedRewardLoss(center=0.25, margin=0.5)
    assert type(rewards) is CalibratedRewardLoss
    assert validation_objective(CrossEntropy()) is NEXT_TOKEN
    other = SimpleNamespace()
    assert validation_objective(other) is other  # pyright: ignore[reportArgumentType]
