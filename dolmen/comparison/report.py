"""How two programs came out, for a person and for a program."""

import math
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any

from rich.table import Table

from dolmen.comparison import taps
from dolmen.comparison.classify import Fault
from dolmen.comparison.compare import Row
from dolmen.core.messages import plural

AFTER = 4  # rows that are shown behind the first that parts: what it leads to


@dataclass(frozen=True)
class FirstDifference:
    """The first difference between two programs."""

    row: Row
    operation: str
    """The operation that computes the tensor."""
    fault: Fault
    processes: dict[str, int]
    """Number of processes of side A and of side B."""

    @property
    def ranks(self) -> str:
        """Ranks that hold something else than B as a whole, of the sides with several processes."""
        sides = {
            side: [rank for of, rank in self.row.ranks if of == side]
            for side, number in self.processes.items()
            if number > 1
        }
        return "; ".join(
            f"rank{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks))} of {side}"
            for side, ranks in sides.items()
            if ranks
        )


@dataclass(frozen=True)
class Report:
    """All that was compared, in the order of a step."""

    title: str
    rows: tuple[Row, ...]
    parting: FirstDifference | None
    notes: tuple[str, ...] = ()

    @property
    def ok(self) -> bool:
        return self.parting is None

    def __str__(self) -> str:
        if self.parting is None:
            return f"the same: {plural(len(self.rows), 'tensor')} compared"
        row, fault = self.parting.row, self.parting.fault
        lines = [
            f"first to part: {describe_row(row)}",
            f"    made by     {self.parting.operation}",
            f"    looks like  {fault.kind}: {fault.text}",
            f"    differs by  {row.difference:.3g}, allowed {row.allowed:.3g}",
        ]
        if self.parting.ranks:
            lines.append(f"    on          {self.parting.ranks}")
        if fault.axis:
            lines.append(f"    axis        {fault.axis}")
        return "\n".join(lines)

    def table(self) -> Table:
        """For a rich console: of weights, gradients and the update the worst tensor, of the layers
        the residual stream, and of the layer that parts everything inside.
        """
        table = Table(
            title=self.title,
            title_justify="left",
            caption="\n".join(self.notes) or None,
            caption_justify="left",
            box=None,
            padding=(0, 2, 0, 0),
            pad_edge=False,
        )
        for name in ("stage", "tensor", "difference", "allowed", "", ""):
            table.add_column(name, overflow="fold")
        for row, note in _shown_rows(self.rows, self.parting):
            verdict = "ok" if row.ok else "PARTS" if _is_first(row, self.parting) else "differs"
            allowed = "" if math.isinf(row.allowed) else f"{row.allowed:.2g}"
            table.add_row(
                row.stage, row.name, f"{row.difference:.2g}", allowed, verdict, note or row.note
            )
        return table

    def as_dict(self) -> dict[str, Any]:
        """Plain values: what --json writes. What is no number, or without end, is null."""
        found = self.parting
        return {
            "title": self.title,
            "ok": self.ok,
            "notes": list(self.notes),
            "first": None
            if found is None
            else {
                **_plain(found.row),
                "operation": found.operation,
                "kind": found.fault.kind,
                "text": found.fault.text,
                "axis": found.fault.axis,
            },
            "rows": [_plain(row) for row in self.rows],
        }


def describe_row(row: Row) -> str:
    """A tensor as a sentence names it."""
    words = {
        "backward": "the gradient that reaches {}",
        "gradients": "the gradient of {}",
        "numbers": "the {}",
        "forward": "{}",
    }
    return words.get(row.stage, row.stage + " of {}").format(row.name)


def operation(row: Row) -> str:
    """Name the operation that computes the tensor of a row."""
    match row.stage:
        case "weights":
            return "conversion, or loading"
        case "forward":
            return taps.operation(row.name)
        case "backward":
            return f"backward of what follows: {taps.operation(row.name)} is right forward"
        case "gradients":
            return f"weight gradient, or its sum over ranks: {row.name}"
        case "numbers":
            return "the sum over tokens, or over tensors and ranks"
        case _:
            return "the optimizer"


def _plain(row: Row) -> dict[str, Any]:
    plain = {**asdict(row), "ok": row.ok, "ranks": [list(one) for one in row.ranks]}
    return {
        name: None if isinstance(value, float) and not math.isfinite(value) else value
        for name, value in plain.items()
    }


def _is_first(row: Row, parting: FirstDifference | None) -> bool:
    return parting is not None and row is parting.row


def _shown_rows(
    rows: tuple[Row, ...], parting: FirstDifference | None
) -> Iterator[tuple[Row, str]]:
    """(row, note) of what a table shows."""
    layer = None if parting is None else taps.layer_of(parting.row.name)
    left = math.inf
    for stage in dict.fromkeys(row.stage for row in rows):
        mine = [row for row in rows if row.stage == stage]
        if stage in ("forward", "backward"):
            chosen = [(r, "") for r in mine if _is_shown(r, layer, parting)]
        elif any(_is_first(row, parting) for row in mine):
            chosen = [(row, "") for row in mine if not row.ok]
        else:
            worst = max(mine, key=lambda r: math.inf if math.isnan(r.difference) else r.difference)
            note = f"the worst of {len(mine)}" if len(mine) > 1 else ""
            chosen = [(worst, note)]
        for row, note in chosen:
            if left > 0:
                yield row, note
            left = AFTER if _is_first(row, parting) else left - 1


def _is_shown(row: Row, layer: int | None, parting: FirstDifference | None) -> bool:
    """The residual stream, and inside the layer that parts all that is of the same stage."""
    if taps.inside(row.name) in ("", *taps.OUTSIDE):
        return True
    same = parting is not None and taps.layer_of(row.name) == layer
    return same and parting is not None and row.stage == parting.row.stage
