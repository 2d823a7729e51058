"""The profile of a step as a picture: a bar per kind, and under it who was busy when.

matrix products   ##########################  823 ms  61 %
attention         ########  240 ms  18 %

computing         ####  ########## ######  ###
collectives          ####        ###
host              ## # ## # ##### ##
"""

from collections.abc import Sequence
from io import BytesIO

from dolmen.training.events import (
    ATTENTION,
    COLLECTIVES,
    COPIES,
    ELEMENTWISE,
    EXPERTS,
    IDLE,
    LOSS,
    NORMS,
    OPTIMIZER,
    OTHER,
    PRODUCTS,
    WAITING,
    Span,
    Timeline,
)
from dolmen.training.timeline import Table

INK, GREY, PALE = "#22303c", "#76808a", "#f6f5f1"
COLORS = {
    PRODUCTS: "#4c78a8",
    ATTENTION: "#7fa9d6",
    EXPERTS: "#5f9ea0",
    LOSS: "#93bf8c",
    NORMS: "#c9b458",
    ELEMENTWISE: "#eeb06d",
    COPIES: "#e58f7b",
    OPTIMIZER: "#a48bbd",
    WAITING: "#b0413e",
    IDLE: "#d5d9dd",
    OTHER: "#9aa3ab",
}
MOVING = ("#d1495b", "#8d3b72", "#b56576", "#6d597a", "#e56b6f", "#355070")  # collectives, by axis
PIXELS = 1600  # of a lane: what is shorter is not drawn apart


def draw(table: Table, timeline: Timeline, title: str) -> bytes:
    """A PNG."""
    # half a second to import, for the ranks that draw
    from matplotlib.figure import Figure

    height = 0.9 + 0.3 * len(table.rows)
    figure = Figure(figsize=(12, height + 2.4), dpi=130, layout="constrained")
    above, below = figure.subplots(2, height_ratios=[height, 1.9])
    colors = _colors(table, timeline)
    _bars(above, table, colors)
    _lanes(below, timeline, colors)
    figure.suptitle(title, x=0.01, ha="left", fontsize=12, fontweight="bold", color=INK)
    image = BytesIO()
    figure.savefig(image, format="png")
    return image.getvalue()


def _colors(table: Table, timeline: Timeline) -> dict[str, str]:
    kinds = {row.kind for row in table.rows} | {s.kind for s in timeline.busy + timeline.host}
    moving = sorted(kind for kind in kinds if kind.startswith(COLLECTIVES))
    return {**COLORS, **{kind: MOVING[i % len(MOVING)] for i, kind in enumerate(moving)}}


def _bars(axis, table: Table, colors: dict[str, str]) -> None:
    for i, row in enumerate(table.rows):
        axis.barh(i, 1e3 * row.busy, color=colors[row.kind], alpha=0.3, height=0.72)
        axis.barh(i, 1e3 * row.seconds, color=colors[row.kind], height=0.72)
        calls = f"   {row.calls:,} calls" if row.calls else ""
        text = f"  {1e3 * row.seconds:.1f} ms   {row.seconds / table.seconds:.1%}{calls}"
        x = 1e3 * max(row.seconds, row.busy)
        axis.text(x, i, text, va="center", fontsize=9, color=INK)
    widest = max(1e3 * max(row.seconds, row.busy) for row in table.rows)
    axis.set(xlim=(0, 1.3 * widest), ylim=(len(table.rows) - 0.4, -0.6))
    axis.set_yticks(range(len(table.rows)), [row.kind for row in table.rows], fontsize=9)
    axis.set_title(
        f"{1e3 * table.seconds:.1f} ms; pale: beside other work", loc="left", fontsize=9, color=GREY
    )
    _plain(axis)


def _lanes(axis, timeline: Timeline, colors: dict[str, str]) -> None:
    """Computing, collectives and, of a GPU, the host, each as it went."""
    moving = [s for s in timeline.busy if s.kind.startswith(COLLECTIVES)]
    lanes = {
        "computing": [s for s in timeline.busy if not s.kind.startswith(COLLECTIVES)],
        "collectives": moving,
    }
    if timeline.gpu:  # a CPU is its own host
        lanes["host"] = [s._replace(kind=OTHER) for s in timeline.host]
    span = (timeline.end - timeline.start) / 1e3
    for i, spans in enumerate(lanes.values()):
        axis.barh(i, span, color=PALE, height=0.8, zorder=1)
        for kind, boxes in _boxes(spans, timeline).items():
            axis.broken_barh(boxes, (i - 0.4, 0.8), facecolor=colors[kind], linewidth=0, zorder=2)
    axis.set(xlim=(0, span), ylim=(len(lanes) - 0.5, -0.5), xlabel="ms")
    axis.set_yticks(range(len(lanes)), list(lanes), fontsize=9)
    _plain(axis)


def _boxes(spans: Sequence[Span], timeline: Timeline) -> dict[str, list[tuple[float, float]]]:
    """(from, length) in ms by kind. Each is of the kind that fills most of a pixel, and as long as
    that share of it, so that a hundred thousand kernels are a few thousand boxes.
    """
    width = (timeline.end - timeline.start) / PIXELS
    pixels: list[dict[str, float]] = [{} for _ in range(PIXELS)]
    for span in spans:
        first = int((span.start - timeline.start) / width)
        last = min(int((span.end - timeline.start) / width), PIXELS - 1)
        for i in range(first, last + 1):
            low = timeline.start + i * width
            part = min(span.end, low + width) - max(span.start, low)
            pixels[i][span.kind] = pixels[i].get(span.kind, 0.0) + max(part, 0.0)
    out: dict[str, list[tuple[float, float]]] = {}
    for i, found in enumerate(pixels):
        if found:
            kind = max(found, key=lambda name: found[name])
            filled = min(1.0, sum(found.values()) / width)
            out.setdefault(kind, []).append((i * width / 1e3, filled * width / 1e3))
    return out


def _plain(axis) -> None:
    axis.tick_params(length=0, labelsize=9, labelcolor=INK)
    for side in axis.spines.values():
        side.set_visible(False)
