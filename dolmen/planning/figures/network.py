"""The cluster as it is wired, and what crosses each tier of it in a step."""

from dolmen.planning.figures.svg import Drawing, Scale, axis
from dolmen.planning.plan import Plan

AXES = ("tp", "cp", "ep", "dp", "pp")
GB = 1e9


def traffic(plan: Plan) -> Drawing:
    """Draw the bytes that a GPU sends in a step: a bar per tier, stacked by axis, with the time its
    link is busy.
    """
    found = plan.ranked[0].traffic
    tiers = list(dict.fromkeys(one.tier for one in found))
    bottom = 36 + 40 * max(1, len(tiers))
    drawing = Drawing("Traffic on each tier of the network", bottom + 40)
    if not found:
        drawing.text(0, 60, "Nothing crosses a link: every rank is alone on each axis.", "label")
        return drawing
    drawing.legend({a: a for a in AXES if any(one.axis == a for one in found)}, 14)
    most = max(sum(one.sent for one in found if one.tier == tier) for tier in tiers)
    scale = Scale(0, most * 1.02 / GB, 110, 700)
    axis(drawing, scale, bottom, "GB that a GPU sends in a step", 30)
    for i, tier in enumerate(tiers):
        y, before, busy = 40 + 40 * i, 0.0, 0.0
        drawing.text(100, y + 16, tier, "", "end")
        for one in (each for each in found if each.tier == tier):
            x, after = scale(before), scale(before + one.sent / GB)
            hint = f"{one.axis} over {tier}: {one.sent / GB:.3g} GB, {one.seconds:.3g} s"
            drawing.box(x, y, after - x, 24, one.axis, hint)
            before, busy = before + one.sent / GB, busy + one.seconds
        # over 100 %: the link bounds the step
        share = busy / plan.ranked[0].estimate.seconds
        words = f"{before:.3g} GB; busy {busy:.3g} s, {share:.0%} of the step"
        drawing.text(scale(before) + 8, y + 16, words, "small")
    return drawing


def cluster(plan: Plan) -> Drawing:
    """Draw the cluster: a row per tier of switches that the plan's GPUs need, then the nodes, then
    the GPUs of one node.
    """
    wired, used = plan.cluster, -(-plan.gpus // plan.cluster.gpus_per_node)
    # the lowest, and those above a tier that is too small
    tiers = [t for i, t in enumerate(wired.tiers) if i == 0 or wired.tiers[i - 1].nodes < used]
    if wired.between is None or used == 1:
        tiers = []
    drawing = Drawing("The cluster", 175 + 70 * len(tiers))
    for level, tier in enumerate(reversed(tiers)):
        y, below = 20.0 + 70 * level, 20.0 + 70 * (level + 1)
        # switches of this tier that the plan's nodes need
        count = -(-used // tier.nodes)
        _row(drawing, count, y, f"{tier.name}: {count:,} × up to {tier.nodes} nodes")
        under = len(tiers) - level - 2
        _draw_wires(
            drawing, count, -(-used // tiers[under].nodes) if under >= 0 else used, y, below
        )
    y = 20.0 + 70 * len(tiers)
    link = "" if wired.between is None else f", {wired.between.bandwidth / GB:.0f} GB/s each way"
    _row(drawing, used, y, f"{used:,} nodes of {wired.gpus_per_node} GPUs{link}")
    gpus = wired.gpus_per_node
    _draw_wires(drawing, min(used, DRAWN), 1, y, y + 70)
    wide = min(56.0, 600 / gpus)
    for i in range(gpus):
        drawing.box(310 - wide * gpus / 2 + wide * i, y + 78, wide - 5, 30, "product")
    drawing.line([(305 - wide * gpus / 2, y + 70), (305 + wide * gpus / 2, y + 70)], "bus")
    device = wired.device
    inside = wired.inside.bandwidth / GB
    drawing.text(640, y + 82, f"a node: {gpus} {device.name}, {inside:.0f} GB/s each way", "")
    drawing.text(640, y + 100, f"{device.memory / 2**30:.0f} GiB each", "small")
    return drawing


DRAWN = 12  # of a row; more are said, not drawn


def _places(count: int) -> list[float]:
    """Return the x coordinates of at most DRAWN boxes in a row."""
    shown = min(count, DRAWN)
    return [310 + (i - (shown - 1) / 2) * 600 / max(shown, 4) for i in range(shown)]


def _row(drawing: Drawing, count: int, y: float, words: str) -> None:
    """Draw a row of `count` boxes, with dots for those beyond DRAWN, and a text to its right."""
    places = _places(count)
    wide = min(110.0, 560 / max(4, len(places)))
    for i, x in enumerate(places):
        last = count > DRAWN and i == len(places) - 2
        if last:
            drawing.text(x, y + 20, "…", "strong", "middle")
        else:
            drawing.box(x - wide / 2, y, wide - 4, 28, "link")
    drawing.text(640, y + 19, words, "")


def _draw_wires(drawing: Drawing, above: int, below: int, y: float, to: float) -> None:
    """Draw lines from the row of `above` boxes at height `y` down to height `to`: each of `below`
    boxes is joined to the one box above it.
    """
    tops, ends = _places(above), _places(below)
    for i, x in enumerate(ends):
        top = tops[min(len(tops) - 1, i * len(tops) // len(ends))]
        drawing.line([(top, y + 28), (x, to)], "wire")
