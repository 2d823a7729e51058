"""dolmen schedule: numbers, lists, pictures, and what is refused."""

import re

import pytest
from tinyrun import dolmen


def test_table_and_closed_form():
    shown = dolmen("schedule", "1f1b", "--pp", 4, "--microbatches", 8)
    assert shown.code == 0 and "1f1b: 4 ranks, 8 microbatches" in shown.out
    assert "span 33; idle 9 (closed form 9): 27.27% of the span, 37.50% of the work" in shown.out
    assert re.findall(r"\n +(\d) +(\d) +16 +24 +27.27% +(\d)", shown.out) == [
        ("0", "0", "4"),
        ("1", "1", "3"),
        ("2", "2", "2"),
        ("3", "3", "1"),
    ]
    far = dolmen("schedule", "1f1b", "--pp", 2, "--microbatches", 1, "--send", 1e20)
    assert far.code == 0 and "2 ranks, 1 microbatch\n" in far.out  # nearly all of it is waiting
    slow = dolmen("schedule", "zero-bubble", "--send", 0.5, "--weight", 0.8).out
    assert "closed form" not in slow and "zero-bubble: 4 ranks, 8 microbatches" in slow


def test_list_is_a_file(tmp_path):
    """What --list prints is read back, with the sizes of the file."""
    shown = dolmen("schedule", "zero-bubble-v", "--pp", 2, "--microbatches", 4, "--list")
    (tmp_path / "mine.txt").write_text(shown.out[shown.out.index("placement: v") :])
    again = dolmen("schedule", tmp_path / "mine.txt", "--out", tmp_path / "mine.svg")
    assert (
        again.code == 0
        and "mine.txt: 2 ranks, 4 microbatches, 2 virtual stages per rank" in again.out
    )
    assert "wrote " in again.out and (tmp_path / "mine.svg").stat().st_size > 10_000


def test_a_search_writes_what_a_run_takes(tmp_path):
    """The file is a schedule, of the span that the search said, with the same times."""
    times = tmp_path / "measured.json"
    times.write_text('{"forward": [1, 2], "input": 1.4, "weight": 0.6, "send": 0.5}')
    words = ("--pp", 2, "--microbatches", 3, "--costs", times)
    one = ("--virtual-stages", 1)
    for name in ("a.txt", "a.yaml"):
        found = dolmen("schedule", "search", *words, *one, "--memory", 2, "--out", tmp_path / name)
        span = re.search(r"\nspan ([0-9.]+); ", found.out)
        assert found.code == 0 and span and "search: 2 ranks, 3 microbatches\n" in found.out
        assert f"\nlower bound {span[1]} of 1 stage per rank: optimal; " in found.out
        again = dolmen("schedule", tmp_path / name, "--costs", times)
        assert again.code == 0 and f"\nspan {span[1]}; " in again.out


def test_a_search_takes_two_stages_per_rank_where_they_are_shorter():
    """Proven shortest, and shorter than zero-bubble-v by a tenth where a rank may hold one
    microbatch more.
    """
    words = "--pp 2 --microbatches 4 --input 1.4 --weight 0.6 --send 0.3".split()
    found = dolmen("schedule", "search", *words, "--memory", 3).out
    assert "\nlower bound 12.8 of 1 or 2 stages per rank: optimal; " in found
    assert "\nspan 12.8; " in found and "2 virtual stages per rank" in found
    assert "\nspan 14.3; " in dolmen("schedule", "zero-bubble-v", *words).out


COSTS = {
    "negative": '{"forward": -1, "backward": 2}',
    "nan": '{"forward": NaN, "backward": 2}',
    "zero": '{"forward": [1, 0], "backward": 2}',
    "text": '{"forward": "1", "backward": 2}',
    "empty": "{}",
    "half": '{"forward": 1, "input": 2}',
    "forward": '{"forward": 1}',
    "other": '{"forward": 1, "backward": 2, "seconds": 3}',
    "length": '{"forward": [1, 2, 3], "backward": 2}',
}


@pytest.mark.parametrize(
    "words, want",
    (
        (["--costs", "negative"], "negative: forward is -1: it must be"),
        (["--costs", "nan"], "nan: is not JSON: NaN"),
        (["--costs", "zero"], "zero: forward"),
        (["--costs", "text"], "text: forward is '1': it must be"),
        (["--costs", "empty"], "empty: it has no forward"),
        (["--costs", "half"], "half: it has no weight"),
        (["--costs", "forward"], "forward: has no backward time"),
        (["--costs", "other"], "other: "),
        (["--costs", "length"], "has 3 times, but there are 2 ranks and 2 stages: give one"),
        (["--costs", "none"], "none: cannot be read"),
        (["--costs", "length", "--send", 1], "--costs and --send both set times"),
        (
            ["--memory", 0.9],
            "--memory (0.9) must be at least 1: any schedule holds the activations of one micro",
        ),
        (["--memory", "nan"], "--memory is nan: it must be finite"),
        (["--microbatches", 10**6], "6,000,000 actions are too many to search (40,000): use fewer"),
        (["--pp", 0], "--pp is 0: it must be at least 1"),
        (["--out", "a.pdf"], "use .svg or .png for the picture, .txt or .yaml for the actions"),
    ),
)
def test_searches_that_are_refused(words, want, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name, text in COSTS.items():
        (tmp_path / name).write_text(text)
    before = {*tmp_path.iterdir()}
    shown = dolmen("schedule", "search", "--pp", 2, *words)
    assert shown.code == 2 and want in shown.err and not shown.out, shown.err
    assert shown.err.count("\n") == 1 and {*tmp_path.iterdir()} == before
    assert (
        "--memory is an option of dolmen schedule search only"
        in dolmen("schedule", "1f1b", "--memory", 2).err
    )


@pytest.mark.parametrize(
    "words, want",
    (
        (["nope"], "gpipe, 1f1b, interleaved"),
        (["interleaved", "--microbatches", 7], "groups of pp (4), but 7"),
        (["1f1b", "--virtual-stages", 2], "virtual-stages 1"),
        (["gpipe", "--forward", 0], "--forward is 0.0: it must be over 0"),
        (["gpipe", "--send", "nan"], "--send is nan"),
        (["gpipe", "--pp", 0], "--pp is 0: it must be at least 1"),
        (["gpipe", "--out", "a.pdf"], "use .svg or .png"),
        (["gpipe", "--out", "no/such/folder/a.png"], "no/such/folder"),
        (["gpipe", "--microbatches", 10**9], "use fewer --microbatches"),
        (["gpipe", "--microbatches", 40_000, "--out", "a.png"], "more than a picture can show"),
        (["none.txt"], "no schedule file none.txt"),
    ),
)
def test_refusals(words, want, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    shown = dolmen("schedule", *words)
    assert shown.code == 2 and want in shown.err and not shown.out and not list(tmp_path.iterdir())


def test_a_file_fixes_its_sizes(tmp_path):
    (tmp_path / "mine.txt").write_text("F0 B0\nF0 B0\n")
    shown = dolmen("schedule", tmp_path / "mine.txt", "--pp", 4)
    assert (
        shown.code == 2
        and "is for pp 2, 1 microbatch and 1 virtual stage, but the options say 4, 1 and 1"
        in shown.err
    )
