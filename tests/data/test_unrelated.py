"""KTO's completions and their unrelated pairs: each prompt with the completion of the next, closed
forms on examples made by hand.
"""

from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest

from dolmen.data import chat_loader, readers
from dolmen.data.examples import Examples
from dolmen.data.order import MegatronOrder


def examples(count: int, longest: int = 99) -> Examples:
    """Example i: i + 1 tokens of a prompt, from 10 i on, and 3 of a completion, 1000 more."""
    tokens, trained = [], []
    for i in range(count):
        tokens += [*range(10 * i, 11 * i + 1), *range(1000 + 10 * i, 1003 + 10 * i)]
        trained += [0] * (i + 1) + [1] * 3
    offsets = np.cumsum([0, *(i + 4 for i in range(count))])
    signs = np.where(np.arange(count) % 3 == 0, 1.0, -1.0).astype(np.float32)
    hashes = np.arange(count, dtype=np.uint64)
    weights = np.full(count, 0.5, np.float32)
    of_both = np.array(tokens, np.int32), np.array(trained, np.uint8)
    return Examples("kto", *of_both, offsets, weights, hashes, signs, longest, "")


def test_each_prompt_is_followed_by_the_next_ones_completion():
    found, chosen = examples(5), np.array([3, 0, 4])
    full = chat_loader.append_unrelated(found, chosen)
    assert len(full) == 8 and np.array_equal(full.tokens[: len(found.tokens)], found.tokens)
    for number, (of, other) in enumerate(((3, 0), (0, 4), (4, 3))):
        span = full.span(5 + number)
        prompt = list(range(10 * of, 11 * of + 1))
        completion = list(range(1000 + 10 * other, 1003 + 10 * other))
        assert full.tokens[span].tolist() == prompt + completion
        assert full.trained[span].tolist() == [0] * len(prompt) + [1] * 3
    assert full.offsets[-1] == len(full.tokens) == len(full.trained)
    assert full.weights.tolist() == [0.5] * 5 + [1] * 3 and full.preference[5:].tolist() == [0] * 3
    assert full.hashes[:5].tolist() == [0, 1, 2, 3, 4] and full.hashes[5:].tolist() == [0] * 3
    assert np.array_equal(full.preference[:5], found.preference)


def test_a_truncated_completion_is_truncated_in_its_pair_too():
    full = chat_loader.append_unrelated(examples(3, longest=4), np.array([2, 1]))
    # of example 2 three tokens are a prompt, so one is a completion's; of example 1 two are
    assert full.tokens[full.offsets[3] : full.offsets[4]].tolist() == [20, 21, 22, 1010, 1011]
    assert full.tokens[full.offsets[4] :].tolist() == [10, 11, 1020]


def test_completions_and_pairs_are_packed_two_by_two_and_counted():
    rows = chat_loader.completions_of(examples(7), np.array([6, 0, 3, 5]), 24, True, 0)
    assert rows.chosen.tolist() == [6, 7, 0, 8, 3, 9, 5, 10]
    line = chat_loader.describe_completions(rows)
    assert line.startswith(
        "kto: 4 completions to train on of 7, of which 3 are desirable, each paired with one to "
        f"another prompt, {len(rows.rows)} sequences of 24 per epoch, {rows.full:.1%} full"
    )
    with pytest.raises(ValueError, match="only one completion is left"):
        chat_loader.completions_of(examples(7), np.array([2]), 24, True, 0)


def test_a_prediction_is_a_trained_token_that_is_not_the_first():
    found = replace(examples(3), trained=np.ones(15, np.uint8))
    assert found.predictions().tolist() == [3, 4, 5] == found.places().tolist()
    short = replace(found, longest=3)
    assert short.predictions().tolist() == [2, 2, 2] == short.places().tolist()
    left_out = replace(found, weights=np.array([0.5, 0, 1], np.float32))
    assert left_out.predictions().tolist() == [3, 0, 5]
    assert examples(3).last_learned(1) == 1012


@pytest.mark.parametrize(
    "rows, held, said",
    (
        ("pairs", 6, "3 pairs"),
        ("completions", 2, "1 completion"),
        ("chats", 6, "6 chats, 1,234 tokens"),
        ("pairs", 0, "none (--data.validation-fraction is 0)"),
    ),
)
def test_what_is_held_out_is_counted(monkeypatch, rows, held, said):
    monkeypatch.setattr(chat_loader, "describe_pairs", lambda _: ["training", "a change"])
    monkeypatch.setattr(chat_loader, "describe_chats", lambda *_: ["training", "a change"])
    monkeypatch.setattr(chat_loader, "describe_completions", lambda _: "training")
    validation = SimpleNamespace(chosen=np.arange(held), tokens=1234)
    found = chat_loader._describe(None, validation, SimpleNamespace(rows=rows))
    assert (found.training, found.validation) == ("training", said)
    assert found.changes == (() if rows == "completions" else ("a change",))


def test_the_size_of_a_row_is_that_of_its_line():
    row = {"text": "Ä" * 20, "number": 1}
    line = len('{"text": "", "number": 1}') + 2 * 20
    assert [*readers.small_rows(iter([(row, "a")]), line)] == [(row, "a")]
    assert [*readers.small_rows(iter([(row, "a")]), None)] == [(row, "a")]
    with pytest.raises(ValueError, match=f"has more than {line - 1} bytes"):
        [*readers.small_rows(iter([(row, "a")]), line - 1)]


def test_rows_of_a_table_are_numbered_from_1_over_all_batches():
    batches = [{"t": ["a", None]}, {"t": ["b", 7]}]
    found = []
    with pytest.raises(ValueError, match="file, row 4.*'t' is a int, not text"):
        found.extend(readers.column_texts(iter(batches), "t", "file"))
    assert [*readers.column_texts(iter(batches[:1]), "t", "file")] == ["a", ""]


def test_epochs_of_a_mixture_are_samples_over_those_of_an_epoch():
    """Three of a for one of b; behind the run's 40 samples the turns repeat."""
    epochs = SimpleNamespace(times=2, last_separate=False)
    separate = SimpleNamespace(times=3, last_separate=True)
    orders = [
        SimpleNamespace(per_epoch=size, sequence_length=8, epochs=of)
        for size, of in ((12, epochs), (5, separate))
    ]
    parts = [SimpleNamespace(name="a"), SimpleNamespace(name="b")]
    mixed = MegatronOrder(parts, orders, [3, 1], 40)
    assert mixed.name == "Megatron, epochs: 2, 3 with the last one separate"
    for samples in (0, 4, 40, 44, 120):
        assert mixed.counts(samples) == [samples * 3 // 4, samples // 4]
        assert mixed.epochs(samples) == {"a": samples * 0.75 / 12, "b": samples * 0.25 / 5}
    for samples in range(90):
        taken = [mixed.turns[i % 40] for i in range(samples)]
        assert mixed.counts(samples) == [taken.count(0), taken.count(1)]
