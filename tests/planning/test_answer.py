"""Texts, tables and JSON of a plan have the plan's numbers, each in its place and its unit."""

from dataclasses import asdict, replace

import plans
import pytest
from rich.table import Table

from dolmen.planning import answer
from dolmen.planning.hardware import read_cluster
from dolmen.planning.inference import Inference, Serving
from dolmen.planning.plan import Change, Compared, DryRun, RankRun

GIB = 2**30


def columns(grid: Table) -> dict[str, list]:
    return {str(column.header): list(column.cells) for column in grid.columns}


def change(words: str, seconds: float, held: float, fits: bool) -> Change:
    return Change(words, seconds, int(held * GIB), fits)


def test_the_title_names_what_was_planned():
    plan = replace(plans.plan(), fitting=321, assumed=("a", "b-c"))
    assert answer.title(plan) == (
        "gpt-1t, 1.01 T parameters, on dgx-a100, 384 nodes of 8 GPUs (3,072), bf16\n"
        "3,072 sequences of 2,048 = 6.29 M tokens per step (a default; set --a and --b-c)\n"
        "11,342 layouts considered, 321 fit into 80.00 GiB"
    )
    assert "default" not in answer.title(plans.plan())


def test_the_ranking_has_a_row_for_each_layout():
    plan = plans.plan()
    table = columns(answer.table(plan))
    seconds = [candidate.estimate.seconds for candidate in plan.ranked]
    assert table[""] == [str(number) for number in range(1, 9)]
    assert table["seconds"] == [f"{s:.3g}" for s in seconds]
    assert table["90 %"] == [f"{0.88 * s:.3g}-{1.13 * s:.3g}" for s in seconds]
    assert table["tok/s/GPU"] == [f"{2048 * 3072 / s / 3072:,.0f}" for s in seconds]
    assert table["MFU"] == ["44.0%"] * 8 and table["HFU"] == ["0.0%"] * 8
    assert table["GiB"] == [f"{plan.ranked[0].fullest / GIB:.1f}"] * 8
    assert {*table["layout"]} == {plan.ranked[0].words} and {*table["bound"]} == {"compute"}
    # 98 s and up to 13 % more are one group, and so on from the first beyond
    assert table["tie"] == ["A"] * 4 + ["B"] * 4
    assert [answer.tie_name(number) for number in (1, 26, 27)] == ["A", "Z", "27"]


def test_notes_say_the_limit_and_the_command():
    plan = replace(plans.plan(), command="dolmen dryrun x", interval="Errors of 9 runs")
    first, mfu, _, last = answer.notes(plan)
    assert first == "GiB: peak of the fullest rank, of 80. Errors of 9 runs."
    assert "peak in bf16" in mfu and last == "Exact memory: dolmen dryrun x"


def test_a_layout_is_explained_by_its_largest_parts():
    plan = plans.plan()
    tiny = plan.ranked[0].estimate.parts | {"cp": 0.01, "ep": 0.098}
    stages = (plans.memory(1, 8), plans.memory(0, 8), plans.memory(7, 8))
    changes = tuple(change(f"change {i}", 97.0 + i, 50.0 + i, True) for i in range(5))
    first = replace(
        plan.ranked[0],
        estimate=plan.ranked[0].estimate._replace(parts=tiny),
        memory=stages,
        changes=changes,
    )
    lines = answer.explanation(replace(plan, ranked=(first, plan.ranked[1])))
    assert lines[0] == f"1. {first.words}: bound by compute" and lines[6][:3] == "2. "
    assert lines[1] == (
        "   time: product 58.0%, tp 10.0%, attention 9.0%, memory traffic 8.0%, bubble 8.0%, "
        "dp 3.0%, sends 2.0%, optimizer 2.0%, ep 0.1%"
    )
    # stage 1 of these three is the fullest
    assert lines[2] == (
        "   GiB of stage 1: activation 24.0, optimizer 20.0, parameter 10.5, compute 4.0, "
        "gradient 4.0, context and workspace 3.0, unsharded 0.5, buffer 0.3"
    )
    assert lines[3:6] == [f"   {answer.format_change(plan, first, c)}" for c in changes[:3]]
    assert len(lines) == 9


def test_changes_are_the_fastest_that_fit_and_what_memory_would_buy():
    plan, layout = plans.plan(), plans.plan().ranked[0]
    fit = [change(f"fits {i}", 90.0 + 5 * i, 60, True) for i in range(4)]
    large = [change("large", 95.0, 90.5, False), change("larger", 96.0, 99, False)]
    slow = change("slow", 98.0, 90, False)

    def shown(*changes: Change) -> list[str]:
        return [c.words for c in answer.changes_to_show(replace(layout, changes=changes))]

    assert shown() == [] and shown(slow) == []
    assert shown(*fit) == ["fits 0", "fits 1", "fits 2"]
    assert shown(fit[0], *large, slow, *fit[1:]) == ["fits 0", "fits 1", "fits 2", "large"]
    lines = [answer.format_change(plan, layout, c) for c in (fit[0], fit[3], large[0])]
    assert lines == [
        "fits 0: 8.2% less time, 60.0 GiB",
        "fits 3: 7.1% more time, 60.0 GiB",
        "large: 3.1% less time, 90.5 GiB, too large by 10.5 GiB",
    ]


def test_the_budget_in_days_energy_and_money():
    """384 nodes of 6.5 kW, 450e9 tokens of 2,048 x 3,072 a step of 98 s."""
    plan = plans.plan()
    days = 450e9 / (2048 * 3072) * 98 / 86400
    assert answer.budget(plan) == [
        f"450 B tokens: {days:,.1f} days ({0.88 * days:,.1f} to {1.13 * days:,.1f}), "
        f"{3072 * 24 * days:,.0f} GPU hours",
        f"energy: {384 * 6.5 / 1000 * 24 * days:,.1f} MWh at full power of the nodes, without "
        "cooling",
        f"rented: {3072 * 24 * days * 1.6:,.0f} at 1.6 per GPU hour",
        f"owned: {384 * 220_000 * days / 1461 + 384 * 6.5 * 24 * days * 0.12:,.0f}, nodes at "
        "220,000 over 4 years, 0.12 per kWh",
    ]
    unknown = replace(
        plan,
        tokens=0,
        prices=replace(plan.prices, rent=0, node=0),
        cluster=replace(plan.cluster, node_watts=None),
    )
    (line,) = answer.budget(unknown)  # 20 tokens for each of 1.008 T parameters
    assert line.startswith(f"20.2 T tokens: {days * 20 * 1008 / 450:,.1f} days")


def dry_run() -> DryRun:
    ranks = tuple(
        RankRun(
            rank,
            Compared("peak", 60 * GIB, int(61.5 * GIB)),
            (
                Compared("parameter", 20 * GIB, 20 * GIB),
                Compared("buffer", int(1 * GIB), int((1 + off) * GIB)),
                Compared("other", GIB, int(1.5 * GIB)),
            ),
            (Compared("tp", 100, 110, 2.0), *([Compared("pp", 50, 50, 1.0)] if rank else [])),
        )
        for rank, off in ((0, 0.7), (1500, 0.0))
    )
    return DryRun(ranks, ("tp 4: too large",))


def test_a_dry_run_is_beside_the_closed_forms():
    plan = replace(plans.plan(), dry=dry_run())
    rejected, grid, _, tp = answer.dry_run_lines(plan)
    assert rejected == "excluded by the dry run: tp 4: too large" and isinstance(grid, Table)
    assert columns(grid) == {
        "dry run of 1.": ["peak GiB", "  buffer", "GiB sent over tp", "GiB sent over pp"],
        "rank 0": ["60.00 (+2.5%)", "1.00 (+70.0%)", "0.00 (+10.0%)", "-"],
        "rank 1,500": ["60.00 (+2.5%)", "1.00 (+0.0%)", "0.00 (+10.0%)", "0.00 (+0.0%)"],
    }
    assert tp == (
        "tp: links are busy for 0.182 s per step shorter than the table assumes (+10.0% of bytes), "
        "which changes its 98 s by at most -0.2%, less where computation hides it."
    )
    assert answer.dry_run_lines(plans.plan()) == []
    left_out = answer.dry_run_lines(replace(plan, dry=replace(dry_run(), left_out="no time")))
    assert left_out == [rejected, "No dry run of the first layout: no time."]


def test_json_has_bytes_and_seconds():
    plan = replace(plans.plan(), fitting=7, dry=dry_run(), assumed=("x",))
    found = answer.plan_dict(plan)
    assert found["days"] == plan.days(plan.ranked[0].estimate).seconds
    assert (found["nodes"], found["gpus"], found["assumed"]) == (384, 3072, ["x"])
    assert found["device_bytes"] == 80 * GIB and (found["considered"], found["fitting"]) == (
        11342,
        7,
    )
    first = found["ranked"][0]
    assert first["stages"][0]["total"] == plan.ranked[0].memory[0].total == first["peak_bytes"]
    assert (first["seconds"], first["low_s"], first["high_s"]) == (98, 98 * 0.88, 98 * 1.13)
    assert first["tokens_s_gpu"] == pytest.approx(2048 / 98)
    assert [one["tie"] for one in found["ranked"]] == [*plan.ties]
    rank = found["dryrun"]["ranks"][1]
    assert rank["held"] == {
        "parameter": [20 * GIB, 20 * GIB],
        "buffer": [GIB, GIB],
        "other": [GIB, int(1.5 * GIB)],
    }
    assert rank["sent"] == {"tp": [100, 110], "pp": [50, 50]}
    assert rank["more_s"] == pytest.approx({"tp": 2 * (100 / 110 - 1), "pp": 0})
    assert "dryrun" not in answer.plan_dict(plans.plan())
    assert "days" not in answer.plan_dict(replace(plan, tokens=0))


def test_generation_has_a_row_for_each_tp():
    rows = tuple(
        Serving(
            tp, 160 * GIB // tp, 3 * GIB // tp, 2 * GIB, tp > 1, 0.02 / tp, 50.0, "memory", 9999
        )
        for tp in (1, 2)
    )
    plan = Inference("m", read_cluster("dgx-a100:1"), 4, 2048, "bf16", rows)
    assert answer.inference_title(plan) == (
        "m: generation on dgx-a100, bf16, 4 sequences of 2,048 tokens, one copy on tp GPUs"
    )
    assert columns(answer.inference_table(plan)) == {
        "tp": ["1", "2"],
        "weights GiB": ["160.0", "80.0"],
        "KV cache GiB": ["3.00", "1.50"],
        "total GiB": ["165.0", "83.5"],
        "fits": ["no", "yes"],
        "ms/token": ["20", "10"],
        "tok/s/GPU": ["50", "50"],
        "bound": ["memory"] * 2,
        "max sequences": ["9,999"] * 2,
    }
    found = answer.inference_dict(plan)
    assert found["device_bytes"] == 80 * GIB and (found["batch"], found["length"]) == (4, 2048)
    assert found["rows"] == [{**asdict(row), "held": row.held} for row in rows]
    assert rows[0].held == 165 * GIB


def test_what_is_counted_moves_the_time_in_proportion():
    assert (
        Compared("", 150, 100, 4.0).more_seconds == 2
        and Compared("", 150, 0, 4.0).more_seconds == 0
    )
    assert [Compared("", *of).off for of in ((100, 150), (0, 7), (0, 0))] == [0.5, 1, 0]
