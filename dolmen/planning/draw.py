"""Pipeline schedules as Gantt charts: a row per rank, a box per action, hatched where the rank
idles. Drawn from the result of `schedule.simulate`.
"""

from pathlib import Path

from dolmen.parallel.schedule import Schedule
from dolmen.parallel.simulation import Simulation

KINDS = {
    "F": ("forward", "#7fa9d6"),
    "B": ("backward", "#eeb06d"),
    "I": ("backward of inputs", "#e58f7b"),
    "W": ("backward of weights", "#93bf8c"),
}
IDLE, IDLE_HATCH, INK, GREY = "#f6f5f1", "#dcd9d0", "#22303c", "#76808a"
WIDTH = 12.0  # inches
CENTRED = {"ha": "center", "va": "center_baseline"}


def gantt(simulation: Simulation, schedule: Schedule, to: Path, title: str) -> None:
    """Draw one simulated pipeline schedule as a Gantt chart to a picture file. Raises ValueError
    unless `to` ends in .svg or .png.
    """
    draw_stacked([(title, schedule, simulation)], to)


def draw_stacked(panels: list[tuple[str, Schedule, Simulation]], to: Path) -> None:
    """Draw several (title, schedule, simulation) as Gantt charts below one another on one time
    scale, to a picture file. Raises ValueError unless `to` ends in .svg or .png.
    """
    if to.suffix.lower() not in (".svg", ".png"):
        raise ValueError(f"the picture {to} ends in {to.suffix or 'nothing'}: use .svg or .png")
    # imported late: it takes half a second
    from matplotlib.figure import Figure
    from matplotlib.layout_engine import ConstrainedLayoutEngine

    # inches
    rows = [0.8 + 0.36 * schedule.ranks for _, schedule, _ in panels]
    layout = ConstrainedLayoutEngine(h_pad=0.08, w_pad=0.1)
    figure = Figure(figsize=(WIDTH, sum(rows) + 0.7), dpi=130, layout=layout)
    axes = figure.subplots(len(panels), squeeze=False, height_ratios=rows)[:, 0]
    # one time scale, so lengths compare
    span = max(simulation.span for _, _, simulation in panels)
    for axis, (title, schedule, simulation) in zip(axes, panels, strict=True):
        _draw_panel(axis, title, schedule, simulation, span)
    for axis in axes[:-1]:
        axis.set_xticklabels([])
    axes[-1].set_xlabel("time", color=GREY, fontsize=9)
    _draw_legend(figure, [schedule for _, schedule, _ in panels])
    # without the date, so equal plans give equal files
    figure.savefig(to, metadata={"Date": None} if to.suffix.lower() == ".svg" else None)


def _draw_panel(axis, title: str, schedule: Schedule, simulation: Simulation, span: float) -> None:
    """Draw one schedule on a matplotlib axis, `span` units of time wide: a row of boxes for each
    rank, with its idle share and its microbatches in flight to the right.
    """
    for rank in range(schedule.ranks):
        _draw_rank(axis, rank, schedule, simulation, 0.8 * WIDTH / span)
        idle = 1 - simulation.busy[rank] / simulation.span
        _draw_columns(
            axis, rank, (f"{idle:.0%}", f"{simulation.peak[rank]:.4g}"), fontsize=9, color=INK
        )
    _draw_columns(axis, -0.78, ("bubble", "live"), fontsize=8, color=GREY)
    axis.set(xlim=(0, span), ylim=(schedule.ranks - 0.45, -0.55), yticks=range(schedule.ranks))
    axis.set_yticklabels([f"rank {rank}" for rank in range(schedule.ranks)], fontsize=9, color=INK)
    axis.tick_params(length=0, labelcolor=INK)
    axis.tick_params(axis="x", labelsize=8, labelcolor=GREY)
    for side in axis.spines.values():
        side.set_visible(False)
    axis.set_title(title, loc="left", fontsize=11, fontweight="bold", color=INK, pad=9)
    axis.set_title(
        f"span {simulation.span:.4g}    bubble {simulation.bubble:.1%}",
        loc="right",
        fontsize=9.5,
        color=INK,
        pad=9,
    )


def _draw_rank(axis, rank: int, schedule: Schedule, simulation: Simulation, inch: float) -> None:
    """Draw the row of a rank: hatched background for idle time, a box per action, with the
    microbatch number where it fits. `inch`: inches of paper per unit of time, about.
    """
    row, many = (rank - 0.42, 0.84), schedule.ranks * schedule.micros * schedule.chunks
    axis.broken_barh(
        [(0, simulation.span)],
        row,
        facecolor=IDLE,
        edgecolor=IDLE_HATCH,
        hatch="/////",
        linewidth=0,
        zorder=1,
    )
    # one matplotlib artist per kind and chunk, not per action
    boxes: dict[tuple[str, int], list[tuple[float, float]]] = {}
    for action, (start, end) in zip(schedule.actions[rank], simulation.times[rank], strict=True):
        boxes.setdefault((action.kind, action.chunk), []).append((start, end - start))
        number = str(action.micro)
        points = (end - start) * inch * 72
        # 72 points per inch; a digit takes about 5.5
        if points >= 5.5 * len(number) and many <= 4000:
            axis.text((start + end) / 2, rank, number, color=INK, fontsize=8, zorder=3, **CENTRED)
    for (kind, chunk), ranges in boxes.items():
        axis.broken_barh(
            ranges,
            row,
            facecolor=_shade(KINDS[kind][1], chunk, schedule.chunks),
            edgecolor="white",
            linewidth=0.9 if many < 1000 else 0.1,
            zorder=2,
        )


def _draw_columns(axis, y: float, texts: tuple[str, str], **style) -> None:
    """Write two texts at height `y` into the columns right of a panel."""
    for x, text in zip((1.035, 1.095), texts, strict=True):
        axis.text(x, y, text, transform=axis.get_yaxis_transform(), **CENTRED, **style)


def _draw_legend(figure, schedules: list[Schedule]) -> None:
    """Add the figure's legend: kinds of actions that occur, chunks by shade, idle."""
    from matplotlib.patches import Patch

    kinds = {
        action.kind for schedule in schedules for actions in schedule.actions for action in actions
    }
    chunks = max(schedule.chunks for schedule in schedules)
    handles = [
        Patch(facecolor=color, label=name) for kind, (name, color) in KINDS.items() if kind in kinds
    ]
    handles += [
        Patch(facecolor=_shade(KINDS["F"][1], c, chunks), label=f"chunk {c}")
        for c in range(1, min(chunks, 5))
    ]
    handles += [
        Patch(facecolor=IDLE, edgecolor=IDLE_HATCH, hatch="/////", linewidth=0, label="idle")
    ]
    figure.legend(
        handles=handles,
        loc="outside lower center",
        ncols=len(handles),
        frameon=False,
        fontsize=9,
        labelcolor=INK,
        handlelength=1.4,
    )


def _shade(color: str, chunk: int, chunks: int) -> tuple[float, float, float]:
    """Return a colour as (red, green, blue) in 0 to 1: itself for chunk 0, paler for each later
    chunk.
    """
    # 0 to 0.62: the last one is still visible
    pale = 0.62 * chunk / max(1, chunks - 1) if chunks > 2 else 0.5 * chunk
    red, green, blue = (1 - (1 - int(color[i : i + 2], 16) / 255) * (1 - pale) for i in (1, 3, 5))
    return red, green, blue
