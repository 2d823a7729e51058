"""How many GPUs for how many days, and what that costs: for a budget of tokens, the fleets of which
no other is smaller and as fast.
"""

from collections.abc import Callable

from dolmen.planning.figures.svg import Drawing, Scale, axis, short, side
from dolmen.planning.plan import Fleet, Plan

Worth = Callable[[Fleet], float]


def front(plan: Plan) -> Drawing:
    """Draw GPUs against days, and beside it cost against days, or GPU-days where no price
    is known.
    """
    drawing = Drawing("GPUs, days and cost", 330)
    if not plan.fleets:
        drawing.text(0, 60, "The plan has only one number of GPUs.", "label")
        return drawing
    _draw_panel(drawing, plan, 60, 430, {"gpus": lambda f: f.gpus}, "GPUs")
    # a curve for each price that is known
    costs: dict[str, Worth] = {}
    if plan.prices.rent:
        costs["rented"] = plan.rent_cost
    if plan.prices.node:
        costs["owned"] = plan.owning_cost
    if costs:
        _draw_panel(drawing, plan, 530, 900, costs, "cost (in the currency of the prices)")
    else:
        days = {"gpus": lambda f: f.gpus * plan.days(f.estimate).seconds}
        _draw_panel(drawing, plan, 530, 900, days, "GPU-days")
    return drawing


def _draw_panel(
    drawing: Drawing, plan: Plan, left: float, right: float, worths: dict[str, Worth], words: str
) -> None:
    """Draw one panel from `left` to `right`: days against each of `worths` (name -> value of a
    fleet), the front as a line, all fleets as dots with intervals. `words`: title of the axis.
    """
    every = [plan.days(fleet.estimate) for fleet in plan.fleets]
    values = [worth(fleet) for worth in worths.values() for fleet in plan.fleets]
    low, high = min(d.low for d in every), max(d.high for d in every)
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
            found, y = plan.days(fleet.estimate), across(worth(fleet))
            drawing.line([(days(found.low), y), (days(found.high), y)], "whisker")
            hint = (
                f"{fleet.gpus:,} GPUs, {fleet.words}: {found.seconds:.3g} days, {worth(fleet):,.0f}"
            )
            # hollow if another fleet is better
            drawing.dot(days(found.seconds), y, hint, "dot" if fleet in front else "off")
            if name == "gpus" and words == "GPUs":
                drawing.text(days(found.seconds) + 7, y - 7, f"{fleet.gpus:,}", "small")
