"""Memory of ranks: by kind at the fullest moment, and along the schedule."""

from dolmen.planning.figures.svg import Drawing, Scale, axis, side
from dolmen.planning.plan import Plan, StageMemory, Timeline

GIB = 2**30
KINDS = {
    "parameter": "parameters",
    "compute": "gathered parameters",
    "gradient": "gradients",
    "unsharded": "unreduced gradients",
    "optimizer": "optimizer",
    "activation": "activations",
    "buffer": "buffers",
    "other": "context and workspace",
}
LEFT, RIGHT = 60.0, 900.0
COLUMNS = 32


def evenly(count: int, most: int) -> list[int]:
    """Return `most` numbers spread evenly over 0 to count - 1, both ends included; all if there are
    no more.
    """
    if count <= most:
        return list(range(count))
    return sorted({round(i * (count - 1) / (most - 1)) for i in range(most)})


def stages(plan: Plan) -> Drawing:
    """Draw a column per pipeline rank (at most COLUMNS, evenly chosen) of the best layout: its peak
    memory stacked by kind in GiB, below a line at the device's limit.
    """
    memory, limit = plan.ranked[0].memory, plan.cluster.device.memory
    shown = evenly(len(memory), COLUMNS)
    drawing = Drawing("Memory of each pipeline rank", 340)
    items = list(KINDS.items())
    drawing.legend(dict(items[:4]), 14)
    drawing.legend(dict(items[4:]), 36)
    scale = Scale(0, max(limit, *(m.total for m in memory)) * 1.06 / GIB, 290, 70)
    side(drawing, scale, LEFT, "GiB", RIGHT)
    # pixels per column
    wide = (RIGHT - LEFT) / len(shown)
    for i, rank in enumerate(shown):
        x, base = LEFT + wide * (i + 0.15), 0.0
        for kind, words in KINDS.items():
            size = _bytes(memory[rank], kind) / GIB
            top = scale(base + size)
            hint = f"rank {rank}, {words}: {size:.2f} GiB"
            drawing.box(x, top, wide * 0.7, scale(base) - top, kind, hint)
            base += size
        # room for a number
        if wide > 34:
            drawing.text(x + wide * 0.35, scale(base) - 5, f"{base:.1f}", "small", "middle")
        drawing.text(x + wide * 0.35, 306, str(rank), "small", "middle")
    drawing.line([(LEFT, scale(limit / GIB)), (RIGHT, scale(limit / GIB))], "limit")
    words = f"{plan.cluster.device.name}: {limit / GIB:.0f} GiB"
    drawing.text(RIGHT, scale(limit / GIB) - 5, words, "strong", "end")
    drawing.text((LEFT + RIGHT) / 2, 326, "pipeline rank", "label", "middle")
    return drawing


def _bytes(memory: StageMemory, kind: str) -> int:
    """Return the bytes of a kind at the peak; "other" is context and workspace."""
    return memory.other if kind == "other" else memory.live._asdict()[kind]


def along(plan: Plan) -> Drawing:
    """Draw the memory of the first, a middle and the last pipeline rank over the time of a step."""
    memory, limit = plan.ranked[0].memory, plan.cluster.device.memory
    times = plan.timeline.simulation.times
    drawing = Drawing("Memory along the schedule", 300)
    most = max(limit, *(m.total for m in memory)) * 1.06 / GIB
    scale = Scale(0, most, 240, 40)
    span = Scale(0, plan.timeline.simulation.span, LEFT, RIGHT)
    side(drawing, scale, LEFT, "GiB", RIGHT)
    axis(drawing, span, 240, "seconds", 40)
    for i, rank in enumerate(evenly(len(memory), 3)):
        held = course(memory[rank], plan.timeline, rank)
        points, level = [], held[0][0]
        for (before, after), (start, end) in zip(held, times[rank], strict=True):
            # a step up as the action starts
            points += [(span(start), scale(level / GIB)), (span(start), scale(before / GIB))]
            points += [(span(end), scale(before / GIB)), (span(end), scale(after / GIB))]
            level = after
        drawing.line(points, f"course{i}")
        drawing.line([(LEFT + 10 + 130 * i, 290), (LEFT + 50 + 130 * i, 290)], f"course{i}")
        drawing.text(LEFT + 56 + 130 * i, 294, f"rank {rank}", "small")
    drawing.line([(LEFT, scale(limit / GIB)), (RIGHT, scale(limit / GIB))], "limit")
    return drawing


def course(memory: StageMemory, timeline: Timeline, rank: int) -> list[tuple[float, float]]:
    """Return (bytes while it runs, bytes after it) of each action of a rank: as simulated, or else
    the activations in proportion to the chunks that are held.
    """
    after: tuple[float, ...] = memory.along
    # all kinds but activations stay the same
    rest = memory.total - memory.live.activation
    if not after:
        held = timeline.chunks_held(rank)
        # the peak belongs to the most chunks that are held
        each = memory.live.activation / max(1, *held)
        after = tuple(rest + each * count for count in held)
    before = (min(rest, after[0]), *after[:-1])
    return [(max(one, two), two) for one, two in zip(before, after, strict=True)]
