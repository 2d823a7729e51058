from pathlib import Path

import pytest

from dolmen.core.filesystem import expand, is_absent, is_url, may_be_hub_id
from dolmen.core.messages import (
    brief,
    choices,
    cut,
    did_you_mean,
    divisor,
    megabytes,
    one_line,
    plural,
    printable,
    python_spelling,
    unknown_options,
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


@pytest.mark.parametrize(
    "name, url, hub_id, absent",
    [
        ("s3://bucket/run", True, False, False),
        ("gs+v2.x-y://b", True, False, False),
        ("S3://bucket", False, False, True),
        ("/a/s3://b", False, False, True),
        ("org/model", False, True, False),
        ("gpt2", False, True, False),
        ("org/model-1.5_b", False, True, False),
        ("a/b/c", False, False, True),
        ("-org/model", False, False, True),
        ("org/model ", False, False, True),
        ("here/model", False, False, True),  # below a folder that is there
        ("here", False, True, False),
        ("./here", False, False, False),
        ("./there", False, False, True),
    ],
)
def test_a_name_is_a_url_a_hub_id_or_a_folder(tmp_path, monkeypatch, name, url, hub_id, absent):
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path)
    assert (is_url(name), may_be_hub_id(name), is_absent(name)) == (url, hub_id, absent)
    assert not is_url(Path(name)), "a Path joins the slashes"


def test_names_that_are_near_are_asked_for():
    known = ("learning", "leaning", "yearning", "earnings", "other")
    assert did_you_mean("lerning", known, most=2) == "did you mean learning or leaning?"
    assert did_you_mean("lerning", known).count(" or ") == 2
    assert did_you_mean("zzz", known) == "" and did_you_mean("zzz", known, "none") == "none"
    assert did_you_mean("othr", known, cutoff=0.95) == ""


def test_five_unknown_options_are_named():
    assert unknown_options({"--a": ""}) == "unknown option --a"
    assert unknown_options({"--a": "did you mean --b?"}) == "unknown option --a: did you mean --b?"
    six = {f"--{letter}": "near" if letter == "b" else "" for letter in "abcdef"}
    assert unknown_options(six) == "unknown options --a, --b (near), --c, --d, --e, 1 more"
    five = dict([*six.items()][:5])
    assert unknown_options(five) == "unknown options --a, --b (near), --c, --d, --e"


@pytest.mark.parametrize(
    "text, spelled",
    [
        ("set --train.lr 3", "set LR 3"),
        ("set train.lr to 3", "set LR to 3"),
        ("leave --train.no-compile", "leave COMPILE=False"),
        ("leave --train.compile out", "leave COMPILE=True out"),
        ("--train.compile is on", "COMPILE is on"),
        ("train.compile", "COMPILE"),
        ("use --resume", "use RESUME=True"),
        ("the resume of a run", "the resume of a run"),
        ("--other.name and a/train.lr", "--other.name and a/train.lr"),
        ("dolmen train x --train.lr 3; then --train.lr", "dolmen train x --train.lr 3; then LR"),
    ],
)
def test_options_are_spelled_as_keywords(text, spelled):
    keywords = {"train.lr": "LR", "train.compile": "COMPILE", "resume": "RESUME"}
    assert python_spelling(text, keywords, ("train.compile", "resume")) == spelled
