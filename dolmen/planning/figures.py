"""Figures of the report of `dolmen plan`, each a function from a plan to a drawing (pages/page.py):

ranking, step              layouts by time, and the parts of their steps
rank_memory, memory_along  memory of ranks by kind at the fullest moment, and along the schedule
timeline                   the schedule, a row per pipeline rank
traffic, cluster           what crosses each tier of the network in a step; how it is wired
front                      GPUs against days and cost: the fleets of which no other is smaller
                           and as fast
"""

import textwrap
from collections.abc import Callable

from dolmen.pages.page import Drawing, Scale, axis, short, side
from dolmen.planning.plan import Candidate, Fleet, Plan, StageMemory, Timeline, words

MOST_LAYOUTS = 12
BAR_ROW = 34.0
BARS_LEFT, BARS_RIGHT = 280.0, 645.0
PART_NAMES = {
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
    """Return the drawing of the seconds of a step with their 90 % intervals, a row per layout, the
    fastest first (12 at most), with throughput, MFU, memory and bottleneck.
    """
    candidates = plan.ranked[:MOST_LAYOUTS]
    bottom = 30 + BAR_ROW * len(candidates)
    drawing = Drawing("Seconds of a step by layout", bottom + 40)
    # from 0, so that lengths are comparable
    scale = Scale(0, max(c.estimate.high for c in candidates) * 1.02, BARS_LEFT, BARS_RIGHT)
    axis(drawing, scale, bottom, "seconds of a step, and 90 % interval", 22)
    for x, title in ((715, "tokens/s"), (775, "MFU"), (840, "memory"), (912, "bound by")):
        drawing.text(x, 14, title, "label", "end")
    for i, candidate in enumerate(candidates):
        y, estimate = 30 + BAR_ROW * (i + 0.5), candidate.estimate
        draw_name(drawing, candidate, y, i == 0)
        drawing.line([(scale(estimate.low), y), (scale(estimate.high), y)], "whisker")
        for end in (estimate.low, estimate.high):
            drawing.line([(scale(end), y - 4), (scale(end), y + 4)], "whisker")
        seconds = f"{estimate.seconds:.4g} s, {estimate.low:.4g} to {estimate.high:.4g}"
        hint = f"{candidate.words}: {seconds}"
        drawing.dot(scale(estimate.seconds), y, hint)
        cells = (
            (715, f"{plan.step_tokens / estimate.seconds:,.0f}"),
            (775, f"{candidate.mfu:.1%}"),
            (840, f"{candidate.fullest / 2**30:.1f} GiB"),
            (912, candidate.bound),
        )
        for x, cell in cells:
            drawing.text(x, y + 4, cell, "", "end")
    return drawing


def step(plan: Plan) -> Drawing:
    """Return the drawing of the parts of a step (products, communication, bubble, ...) as a stacked
    bar, for the best eight layouts.
    """
    candidates = plan.ranked[:8]
    bottom = 60 + BAR_ROW * len(candidates)
    drawing = Drawing("Parts of a step", bottom + 40)
    # only parts that occur
    names = {
        n: w
        for n, w in PART_NAMES.items()
        if any(c.estimate.parts.get(n, 0) > 0 for c in candidates)
    }
    half = -(-len(names) // 2)
    for y, part in ((14, list(names)[:half]), (36, list(names)[half:])):
        drawing.legend({FILL.get(n, n): names[n] for n in part}, y, 0)
    scale = Scale(0, max(c.estimate.seconds for c in candidates) * 1.02, BARS_LEFT, 900)
    axis(drawing, scale, bottom, "seconds", 52)
    for i, candidate in enumerate(candidates):
        y = 60 + BAR_ROW * i
        draw_name(drawing, candidate, y + BAR_ROW / 2 - 3, i == 0)
        _draw_bar(drawing, candidate, scale, y, names)
    return drawing


def draw_name(drawing: Drawing, candidate: Candidate, y: float, best: bool) -> None:
    """Write a layout left of its row at height `y`: the mesh, and below it, smaller, the other
    options. `best`: in bold.
    """
    mesh = {name: value for name, value in candidate.layout.items() if name in MESH}
    rest = words({name: value for name, value in candidate.layout.items() if name not in MESH})
    for long, brief in BRIEF.items():
        rest = rest.replace(long, brief)
    # characters that fit left of the bars
    below = textwrap.wrap(rest, 50)
    top = y + 4 - 5.5 * len(below)
    drawing.text(BARS_LEFT - 12, top, words(mesh) or "one GPU", "strong" if best else "", "end")
    for i, line in enumerate(below, 1):
        drawing.text(BARS_LEFT - 12, top + 11 * i, line, "tiny", "end")


def _draw_bar(
    drawing: Drawing, candidate: Candidate, scale: Scale, y: float, names: dict[str, str]
) -> None:
    """Draw the stacked bar of a layout's step at height `y`, with shares where they fit. `names`:
    parts and their texts, in order.
    """
    before = 0.0
    for name, label in names.items():
        seconds = candidate.estimate.parts.get(name, 0.0)
        x, width = scale(before), scale(before + seconds) - scale(before)
        share = seconds / candidate.estimate.seconds
        drawing.box(x, y, width, BAR_ROW - 6, FILL.get(name, name), f"{label}: {seconds:.4g} s")
        # pixels that "12%" takes
        if width > 34:
            drawing.text(x + width / 2, y + 14, f"{share:.0%}", "inside", "middle")
        before += seconds


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
MOST_COLUMNS = 32


def evenly(count: int, most: int) -> list[int]:
    """Return `most` numbers spread evenly over 0 to `count` - 1, both ends included; all of them if
    `count` is no more than `most`.
    """
    if count <= most:
        return list(range(count))
    return sorted({round(i * (count - 1) / (most - 1)) for i in range(most)})


def rank_memory(plan: Plan) -> Drawing:
    """Return the drawing of the best layout's peak memory, a column per pipeline rank (at most 32,
    evenly chosen), stacked by kind in GiB, below a line at the device's limit.
    """
    memory, limit = plan.ranked[0].memory, plan.cluster.device.memory
    columns = evenly(len(memory), MOST_COLUMNS)
    drawing = Drawing("Memory of each pipeline rank", 340)
    items = list(KINDS.items())
    drawing.legend(dict(items[:4]), 14)
    drawing.legend(dict(items[4:]), 36)
    scale = Scale(0, max(limit, *(m.total for m in memory)) * 1.06 / GIB, 290, 70)
    side(drawing, scale, LEFT, "GiB", RIGHT)
    # pixels per column
    wide = (RIGHT - LEFT) / len(columns)
    for i, rank in enumerate(columns):
        x, base = LEFT + wide * (i + 0.15), 0.0
        for kind, title in KINDS.items():
            size = _kind_bytes(memory[rank], kind) / GIB
            top = scale(base + size)
            hint = f"rank {rank}, {title}: {size:.2f} GiB"
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


def _kind_bytes(memory: StageMemory, kind: str) -> int:
    """Return the bytes of a memory kind at the rank's peak; "other" is context and workspace."""
    return memory.other if kind == "other" else memory.live._asdict()[kind]


def memory_along(plan: Plan) -> Drawing:
    """Return the drawing of the memory of the first, a middle and the last pipeline rank over the
    time of a step, for the best layout.
    """
    memory, limit = plan.ranked[0].memory, plan.cluster.device.memory
    times = plan.timeline.simulation.times
    drawing = Drawing("Memory along the schedule", 300)
    most = max(limit, *(m.total for m in memory)) * 1.06 / GIB
    scale = Scale(0, most, 240, 40)
    span = Scale(0, plan.timeline.simulation.span, LEFT, RIGHT)
    side(drawing, scale, LEFT, "GiB", RIGHT)
    axis(drawing, span, 240, "seconds", 40)
    for i, rank in enumerate(evenly(len(memory), 3)):
        memory_course = course(memory[rank], plan.timeline, rank)
        points, level = [], memory_course[0][0]
        for (before, after), (start, end) in zip(memory_course, times[rank], strict=True):
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
    """Return (bytes while it runs, bytes after it) for each schedule action of a rank: the
    activations are in proportion to the chunks that are held.
    """
    # all kinds but activations stay the same
    rest, chunks = memory.total - memory.live.activation, timeline.chunks_held(rank)
    # the peak belongs to the most chunks that are held
    per_microbatch = memory.live.activation / max(1, *chunks)
    after = [rest + per_microbatch * count for count in chunks]
    before = (min(rest, after[0]), *after[:-1])
    return [(max(first, second), second) for first, second in zip(before, after, strict=True)]


MOST_RANKS = 16
MOST_BOXES = 240  # of a row, in a panel: narrower ones are no boxes
RANK_HEIGHT = 20.0
TIMELINE_LEFT, TIMELINE_RIGHT = 70.0, 860.0
ACTION_NAMES = {
    "F": "forward",
    "B": "backward",
    "I": "backward of inputs",
    "W": "backward of weights",
}


def timeline(plan: Plan) -> Drawing:
    """Return the drawing of the best layout's pipeline schedule, or of its beginning and end if a
    rank has more than 240 actions.
    """
    ranks = evenly(plan.timeline.schedule.ranks, MOST_RANKS)
    parts = windows(plan.timeline)
    tall = RANK_HEIGHT * len(ranks) + 64
    drawing = Drawing("The schedule of a step", 30 + tall * len(parts))
    kinds = {a.kind for actions in plan.timeline.schedule.actions for a in actions}
    names = {kind: name for kind, name in ACTION_NAMES.items() if kind in kinds}
    drawing.legend(names | {"idle": "idle"}, 14)
    micros, span = plan.timeline.schedule.micros, plan.timeline.simulation.span
    full = plan.ranked[0].estimate.seconds
    caption = f"{micros} microbatches in {span:.3g} s, of a step of {full:.3g} s"
    drawing.text(TIMELINE_RIGHT, 14, caption, "label", "end")
    for i, (start, end) in enumerate(parts):
        _draw_actions(
            drawing,
            plan.timeline,
            ranks,
            Scale(start, end, TIMELINE_LEFT, TIMELINE_RIGHT),
            34 + tall * i,
        )
    return drawing


def windows(timeline: Timeline) -> list[tuple[float, float]]:
    """Return the (start, end) seconds of the panels of the timeline: one for all, or the beginning
    and the end.
    """
    span = timeline.simulation.span
    longest = max(len(actions) for actions in timeline.schedule.actions)
    if longest <= MOST_BOXES:
        return [(0.0, span)]
    part = span * MOST_BOXES / longest
    return [(0.0, part), (span - part, span)]


def _draw_actions(
    drawing: Drawing, timeline: Timeline, ranks: list[int], scale: Scale, top: float
) -> None:
    """Draw the actions of the `ranks` ranks within the time range of `scale`, from height `top`
    down, with each rank's idle share.
    """
    schedule, simulation = timeline.schedule, timeline.simulation
    bottom = top + RANK_HEIGHT * len(ranks)
    axis(drawing, scale, bottom + 2, "seconds", top)
    for row, rank in enumerate(ranks):
        y = top + RANK_HEIGHT * row
        drawing.box(TIMELINE_LEFT, y + 2, TIMELINE_RIGHT - TIMELINE_LEFT, RANK_HEIGHT - 4, "idle")
        boxes: dict[str, list[tuple[float, float]]] = {}
        numbers = []
        for action, (start, end) in zip(
            schedule.actions[rank], simulation.times[rank], strict=True
        ):
            # clipped to the panel
            first, last = max(start, scale.low), min(end, scale.high)
            if first >= last:
                continue
            x, width = scale(first), scale(last) - scale(first)
            boxes.setdefault(action.kind, []).append((x, width))
            # room for the number; only chunk 0 is numbered
            if width > 7 * len(str(action.micro)) and not action.chunk:
                numbers.append((x + width / 2, str(action.micro)))
        for kind, box_list in boxes.items():
            drawing.boxes(box_list, y + 2, RANK_HEIGHT - 4, kind)
        for x, micro in numbers:
            drawing.text(x, y + 14, micro, "tiny", "middle")
        drawing.text(TIMELINE_LEFT - 8, y + 14, f"rank {rank}", "small", "end")
        idle = 1 - simulation.busy[rank] / simulation.span
        drawing.text(TIMELINE_RIGHT + 8, y + 14, f"{idle:.0%} idle", "small")


AXES = ("tp", "cp", "ep", "dp", "pp")
GB = 1e9


def traffic(plan: Plan) -> Drawing:
    """Return the drawing of the bytes that a GPU sends in a step: a bar per tier of the network,
    stacked by mesh axis, with the time its link is busy.
    """
    traffic_rows = plan.ranked[0].traffic
    tiers = list(dict.fromkeys(traffic.tier for traffic in traffic_rows))
    bottom = 36 + 40 * max(1, len(tiers))
    drawing = Drawing("Traffic on each tier of the network", bottom + 40)
    if not traffic_rows:
        drawing.text(0, 60, "Nothing crosses a link: every rank is alone on each axis.", "label")
        return drawing
    drawing.legend({a: a for a in AXES if any(traffic.axis == a for traffic in traffic_rows)}, 14)
    most = max(
        sum(traffic.sent for traffic in traffic_rows if traffic.tier == tier) for tier in tiers
    )
    scale = Scale(0, most * 1.02 / GB, 110, 700)
    axis(drawing, scale, bottom, "GB that a GPU sends in a step", 30)
    for i, tier in enumerate(tiers):
        y, before, busy = 40 + 40 * i, 0.0, 0.0
        drawing.text(100, y + 16, tier, "", "end")
        for entry in (traffic for traffic in traffic_rows if traffic.tier == tier):
            x, after = scale(before), scale(before + entry.sent / GB)
            hint = f"{entry.axis} over {tier}: {entry.sent / GB:.3g} GB, {entry.seconds:.3g} s"
            drawing.box(x, y, after - x, 24, entry.axis, hint)
            before, busy = before + entry.sent / GB, busy + entry.seconds
        # over 100 %: the link bounds the step
        share = busy / plan.ranked[0].estimate.seconds
        words = f"{before:.3g} GB; busy {busy:.3g} s, {share:.0%} of the step"
        drawing.text(scale(before) + 8, y + 16, words, "small")
    return drawing


def cluster(plan: Plan) -> Drawing:
    """Return the drawing of the cluster: a row per tier of switches that the plan's GPUs need, then
    the nodes, then the GPUs of one node.
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
        _draw_row(drawing, count, y, f"{tier.name}: {count:,} × up to {tier.nodes} nodes")
        under = len(tiers) - level - 2
        _draw_wires(
            drawing, count, -(-used // tiers[under].nodes) if under >= 0 else used, y, below
        )
    y = 20.0 + 70 * len(tiers)
    link = "" if wired.between is None else f", {wired.between.bandwidth / GB:.0f} GB/s each way"
    _draw_row(drawing, used, y, f"{used:,} nodes of {wired.gpus_per_node} GPUs{link}")
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


DRAWN = 12  # of a row; more are counted, not drawn


def _box_places(count: int) -> list[float]:
    """Return the x coordinates of the boxes in a row of `count`, of which at most 12 are drawn."""
    picture_count = min(count, DRAWN)
    return [
        310 + (i - (picture_count - 1) / 2) * 600 / max(picture_count, 4)
        for i in range(picture_count)
    ]


def _draw_row(drawing: Drawing, count: int, y: float, words: str) -> None:
    """Draw a row of `count` boxes at height `y`, with dots for those beyond 12, and a text to its
    right.
    """
    places = _box_places(count)
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
    tops, ends = _box_places(above), _box_places(below)
    for i, x in enumerate(ends):
        top = tops[min(len(tops) - 1, i * len(tops) // len(ends))]
        drawing.line([(top, y + 28), (x, to)], "wire")


Worth = Callable[[Fleet], float]


def front(plan: Plan) -> Drawing:
    """Return the drawing of GPUs against days for each number of GPUs, and beside it of cost
    against days, or GPU-days where no price is known.
    """
    drawing = Drawing("GPUs, days and cost", 330)
    if not plan.fleets:
        drawing.text(0, 60, "The plan has only one number of GPUs.", "label")
        return drawing
    _draw_fleets(drawing, plan, 60, 430, {"gpus": lambda f: f.gpus}, "GPUs")
    # a curve for each price that is known
    costs: dict[str, Worth] = {}
    if plan.prices.rent:
        costs["rented"] = plan.rent_cost
    if plan.prices.node:
        costs["owned"] = plan.owning_cost
    if costs:
        _draw_fleets(drawing, plan, 530, 900, costs, "cost (in the currency of the prices)")
    else:
        days = {"gpus": lambda f: f.gpus * plan.days(f.estimate).seconds}
        _draw_fleets(drawing, plan, 530, 900, days, "GPU-days")
    return drawing


def _draw_fleets(
    drawing: Drawing, plan: Plan, left: float, right: float, worths: dict[str, Worth], words: str
) -> None:
    """Draw one panel from `left` to `right`: days against each of `worths` (name -> value of a
    fleet), the front as a line, all fleets as dots with intervals. `words`: title of the axis.
    """
    all_days = [plan.days(fleet.estimate) for fleet in plan.fleets]
    values = [worth(fleet) for worth in worths.values() for fleet in plan.fleets]
    low, high = min(d.low for d in all_days), max(d.high for d in all_days)
    # halving the days doubles the GPUs: a straight line
    days = Scale(low / 1.15, high * 1.15, left, right, log=True)
    across = Scale(min(values) / 1.3, max(values) * 1.3, 250, 40, log=True)
    axis(drawing, days, 250, f"days for {short(plan.budget)} tokens, and 90 % interval", 40)
    side(drawing, across, left, words, right)
    front = plan.front
    for i, (name, worth) in enumerate(worths.items()):
        drawing.line(
            [(days(plan.days(f.estimate).seconds), across(worth(f))) for f in front], f"course{i}"
        )
        if len(worths) > 1:
            drawing.line([(left + 110 * i, 318), (left + 40 + 110 * i, 318)], f"course{i}")
            drawing.text(left + 46 + 110 * i, 322, name, "small")
        for fleet in plan.fleets:
            duration, y = plan.days(fleet.estimate), across(worth(fleet))
            drawing.line([(days(duration.low), y), (days(duration.high), y)], "whisker")
            costs = f"{duration.seconds:.3g} days, {worth(fleet):,.0f}"
            hint = f"{fleet.gpus:,} GPUs, {fleet.words}: {costs}"
            # hollow if another fleet is better
            drawing.dot(days(duration.seconds), y, hint, "dot" if fleet in front else "off")
            if name == "gpus" and words == "GPUs":
                drawing.text(days(duration.seconds) + 7, y - 7, f"{fleet.gpus:,}", "small")
