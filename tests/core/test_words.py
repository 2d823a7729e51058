from pathlib import Path

import pytest

from dolmen.core.filesystem import expand
from dolmen.core.messages import brief, cut, divisor, one_line, plural, printable


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
    assert plural(*words) == text


def test_a_message_is_one_line_that_a_terminal_shows():
    """Every character of the first planes, and what is cut."""
    for letter in map(chr, range(0x11000)):
        shown = printable(letter)
        assert shown.isprintable() and (shown == letter) == letter.isprintable()
        assert letter.isprintable() or shown.isascii()
    assert one_line("a\nb\u202ec\x1b").isprintable()
    assert cut("x" * 80) == "x" * 80 and brief("x") == "'x'"
    assert cut("x" * 81) == "x" * 77 + "... (81 characters)"


def test_divisor():
    assert [divisor(12, near) for near in (1, 5, 6, 11, 12, 99)] == [1, 4, 6, 6, 12, 12]


def test_expand():
    assert expand("~/x") == Path.home() / "x" and expand("a/~") == Path("a/~")
    assert expand("~nobody-of-this-name/x") == Path("~nobody-of-this-name/x")
