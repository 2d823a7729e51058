"""The layout never changes the answer of what a family brings either."""

import pytest
from mechanisms import CONFIGS, ROWS
from table import SINGLE, Layout, hold, run


@pytest.mark.parametrize("row", [row.parameter for row in ROWS])
def test_layout_never_changes_the_answer(row, result):
    hold(result(row), row.name)


def asked(config):
    """What a batch must say beside tokens, for what the model has to be felt."""
    streams = config.tree.streams if config.tree.streams > 1 else 0
    return {"prefixes": config.tree.prefixed, "streams": streams}


def test_each_is_another_answer():
    """Rows of one model under two names would prove little."""
    losses = [
        run(config, SINGLE, Layout(), steps=1, **asked(config)).losses[0]
        for config in CONFIGS.values()
    ]
    assert len(set(losses)) == len(losses)
