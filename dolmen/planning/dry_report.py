"""Tables and JSON of what dry runs of several ranks of one world have counted."""

import re
from collections import Counter
from dataclasses import dataclass
from typing import Any

from rich.table import Table

from dolmen.core import log
from dolmen.core.messages import plural
from dolmen.model import count
from dolmen.ops.kernels import Hardware
from dolmen.planning.ledger import WORDS, Ledger, LedgerRow
from dolmen.training.config import RunConfig


@dataclass(frozen=True)
class DryRunReport:
    """Ledgers of several ranks of one run, as computed on some hardware."""

    run: RunConfig
    hardware: Hardware
    ledgers: tuple[Ledger, ...]

    def as_dict(self) -> dict[str, Any]:
        """Return the counts of each rank as plain values, for --json."""
        return {"ranks": [_rank_dict(ledger) for ledger in self.ledgers]}

    @property
    def title(self) -> str:
        """Text with model, layout and microbatches in one line."""
        layout, run = self.run.layout, self.run
        axes = [("tp", layout.tp), ("cp", layout.cp), ("pp", layout.pp), ("dp", layout.dp)]
        sizes = " x ".join(f"{name} {size}" for name, size in axes if size != 1) or "one"
        # per data-parallel rank
        micros = run.train.global_batch_size // (layout.dp or 1) // run.microbatch_size
        return (
            f"{run.name}: {log.size(count.parameters(run.spec))} parameters on "
            f"{plural(layout.world, 'rank')} ({sizes}), {self.hardware.name}; "
            f"{plural(micros, 'microbatch', 'microbatches')} of {run.microbatch_size} x "
            f"{run.sequence_length:,} tokens"
        )

    def table(self) -> Table:
        """Return a table with a column per rank: memory at rest and at the peak, FLOPs, sends."""
        table = Table(box=None, padding=(0, 2, 0, 0))
        table.add_column("")
        for ledger in self.ledgers:
            table.add_column(f"rank {ledger.rank:,}", justify="right")
        for title, lives in (
            ("at rest", [ledger.rest for ledger in self.ledgers]),
            ("at the peak", [ledger.at_peak for ledger in self.ledgers]),
        ):
            # the sum, then its kinds
            table.add_row(title, *(log.gib(live.total) for live in lives), style="bold")
            for kind, word in WORDS.items():
                bytes_by_rank = [live._asdict()[kind] for live in lives]
                # kinds that no rank has are left out
                if any(bytes_by_rank):
                    table.add_row(f"  {word}", *map(log.gib, bytes_by_rank))
        table.add_row("  reached in", *(_peak_place(ledger) for ledger in self.ledgers))
        self._add_rows(
            table, "FLOPs", [_flops_by_module(ledger) for ledger in self.ledgers], log.size
        )
        sent = [
            {f"{a} {op}": both for (a, op), both in _sends_by_axis(ledger).items()}
            for ledger in self.ledgers
        ]
        self._add_rows(
            table, "sent: messages and bytes", sent, lambda both: f"{both[0]:,}  {log.gib(both[1])}"
        )
        return table

    @staticmethod
    def _add_rows(table: Table, title: str, rank_values: list[dict[str, Any]], format: Any) -> None:
        """Add a heading to the table, and a row for each name that any rank has a value of,
        formatted by `format`; "-" where a rank has none. A sum, "in all", is the last.
        """
        table.add_row(title, style="bold")
        names = {name for values in rank_values for name in values}
        for name in sorted(names, key=lambda name: (name == "in all", name)):
            cells = [format(values[name]) if name in values else "-" for values in rank_values]
            table.add_row(f"  {name}", *cells)


def _peak_place(ledger: Ledger) -> str:
    """Return action and module in which a rank reaches its memory peak, as text."""
    # the first of equal ones
    row = max(ledger.rows, key=lambda row: row.peak)
    return f"{row.action} {row.module}".strip()


def _flops_by_module(ledger: Ledger) -> dict[str, int]:
    """Return the FLOPs by module, summed over layers, and "in all". Those outside of any module
    belong to the LM head.
    """
    flops: Counter[str] = Counter()
    for row in ledger.rows:
        if row.flops:
            # all layers are one row
            name = re.sub(r"^layers\.[0-9]+", "layers", row.module) or "head"
            flops[".".join(name.split(".")[:2])] += row.flops * row.times
    return {**flops, "in all": ledger.flops}


def _sends_by_axis(ledger: Ledger) -> dict[tuple[str, str], tuple[int, int]]:
    """Return (axis, operation) -> (how often, bytes in all) of a rank's collectives and sends,
    sorted.
    """
    sends: dict[tuple[str, str], tuple[int, int]] = {}
    rows: list[LedgerRow] = [row for row in ledger.rows if row.kind in ("collective", "send")]
    for row in rows:
        often, size = sends.get((row.axis, row.op), (0, 0))
        # rows of the steady state count many times
        sends[row.axis, row.op] = often + row.times, size + row.payload * row.times
    return dict(sorted(sends.items()))


def _rank_dict(ledger: Ledger) -> dict[str, Any]:
    """Return a ledger's sums as plain values, for --json."""
    return {
        "rank": ledger.rank,
        "peak_bytes": ledger.peak,
        "live_bytes": {WORDS[kind]: size for kind, size in ledger.at_peak._asdict().items()},
        "flops": ledger.flops,
        "collectives": [
            {"axis": axis, "op": op, "count": often, "bytes": size}
            for (axis, op), (often, size) in _sends_by_axis(ledger).items()
        ],
    }
