"""What a GPU sends in a step over each tier of the network, by axis of the mesh: of the rows that
`Pricing.crossing` lists, each over the links that its group has (placement.py).

A ring of n ranks, g of them in each node, goes from one node to the next at one of g steps: so of
what its ranks send, (n - 1) / n of a payload each (twice that of an all-reduce), 1 / g crosses the
network, and the rest stays in nodes.
"""

from collections.abc import Iterator

from dolmen.planning.cost import Machine, row_seconds
from dolmen.planning.ledger import Row
from dolmen.planning.placement import Road
from dolmen.planning.plan import Traffic
from dolmen.planning.pricing import Pricing
from dolmen.planning.space import Choice

NODE = "node"
AXES = {"fsdp": "dp"}  # what cost.Parts calls them


def traffic(pricing: Pricing, choice: Choice) -> tuple[Traffic, ...]:
    """Of the rank with most parameters that has stages before and after it, where one has; the
    nearest tier first.
    """
    machine = pricing.machine(choice)
    rank = max(
        range(choice.pp)[1:-1] or range(choice.pp),
        key=lambda rank: pricing.capacity.ranks.elements(choice, rank),
    )
    sums: dict[tuple[str, str], tuple[float, float]] = {}
    for row in pricing.crossing(choice, rank):
        for one in crossed(row, machine):
            sent, seconds = sums.get((one.tier, one.axis), (0.0, 0.0))
            sums[one.tier, one.axis] = sent + one.sent, seconds + one.seconds
    tiers = [NODE, *(tier.name for tier in pricing.cluster.tiers), "network"]
    found = (Traffic(*key, *values) for key, values in sums.items())
    return tuple(sorted(found, key=lambda one: (tiers.index(one.tier), one.axis)))


def crossed(row: Row, machine: Machine) -> Iterator[Traffic]:
    """What a collective or a send, as often as it happens, has on each tier."""
    axis = AXES.get(row.axis, row.axis)
    if row.kind == "send":
        tier, size = machine.hop().tier, float(row.payload * row.times)
        yield Traffic(tier, axis, size, row_seconds(row, machine) * row.times)
        return
    road = machine.road(row.axis)
    if road.ranks == 1:
        return
    inside, across = (part * row.payload * row.times for part in shares(row.op, road))
    if inside:
        yield Traffic(NODE, axis, inside, inside / road.near)
    if across:
        yield Traffic(road.tier, axis, across, row_seconds(row, machine) * row.times)


def shares(op: str, road: Road) -> tuple[float, float]:
    """(of a payload what each rank sends within its node, what it sends out of it)."""
    n, g = road.ranks, road.together
    if op == "all-to-all":
        return (g - 1) / n, (n - g) / n
    sent = (n - 1) / n * (2 if op == "all-reduce" else 1)
    return (sent, 0.0) if g == n else (sent * (g - 1) / g, sent / g)
