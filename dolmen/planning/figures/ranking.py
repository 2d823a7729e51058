"""Layouts by their time, and the parts of their steps."""

import textwrap

from dolmen.planning.figures.svg import Drawing, Scale, axis
from dolmen.planning.plan import Candidate, Plan, words

MOST = 12
ROW = 34.0
LEFT, RIGHT = 280.0, 645.0
NAMES = {
    "product": "matrix products",
    "attention": "attention",
    "memory": "memory-bound",
    "host": "waiting for the host",
    "tp": "tp",
    "cp": "cp",
    "ep": "ep",
    "dp": "dp",
    "pp": "pp",
    "bubble": "bubble",
    "optimizer": "optimizer",
}
"""Parts of a step (step.Estimate), in the order of their bars."""
MESH = {f"layout.{axis}" for axis in ("tp", "cp", "pp", "dp", "ep")}
BRIEF = {
    "microbatch-size": "microbatch",
    "sequence-parallel": "sp",
    "schedule ": "",
    "virtual-stages": "v",
    "recompute-layers": "layers",
}
FILL = {"memory": "memory-bound"}  # in memory's own figure the word means something else


def ranking(plan: Plan) -> Drawing:
    """Draw the seconds of a step with their 90 % intervals, a row per layout, the fastest first (at
    most MOST), with throughput, MFU, memory and bottleneck.
    """
    shown = plan.ranked[:MOST]
    bottom = 30 + ROW * len(shown)
    drawing = Drawing("Seconds of a step by layout", bottom + 40)
    # from 0, so that lengths are comparable
    scale = Scale(0, max(c.estimate.high for c in shown) * 1.02, LEFT, RIGHT)
    axis(drawing, scale, bottom, "seconds of a step, and 90 % interval", 22)
    for x, title in ((715, "tokens/s"), (775, "MFU"), (840, "memory"), (912, "bound by")):
        drawing.text(x, 14, title, "label", "end")
    for i, one in enumerate(shown):
        y, found = 30 + ROW * (i + 0.5), one.estimate
        draw_name(drawing, one, y, i == 0)
        drawing.line([(scale(found.low), y), (scale(found.high), y)], "whisker")
        for end in (found.low, found.high):
            drawing.line([(scale(end), y - 4), (scale(end), y + 4)], "whisker")
        hint = f"{one.words}: {found.seconds:.4g} s, {found.low:.4g} to {found.high:.4g}"
        drawing.dot(scale(found.seconds), y, hint)
        cells = (
            (715, f"{plan.step_tokens / found.seconds:,.0f}"),
            (775, f"{one.mfu:.1%}"),
            (840, f"{one.fullest / 2**30:.1f} GiB"),
            (912, one.bound),
        )
        for x, cell in cells:
            drawing.text(x, y + 4, cell, "", "end")
    return drawing


def step(plan: Plan) -> Drawing:
    """Draw the parts of a step as a stacked bar, for the best eight layouts."""
    shown = plan.ranked[:8]
    bottom = 60 + ROW * len(shown)
    drawing = Drawing("Parts of a step", bottom + 40)
    # only parts that occur
    names = {n: w for n, w in NAMES.items() if any(c.estimate.parts.get(n, 0) > 0 for c in shown)}
    half = -(-len(names) // 2)
    for y, part in ((14, list(names)[:half]), (36, list(names)[half:])):
        drawing.legend({FILL.get(n, n): names[n] for n in part}, y, 0)
    scale = Scale(0, max(c.estimate.seconds for c in shown) * 1.02, LEFT, 900)
    axis(drawing, scale, bottom, "seconds", 52)
    for i, one in enumerate(shown):
        y = 60 + ROW * i
        draw_name(drawing, one, y + ROW / 2 - 3, i == 0)
        _draw_bar(drawing, one, scale, y, names)
    return drawing


def draw_name(drawing: Drawing, one: Candidate, y: float, best: bool) -> None:
    """Write a layout left of its row at height `y`: the mesh, and below it, smaller, the other
    options. `best`: in bold.
    """
    mesh = {name: value for name, value in one.layout.items() if name in MESH}
    rest = words({name: value for name, value in one.layout.items() if name not in MESH})
    for long, brief in BRIEF.items():
        rest = rest.replace(long, brief)
    # characters that fit left of the bars
    below = textwrap.wrap(rest, 50)
    top = y + 4 - 5.5 * len(below)
    drawing.text(LEFT - 12, top, words(mesh) or "one GPU", "strong" if best else "", "end")
    for i, line in enumerate(below, 1):
        drawing.text(LEFT - 12, top + 11 * i, line, "tiny", "end")


def _draw_bar(
    drawing: Drawing, one: Candidate, scale: Scale, y: float, names: dict[str, str]
) -> None:
    """Draw the stacked bar of a layout's step at height `y`, with shares where they fit. `names`:
    parts and their texts, in order.
    """
    before = 0.0
    for name, said in names.items():
        seconds = one.estimate.parts.get(name, 0.0)
        x, width = scale(before), scale(before + seconds) - scale(before)
        share = seconds / one.estimate.seconds
        drawing.box(x, y, width, ROW - 6, FILL.get(name, name), f"{said}: {seconds:.4g} s")
        # pixels that "12%" takes
        if width > 34:
            drawing.text(x + width / 2, y + 14, f"{share:.0%}", "inside", "middle")
        before += seconds
