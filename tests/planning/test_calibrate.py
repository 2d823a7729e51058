"""Efficiencies fitted to measured runs, and intervals made of the errors of those left out."""

import csv
import math
import random

import pytest

from benchmarks.planning.calibrate import (
    Sample,
    applied,
    calibrate,
    coverage,
    errors_yaml,
    fit,
    main,
    published_rows,
)
from benchmarks.planning.published import FOLDER, read_rows
from dolmen.planning.step import FILE, PredictionErrors, half_width, read_errors

DRAW = random.Random(3)


def sample(paper: str, factors=(1.2, 0.9, 1.1), device="a100") -> Sample:
    """Of a device whose parts take `factors` times what its file says, exactly."""
    parts = [DRAW.uniform(0.05, 1) for _ in range(3)]
    first, second, third = (part / sum(parts) for part in parts)
    taken = sum(f * s for f, s in zip(factors, (first, second, third), strict=True))
    return Sample("run", paper, device, (first, second, third), math.log(taken))


def test_factors_are_found_again():
    many = [sample(f"paper {i}") for i in range(1000)]
    factors = fit(many)
    assert factors == pytest.approx((1.2, 0.9, 1.1), rel=0.01)
    assert max(abs(applied(s, factors)) for s in many) < 0.01


def test_few_rows_move_little_and_none_nothing():
    assert fit([]) == (1, 1, 1)
    assert 1 < fit([sample("one", (2.0, 2.0, 2.0))])[0] < 2


def test_a_paper_counts_once_however_many_rows_it_has():
    """Ninety rows of one paper say 2, three of another 1: neither is outvoted."""
    third = (1 / 3, 1 / 3, 1 / 3)
    long, short = (
        Sample("r", name, "a100", third, math.log(x)) for name, x in (("l", 2), ("s", 1))
    )
    assert fit([long] * 90 + [short] * 3) == pytest.approx(fit([long, short]))


def test_half_widths():
    few = [0.01 * i for i in range(1, 20)]
    assert half_width(few) == pytest.approx(0.19 * 1.25)
    many = [0.01 * i for i in range(1, 101)]
    assert half_width(many) == pytest.approx(0.91)  # 90 of 100 and one more
    assert half_width([]) == math.log(2)


def test_a_device_without_rows_is_twice_as_wide():
    errors = tuple((f"r{i}", "paper", "a100", 0.01 * i) for i in range(30))
    known, unknown = (PredictionErrors(errors).spread(device) for device in ("a100", "b300"))
    assert unknown.log == pytest.approx(2 * known.log)
    assert (known.rows, known.device, unknown.device) == (30, True, False)
    assert "n = 30" in known.words and "none on this device" in unknown.words


def test_one_lucky_row_makes_no_device_sure():
    errors = (*((f"r{i}", "paper", "a100", 0.01 * i) for i in range(30)), ("v", "v", "v100", 0.0))
    calibration = PredictionErrors(errors)
    assert calibration.spread("v100").log == calibration.spread("a100").log


def test_the_shipped_errors_are_of_the_shipped_rows():
    """`python -m benchmarks.planning.accuracy --write` fits them again."""
    measured = {row.row_id for row in published_rows() if row.measured() is not None}
    assert {row_id for row_id, *_ in read_errors().rows} == measured
    assert errors_yaml(read_errors()) == FILE.read_text()


def test_a_calibration_is_read_as_it_was_written(tmp_path):
    names = ["korthikanti2022_table4_layer", "megatron_v1_blog"]
    made = calibrate(read_rows([FOLDER / f"{name}.csv" for name in names]))
    file = tmp_path / "errors.yaml"
    file.write_text(errors_yaml(made.errors))
    again = read_errors(file)
    assert [e[:3] for e in again.rows] == [e[:3] for e in made.errors.rows]
    assert {len(e) for e in again.rows} == {4} and set(made.factors) == {"a100", "v100"}


def test_what_is_not_understood_of_rows_is_reported(tmp_path, monkeypatch, capsys):
    """Row by row, by the command, and why nothing is learnt of one."""
    whole = (FOLDER / "megatron_v1_blog.csv").read_text().splitlines()
    with (FOLDER / "megatron_v1_blog.csv").open() as stream:
        (row,) = csv.DictReader(stream)
    rows = [{**row, "dp": "eight"}, {**row, "row_id": "cold", "step_time_s": ""}]
    rows[1] |= dict.fromkeys(("tokens_s_gpu", "tflops_per_gpu", "mfu_pct", "hfu_pct"), "")
    with (tmp_path / "rows.csv").open("w", newline="") as stream:
        writer = csv.DictWriter(stream, whole[0].split(","))
        writer.writeheader()
        writer.writerows(rows)
    monkeypatch.setattr("sys.argv", ["calibrate", str(tmp_path / "rows.csv")])
    assert main() == 0
    warnings = [x for x in capsys.readouterr().out.splitlines() if x.startswith("warning: ")]
    assert any("dp 'eight' is no number: taken as empty" in line for line in warnings)
    assert "warning: cold: it does not say what was measured: nothing is learnt of it" in warnings


def test_rows_that_were_not_measured_teach_nothing():
    rows = [row for row in published_rows() if row.measured() is None]
    with pytest.raises(ValueError, match="nothing to calibrate by"):
        calibrate(rows)


def test_coverage_is_of_intervals_made_without_the_publication():
    """Each of two papers has twenty runs; one is off by 10 %, the other by twice as much: each is
    judged by the other's errors.
    """
    rows = [(f"{p}#{i}", p, "a100", e) for p, e in (("one", 0.1), ("two", 0.2)) for i in range(20)]
    wide, inside = coverage(PredictionErrors(tuple(rows)))
    assert inside == 0.5 and math.exp(2 * 0.1) < wide < math.exp(2 * 0.2)
