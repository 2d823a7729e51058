"""The picture has a box for every action, says what was measured, and is a file of the kind asked
for.
"""

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
