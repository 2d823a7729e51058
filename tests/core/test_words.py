from pathlib import Path

import pytest

from dolmen.core.paths import expand
from dolmen.core.words import counted


@pytest.mark.parametrize(
    "words, text",
    [
        ((0, "step"), "0 steps"),
        ((1, "step"), "1 step"),
        ((1200, "step"), "1,200 steps"),
        ((1, "process", "processes"), "1 process"),
        ((2, "process", "processes"), "2 processes"),
    ],
)
def test_counted(words, text):
    assert counted(*words) == text


def test_expand():
    assert expand("~/x") == Path.home() / "x" and expand("a/~") == Path("a/~")
    assert expand("~nobody-of-this-name/x") == Path("~nobody-of-this-name/x")
