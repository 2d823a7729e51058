"""The order of samples: a bijection within an epoch, fair between sources, the same from any
starting point.
"""

from fractions import Fraction

import numpy as np
import pytest

from dolmen.data.mixture import (
    Mixture,
    Part,
    TokenStream,
    counts,
    permute_index,
    seed_of,
    take,
    turns,
)


def part(name, tokens, weight, first=0):
    stream = TokenStream.from_ranges(
        np.arange(first, first + tokens), np.array([0]), np.array([tokens])
    )
    return Part(name, Fraction(weight), stream)


@pytest.mark.parametrize("size", [1, 2, 3, 4, 5, 7, 16, 17, 100, 1000, 1025, 4097])
def test_permutation_is_a_bijection(size):
    every = np.arange(size)
    for key in range(5):
        assert np.array_equal(np.sort(permute_index(every, size, seed_of(key))), every)


def test_permutation_mixes_and_reaches_far():
    a, b = (
        permute_index(np.arange(1000), 1000, seed_of(1)),
        permute_index(np.arange(1000), 1000, seed_of(2)),
    )
    assert (a == b).mean() < 0.01 and abs(np.corrcoef(np.arange(1000), a)[0, 1]) < 0.1
    assert abs(np.corrcoef(a[:-1], a[1:])[0, 1]) < 0.1
    far = permute_index(np.arange(100), 10**12, seed_of(3))
    assert len(set(far.tolist())) == 100 and 0 <= far.min() and 4 * 10**11 < far.mean() < 6 * 10**11


def test_the_same_on_every_machine():
    assert seed_of(0, "window", 1, 2) == 5869359504890157237
    assert permute_index(np.arange(6), 1000, seed_of(7)).tolist() == [102, 503, 397, 771, 865, 882]


@pytest.mark.parametrize(
    "weights", [[7, 3], [1, 1, 1], [1, 1000], [5, 3, 2, 1, 1, 1], [10**12 + 1, 10**12, 3]]
)
def test_turns_are_fair_and_start_anywhere(weights):
    order = take(weights, [0] * len(weights), 1500)
    for first in (0, 1, 2, 10, 999):
        assert counts(weights, first) == [
            order[:first].count(source) for source in range(len(weights))
        ]
        assert turns(weights, first, 500) == order[first : first + 500]
    n = np.arange(1, 1501)
    for source, weight in enumerate(weights):
        taken, share = np.cumsum(np.array(order) == source), weight / sum(weights)
        assert (
            np.abs(taken - n * share).max() <= (1 - share + share * (len(weights) - 1)) / 2 + 1e-9
        )


def test_an_epoch_predicts_each_token_once():
    tokens, length = 1000, 7
    mixture = Mixture([part("a", tokens, 1)], length, seed=3)
    windows = tokens // length
    starts = []
    for epoch in range(3):
        rows = mixture.windows(epoch * windows, windows)
        assert all(np.array_equal(row, (row[0] + np.arange(length + 1)) % tokens) for row in rows)
        labels = rows[:, 1:].ravel()
        assert len(set(labels.tolist())) == len(labels) == windows * length
        starts.append(rows[:, 0].tolist())
    assert starts[0] != starts[1] and {s % length for s in starts[0][:9]} != {
        s % length for s in starts[1][:9]
    }
    assert mixture.epochs(windows * 3) == {"a": 3.0}
    assert mixture.epochs(windows // 2)["a"] == pytest.approx(0.5, abs=0.01)


def test_each_epoch_source_and_seed_has_its_own_order_and_shift():
    orders, shifts = set(), set()
    for seed in range(3):
        mixture = Mixture([part("a", 1000, 1), part("b", 1000, 1)], 9, seed)
        for source in range(2):
            for epoch in range(4):
                starts = mixture.starts(source, epoch, np.arange(111))
                shifts.add(int(starts.min()))
                orders.add(tuple((starts - starts.min()) // 9))
    assert len(orders) == len(shifts) == 24
    assert all(sorted(order) == list(range(111)) for order in orders)


def test_weighted_sources_have_their_own_epochs():
    mixture = Mixture([part("a", 100, "0.7"), part("b", 1000, "0.3", first=10_000)], 9, seed=0)
    rows = mixture.windows(0, 100)
    assert (rows[:, 0] < 10_000).sum() == 70
    assert mixture.epochs(100) == {"a": 70 / 11, "b": 30 / 111}
    assert np.array_equal(mixture.windows(37, 20), rows[37:57])
    assert not np.array_equal(Mixture(mixture.parts, 9, seed=1).windows(0, 100), rows)


def test_source_shorter_than_a_window():
    with pytest.raises(
        ValueError, match=r"tiny has 10 tokens .* \(11\): use --train.sequence-length 9 or less"
    ):
        Mixture([part("tiny", 10, 1)], 10, seed=0)
    Mixture([part("tiny", 11, 1)], 10, seed=0).windows(0, 5)


def test_each_token_of_each_source_is_predicted_once_an_epoch():
    """Of three weighted sources, read for several epochs of each."""
    length, sizes = 7, (70, 210, 350)
    parts = [
        part(name, size, weight, first=1000 * number)
        for number, (name, size, weight) in enumerate(zip("abc", sizes, "532", strict=True))
    ]
    mixture = Mixture(parts, length, seed=5)
    labels = mixture.windows(0, 1000)[:, 1:].reshape(-1, length)
    for number, size in enumerate(sizes):
        own = labels[labels[:, 0] // 1000 == number] - 1000 * number
        windows = size // length
        for epoch in range(len(own) // windows):
            seen = own[epoch * windows : (epoch + 1) * windows].ravel()
            assert np.array_equal(np.sort(seen), np.arange(size)), (number, epoch)


def test_weights_are_those_asked_for():
    """The share of every source in every stretch of batches, to a sample and a half: see the bound
    at the head of mixture.py, twice for a stretch.
    """
    weights = (Fraction(5, 10), Fraction(3, 10), Fraction(2, 10))
    parts = [part(str(i), 500, weight, 1000 * i) for i, weight in enumerate(weights)]
    source = Mixture(parts, 9, seed=1).windows(0, 3000)[:, 0] // 1000
    for first, count in ((0, 3000), (17, 100), (1234, 8)):
        for number, weight in enumerate(weights):
            share = (source[first : first + count] == number).sum()
            assert abs(share - weight * count) <= 2 * (1 - weight + weight * 2) / 2


def test_the_seed_decides_the_order():
    every = np.arange(222)
    starts = [Mixture([part("a", 2000, 1)], 9, seed).starts(0, 0, every) for seed in (0, 0, 1, 2)]
    assert np.array_equal(starts[0], starts[1])
    first = [int(found.min()) for found in starts[1:]]
    assert len(set(first)) == 3, "where the windows begin"
    orders = [found - found.min() for found in starts[1:]]
    for one, other in ((0, 1), (0, 2), (1, 2)):
        # two random orders of 222 windows have one in the same place on average
        assert (orders[one] == orders[other]).sum() < 8


@pytest.mark.parametrize("gap", (False, True))
def test_documents_of_a_sample_are_those_that_its_tokens_are_of(gap):
    """A token is the number of its document; with a gap, the stream leaves two documents out."""
    lengths = [3, 8, 1, 1, 14, 2, 5, 9]
    tokens = np.repeat(np.arange(len(lengths)), lengths)
    offsets = np.cumsum([0, *lengths])
    starts, stops = (offsets[[0, 4]], offsets[[2, 8]]) if gap else (offsets[:1], offsets[-1:])
    stream = TokenStream.from_ranges(tokens, np.array(starts), np.array(stops))
    mixed = Mixture([Part("a", Fraction(1), stream, offsets), part("b", 50, 1)], 6, seed=0)
    windows, lines = mixed.windows(0, 14), mixed.documents(0, 14)
    spans = 0
    for window, line in zip(windows, lines, strict=True):
        if line.startswith("b"):
            assert line == f"b: tokens from {window[0]}"
            continue
        name, _, found = line.partition(": documents ")
        named = [
            document
            for span in found.split(", ")
            for document in range(int(span.split("..")[0]), int(span.split("..")[-1]) + 1)
        ]
        spans += found.count(",")
        assert name == "a" and sorted(named) == sorted({*window.tolist()})
    assert spans > 1 or not gap
