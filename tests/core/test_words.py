from pathlib import Path

import pytest

from dolmen.core.filesystem import expand
from dolmen.core.messages import (
    brief,
    choices,
    cut,
    divisor,
    megabytes,
    one_line,
    plural,
    printable,
)


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


def test_a_size_below_a_tenth_of_a_megabyte_is_in_bytes():
    assert [megabytes(n) for n in (1, 99_999, 100_000, 123_456_789)] == [
        "1 byte",
        "99,999 bytes",
        "0.1 MB",
        "123.5 MB",
    ]


def test_formats_are_found_under_the_names_of_others():
    formats = ("hf", "megatron", "megatron-core", "torch-dist")
    assert choices("transformers", formats) == "did you mean hf?"
    assert choices("mcore", formats) == "did you mean megatron-core?"
    assert choices("onnx", formats) == f"use one of {', '.join(formats)}"
