"""Pipeline schedules as Gantt charts: a row per rank, a box per action, hatched where the rank
idles. Drawn from the result of `schedule.simulate`, for `dolmen schedule --out` and for the report
of a plan.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from dolmen.files import write
from dolmen.pages import picture
from dolmen.pages.picture import FAINT, INSIDE, PAPER, SHADE, Fill
from dolmen.parallel.schedule import Schedule
from dolmen.parallel.simulation import Simulation

KINDS = {
    "F": Fill("forward", "#b5d0ec"),
    "B": Fill("backward", "#e9a65c"),
    "I": Fill("backward of inputs", "#e58f7b", "//"),
    "W": Fill("backward of weights", "#7aab71"),
}
IDLE = Fill("idle", SHADE, "///")
COLUMNS = {"bubble": 40, "live": 66}
"""Right edges of the columns, in points."""


class Panel(NamedTuple):
    """The ranks and the time of a simulated schedule that one panel shows."""

    title: str
    schedule: Schedule
    simulation: Simulation
    ranks: Sequence[int]
    """Rows."""
    window: tuple[float, float]
    """First and last moment, in the unit of the simulation."""


def gantt(simulation: Simulation, schedule: Schedule, to: Path, title: str) -> None:
    """Draw one simulated pipeline schedule as a Gantt chart to a picture file. Raises ValueError
    unless `to` ends in .svg or .png.
    """
    draw_stacked([(title, schedule, simulation)], to)


def draw_stacked(panels: list[tuple[str, Schedule, Simulation]], to: Path) -> None:
    """Draw several (title, schedule, simulation) as Gantt charts below one another on one time
    scale, to a picture file. Raises ValueError unless `to` ends in .svg or .png.
    """
    kind = to.suffix.lower().removeprefix(".")
    if kind not in ("svg", "png"):
        raise ValueError(f"the picture {to} ends in {to.suffix or 'nothing'}: use .svg or .png")
    # one time scale, so lengths compare
    window = 0.0, max(simulation.span for _, _, simulation in panels)
    charts = [Panel(*panel, range(panel[1].ranks), window) for panel in panels]
    write.replace(to, picture.draw(paint_panels, charts, "time", kind=kind))


def paint_panels(figure: Any, panels: Sequence[Panel], unit: str) -> None:
    """Draw panels below one another on a matplotlib figure, with a legend above. `unit`: title of
    the axis of time.
    """
    # inches
    heights = [0.6 + 0.28 * len(panel.ranks) for panel in panels]
    figure.set_figheight(sum(heights) + 0.6)
    all_axes = figure.subplots(len(panels), squeeze=False, height_ratios=heights)[:, 0]
    for axes, panel in zip(all_axes, panels, strict=True):
        _paint_panel(axes, panel)
    all_axes[-1].set_xlabel(unit)
    kinds = {a.kind for p in panels for actions in p.schedule.actions for a in actions}
    chunks = max(panel.schedule.chunks for panel in panels)
    fills = [fill for kind, fill in KINDS.items() if kind in kinds]
    fills += [
        Fill(f"chunk {chunk}", _shade(KINDS["F"].colour, chunk, chunks))
        for chunk in range(1, min(chunks, 5))
    ]
    picture.add_legend(figure, [*fills, IDLE], len(fills) + 1)


def _paint_panel(axes: Any, panel: Panel) -> None:
    """Draw one panel on matplotlib axes: a row of boxes for each rank, with its idle share and its
    microbatches in flight to the right.
    """
    schedule, simulation, (start, end) = panel.schedule, panel.simulation, panel.window
    # pixels of a page's picture per unit of time, about
    scale = 680 / (end - start)
    shown = min(end, simulation.span) - start
    background = [(start, row, shown) for row in range(len(panel.ranks))]
    _add_boxes(axes, background, IDLE, 0)
    boxes: dict[tuple[str, int], list[tuple[float, int, float]]] = {}
    for row, rank in enumerate(panel.ranks):
        for action, times in zip(schedule.actions[rank], simulation.times[rank], strict=True):
            # clipped to the panel
            first, last = max(times[0], start), min(times[1], end)
            if first >= last:
                continue
            boxes.setdefault((action.kind, action.chunk), []).append((first, row, last - first))
            number = str(action.micro)
            # a digit takes 7 pixels
            if (last - first) * scale > 7 * len(number):
                middle = (first + last) / 2
                axes.text(
                    middle, row, number, color=INSIDE, size=7, ha="center", va="center_baseline"
                )
    many = sum(map(len, boxes.values()))
    for (kind, chunk), places in boxes.items():
        colour = _shade(KINDS[kind].colour, chunk, schedule.chunks)
        _add_boxes(axes, places, KINDS[kind]._replace(colour=colour), 0.8 if many < 1000 else 0.2)
    idle = [f"{1 - simulation.busy[rank] / simulation.span:.0%}" for rank in panel.ranks]
    live = [f"{simulation.peak[rank]:.4g}" for rank in panel.ranks]
    picture.add_columns(axes, COLUMNS, list(zip(idle, live, strict=True)))
    axes.set(xlim=panel.window, ylim=(len(panel.ranks) - 0.45, -0.55))
    axes.set_yticks(range(len(panel.ranks)), [f"rank {rank}" for rank in panel.ranks])
    axes.tick_params(axis="y", length=0)
    axes.spines[["left", "bottom"]].set_visible(False)
    axes.set_title(panel.title, weight="bold")
    measured = f"span {simulation.span:.4g}, bubble {simulation.bubble:.1%}"
    axes.set_title(measured, loc="right", color=FAINT)


def _add_boxes(
    axes: Any, places: Sequence[tuple[float, int, float]], fill: Fill, gap: float
) -> None:
    """Add boxes of one fill to matplotlib axes. `places`: (left edge, row, width) of each; `gap`:
    points between neighbours.
    """
    import numpy as np
    from matplotlib.patches import PathPatch
    from matplotlib.path import Path as Outline

    # one path for all: thousands of marks would make a page slow
    corners = [
        [(x, row - 0.42), (x + width, row - 0.42), (x + width, row + 0.42), (x, row + 0.42)]
        for x, row, width in places
    ]
    outline = Outline.make_compound_path_from_polys(np.array(corners))
    edge = {"edgecolor": PAPER} if gap else {}
    axes.add_patch(
        PathPatch(outline, facecolor=fill.colour, hatch=fill.hatch, linewidth=gap, **edge)
    )


def _shade(colour: str, chunk: int, chunks: int) -> str:
    """Return a colour as #rrggbb: itself for chunk 0, paler for each later chunk."""
    # 0 to 0.62: the last one is still visible
    pale = 0.62 * chunk / max(1, chunks - 1) if chunks > 2 else 0.5 * chunk
    parts = (int(colour[i : i + 2], 16) for i in (1, 3, 5))
    return "#" + "".join(f"{round(part + (255 - part) * pale):02x}" for part in parts)
