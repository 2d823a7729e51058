"""The picture has a box for every action, says what was measured, and is a file of the kind asked
for.
"""

from pathlib import Path

import pytest

from dolmen.parallel.simulation import SCHEDULES, make_schedule, simulate
from dolmen.planning import draw


@pytest.mark.parametrize("name", SCHEDULES)
def test_svg_holds_what_was_measured(name, tmp_path):
    schedule = make_schedule(name, 4, 8, 2 if name in ("interleaved", "zero-bubble-v") else 1)
    simulation = simulate(schedule)
    draw.gantt(simulation, schedule, tmp_path / "a.svg", "as asked")
    text = (tmp_path / "a.svg").read_text()
    assert (
        "<!-- as asked -->" in text
        and f"<!-- span {simulation.span:.4g}    bubble {simulation.bubble:.1%} -->" in text
    )
    for rank in range(4):
        assert f"<!-- rank {rank} -->" in text and f"<!-- {simulation.peak[rank]:.4g} -->" in text
    kinds = {action.kind for action in schedule.actions[0]}
    assert all(
        (f"<!-- {label} -->" in text) == (kind in kinds) for kind, (label, _) in draw.KINDS.items()
    )


def test_png_of_several(tmp_path):
    panels = [
        (name, make_schedule(name, 2, 4), simulate(make_schedule(name, 2, 4)))
        for name in ("gpipe", "1f1b")
    ]
    draw.draw_stacked(panels, tmp_path / "a.png")
    assert (tmp_path / "a.png").read_bytes().startswith(b"\x89PNG")


def test_other_suffixes_are_refused(tmp_path):
    schedule = make_schedule("gpipe", 2, 2)
    for name in ("a.pdf", "a"):
        with pytest.raises(ValueError, match="use .svg or .png"):
            draw.gantt(simulate(schedule), schedule, tmp_path / name, "")
    assert not list(tmp_path.iterdir())


def test_later_chunks_are_paler():
    shades = [sum(draw._shade("#406080", chunk, 4)) for chunk in range(4)]
    assert shades == sorted(set(shades)) and shades[-1] < 2.7


@pytest.fixture
def figures(monkeypatch) -> list:
    """What was drawn instead of a file."""
    from matplotlib.figure import Figure

    drawn: list = []
    monkeypatch.setattr(Figure, "savefig", lambda figure, to, **_: drawn.append(figure))
    return drawn


def test_boxes_lie_at_the_times_of_their_actions(figures):
    """Read back from what matplotlib is to draw: each rank in its row, on one scale of time."""
    sizes = (("1f1b", 3, 4, 1), ("zero-bubble-v", 2, 5, 2))
    made = [(name, make_schedule(name, *size)) for name, *size in sizes]
    panels = [(name, schedule, simulate(schedule)) for name, schedule in made]
    draw.draw_stacked(panels, Path("a.svg"))
    (figure,) = figures
    rows = [axis.get_position().height for axis in figure.axes]
    assert figure.get_size_inches()[0] == draw.WIDTH and rows[0] > rows[1]
    span = max(simulation.span for *_, simulation in panels)
    for axis, (name, schedule, simulation) in zip(figure.axes, panels, strict=True):
        assert axis.get_xlim() == (0, span) and axis.get_title("left") == name
        bottom, top = axis.get_ylim()
        assert bottom > schedule.ranks - 1 + 0.42 and top < -0.42  # the first rank is on top
        labels = [label.get_text() for label in axis.get_yticklabels()]
        assert labels == [f"rank {rank}" for rank in range(schedule.ranks)]
        found: list[dict] = [{} for _ in range(schedule.ranks)]
        for collection in axis.collections:
            colour = tuple(collection.get_facecolor()[0][:3].tolist())
            for path in collection.get_paths():
                (left, low), (right, high) = path.get_extents().get_points().tolist()
                assert (low + 0.42, high - 0.42) == pytest.approx((round(low + 0.42),) * 2)
                found[round(low + 0.42)][left, right] = colour, collection.get_zorder()
        texts = {text.get_position(): text.get_text() for text in axis.texts}
        for rank, boxes in enumerate(found):
            (whole, (_, behind)), *_ = sorted(boxes.items(), key=lambda box: box[1][1])
            assert whole == (0, simulation.span)
            actions = zip(schedule.actions[rank], simulation.times[rank], strict=True)
            for action, (start, end) in actions:
                ((place, (colour, above)),) = (
                    box
                    for box in boxes.items()
                    if box[0] == pytest.approx((start, end)) and box[0] != whole
                )
                shade = draw._shade(draw.KINDS[action.kind][1], action.chunk, schedule.chunks)
                assert colour == pytest.approx(shade) and above > behind
                middle = next(
                    text
                    for at, text in texts.items()
                    if at == pytest.approx((sum(place) / 2, rank))
                )
                assert middle == str(action.micro)
            assert len(boxes) == 1 + len(schedule.actions[rank])
            busy = sum(end - start for start, end in simulation.times[rank])
            right = [text for (x, y), text in sorted(texts.items()) if y == rank and 1 < x < 1.1]
            assert right[-2:] == [
                f"{1 - busy / simulation.span:.0%}",
                f"{simulation.peak[rank]:.4g}",
            ]
    (legend,) = figure.legends
    words = [text.get_text() for text in legend.get_texts()]
    assert words == [*(name for name, _ in draw.KINDS.values()), "chunk 1", "idle"]
    colours = [handle.get_facecolor()[:3] for handle in legend.legend_handles]
    assert colours[4] == pytest.approx(draw._shade(draw.KINDS["F"][1], 1, 2))


def test_narrow_boxes_have_no_numbers(figures):
    schedule = make_schedule("gpipe", 2, 300)
    draw.gantt(simulate(schedule), schedule, Path("a.svg"), "")
    assert {text.get_position()[0] for text in figures[0].axes[0].texts} == {1.035, 1.095}


def test_the_first_chunk_has_its_colour():
    assert draw._shade("#336699", 0, 1) == pytest.approx((0x33 / 255, 0x66 / 255, 0x99 / 255))
    assert draw._shade("#000000", 1, 2) == (0.5, 0.5, 0.5)
    assert draw._shade("#000000", 3, 4) == pytest.approx((0.62,) * 3)
