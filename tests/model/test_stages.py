"""Which layers a pipeline stage gets."""

import pytest

from dolmen.model.layout import balance


def test_embedding_layers_and_head_are_shared_evenly():
    """In order, all of them, and no stage has two more than another."""
    for layers in range(1, 33):
        for stages in range(1, layers + 3):
            found = balance(layers, stages)
            assert [i for part in found for i in part] == list(range(layers))
            things = [len(part) for part in found]
            things[0] += 1
            things[-1] += 1
            assert max(things) - min(things) <= 1, f"{layers} layers in {stages} stages"
            if layers % stages == 0:
                assert len({len(part) for part in found}) == 1, f"{layers} layers in {stages}"
    assert [len(part) for part in balance(7, 4)] == [2, 2, 2, 1]  # the head takes more time
    with pytest.raises(ValueError, match="5 stages for 2 layers"):
        balance(2, 5)
