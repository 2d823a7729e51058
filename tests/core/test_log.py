"""Numbers as a person reads them."""

import pytest

from dolmen.core.log import console, duration, gib, size


@pytest.mark.parametrize(
    "count, unit, text",
    [
        (12_345_678, "", "12.3 M"),
        (8.03e9, "", "8.03 B"),
        (8.03e9, "B", "8.03 GB"),
        (950, "", "950"),
        (1000, "", "1 k"),
        (1.5e12, "FLOP", "1.5 TFLOP"),
        (0, "", "0"),
        (3, "B", "3 B"),
        (-2000, "", "-2 k"),
        (999.6, "", "1 k"),
        (999_700, "", "1 M"),
    ],
)
def test_size(count, unit, text):
    assert size(count, unit) == text


def test_tables_fit_100_columns_where_there_is_no_terminal(monkeypatch):
    monkeypatch.setenv("COLUMNS", "77")
    assert console().width == 100
    monkeypatch.setenv("FORCE_COLOR", "1")  # rich takes it for a terminal
    assert console().width == 77


def test_bytes_and_times():
    assert (
        gib(2**30) == "1.00 GiB"
        and gib(3 * 2**29) == "1.50 GiB"
        and gib(2**20) == "1.0 MiB"
        and gib(2**30 - 1) == "1024.0 MiB"
    )
    assert (
        duration(0) == "0:00"
        and duration(61.9) == "1:01"
        and duration(3723) == "1:02:03"
        and duration(59.999) == "0:59"
    )


def test_only_the_first_rank_is_heard(capsys):
    console(False).print("nothing")
    console(True).print("[bold]plain[/bold]")
    assert capsys.readouterr().out == "[bold]plain[/bold]\n"
