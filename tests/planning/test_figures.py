"""Figures of a plan are read back from what matplotlib is to draw: each mark lies where the number
is that it stands for, in the unit of its axis.
"""

from dataclasses import replace
from typing import Any

import plans
import pytest
from matplotlib.figure import Figure
from matplotlib.patches import PathPatch, Rectangle

from dolmen.pages import picture
from dolmen.planning import draw, figures
from dolmen.planning.report import FIGURES

GIB = 2**30


def painted(paint, *values) -> Figure:
    """The figure, after it was drawn, so that its layout is final."""
    seen: list[Figure] = []

    def keep(figure: Figure) -> None:
        seen.append(figure)
        paint(figure, *values)

    picture.draw(keep)
    return seen[0]


def texts(axes: Any) -> list[str]:
    return [text.get_text() for text in axes.texts]


def cells(axes: Any, row: float) -> list[str]:
    """Texts right of the axes, in a row."""
    return [t.get_text() for t in axes.texts if getattr(t, "xy", None) == (1, row)]


def spans(axes: Any, upright: bool = False) -> list[tuple[float, float, float, str]]:
    """Of each bar: (place, start, end, tooltip)."""
    bars = []
    for bar in (patch for patch in axes.patches if isinstance(patch, Rectangle)):
        (x0, y0), (x1, y1) = bar.get_bbox().get_points().tolist()
        place, start, end = ((x0 + x1) / 2, y0, y1) if upright else ((y0 + y1) / 2, x0, x1)
        bars.append((place, start, end, bar.get_gid() or ""))
    return bars


def legend(figure: Figure) -> list[str]:
    return [text.get_text() for text in figure.legends[0].get_texts()]


@pytest.mark.parametrize(
    "size", ((8, 24, "1f1b", 384), (64, 256, "interleaved", 100), (1, 2, "gpipe", 1))
)
@pytest.mark.parametrize("figure", FIGURES, ids=[figure.paint.__name__ for figure in FIGURES])
def test_marks_are_within_their_picture(figure, size):
    drawn = painted(figure.paint, plans.plan(*size))
    width, height = drawn.bbox.width, drawn.bbox.height
    for axes in drawn.axes:
        box = axes.get_tightbbox()
        assert box is not None
        # letters are as wide as whole pixels make them, and here they are more than in a file
        assert -8 < box.x0 and box.x1 < width + 8 and -8 < box.y0 and box.y1 < height + 8
        assert axes.bbox.width > width / 4


def test_layouts_are_ranked_by_their_seconds():
    plan = plans.plan()
    plan = replace(plan, ranked=tuple(plans.candidate(8, 8, 50.0 + 3 * i) for i in range(14)))
    (axes,) = painted(figures.paint_ranking, plan).axes
    assert len(axes.containers) == 12 and axes.get_xlim()[0] == 0
    bottom, top = axes.get_ylim()
    assert bottom > 11 and top < 0  # the fastest is on top
    assert cells(axes, -0.75) == ["tokens/s", "MFU", "memory", "bound by"]
    for row, (bar, candidate) in enumerate(zip(axes.containers, plan.ranked, strict=False)):
        dot, _, (whisker,) = bar.lines
        estimate = candidate.estimate
        assert (dot.get_xdata()[0], dot.get_ydata()[0]) == (estimate.seconds, row)
        (low, high) = whisker.get_segments()[0]
        assert [*low, *high] == pytest.approx([estimate.low, row, estimate.high, row])
        assert dot.get_gid().startswith(f"{candidate.words}: {estimate.seconds:.4g}, ")
        tokens = f"{2048 * 3072 / estimate.seconds:,.0f}"
        memory = f"{candidate.fullest / GIB:.1f} GiB"
        assert cells(axes, row) == [tokens, "44.0%", memory, "compute"]
    bold = [text.get_text() for text in axes.texts if text.get_weight() == "bold"]
    assert bold == ["tp 8 pp 8"]


def test_a_layout_has_its_mesh_above_its_other_options():
    below = ["zero 1 sp interleaved v 3 recompute full", "layers 4 microbatch 2"]
    assert figures._name(plans.candidate(8, 8, 1.0)) == ["tp 8 pp 8", *below]
    assert figures._name(replace(plans.candidate(8, 8, 1.0), layout={})) == ["one GPU"]


def test_parts_of_a_step_lie_end_to_end():
    plan = plans.plan()
    figure = painted(figures.paint_step, plan)
    (axes,) = figure.axes
    names = {name: fill for name, fill in figures.PARTS.items() if name in plans.PARTS}
    assert legend(figure) == [fill.title for fill in names.values()]
    bars = iter(spans(axes))
    inside = (text for text in axes.texts if text.get_bbox_patch())
    for row, candidate in enumerate(plan.ranked):
        end, labels = 0.0, []
        for name, fill in names.items():
            seconds = candidate.estimate.parts[name]
            *bar, hint = next(bars)
            assert bar == pytest.approx([row, end, end + seconds])
            assert hint == f"{fill.title}: {seconds:.4g} s"
            end += seconds
            labels += [f"{plans.PARTS[name]:.0%}"] if plans.PARTS[name] > 0.06 else []
        assert end == pytest.approx(candidate.estimate.seconds)
        shares = [next(inside) for _ in labels]
        assert [text.get_text() for text in shares] == labels
        assert {text.xy for text in shares} == {(0.5, 0.5)}  # of its own part
    assert not [*bars, *inside] and axes.get_xlim()[0] == 0 and axes.get_xlim()[1] > end


@pytest.mark.parametrize("pp", (8, 64))
def test_memory_of_a_rank_is_a_column_below_the_limit(pp):
    plan = plans.plan(pp, 64)
    figure = painted(figures.paint_memory, plan)
    (axes,) = figure.axes
    ranks = figures.evenly(pp, 32)
    assert legend(figure) == [fill.title for fill in figures.KINDS.values()]
    assert [label.get_text() for label in axes.get_xticklabels()] == [*map(str, ranks)]
    bars = iter(spans(axes, upright=True))
    for place, rank in enumerate(ranks):
        stage, base = plan.ranked[0].memory[rank], 0.0
        kinds = {**stage.live._asdict(), "other": stage.other}
        for kind, fill in figures.KINDS.items():
            *bar, hint = next(bars)
            assert bar == pytest.approx([place, base, base + kinds[kind] / GIB])
            assert hint.startswith(f"rank {rank}, {fill.title}: ")
            base += kinds[kind] / GIB
    totals = [f"{plan.ranked[0].memory[rank].total / GIB:.1f}" for rank in ranks]
    assert texts(axes) == (totals if pp == 8 else []) + ["a100: 80.00 GiB"]
    assert axes.lines[0].get_ydata() == [80, 80] and axes.get_ylim()[1] > 80
    # the line is the device's memory, not the part of it that layouts may use
    (axes,) = painted(figures.paint_memory, replace(plan, headroom=0.05)).axes
    assert texts(axes)[-1] == "a100: 80.00 GiB, of which layouts use at most 76.00 GiB"
    assert axes.lines[0].get_ydata() == [80, 80]


def test_memory_along_a_schedule_follows_the_chunks_that_are_held():
    plan = plans.plan()
    (axes,) = painted(figures.paint_memory_course, plan).axes
    assert [line.get_label() for line in axes.lines[:3]] == ["rank 0", "rank 4", "rank 7"]
    for line, rank in zip(axes.lines, (0, 4, 7), strict=False):
        stage = plan.ranked[0].memory[rank]
        rest, each = stage.total - stage.live.activation, stage.live.activation
        kinds = [action.kind for action in plan.timeline.schedule.actions[rank]]
        counts = [kinds[: n + 1].count("F") - kinds[: n + 1].count("B") for n in range(len(kinds))]
        most = max(counts)
        wanted = [(0.0, rest)]
        times = plan.timeline.simulation.times[rank]
        for kind, count, (start, end) in zip(kinds, counts, times, strict=True):
            during = rest + each * (count if kind == "F" else count + 1) / most
            after = rest + each * count / most
            wanted += [(start, wanted[-1][1]), (start, during), (end, during), (end, after)]
        # before its first action a rank holds what that will hold
        wanted[0] = (0.0, wanted[2][1])
        wanted[1] = (wanted[1][0], wanted[2][1])
        assert line.get_xdata() == pytest.approx([at for at, _ in wanted])
        assert line.get_ydata() == pytest.approx([level / GIB for _, level in wanted])


def boxes(axes: Any) -> dict[tuple[int, float, float], str]:
    """(row, start, end) of all boxes of a schedule -> colour."""
    found = {}
    for patch in (patch for patch in axes.patches if isinstance(patch, PathPatch)):
        colour = "#" + "".join(f"{round(255 * part):02x}" for part in patch.get_facecolor()[:3])
        for corners in patch.get_path().to_polygons(closed_only=False):
            (left, low), (right, high) = corners.min(0).tolist(), corners.max(0).tolist()
            assert high - low == pytest.approx(0.84)
            found[round((low + high) / 2), left, right] = colour
    return found


@pytest.mark.parametrize("kind", ("1f1b", "zero-bubble-v"))
def test_actions_are_boxes_at_their_times(kind):
    """With the numbers of their microbatches, in the row of their rank."""
    plan = plans.plan(4, 6, kind)
    schedule, simulation = plan.timeline.schedule, plan.timeline.simulation
    figure = painted(figures.paint_timeline, plan)
    (axes,) = figure.axes
    fills = [draw.KINDS[kind].title for kind in ("FB" if kind == "1f1b" else "FIW")]
    assert legend(figure) == [*fills, *(["chunk 1"] if schedule.chunks > 1 else []), "idle"]
    wanted, numbers = {}, {}
    for rank, actions in enumerate(schedule.actions):
        wanted[rank, 0.0, simulation.span] = draw.IDLE.colour
        for action, (start, end) in zip(actions, simulation.times[rank], strict=True):
            shade = draw._shade(draw.KINDS[action.kind].colour, action.chunk, schedule.chunks)
            wanted[rank, start, end] = shade
            numbers[(start + end) / 2, rank] = str(action.micro)
        busy = sum(end - start for start, end in simulation.times[rank])
        idle = f"{1 - busy / simulation.span:.0%}"
        assert cells(axes, rank) == [idle, f"{simulation.peak[rank]:.4g}"]
    assert boxes(axes) == wanted
    plain = [text for text in axes.texts if not hasattr(text, "xy")]
    assert {text.get_position(): text.get_text() for text in plain} == numbers
    assert axes.get_xlim() == (0, simulation.span) and axes.get_ylim()[0] > axes.get_ylim()[1]


def test_of_a_long_schedule_both_ends_are_shown():
    plan = plans.plan(4, 256)
    (first, part), (last, span) = figures.windows(plan.timeline)
    assert (first, span) == (0, plan.timeline.simulation.span)
    assert part == span - last == pytest.approx(span * 240 / 512)
    left, right = painted(figures.paint_timeline, plan).axes
    assert left.get_xlim() == (first, part) and right.get_xlim() == (last, span)
    for axes, (low, high) in ((left, (first, part)), (right, (last, span))):
        assert all(low <= start < end <= high for _, start, end in boxes(axes))
        assert len(boxes(axes)) > 4 * 240


def test_traffic_is_a_bar_for_each_tier():
    figure = painted(figures.paint_traffic, plans.plan())
    (axes,) = figure.axes
    assert legend(figure) == ["tp", "dp", "pp"]
    wanted = [(0, 0, 310, "node, tp"), (1, 0, 20, "leaf, dp"), (1, 20, 24, "leaf, pp")]
    wanted.append((2, 0, 11, "core, dp"))
    for (*bar, hint), (*place, name) in zip(spans(axes), wanted, strict=True):
        assert bar == pytest.approx(place) and hint.startswith(f"{name}: ")
    assert [text for text in texts(axes) if "of the step" in text] == [
        "310 GB; busy 19.6 s, 20% of the step",
        "24 GB; busy 4.9 s, 5% of the step",
        "11 GB; busy 2.94 s, 3% of the step",
    ]


def test_fleets_are_where_their_days_and_costs_are():
    plan = plans.plan()
    left, right = painted(figures.paint_front, plan).axes
    for axes, worths in (
        (left, [lambda fleet: fleet.gpus]),
        (right, [plan.rent_cost, plan.owning_cost]),
    ):
        assert axes.get_xscale() == axes.get_yscale() == "log"
        wanted = [(plan.days(f.estimate), worth(f)) for worth in worths for f in plan.fleets]
        for bar, (days, worth) in zip(axes.containers, wanted, strict=True):
            dot, _, (whisker,) = bar.lines
            assert (dot.get_xdata()[0], dot.get_ydata()[0]) == (days.seconds, worth)
            ((low, _), (high, _)) = whisker.get_segments()[0]
            assert [low, high] == pytest.approx([days.low, days.high])
        curves = [line for line in axes.lines if len(line.get_xdata()) == len(plan.front)]
        for curve, worth in zip(curves, worths, strict=True):
            assert [*curve.get_ydata()] == [worth(fleet) for fleet in plan.front]
            assert [*curve.get_xdata()] == [plan.days(f.estimate).seconds for f in plan.front]
    assert {f"{fleet.gpus:,}" for fleet in plan.fleets} == {*texts(left)}


@pytest.mark.parametrize("count", (1, 2, 4, 9, 12, 13, 500))
def test_boxes_of_a_row_are_centred(count):
    places = figures.box_places(count)
    assert len(places) == min(count, 12) and sum(places) / len(places) == pytest.approx(0.5)
    gaps = [b - a for a, b in zip(places, places[1:], strict=False)]
    assert not gaps or min(gaps) == pytest.approx(max(gaps)) == pytest.approx(
        1 / max(4, len(places))
    )
    assert 0 < places[0] and places[-1] < 1


def test_every_box_of_the_cluster_hangs_on_one_above():
    (axes,) = painted(figures.paint_cluster, plans.plan(nodes=384)).axes
    bars = spans(axes)
    rows = [[x for x, *_, at in boxes_at(axes) if at == y] for y in range(5)]
    assert [len(row) for row in rows] == [1, 3, 12, 12, 8] and len(bars) == 36
    for y, (above, row) in enumerate(zip(rows, rows[1:], strict=False), 1):
        wires = [line for line in axes.lines if line.get_ydata()[1] == y - 0.25]
        assert [line.get_xdata()[1] for line in wires] == pytest.approx(row)
        tops = [round(line.get_xdata()[0], 9) for line in wires]
        counts = [tops.count(x) for x in dict.fromkeys(tops)]
        assert {*tops} <= {*above, 0.5} and max(counts) - min(counts) <= 1


def boxes_at(axes: Any) -> list[tuple[float, int]]:
    """(middle, row) of each box."""
    return [
        (round(x, 9), round(y))
        for x, y in (
            (patch.get_x() + patch.get_width() / 2, patch.get_y() + patch.get_height() / 2)
            for patch in axes.patches
        )
    ]


def test_numbers_spread_evenly_have_both_ends():
    for count in range(1, 60):
        for most in (3, 16):
            numbers = figures.evenly(count, most)
            assert len(numbers) == min(count, most) and (numbers[0], numbers[-1]) == (0, count - 1)
            steps = [b - a for a, b in zip(numbers, numbers[1:], strict=False)]
            assert not steps or max(steps) - min(steps) <= 1
