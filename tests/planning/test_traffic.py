"""What crosses each tier of the network, by hand; and the same model on other numbers of nodes."""

import pytest
from test_search import question

from dolmen.planning.config import PlanConfig
from dolmen.planning.cost import Placement
from dolmen.planning.pricing import shares, traffic
from dolmen.planning.search import add_fleets, make_plan, sizes
from dolmen.planning.space import Pins


def chosen(pins: Pins, nodes: int, batch: int):
    question_ = question("gpt-18b", f"dgx-a100:{nodes}", pins, global_batch_size=batch)
    return question_, min(question_.space().choices(), key=lambda one: one.microbatch_size)


def test_bytes_are_those_of_rings():
    """40 layers of 6,144 on tp 8, pp 4 and dp 2: a rank of 10 layers or so, 8 microbatches."""
    pins = Pins(8, 1, 4, 2, 1, 1, True, schedule="1f1b", recompute="none")
    requested, choice = chosen(pins, 8, 16)
    found = {(one.tier, one.axis): one for one in traffic(requested.pricing, choice)}
    assert list(found) == [("node", "tp"), ("leaf", "dp"), ("leaf", "pp")]
    stream = 2048 * 6144 * 2
    layers = max(len(stage) for stage in requested.capacity.ranks.layers_of_stages(choice)[1:-1])
    # two additions a layer: what is gathered and scattered forward and backward, and gathered once
    # more for the gradients of weights
    tp = 2 * 5 * layers * 8 * stream * 7 / 8
    assert found["node", "tp"].sent == pytest.approx(tp)
    # up and down, of each microbatch this rank's share of tokens
    assert found["leaf", "pp"].sent == pytest.approx(2 * 8 * stream / 8)
    rank = 1 if len(requested.capacity.ranks.layers_of_stages(choice)[1]) == layers else 2
    elements = requested.capacity.ranks.elements(choice, rank)
    # parameters in two bytes and gradients in four, half of each to the other replica
    assert found["leaf", "dp"].sent == pytest.approx(elements * (2 + 4) / 2)
    assert all(one.seconds > 0 for one in found.values())


def test_of_a_ring_over_nodes_the_rest_stays_inside():
    requested, _ = chosen(Pins(8), 8, 64)
    placed = Placement(
        requested.cluster,
        requested.pricing.machine(next(requested.space().choices())).placement.topology,
        8,
    )
    road = placed.road(range(16))
    assert (road.ranks, road.together, road.nodes) == (16, 8, 2)
    assert shares("all-gather", road) == (15 / 16 * 7 / 8, 15 / 16 / 8)
    assert shares("all-reduce", road) == (2 * 15 / 16 * 7 / 8, 2 * 15 / 16 / 8)
    assert shares("all-to-all", road) == (7 / 16, 8 / 16)
    inside = placed.road(range(8))
    assert shares("reduce-scatter", inside) == (7 / 8, 0)


def test_fleets_are_the_best_of_other_numbers_of_nodes():
    question_ = question(
        "gpt-7.5b", "dgx-a100:4", Pins(zero=1, recompute="full"), global_batch_size=64
    )
    plan = add_fleets(question_, make_plan(question_, PlanConfig(top=1, dryrun=False)))
    assert {fleet.gpus for fleet in plan.fleets} == {8, 16, 32, 64, 128} - {
        gpus for gpus in (8, 16) if gpus not in {fleet.gpus for fleet in plan.fleets}
    }
    assert plan.fleets[0].estimate == plan.ranked[0].estimate and plan.fleets[0].gpus == 32
    times = [fleet.estimate.seconds for fleet in plan.front]
    assert times == sorted(times, reverse=True)
    assert sizes(384, 560) == [48, 96, 192] and sizes(3, 20) == [6, 12]
