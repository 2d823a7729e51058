"""Figures of a plan are read back: what a mark's place says by the ticks beside it is the number
that it stands for.
"""

import math
import re
from collections.abc import Callable
from dataclasses import replace
from xml.etree import ElementTree

import plans
import pytest

from dolmen.pages.page import Drawing
from dolmen.planning import figures
from dolmen.planning.report import FIGURES

GIB, GB = 2**30, 1e9
UNITS = {"k": 1e3, "M": 1e6, "B": 1e9, "T": 1e12}
PIXEL = 0.11  # coordinates have one decimal
Point = tuple[float, float]


def value_of(words: str) -> float:
    """The number that a tick's text says: 12.5k."""
    return float(words.rstrip("kMBT")) * UNITS.get(words[-1], 1)


class Picture:
    """Marks of a drawing with their places, in the order in which they were drawn."""

    def __init__(self, drawing: Drawing):
        svg = ElementTree.fromstring(str(drawing))
        *_, self.width, self.height = map(float, svg.attrib["viewBox"].split())
        self.texts: list[tuple[float, float, str, str]] = []
        self.boxes: list[tuple[float, float, float, float, str, str]] = []
        self.anchors: dict[tuple[float, float, str], str] = {}
        self.lines: list[tuple[list[Point], str]] = []
        self.dots: list[tuple[float, float, str, str]] = []
        for mark in svg:
            get, hint = mark.attrib.get, mark.findtext("title") or ""
            x, y, kind = float(get("x", 0)), float(get("y", 0)), get("class", "")
            if mark.tag == "text":
                self.texts.append((x, y, mark.text or "", kind))
                self.anchors[x, y, mark.text or ""] = get("text-anchor", "")
            elif mark.tag == "rect":
                size = float(get("width", 0)), float(get("height", 0))
                self.boxes.append((x, y, *size, get("fill", "")[7:-1], hint))
            elif mark.tag == "circle":
                self.dots.append((float(get("cx", 0)), float(get("cy", 0)), hint, kind))
            elif kind == "thin":
                self._add_boxes(get("d", ""), get("fill", "")[7:-1])
            else:
                points = [tuple(map(float, p.split())) for p in get("d", "")[1:].split("L")]
                self.lines.append((points, kind))

    def _add_boxes(self, path: str, fill: str) -> None:
        for x, y, width, height in re.findall(r"M(\S+) (\S+?)h(.+?)v(.+?)h-\3z", path):
            self.boxes.append((float(x), float(y), float(width), float(height), fill, ""))

    def extent(self, x: float, y: float, words: str) -> Point:
        """About where a text begins and ends: 5.2 pixels a letter, fewer than any font takes."""
        left = x - {"start": 0.0, "middle": 0.5, "end": 1.0}[self.anchors[x, y, words]] * 5.2 * len(
            words
        )
        return left, left + 5.2 * len(words)

    def legend(self) -> dict[str, str]:
        """Fill -> text of the boxes of the legend, 16 pixels wide, whose texts do not overlap."""
        boxes = [(x, y, fill) for x, y, width, _, fill, _ in self.boxes if width == 16]
        texts = [next(t for t in self.texts if t[:2] == (x + 21, y + 10)) for x, y, _ in boxes]
        for (x, y, *_), text in zip(boxes[1:], texts, strict=False):
            assert y + 10 != text[1] or self.extent(*text[:3])[1] < x
        return {fill: text[2] for (*_, fill), text in zip(boxes, texts, strict=True)}

    def ticks(self, place: int) -> dict[float, float]:
        """Pixel -> value of the ticks of the horizontal axis (0) or of the vertical one (1), as
        their grid lines are and as their texts say.
        """
        grid = {points[0][place] for points, kind in self.lines if kind == "grid"}
        around = (0.0, 4.0)[place]  # texts stand below the middle of their line
        texts = {
            (x, y - around)[place]: words for x, y, words, kind in self.texts if kind == "small"
        }
        return {at: value_of(texts[at]) for at in sorted(grid) if at in texts}

    def scale(self, place: int, log: bool = False) -> Callable[[float], float]:
        """Pixel of the horizontal axis (0) or the vertical one (1) -> value."""
        ticks = [*self.ticks(place).items()]
        (first, low), (last, high) = ticks[0], ticks[-1]
        to, back = (math.log, math.exp) if log else (float, float)

        def read(pixel: float) -> float:
            return back(to(low) + (pixel - first) / (last - first) * (to(high) - to(low)))

        assert [read(pixel) for pixel, _ in ticks] == pytest.approx([v for _, v in ticks], rel=5e-3)
        # more is on the right, and above
        assert (last - first) * (high - low) * (1, -1)[place] > 0
        return read

    def fill(self, *names: str) -> list[tuple[float, float, float, float, str, str]]:
        return [box for box in self.boxes if box[4] in names and box[5]]

    def kind(self, name: str) -> list[list[Point]]:
        return [points for points, kind in self.lines if kind == name]


def near(*values: float, abs: float = 0.0):
    return pytest.approx([*values], rel=2e-3, abs=abs)


@pytest.mark.parametrize(
    "size", ((8, 24, "1f1b", 384), (64, 256, "interleaved", 100), (1, 2, "gpipe", 1))
)
@pytest.mark.parametrize("figure", FIGURES, ids=[figure.draw.__name__ for figure in FIGURES])
def test_marks_are_within_their_picture(figure, size):
    picture = Picture(figure.draw(plans.plan(*size)))
    for x, y, width, height, *_ in picture.boxes:
        assert 0 <= x and x + width <= picture.width and 0 <= y and y + height <= picture.height
    for mark in picture.texts:
        left, right = picture.extent(*mark[:3])
        assert 0 <= left and right <= picture.width + 2 and 8 <= mark[1] <= picture.height, mark
    points = [point for line, _ in picture.lines for point in line]
    for x, y in [*points, *((x, y) for x, y, *_ in picture.dots)]:
        assert 0 <= x <= picture.width and 0 <= y <= picture.height


def test_layouts_are_ranked_by_their_seconds():
    plan = plans.plan()
    plan = replace(plan, ranked=tuple(plans.candidate(8, 8, 50.0 + 3 * i) for i in range(14)))
    picture = Picture(figures.ranking(plan))
    read = picture.scale(0)
    assert len(picture.dots) == 12 and read(figures.BARS_LEFT) == pytest.approx(0, abs=0.1)
    whiskers = picture.kind("whisker")
    longest = max(x for line in whiskers for x, _ in line)
    assert figures.BARS_RIGHT * 0.96 < longest < figures.BARS_RIGHT
    heads = {words: x for x, y, words, _ in picture.texts if y == 14}
    assert [*heads] == ["tokens/s", "MFU", "memory", "bound by"]
    for i, ((x, y, hint, _), candidate) in enumerate(zip(picture.dots, plan.ranked, strict=False)):
        estimate = candidate.estimate
        assert read(x) == pytest.approx(estimate.seconds, abs=0.1) and candidate.words in hint
        assert y == pytest.approx(47 + 34 * i)
        (low, high), *ends = whiskers[3 * i : 3 * i + 3]
        assert [read(low[0]), read(high[0])] == near(estimate.low, estimate.high, abs=0.1)
        assert low[1] == high[1] == y and [end[0][0] for end in ends] == [low[0], high[0]]
        assert all([point[1] for point in end] == [y - 4, y + 4] for end in ends)
        cells = {x: words for x, at, words, _ in picture.texts if at == y + 4 and x > 650}
        tokens = f"{2048 * 3072 / estimate.seconds:,.0f}"
        memory = f"{candidate.fullest / GIB:.1f} GiB"
        assert cells == dict(zip(heads.values(), (tokens, "44.0%", memory, "compute"), strict=True))
    assert [words for *_, words, kind in picture.texts if kind == "strong"] == ["tp 8 pp 8"]


def test_the_name_of_a_layout_is_in_the_middle_of_its_row():
    drawing = Drawing("", 100)
    figures.draw_name(drawing, plans.candidate(8, 8, 1.0), 50.0, False)
    (*_, mesh, kind), *below = Picture(drawing).texts
    assert (mesh, kind) == ("tp 8 pp 8", "") and {x for x, *_ in below} == {figures.BARS_LEFT - 12}
    lines = [y for _, y, *_ in Picture(drawing).texts]
    assert len(lines) == 3 and [b - a for a, b in zip(lines, lines[1:], strict=False)] == [11, 11]
    assert 46 <= sum(lines) / 3 <= 55  # base lines, of letters 8 pixels high
    alone = Drawing("", 100)
    figures.draw_name(alone, replace(plans.candidate(8, 8, 1.0), layout={}), 50.0, True)
    assert Picture(alone).texts == [(268, 54, "one GPU", "strong")]


def test_parts_of_a_step_lie_end_to_end():
    plan = plans.plan()
    picture = Picture(figures.step(plan))
    read = picture.scale(0)
    fills = [figures.FILL.get(name, name) for name in figures.PART_NAMES if name in plans.PARTS]
    bars = picture.fill(*fills)
    assert len(bars) == 8 * len(fills) and [*picture.legend()] == fills
    assert 860 < max(x + width for x, _, width, *_ in bars) < 900
    assert [words for *_, words, kind in picture.texts if kind == "strong"] == ["tp 8 pp 8"]
    for row, candidate in enumerate(plan.ranked):
        end = 0.0
        for x, y, width, height, fill, _ in bars[len(fills) * row :][: len(fills)]:
            name = {"memory-bound": "memory"}.get(fill, fill)
            seconds = candidate.estimate.parts[name]
            assert [read(x), read(x + width)] == near(end, end + seconds, abs=0.05)
            assert (y, height) == (60 + 34 * row, 28)
            end += seconds
            inside = [
                w
                for at, h, w, k in picture.texts
                if k == "inside"
                and y < h < y + 28
                and at == pytest.approx(x + width / 2, abs=PIXEL)
            ]
            wide = seconds / candidate.estimate.seconds > 0.055
            assert inside == ([f"{seconds / candidate.estimate.seconds:.0%}"] if wide else [])
        assert end == pytest.approx(candidate.estimate.seconds)


@pytest.mark.parametrize("pp", (8, 64))
def test_memory_of_a_rank_is_a_column_below_the_limit(pp):
    plan = plans.plan(pp, 64)
    picture = Picture(figures.rank_memory(plan))
    read, ranks = picture.scale(1), figures.evenly(pp, 32)
    assert ranks[0] == 0 and ranks[-1] == pp - 1 and len(ranks) == min(pp, 32)
    columns = picture.fill(*figures.KINDS)
    assert picture.legend() == figures.KINDS
    assert len(columns) == len(ranks) * len(figures.KINDS)
    for i, rank in enumerate(ranks):
        stage, base = plan.ranked[0].memory[rank], 0.0
        kinds = {**stage.live._asdict(), "other": stage.other}
        for x, y, width, height, kind, hint in columns[8 * i : 8 * i + 8]:
            top = base + kinds[kind] / GIB
            assert [read(y + height), read(y)] == near(base, top, abs=0.05)
            assert hint.startswith(f"rank {rank}, ")
            base = top
            assert 60 <= x and x + width <= 900
        middle = [at for at, y, words, _ in picture.texts if y == 306 and words == str(rank)]
        assert middle == [pytest.approx(x + width / 2, abs=PIXEL)]
    totals = [words for _, y, words, kind in picture.texts if kind == "small" and "." in words]
    wanted = [f"{plan.ranked[0].memory[rank].total / GIB:.1f}" for rank in ranks]
    assert totals == (wanted if pp == 8 else [])
    (limit,) = picture.kind("limit")
    assert [read(y) for _, y in limit] == near(80, 80) and [x for x, _ in limit] == [60, 900]


def test_memory_along_a_schedule_follows_the_chunks_that_are_held():
    plan = plans.plan()
    picture = Picture(figures.memory_along(plan))
    seconds, gib = picture.scale(0), picture.scale(1)
    assert figures.evenly(8, 3) == [0, 4, 7]
    for i, rank in enumerate((0, 4, 7)):
        stage = plan.ranked[0].memory[rank]
        rest, each = stage.total - stage.live.activation, stage.live.activation
        level, wanted = None, []
        kinds = [action.kind for action in plan.timeline.schedule.actions[rank]]
        counts = [kinds[: n + 1].count("F") - kinds[: n + 1].count("B") for n in range(len(kinds))]
        most = max(counts)
        for kind, count, (start, end) in zip(
            kinds, counts, plan.timeline.simulation.times[rank], strict=True
        ):
            during = rest + each * (count if kind == "F" else count + 1) / most
            after = rest + each * count / most
            level = during if level is None else level
            wanted += [(start, level), (start, during), (end, during), (end, after)]
            level = after
        line = picture.kind(f"course{i}")[0]
        assert [seconds(x) for x, _ in line] == near(*(at for at, _ in wanted), abs=0.05)
        assert [gib(y) for _, y in line] == near(*(level / GIB for _, level in wanted), abs=0.1)


@pytest.mark.parametrize("kind", ("1f1b", "zero-bubble-v"))
def test_actions_are_boxes_at_their_times(kind):
    plan = plans.plan(4, 6, kind)
    schedule, simulation = plan.timeline.schedule, plan.timeline.simulation
    picture = Picture(figures.timeline(plan))
    read = picture.scale(0)
    for rank in range(4):
        top = 34 + 20 * rank
        boxes = sorted(
            (x, width, fill)
            for x, y, width, height, fill, _ in picture.boxes
            if y == top + 2 and height == 16 and fill != "idle"
        )
        assert [*picture.legend()] == [*("FB" if kind == "1f1b" else "FIW"), "idle"]
        actions = list(zip(schedule.actions[rank], simulation.times[rank], strict=True))
        assert [fill for *_, fill in boxes] == [action.kind for action, _ in actions]
        assert [read(x) for x, *_ in boxes] == near(*(start for _, (start, _) in actions), abs=0.05)
        ends = [read(x + width) for x, width, _ in boxes]
        assert ends == near(*(end for _, (_, end) in actions), abs=0.05)
        numbered = [action for action, _ in actions if not action.chunk]
        numbers = {
            x: words for x, y, words, size in picture.texts if size == "tiny" and y == top + 14
        }
        assert [*numbers.values()] == [str(action.micro) for action in numbered]
        middles = [(start + end) / 2 for action, (start, end) in actions if not action.chunk]
        assert [read(x) for x in numbers] == near(*middles, abs=0.05)
        idle = 1 - sum(end - start for start, end in simulation.times[rank]) / simulation.span
        assert f"{idle:.0%} idle" in [words for _, y, words, _ in picture.texts if y == top + 14]


def test_of_a_long_schedule_both_ends_are_shown():
    plan = plans.plan(4, 256)
    (first, part), (last, span) = figures.windows(plan.timeline)
    assert (first, span) == (0, plan.timeline.simulation.span)
    assert part == span - last == pytest.approx(span * 240 / 512)


def test_traffic_is_a_bar_for_each_tier():
    plan = plans.plan()
    picture = Picture(figures.traffic(plan))
    read, bars = picture.scale(0), picture.fill(*figures.AXES)
    assert [*picture.legend()] == ["tp", "dp", "pp"]
    assert 660 < max(x + width for x, _, width, *_ in bars) < 700
    starts = {"tp": [0], "pp": [0], "dp": [4, 0]}
    places = [(40, "tp", 310), (80, "pp", 4), (80, "dp", 20), (120, "dp", 11)]
    for (x, y, width, _, fill, hint), (row, axis, sent) in zip(bars, places, strict=True):
        start = starts[axis].pop(0)
        assert (y, fill) == (row, axis) and hint.startswith(f"{axis} over ")
        assert [read(x), read(x + width)] == near(start, start + sent, abs=0.1)
    said = [words for *_, words, kind in picture.texts if "of the step" in words]
    assert said == [
        "310 GB; busy 19.6 s, 20% of the step",
        "24 GB; busy 4.9 s, 5% of the step",
        "11 GB; busy 2.94 s, 3% of the step",
    ]


def test_fleets_are_where_their_days_and_costs_are():
    plan = plans.plan()
    picture = Picture(figures.front(plan))
    left = [dot for dot in picture.dots if dot[0] <= 430]
    right = [dot for dot in picture.dots if dot[0] > 430]
    ticks = picture.ticks(0)
    for dots, worths, low, high in (
        (left, [lambda f: f.gpus], 60, 430),
        (right, [plan.rent_cost, plan.owning_cost], 530, 900),
    ):
        panel = Picture(Drawing("", 0))
        panel.texts = [t for t in picture.texts if low - 60 < t[0] <= high]
        panel.lines = [
            (p, k) for p, k in picture.lines if low <= p[0][0] and p[-1][0] <= high + 0.1
        ]
        days, across = panel.scale(0, log=True), panel.scale(1, log=True)
        wanted = [(plan.days(f.estimate), worth(f)) for worth in worths for f in plan.fleets]
        assert [days(x) for x, *_ in dots] == near(*(d.seconds for d, _ in wanted))
        assert [across(y) for _, y, *_ in dots] == pytest.approx([w for _, w in wanted], rel=0.02)
        whiskers = panel.kind("whisker")
        assert [days(line[0][0]) for line in whiskers] == near(*(d.low for d, _ in wanted))
        assert [days(line[1][0]) for line in whiskers] == near(*(d.high for d, _ in wanted))
        assert all(low < x < high and 40 < y < 250 for x, y, *_ in dots)
        best = [(x, y) for x, y, _, kind in dots if kind == "dot"]
        curves = [panel.kind(f"course{i}")[0] for i in range(len(worths))]
        assert [point for curve in curves for point in curve] == best
    assert ticks
    counts = [words for _, _, words, _ in picture.texts if words.replace(",", "").isdigit()]
    assert {f"{fleet.gpus:,}" for fleet in plan.fleets} <= {*counts}


@pytest.mark.parametrize("count", (1, 2, 4, 9, 12, 13, 500))
def test_boxes_of_a_row_are_centred_and_do_not_touch(count):
    drawing = Drawing("", 100)
    figures._draw_row(drawing, count, 20, "row")
    picture, places = Picture(drawing), figures._box_places(count)
    assert len(places) == min(count, 12) and sum(places) / len(places) == pytest.approx(310)
    lefts = [(x, width) for x, _, width, *_ in picture.boxes]
    assert all(x + width < other for (x, width), (other, _) in zip(lefts, lefts[1:], strict=False))
    assert 0 <= lefts[0][0] and sum(lefts[-1]) <= 620
    dots = [x for x, _, words, _ in picture.texts if words == "…"]
    assert dots == ([pytest.approx(places[-2], abs=PIXEL)] if count > 12 else [])
    assert len(lefts) == len(places) - len(dots)


@pytest.mark.parametrize("above, below", ((1, 4), (2, 7), (5, 12), (3, 100), (12, 12)))
def test_every_box_hangs_on_one_above(above, below):
    drawing = Drawing("", 100)
    figures._draw_wires(drawing, above, below, 20, 90)
    lines = Picture(drawing).kind("wire")
    assert [x for _, (x, _) in lines] == pytest.approx(figures._box_places(below), abs=PIXEL)
    assert all((start[1], end[1]) == (48, 90) for start, end in lines)
    tops = [start[0] for start, _ in lines]
    assert tops == sorted(tops)
    joined = [tops.count(x) for x in dict.fromkeys(tops)]
    assert len(joined) == min(above, below, 12) and max(joined) - min(joined) <= 1


def test_numbers_spread_evenly_have_both_ends():
    for count in range(1, 60):
        for most in (3, 16):
            numbers = figures.evenly(count, most)
            assert len(numbers) == min(count, most) and (numbers[0], numbers[-1]) == (0, count - 1)
            steps = [b - a for a, b in zip(numbers, numbers[1:], strict=False)]
            assert not steps or max(steps) - min(steps) <= 1
