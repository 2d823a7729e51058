"""The schedule of the best layout, a row per pipeline rank."""

from dolmen.planning.figures.memory import evenly
from dolmen.planning.figures.svg import Drawing, Scale, axis
from dolmen.planning.plan import Plan, Timeline

ROWS = 16
BOXES = 240  # of a row, in a panel: narrower ones are no boxes
ROW = 20.0
LEFT, RIGHT = 70.0, 860.0
NAMES = {"F": "forward", "B": "backward", "I": "backward of inputs", "W": "backward of weights"}


def timeline(plan: Plan) -> Drawing:
    """Draw the schedule of a step, or its beginning and end if a rank has more than BOXES
    actions.
    """
    shown = evenly(plan.timeline.schedule.ranks, ROWS)
    parts = windows(plan.timeline)
    tall = ROW * len(shown) + 64
    drawing = Drawing("The schedule of a step", 30 + tall * len(parts))
    kinds = {a.kind for actions in plan.timeline.schedule.actions for a in actions}
    drawing.legend({k: words for k, words in NAMES.items() if k in kinds} | {"idle": "idle"}, 14)
    micros, span = plan.timeline.schedule.micros, plan.timeline.simulation.span
    whole = plan.ranked[0].estimate.seconds
    caption = f"{micros} microbatches in {span:.3g} s, of a step of {whole:.3g} s"
    drawing.text(RIGHT, 14, caption, "label", "end")
    for i, (start, end) in enumerate(parts):
        _draw_panel(drawing, plan.timeline, shown, Scale(start, end, LEFT, RIGHT), 34 + tall * i)
    return drawing


def windows(timeline: Timeline) -> list[tuple[float, float]]:
    """Return the (start, end) times of the panels: one for all, or the beginning and the end."""
    span = timeline.simulation.span
    longest = max(len(actions) for actions in timeline.schedule.actions)
    if longest <= BOXES:
        return [(0.0, span)]
    part = span * BOXES / longest
    return [(0.0, part), (span - part, span)]


def _draw_panel(
    drawing: Drawing, timeline: Timeline, shown: list[int], scale: Scale, top: float
) -> None:
    """Draw the actions of the `shown` ranks within the time range of `scale`, from height `top`
    down, with each rank's idle share.
    """
    schedule, simulation = timeline.schedule, timeline.simulation
    bottom = top + ROW * len(shown)
    axis(drawing, scale, bottom + 2, "seconds", top)
    for row, rank in enumerate(shown):
        y = top + ROW * row
        drawing.box(LEFT, y + 2, RIGHT - LEFT, ROW - 4, "idle")
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
        for kind, each in boxes.items():
            drawing.boxes(each, y + 2, ROW - 4, kind)
        for x, micro in numbers:
            drawing.text(x, y + 14, micro, "tiny", "middle")
        drawing.text(LEFT - 8, y + 14, f"rank {rank}", "small", "end")
        idle = 1 - simulation.busy[rank] / simulation.span
        drawing.text(RIGHT + 8, y + 14, f"{idle:.0%} idle", "small")
