"""The picture has a box for every action, says what was measured, and is a file of the kind asked
for. Boxes are read back in test_figures.py, as a plan has the same picture.
"""

import re

import pytest
from matplotlib.figure import Figure

from dolmen.pages import picture
from dolmen.pages.picture import Fill
from dolmen.parallel.simulation import SCHEDULES, make_schedule, simulate
from dolmen.planning import draw


def said(file) -> list[str]:
    return re.findall("<text[^>]*>([^<]*)</text>", file.read_text())


@pytest.mark.parametrize("name", SCHEDULES)
def test_svg_holds_what_was_measured(name, tmp_path):
    schedule = make_schedule(name, 4, 8, 2 if name in ("interleaved", "zero-bubble-v") else 1)
    simulation = simulate(schedule)
    draw.gantt(simulation, schedule, tmp_path / "a.svg", "as asked")
    words = {*said(tmp_path / "a.svg")}
    span = f"span {simulation.span:.4g}, bubble {simulation.bubble:.1%}"
    assert {"as asked", span, *(f"rank {rank}" for rank in range(4))} <= words
    assert {f"{peak:.4g}" for peak in simulation.peak} <= words
    kinds = {action.kind for action in schedule.actions[0]}
    assert all((fill.title in words) == (kind in kinds) for kind, fill in draw.KINDS.items())


def test_equal_schedules_give_equal_files(tmp_path):
    schedule = make_schedule("1f1b", 2, 4)
    for name in ("a.svg", "b.svg"):
        draw.gantt(simulate(schedule), schedule, tmp_path / name, "one")
    assert (tmp_path / "a.svg").read_bytes() == (tmp_path / "b.svg").read_bytes()


def test_a_name_is_text_whatever_is_in_it(tmp_path):
    """No formula, which may be none that matplotlib knows, and no markup."""
    schedule = make_schedule("gpipe", 2, 2)
    draw.gantt(simulate(schedule), schedule, tmp_path / "a.svg", r"$\none{$ <b>&")
    assert r"$\none{$ &lt;b&gt;&amp;" in said(tmp_path / "a.svg")


def test_png_of_several(tmp_path):
    """On one scale of time: the shorter one does not fill the width."""
    panels = [
        (name, make_schedule(name, 2, 4), simulate(make_schedule(name, 2, 4)))
        for name in ("gpipe", "zero-bubble")
    ]
    draw.draw_stacked(panels, tmp_path / "a.png")
    assert (tmp_path / "a.png").read_bytes().startswith(b"\x89PNG")


def test_other_suffixes_are_refused(tmp_path):
    schedule = make_schedule("gpipe", 2, 2)
    for name in ("a.pdf", "a"):
        with pytest.raises(ValueError, match="use .svg or .png"):
            draw.gantt(simulate(schedule), schedule, tmp_path / name, "")
    assert not list(tmp_path.iterdir())


def test_narrow_boxes_have_no_numbers(tmp_path):
    schedule = make_schedule("gpipe", 2, 300)
    draw.gantt(simulate(schedule), schedule, tmp_path / "a.svg", "many")
    assert not {"7", "17", "299"} & {*said(tmp_path / "a.svg")}


def test_later_chunks_are_paler():
    assert draw._shade("#336699", 0, 1) == "#336699" and draw._shade("#000000", 1, 2) == "#808080"
    shades = [int(draw._shade("#406080", chunk, 4)[1:3], 16) for chunk in range(4)]
    assert shades[0] == 0x40 and shades == sorted(set(shades)) and shades[-1] == 182


def test_a_legend_is_no_wider_than_its_picture():
    """Of a schedule with five chunks per rank: what does not fit in a row goes to a second one."""
    figure = Figure(figsize=(picture.WIDTH, 3))
    fills = [*draw.KINDS.values(), *(Fill(f"chunk {n}", "#b5d0ec") for n in range(1, 5)), draw.IDLE]
    picture.add_legend(figure, fills, len(fills))
    (legend,) = figure.legends
    assert legend.get_window_extent().width <= figure.bbox.width
    assert [text.get_text() for text in legend.get_texts()] == [fill.title for fill in fills]
