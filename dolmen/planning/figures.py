"""Figures of the report of `dolmen plan`, each a function that draws a plan on a matplotlib figure:

paint_ranking, paint_step          layouts by time, and the parts of their steps
paint_memory, paint_memory_course  memory of ranks by kind at the fullest moment, and over a step
paint_timeline                     the schedule, a row per pipeline rank
paint_traffic, paint_cluster       what crosses each tier of the network in a step; how it is wired
paint_front                        GPUs against days and cost: the fleets of which no other is
                                   smaller and as fast
"""

import textwrap
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from dolmen.core.log import gib, size
from dolmen.core.messages import plural
from dolmen.pages.page import evenly
from dolmen.pages.picture import (
    BLUE,
    FAINT,
    INK,
    INSIDE,
    ORANGE,
    PAPER,
    RED,
    Fill,
    add_columns,
    add_legend,
)
from dolmen.planning.draw import Panel, paint_panels
from dolmen.planning.plan import (
    Candidate,
    Fleet,
    Plan,
    StageMemory,
    Timeline,
    words,
)

GIB = 2**30
MOST_LAYOUTS = 12
MOST_STEPS = 8
MOST_COLUMNS = 32  # pipeline ranks
PARTS = {
    "product": Fill("matrix products", "#7fa9d6"),
    "attention": Fill("attention", "#a9c5e6", "////"),
    "memory": Fill("memory-bound", "#d3e1f2", "\\\\\\\\"),
    "host": Fill("waiting for the host", "#e6e2d8", "||||"),
    "tp": Fill("tp", "#e58f7b", "----"),
    "cp": Fill("cp", "#f0b9a9", "xxx"),
    "ep": Fill("ep", "#f6d9c6", "//||"),
    "dp": Fill("dp", "#eeb06d", "//////"),
    "pp": Fill("pp", "#c9b3d9", "-----"),
    "bubble": Fill("bubble", "#f6f5ee", "///"),
    "optimizer": Fill("optimizer", "#93bf8c", "+++"),
}
"""Parts of a step (step.Estimate), in the order of their bars."""
KINDS = {
    "parameter": Fill("parameters", "#7fa9d6"),
    "compute": Fill("gathered parameters", "#a9c5e6", "////"),
    "gradient": Fill("gradients", "#eeb06d", "----"),
    "unsharded": Fill("unreduced gradients", "#f5d3ae", "-----"),
    "optimizer": Fill("optimizer", "#93bf8c", "+++"),
    "activation": Fill("activations", "#e58f7b", "\\\\\\\\"),
    "buffer": Fill("buffers", "#c9b3d9", "||||"),
    "other": Fill("context and workspace", "#e6e2d8", "xxx"),
}
"""Kinds of memory, from the bottom of a column up."""
MESH = {f"layout.{axis}" for axis in ("tp", "cp", "pp", "dp", "ep")}
BRIEF = {
    "microbatch-size": "microbatch",
    "sequence-parallel": "sp",
    "schedule ": "",
    "virtual-stages": "v",
    "recompute-layers": "layers",
}
COURSES = ((INK, "-"), (BLUE, "--"), (ORANGE, ":"))
LIMIT = {"color": RED, "linestyle": (0, (5, 3)), "linewidth": 1.5}


def paint_ranking(figure: Any, plan: Plan) -> None:
    """Draw the seconds of a step with their 90 % intervals, a row per layout, the fastest first (12
    at most), with throughput, MFU, memory and bottleneck.
    """
    candidates = plan.ranked[:MOST_LAYOUTS]
    axes = _add_rows(figure, [_name(candidate) for candidate in candidates])
    for row, candidate in enumerate(candidates):
        _add_interval(axes, candidate.estimate, row, f"{candidate.words}: ")
    cells = [
        (
            f"{plan.step_tokens / candidate.estimate.seconds:,.0f}",
            f"{candidate.mfu:.1%}",
            f"{candidate.fullest / GIB:.1f} GiB",
            candidate.bound,
        )
        for candidate in candidates
    ]
    add_columns(axes, {"tokens/s": 50, "MFU": 90, "memory": 144, "bound by": 200}, cells)
    # from 0, so that lengths are comparable
    axes.set(xlim=(0, None), xlabel="seconds of a step, and 90 % interval")


def paint_step(figure: Any, plan: Plan) -> None:
    """Draw the parts of a step (products, communication, bubble, ...) as a stacked bar, for the
    best eight layouts.
    """
    candidates = plan.ranked[:MOST_STEPS]
    axes = _add_rows(figure, [_name(candidate) for candidate in candidates], legend=2)
    longest = max(candidate.estimate.seconds for candidate in candidates)
    for row, candidate in enumerate(candidates):
        whole = candidate.estimate.seconds
        # room for "12%"
        _stack(
            axes, row, candidate.estimate.parts, PARTS, "", "s",
            label=lambda part, whole=whole: f"{part / whole:.0%}" if part > 0.045 * longest else "",
        )  # fmt: skip
    axes.set(xlim=(0, longest * 1.02), xlabel="seconds")
    # only parts that occur
    used = [f for n, f in PARTS.items() if any(c.estimate.parts.get(n, 0) > 0 for c in candidates)]
    add_legend(figure, used, -(-len(used) // 2))


def paint_memory(figure: Any, plan: Plan) -> None:
    """Draw the best layout's peak memory, a column per pipeline rank (at most 32, evenly chosen),
    stacked by kind in GiB, below a line at the device's limit.
    """
    figure.set_figheight(3.6)
    axes = figure.subplots()
    memory = plan.ranked[0].memory
    ranks = evenly(len(memory), MOST_COLUMNS)
    for place, rank in enumerate(ranks):
        amounts = {kind: kind_bytes(memory[rank], kind) / GIB for kind in KINDS}
        top = _stack(axes, place, amounts, KINDS, f"rank {rank}, ", "GiB", upright=True)
        # room for a number
        if len(ranks) < 25:
            axes.annotate(f"{top:.1f}", (place, top), (0, 3), **OFFSET, ha="center", size=8)
    _add_limit(axes, plan)
    axes.set(xlabel="pipeline rank", ylabel="GiB")
    axes.set_xticks(range(len(ranks)), map(str, ranks))
    axes.grid(axis="y")
    add_legend(figure, list(KINDS.values()), 4)


def paint_memory_course(figure: Any, plan: Plan) -> None:
    """Draw the memory of the first, a middle and the last pipeline rank over the time of a step,
    for the best layout.
    """
    axes = figure.subplots()
    memory = plan.ranked[0].memory
    for rank, (colour, dash) in zip(evenly(len(memory), 3), COURSES, strict=False):
        seconds, held = [0.0], []
        levels = memory_course(memory[rank], plan.timeline, rank)
        held.append(levels[0][0])
        for (during, after), times in zip(
            levels, plan.timeline.simulation.times[rank], strict=True
        ):
            # a step up as the action starts
            seconds += [times[0], times[0], times[1], times[1]]
            held += [held[-1], during, during, after]
        axes.plot(
            seconds,
            [count / GIB for count in held],
            color=colour,
            linestyle=dash,
            label=f"rank {rank}",
        )
    _add_limit(axes, plan)
    axes.set(xlabel="seconds", ylabel="GiB", xlim=(0, plan.timeline.simulation.span))
    axes.grid()
    figure.legend(loc="outside upper left", ncols=3)


def paint_timeline(figure: Any, plan: Plan) -> None:
    """Draw the best layout's pipeline schedule (at most 16 ranks, evenly chosen), or its beginning
    and end if a rank has more than 240 actions.
    """
    schedule, simulation = plan.timeline
    ranks = evenly(schedule.ranks, 16)
    micros, step = schedule.micros, plan.ranked[0].estimate.seconds
    title = f"{micros} microbatches in {simulation.span:.3g} s, of a step of {step:.3g} s"
    parts = windows(plan.timeline)
    panels = [
        Panel(title if i == 0 else "the end", schedule, simulation, ranks, window)
        for i, window in enumerate(parts)
    ]
    paint_panels(figure, panels, "seconds")


def paint_traffic(figure: Any, plan: Plan) -> None:
    """Draw the bytes that a GPU sends in a step: a bar per tier of the network, stacked by mesh
    axis, with the time its link is busy.
    """
    rows = plan.ranked[0].traffic
    if not rows:
        return _write(figure, "Nothing crosses a link: every rank is alone on each axis.")
    tiers = list(dict.fromkeys(row.tier for row in rows))
    axes = _add_rows(figure, [[tier] for tier in tiers], legend=1)
    for y, tier in enumerate(tiers):
        crossing = [row for row in rows if row.tier == tier]
        sent = {row.axis: row.sent / 1e9 for row in crossing}
        total = _stack(axes, y, sent, PARTS, f"{tier}, ", "GB")
        busy = sum(row.seconds for row in crossing)
        # over 100 %: the link bounds the step
        share = busy / plan.ranked[0].estimate.seconds
        text = f"{total:.3g} GB; busy {busy:.3g} s, {share:.0%} of the step"
        axes.annotate(text, (total, y), (6, 0), textcoords="offset points", va="center", size=8)
    # room for the text right of the longest bar
    axes.set(xlim=(0, axes.get_xlim()[1] * 1.5), xlabel="GB that a GPU sends in a step")
    add_legend(figure, [PARTS[axis] for axis in PARTS if any(r.axis == axis for r in rows)], 5)


def paint_cluster(figure: Any, plan: Plan) -> None:
    """Draw the cluster: a row per tier of switches that the plan's GPUs need, then the nodes, then
    the GPUs of one node.
    """
    wired, used = plan.cluster, -(-plan.gpus // plan.cluster.gpus_per_node)
    # the lowest, and those above a tier that is too small
    tiers = [t for i, t in enumerate(wired.tiers) if i == 0 or wired.tiers[i - 1].nodes < used]
    if wired.between is None or used == 1:
        tiers = []
    # switches of each tier that the plan's nodes need
    switches = [(-(-used // tier.nodes), tier) for tier in reversed(tiers)]
    rows = [(n, f"{tier.name}: {n:,} × up to {tier.nodes} nodes") for n, tier in switches]
    link = "" if wired.between is None else f", {wired.between.bandwidth / 1e9:.0f} GB/s each way"
    rows.append((used, f"{plural(used, 'node')} of {wired.gpus_per_node} GPUs{link}"))
    device = wired.device
    inside = f"{wired.inside.bandwidth / 1e9:.0f} GB/s each way, {device.memory / GIB:.0f} GiB each"
    rows.append((wired.gpus_per_node, f"a node: {wired.gpus_per_node} {device.name}\n{inside}"))
    figure.set_figheight(0.7 * len(rows))
    axes = figure.subplots()
    above: list[float] = []
    for y, (count, text) in enumerate(rows):
        places = box_places(count)
        # the GPUs of one node all hang on its fabric
        above = [0.5] if y == len(rows) - 1 else above
        for i, x in enumerate(places):
            if above:
                top = above[i * len(above) // len(places)]
                axes.plot((top, x), (y - 0.75, y - 0.25), color=FAINT, linewidth=0.8)
        colour = "#7fa9d6" if y == len(rows) - 1 else "#d3e1f2"
        axes.bar(places, -0.5, 0.8 / max(4, len(places)), y + 0.25, color=colour)
        if count > MOST_BOXES:
            axes.text(places[-2], y, "…", color=INSIDE, ha="center", va="center", weight="bold")
        axes.text(1.03, y, text, va="center")
        above = places
    axes.set(xlim=(0, 1), ylim=(len(rows) - 0.4, -0.6))
    axes.axis("off")


def paint_front(figure: Any, plan: Plan) -> None:
    """Draw GPUs against days for each number of GPUs, and beside it cost against days, or GPU-days
    where no price is known.
    """
    if not plan.fleets:
        return _write(figure, "The plan has only one number of GPUs.")
    left, right = figure.subplots(1, 2)
    _paint_fleets(left, plan, {"GPUs": lambda fleet: fleet.gpus}, "GPUs", labelled=True)
    # a curve for each price that is known
    costs: dict[str, Callable[[Fleet], float]] = {}
    if plan.prices.rent:
        costs["rented"] = plan.rent_cost
    if plan.prices.node:
        costs["owned"] = plan.owning_cost
    if costs:
        _paint_fleets(right, plan, costs, "cost (in the currency of the prices)")
    else:
        days = {"GPU-days": lambda fleet: fleet.gpus * plan.days(fleet.estimate).seconds}
        _paint_fleets(right, plan, days, "GPU-days")


def _paint_fleets(
    axes: Any,
    plan: Plan,
    curves: Mapping[str, Callable[[Fleet], float]],
    title: str,
    labelled: bool = False,
) -> None:
    """Draw one panel: days against each of `curves` (name -> value of a fleet), the front as a
    line, all fleets as dots with intervals. `title`: of the vertical axis; `labelled`: write the
    number of GPUs beside each dot.
    """
    front = plan.front
    for (name, value_of), (colour, dash) in zip(curves.items(), COURSES, strict=False):
        days = [plan.days(fleet.estimate).seconds for fleet in front]
        axes.plot(days, [*map(value_of, front)], color=colour, linestyle=dash, label=name)
        for fleet in plan.fleets:
            hint = f"{fleet.gpus:,} GPUs, {fleet.words}: {title} {value_of(fleet):,.0f}, days "
            # hollow if another fleet is better
            _add_interval(axes, plan.days(fleet.estimate), value_of(fleet), hint, fleet in front)
            if labelled:
                place = plan.days(fleet.estimate).seconds, value_of(fleet)
                axes.annotate(f"{fleet.gpus:,}", place, (6, 5), **OFFSET, size=8)
    # halving the days doubles the GPUs: a straight line
    values = [value_of(fleet) for value_of in curves.values() for fleet in plan.fleets]
    low, high = min(values) / 1.3, max(values) * 1.3
    axes.set(xscale="log", yscale="log", ylim=(low, high), ylabel=title)
    axes.set_xlabel(f"days for {size(plan.budget)} tokens, and 90 % interval")
    for axis in (axes.xaxis, axes.yaxis):
        axis.get_major_locator().set_params(subs=(1, 2, 5))
        axis.set_major_formatter(lambda value, _: size(value))
    axes.minorticks_off()
    axes.grid()
    if len(curves) > 1:
        axes.legend()


def kind_bytes(memory: StageMemory, kind: str) -> int:
    """Return the bytes of a memory kind at the rank's peak; "other" is context and workspace."""
    return memory.other if kind == "other" else memory.live._asdict()[kind]


def memory_course(memory: StageMemory, timeline: Timeline, rank: int) -> list[tuple[float, float]]:
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


MOST_ACTIONS = 240  # of a rank, in a panel: boxes of more would be too narrow to see


def windows(timeline: Timeline) -> list[tuple[float, float]]:
    """Return the (start, end) seconds of the panels of the timeline: one for all, or the beginning
    and the end.
    """
    span = timeline.simulation.span
    longest = max(len(actions) for actions in timeline.schedule.actions)
    if longest <= MOST_ACTIONS:
        return [(0.0, span)]
    part = span * MOST_ACTIONS / longest
    return [(0.0, part), (span - part, span)]


MOST_BOXES = 12  # of a row; more are counted, not drawn


def box_places(count: int) -> list[float]:
    """Return where the boxes in a row of `count` are, from 0 to 1; at most 12 are drawn."""
    boxes = min(count, MOST_BOXES)
    return [0.5 + (i - (boxes - 1) / 2) / max(boxes, 4) for i in range(boxes)]


OFFSET = {"textcoords": "offset points", "color": FAINT}


def _name(candidate: Candidate) -> list[str]:
    """Return a layout as lines of text: its mesh, and below it the other options, abbreviated."""
    mesh = {name: value for name, value in candidate.layout.items() if name in MESH}
    rest = words({name: value for name, value in candidate.layout.items() if name not in MESH})
    for long, brief in BRIEF.items():
        rest = rest.replace(long, brief)
    return [words(mesh) or "one GPU", *textwrap.wrap(rest, 44)]


def _add_rows(figure: Any, names: Sequence[list[str]], legend: int = 0) -> Any:
    """Add axes with a row for each name, downwards, to the figure and set its height. `names`:
    lines of text; `legend`: lines of a legend that is added later.
    """
    figure.set_figheight(0.7 + 0.22 * legend + (0.2 + 0.09 * max(map(len, names))) * len(names))
    axes = figure.subplots()
    for y, lines in enumerate(names):
        for i, line in enumerate(lines):
            # points, around the middle of the row
            at = -8, 4.8 * (len(lines) - 1) - 9.6 * i
            style = {"color": FAINT, "size": 7.5} if i else {"weight": "normal" if y else "bold"}
            axes.annotate(
                line, (0, y), at, axes.get_yaxis_transform(), "offset points", ha="right",
                va="center", **style,
            )  # fmt: skip
    axes.set(ylim=(len(names) - 0.5, -0.6), yticks=[])
    axes.spines["left"].set_visible(False)
    axes.grid(axis="x")
    return axes


def _stack(
    axes: Any,
    place: float,
    amounts: Mapping[str, float],
    fills: Mapping[str, Fill],
    subject: str,
    unit: str,
    upright: bool = False,
    label: Callable[[float], str] = lambda amount: "",
) -> float:
    """Draw amounts (name -> length, in `unit`) as one stacked bar at `place`, in the order of
    `fills`, and return its length. `subject`: start of the tooltips; `label`: text in the part of
    an amount.
    """
    start, bar = 0.0, axes.bar if upright else axes.barh
    for name, fill in fills.items():
        if amount := amounts.get(name, 0.0):
            hint = f"{subject}{fill.title}: {amount:.4g} {unit}"
            bars = bar(place, amount, 0.72, start, color=fill.colour, hatch=fill.hatch, gid=hint)
            if text := label(amount):
                # without hatching behind it
                box = {"facecolor": fill.colour, "pad": 0.6, "linewidth": 0}
                axes.bar_label(bars, [text], label_type="center", color=INSIDE, size=8, bbox=box)
            start += amount
    return start


def _add_interval(axes: Any, value: Any, y: float, hint: str, filled: bool = True) -> None:
    """Draw an estimate at height `y`: a dot, filled or not, with its interval. `hint`: start of the
    tooltip.
    """
    sides = [[value.seconds - value.low], [value.high - value.seconds]]
    hint += f"{value.seconds:.4g}, {value.low:.4g} to {value.high:.4g}"
    face = INK if filled else PAPER
    axes.errorbar(
        value.seconds, y, xerr=sides, fmt="o", color=INK, markerfacecolor=face, markersize=5,
        linewidth=1.2, capsize=3, gid=hint,
    )  # fmt: skip


def _add_limit(axes: Any, plan: Plan) -> None:
    """Draw a line at the memory of the plan's device, in GiB; above it the device's name, its
    memory, and how much of it layouts may use.
    """
    device = plan.cluster.device
    axes.axhline(device.memory / GIB, **LIMIT)
    text = f"{device.name}: {gib(device.memory)}"
    if plan.headroom:
        text += f", of which layouts use at most {gib(int(device.memory * (1 - plan.headroom)))}"
    place = 1, device.memory / GIB
    axes.annotate(
        text, place, (0, 3), ("axes fraction", "data"), "offset points", ha="right", weight="bold"
    )
    axes.set_ylim(0, axes.get_ylim()[1] * 1.05)


def _write(figure: Any, text: str) -> None:
    """Write a sentence where there is nothing to draw."""
    figure.set_figheight(0.5)
    figure.text(0, 0.5, text, color=FAINT, style="italic", va="center")
