"""A series is the metrics of its rows in equal intervals: compared with lists that are made of all
rows at once.
"""

import math
import random

import pytest

from dolmen.watching.series import Series


def random_rows(chance: random.Random, steps: int) -> list[dict]:
    """Rows of rising steps, some repeated after a restart, with numbers that may be missing."""
    rows: list[dict] = []
    step = 0
    while step < steps:
        step += chance.choice((1, 1, 2, 5))
        row = {"step": step, "loss": chance.choice((chance.uniform(-9, 9), None, math.nan, 3))}
        if chance.random() < 0.7:
            row |= {"tokens": 64 * step, "seconds": step / 4}
        if chance.random() < 0.3:
            row["val_loss"] = chance.uniform(0, 1)
        rows.append(row)
        if chance.random() < 0.03:
            step -= 3
    return rows


def expected(rows: list[dict], width: int) -> dict:
    """What `as_dict` is to return, from lists of the values of each interval."""
    groups: dict[int, list[dict]] = {}
    for row in rows:
        groups.setdefault(row["step"] // width, []).append(row)
    intervals = [group for _, group in sorted(groups.items())]
    ends: dict[str, list[float]] = {"tokens": [], "seconds": []}
    for name, found in ends.items():
        for group in intervals:
            known = [row[name] for row in group if name in row]
            found.append(known[-1] if known else found[-1] if found else 0)
    columns = {}
    for name in ("loss", "val_loss"):
        values = [[row[name] for row in group if name in row] for group in intervals]
        finite = [[v for v in each if v is not None and math.isfinite(v)] for each in values]
        at = [i for i, each in enumerate(finite) if each]
        columns[name] = {
            "mean": [sum(finite[i]) / len(finite[i]) for i in at],
            "at": at if len(at) < len(intervals) else None,
            "low": [min(finite[i]) for i in at],
            "high": [max(finite[i]) for i in at],
            "gaps": [i for i, each in enumerate(values) if len(each) > len(finite[i])],
            "most": max((len(each) for each in finite), default=0),
        }
    return {"step": [max(row["step"] for row in group) for group in intervals], **ends} | columns


@pytest.mark.parametrize("seed", range(6))
def test_intervals_have_the_numbers_of_their_rows(seed):
    chance = random.Random(seed)
    rows = random_rows(chance, chance.choice((20, 200, 900)))
    series = Series(most=32)
    for row in rows:
        series.add(row)
    found = series.as_dict()
    steps = [row["step"] for row in rows]
    width = 1
    while len({step // width for step in steps}) > 32:
        width *= 2
    assert (found["width"], found["rows"]) == (width, len(rows))
    want = expected(rows, width)
    for name in ("step", "tokens", "seconds"):
        assert found[name] == pytest.approx(want[name]), name
    for name in ("loss", "val_loss"):
        column, wanted = found["columns"][name], want[name]
        assert column["mean"] == pytest.approx(wanted["mean"], rel=1e-6, abs=1e-6)
        assert column.get("at") == wanted["at"] and column.get("gaps", []) == wanted["gaps"]
        if wanted["most"] > 1:
            assert column["low"] == pytest.approx(wanted["low"], rel=1e-7)
            assert column["high"] == pytest.approx(wanted["high"], rel=1e-7)
        else:
            assert "low" not in column
        values = [row[name] for row in rows if name in row]
        last = values[-1]
        assert found["last"].get(name) == (last if last is not None and last == last else None)


def test_names_of_columns_are_bounded():
    series = Series()
    series.add({"step": 1, "x" * 200: 1.0, "y" * 201: 2.0})
    assert [*series.as_dict()["columns"]] == ["x" * 200]
