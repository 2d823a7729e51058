"""Numbers of a run by step, thinned so that a million rows fit a page and nothing is hidden: equal
intervals of steps, each with the mean, the least and the most of its values.

    rows of metrics.jsonl --add, one by one--> at most MOST intervals --as_dict--> plain lists

The width of an interval is a power of 2, doubled whenever there are too many. So the same rows give
the same intervals, however many were added at a time.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

MOST = 1000
"""Intervals; there are half as many at least, of a run with more rows than that."""
MOST_COLUMNS = 200
LONGEST = 200
"""Characters of a column's name."""
PLACES = ("step", "tokens", "seconds", "time")


@dataclass
class Spread:
    """Mean, minimum and maximum of one column's values in one interval."""

    count: int = 0
    mean: float = 0.0
    low: float = math.inf
    high: float = -math.inf
    gaps: int = 0
    """Number of values that were not finite."""

    def add(self, value: float | None) -> None:
        """Add a value to mean, minimum and maximum; None (a value that was not finite) only counts
        as a gap.
        """
        if value is None:
            self.gaps += 1
        else:
            self.join(Spread(1, value, value, value))

    def join(self, other: "Spread") -> None:
        """Add all values that `other`, the same column in a neighbouring interval, has counted."""
        self.gaps += other.gaps
        if not other.count:
            return
        self.count += other.count
        # weighted by counts; a sum of large values could overflow
        share = other.count / self.count
        self.mean = self.mean * (1 - share) + other.mean * share
        # a peak stays visible, however wide the interval
        self.low, self.high = min(self.low, other.low), max(self.high, other.high)


@dataclass
class Interval:
    """Metrics in an interval of steps, and step, tokens and seconds at its end."""

    step: int = 0
    tokens: float | None = None
    seconds: float | None = None
    columns: dict[str, Spread] = field(default_factory=dict)

    def join(self, other: "Interval") -> None:
        """Add all values of the following interval to this one, which then ends where it does."""
        self.step = max(self.step, other.step)
        self.tokens = self.tokens if other.tokens is None else other.tokens
        self.seconds = self.seconds if other.seconds is None else other.seconds
        for name, spread in other.columns.items():
            self.columns.setdefault(name, Spread()).join(spread)


class Series:
    """The metrics of a run by step, in at most `most` intervals. Values that are neither numbers
    nor null are left out, and so are columns after the first MOST_COLUMNS.
    """

    def __init__(self, most: int = MOST):
        """Start without rows. `most`: maximum number of intervals of steps."""
        self.most = most
        self.width = 1
        self.rows = 0
        self.intervals: dict[int, Interval] = {}
        self.last: dict[str, float | None] = {}
        """Last value of each column."""
        self.names: set[str] = set()

    def add(self, row: Mapping[str, Any]) -> None:
        """Add a row of metrics.jsonl to the interval of its step, and double the width of all
        intervals while there are more than `most`. Numbers are added to their column; null and
        floats that are not finite count as gaps; other values are ignored.
        """
        self.rows += 1
        # steps 0 ... width - 1 are interval 0, and so on
        index = row["step"] // self.width
        interval = self.intervals.setdefault(index, Interval())
        interval.step = max(interval.step, row["step"])
        tokens, seconds = number(row.get("tokens")), number(row.get("seconds"))
        interval.tokens = interval.tokens if tokens is None else tokens
        interval.seconds = interval.seconds if seconds is None else seconds
        for name, value in row.items():
            if name in PLACES or not self._has_column(name):
                continue
            parsed = number(value)
            # null, and a float that is not finite, are gaps; texts and lists are no column
            if parsed is not None or value is None or isinstance(value, float):
                self.last[name] = parsed
                interval.columns.setdefault(name, Spread()).add(parsed)
        # a row far ahead may need several doublings
        while len(self.intervals) > self.most:
            self._halve()

    def _has_column(self, name: str) -> bool:
        """Return whether the series has a column of this name, after adding it if the name has at
        most 200 characters and there are fewer than 200 columns.
        """
        # names come from files, so their number and length are bounded
        if name not in self.names and len(self.names) < MOST_COLUMNS and len(name) <= LONGEST:
            self.names.add(name)
        return name in self.names

    def _halve(self) -> None:
        """Halve the number of intervals: double their width, joining each two neighbours."""
        self.width *= 2
        before, self.intervals = sorted(self.intervals.items()), {}
        for index, interval in before:
            self.intervals.setdefault(index // 2, Interval()).join(interval)

    def as_dict(self) -> dict[str, Any]:
        """Return the series as plain values: the number of rows, the width of intervals in steps,
        the last value of each column, lists of step, tokens and seconds at the end of each
        interval, and for each column lists over intervals:

           mean        of the intervals that have values of it
           at          indices of these intervals; left out where all have values
           low, high   minimum and maximum, where intervals hold several rows
           gaps        indices of the intervals with values that are not finite
        """
        intervals = [interval for _, interval in sorted(self.intervals.items())]
        return {
            "rows": self.rows,
            "width": self.width,
            "step": [interval.step for interval in intervals],
            "tokens": _forward_fill([interval.tokens for interval in intervals]),
            "seconds": _forward_fill([interval.seconds for interval in intervals]),
            "columns": {
                name: _column(name, intervals) for name in sorted(self.names & {*self.last})
            },
            "last": {name: value for name, value in self.last.items() if value is not None},
        }


def _column(name: str, intervals: list[Interval]) -> dict[str, Any]:
    """Return the column `name` as lists over the intervals that have values of it: mean, and where
    they are needed at (indices of these intervals), low and high (minimum and maximum) and gaps
    (indices of intervals with values that are not finite).
    """
    spreads = {
        i: interval.columns[name]
        for i, interval in enumerate(intervals)
        if name in interval.columns
    }
    counted = {i: spread for i, spread in spreads.items() if spread.count}
    column: dict[str, Any] = {"mean": [_round_digits(one.mean) for one in counted.values()]}
    # indices only where they are needed: most columns have a value in every interval
    if len(counted) < len(intervals):
        column["at"] = list(counted)
    if any(spread.count > 1 for spread in counted.values()):
        column["low"] = [_round_digits(one.low) for one in counted.values()]
        column["high"] = [_round_digits(one.high) for one in counted.values()]
    if gaps := [i for i, spread in spreads.items() if spread.gaps]:
        column["gaps"] = gaps
    return column


def _forward_fill(values: list[float | None]) -> list[float]:
    """Return the values, rounded to eight digits, with each None replaced by the value before it,
    or by 0 at the start.
    """
    out, last = [], 0.0
    for value in values:
        # an interval may lack it, and a curve needs a place for each
        last = last if value is None else value
        out.append(_round_digits(last))
    return out


def _round_digits(value: float) -> float:
    """Return the value rounded to eight significant digits, which are enough for a picture."""
    return float(f"{value:.8g}")


def number(value: Any) -> float | None:
    """Return an int or float as a float; None for anything else (bool too), for one that is not
    finite, and for one beyond 1e300 in size.
    """
    if isinstance(value, bool) or not isinstance(value, (int, float)) or abs(value) > 1e300:
        return None
    return float(value) if math.isfinite(value) else None
