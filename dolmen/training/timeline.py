"""Where the time of a step went: its timeline as seconds by kind of work, and as lines to read.

Every instant of the step is of one kind, so the kinds add up to the step:

    computing kernels    share the instants in which several run
    else collectives     what hides behind computing takes no time of the step
    else idle            the device waits for the host
"""

from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

from dolmen.training.events import COLLECTIVES, IDLE, OTHER, WAITING, Span, Timeline


@dataclass(frozen=True)
class Row:
    """Of one kind. `busy` are the seconds that it ran for, `seconds` those in which nothing else
    did that comes before it.
    """

    kind: str
    seconds: float
    calls: int
    busy: float


@dataclass(frozen=True)
class Table:
    """`rows` add up to `seconds`, the longest first; of these, `again` were recomputation. `other`:
    (name, seconds) of what the kind `other` is made of, the largest first.
    """

    seconds: float
    gpu: bool
    rows: tuple[Row, ...]
    again: float
    other: tuple[tuple[str, float], ...]


def tabulate(timeline: Timeline) -> Table:
    """Seconds of the step by kind."""
    seconds: defaultdict[str, float] = defaultdict(float)
    names: defaultdict[str, float] = defaultdict(float)
    again = 0.0
    for length, spans in _instants(timeline):
        for span in spans:
            part = length / len(spans) / 1e6
            seconds[span.kind] += part
            again += part if span.again else 0.0
            names[span.name] += part if span.kind == OTHER else 0.0
    total = (timeline.end - timeline.start) / 1e6
    seconds[IDLE] = total - sum(seconds.values())
    busy = defaultdict(float, {IDLE: seconds[IDLE]})
    for span in timeline.busy:
        busy[span.kind] += (span.end - span.start) / 1e6
    rows = [Row(kind, s, timeline.calls[kind], busy[kind]) for kind, s in _largest(seconds)]
    other = tuple((name, s) for name, s in _largest(names)[:8] if s > 0)
    return Table(total, timeline.gpu, tuple(rows), again, other)


def _largest(seconds: Mapping[str, float]) -> list[tuple[str, float]]:
    return sorted(seconds.items(), key=lambda item: item[1], reverse=True)


def _instants(timeline: Timeline) -> Iterable[tuple[float, list[Span]]]:
    """Pieces of the step in which something is busy: how long, and what the time is put down to."""
    edges = [(s.start, True, i) for i, s in enumerate(timeline.busy)]
    edges += [(s.end, False, i) for i, s in enumerate(timeline.busy)]
    active: dict[int, Span] = {}
    at = timeline.start
    for time, opens, i in sorted(edges):
        if active and time > at:
            computing = [s for s in active.values() if not s.kind.startswith(COLLECTIVES)]
            yield time - at, computing or list(active.values())
        at = time
        if opens:
            active[i] = timeline.busy[i]
        else:
            del active[i]


def with_waiting(
    table: Table, took: Mapping[str, list[float]], least: Mapping[str, list[float]]
) -> Table:
    """The table with the time in collectives that was spent waiting for other ranks apart: of each
    collective, what it took here less the `least` that it took on any rank of its axis, which the
    last to come had to wait for nobody.
    """
    rows, waiting = [], 0.0
    for row in table.rows:
        here, best = sum(took.get(row.kind, ())), sum(least.get(row.kind, took.get(row.kind, ())))
        share = (here - best) / here if here else 0.0
        waiting += share * row.seconds
        rest = 1 - share
        rows.append(replace(row, seconds=rest * row.seconds, busy=rest * row.busy))
    if waiting:
        rows.append(Row(WAITING, waiting, 0, waiting))
    return replace(table, rows=tuple(sorted(rows, key=lambda row: -row.seconds)))


def lines(table: Table) -> list[str]:
    """For a person: `matrix products          61.2 %     823.0 ms    412 calls`."""
    out = []
    for row in table.rows:
        calls = f"{row.calls:7,} calls" if row.calls else ""
        hidden = row.busy - row.seconds
        behind = f"; {1e3 * hidden:.1f} ms more beside other work" if hidden > 1e-4 else ""
        share = 100 * row.seconds / table.seconds
        out.append(f"{row.kind:27}{share:5.1f} % {1e3 * row.seconds:10.1f} ms {calls}{behind}")
    if table.again:
        out.append(f"of these {1e3 * table.again:.1f} ms were recomputation of forward")
    if table.other:
        names = ", ".join(f"{name[:60]} {1e3 * seconds:.1f} ms" for name, seconds in table.other)
        out.append(f"{OTHER}: {names}")
    return out
