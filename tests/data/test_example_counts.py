"""What is counted of examples, beside plain loops over their tokens."""

import numpy as np
import pytest

from dolmen.data.examples import Examples

LONGEST = 5


def examples(seed: int) -> Examples:
    """Of 2 to 8 tokens, a third of them trained on, some of weight 0."""
    random = np.random.default_rng(seed)
    lengths = np.concatenate([np.arange(2, 9), random.integers(2, 9, 20)])
    offsets = np.concatenate([[0], np.cumsum(lengths)])
    tokens = random.integers(1, 99, offsets[-1])
    trained = (random.random(len(tokens)) < 1 / 3).astype(np.float32)
    trained[offsets[:-1] + 1] = 1
    weights = random.choice([0.0, 1.0], len(lengths))
    empty = np.zeros(len(lengths))
    return Examples("x", tokens, trained, offsets, weights, empty, empty, LONGEST, "")


@pytest.mark.parametrize("seed", range(3))
def test_counts_are_those_of_truncated_examples(seed):
    found = examples(seed)
    for index in range(len(found)):
        first, end = found.offsets[index : index + 2].tolist()
        there = [*range(first, end)][:LONGEST]
        assert [*range(*found.span(index).indices(end))] == there
        assert found.places()[index] == len(there) - 1
        assert found.long[index] == (end - first > len(there))
        counted = sum(found.trained[at] > 0 for at in there[1:])
        assert found.predictions()[index] == (counted if found.weights[index] else 0)
        last = [found.tokens[at] for at in there if found.trained[at] > 0][-1]
        assert found.last_learned(index) == last
    assert not found.weighted and {5, 6} <= {*np.diff(found.offsets).tolist()}
