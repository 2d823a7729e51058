"""The report of a dry run: sums over rows that count many times, each in its own unit."""

from dataclasses import replace

import pytest

from dolmen.model.layout import Layout
from dolmen.ops.kernels import KNOWN
from dolmen.planning.dry_report import DryRunReport
from dolmen.planning.ledger import Ledger, LedgerRow, Live
from dolmen.recipes import RECIPES

GIB = 2**30


def ledger(rank: int) -> Ledger:
    rows = (
        LedgerRow("F0", "layers.0.attn.q", "product", "mm", 10**9, times=3, peak=5 * GIB),
        LedgerRow("F0", "layers.7.attn.k", "product", "mm", 2 * 10**9, peak=9 * GIB),
        LedgerRow("B0", "layers.7.mlp.up", "product", "mm", 4 * 10**9, peak=9 * GIB),
        LedgerRow("B0", "", "product", "mm", 8 * 10**9),
        LedgerRow("B0", "embed", "memory", "add", live=Live(1, 2)),
        LedgerRow("F0", "", "collective", "all-reduce", axis="tp", payload=GIB, times=2),
        LedgerRow("F1", "", "collective", "all-reduce", axis="tp", payload=GIB // 2),
        LedgerRow("B1", "", "collective", "all-gather", axis="dp", payload=GIB),
        *([LedgerRow("F0", "", "send", "send", axis="pp", payload=4 * GIB)] if rank else []),
    )
    held = Live(parameter=3 * GIB, optimizer=6 * GIB * (rank > 0))
    return Ledger(rank, Live(parameter=2 * GIB), rows, held)


@pytest.fixture
def report() -> DryRunReport:
    run = RECIPES["gpt-1.7b"]()
    train = replace(run.train, global_batch_size=48, microbatch_size=2, sequence_length=1024)
    run = replace(run, train=train, layout=Layout(tp=2, pp=2, dp=4))
    return DryRunReport(run, KNOWN["a100"], (ledger(0), ledger(1500)))


def test_the_title_counts_microbatches_of_a_replica(report):
    assert report.title == (
        "gpt-1.7b: 1.65 B parameters on 16 ranks (tp 2 x pp 2 x dp 4), NVIDIA A100; "
        "6 microbatches of 2 x 1,024 tokens"
    )
    alone = replace(report, run=replace(report.run, layout=Layout(dp=1)))
    assert "on 1 rank (one), NVIDIA A100; 24 microbatches" in alone.title


def test_the_table_has_a_column_of_each_rank(report):
    first, *ranks = (list(column.cells) for column in report.table().columns)
    assert [column.header for column in report.table().columns] == ["", "rank 0", "rank 1,500"]
    assert [column.justify for column in report.table().columns] == ["left", "right", "right"]
    rows = dict(zip(first, zip(*ranks, strict=True), strict=True))
    assert first == [
        *("at rest", "  parameter", "at the peak", "  parameter", "  optimizer", "  reached in"),
        *("FLOPs", "  head", "  layers.attn", "  layers.mlp", "  in all"),
        *("sent: messages and bytes", "  dp all-gather", "  pp send", "  tp all-reduce"),
    ]
    cells = [column[0] for column in ranks] + [column[2] for column in ranks]
    assert cells == ["2.00 GiB", "2.00 GiB", "3.00 GiB", "9.00 GiB"]
    assert rows["  optimizer"] == ("0.0 MiB", "6.00 GiB")
    assert rows["  reached in"] == ("F0 layers.7.attn.k",) * 2
    # of attention three times one and two, of the rest what stands there
    assert rows["  layers.attn"] == ("5 B",) * 2
    assert rows["  tp all-reduce"] == ("3  2.50 GiB",) * 2
    assert rows["  pp send"] == ("-", "1  4.00 GiB") and rows["  dp all-gather"][0] == "1  1.00 GiB"


def test_json_has_bytes_flops_and_messages(report):
    first, second = report.as_dict()["ranks"]
    assert (first["rank"], second["rank"]) == (0, 1500) and first["peak_bytes"] == 9 * GIB
    assert first["flops"] == (3 + 2 + 4 + 8) * 10**9
    assert second["live_bytes"]["optimizer"] == 6 * GIB
    assert second["live_bytes"]["unsharded gradient"] == 0
    assert first["collectives"] == [
        {"axis": "dp", "op": "all-gather", "count": 1, "bytes": GIB},
        {"axis": "tp", "op": "all-reduce", "count": 3, "bytes": 5 * GIB // 2},
    ]
    assert second["collectives"][1] == {"axis": "pp", "op": "send", "count": 1, "bytes": 4 * GIB}
