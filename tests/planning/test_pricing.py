"""Seconds in closed form against the simulated lists, and rows in closed form against counts."""

import random

import pytest

from dolmen.model import count
from dolmen.parallel.simulation import make_schedule
from dolmen.planning.blocks import block_rows, embedding_rows, head_rows
from dolmen.planning.capacity import Capacity
from dolmen.planning.cost import CONTENTION
from dolmen.planning.hardware import read_cluster
from dolmen.planning.operations import OURS, RankShare
from dolmen.planning.pricing import Pricing, exposed_seconds
from dolmen.planning.space import LayoutChoice, Pins, Space
from dolmen.planning.step import ErrorSpread, step_time
from dolmen.recipes import RECIPES


def pricing(name: str, nodes: int, batch: int) -> Pricing:
    spec = RECIPES[name]().spec
    cluster = read_cluster(f"dgx-a100:{nodes}")
    spread = ErrorSpread(0.2, 0, False)
    return Pricing(Capacity(spec, 2048), cluster, batch, "bf16", spread)


def test_the_closed_form_is_what_a_simulation_takes():
    """Within 3 % where chunks are even and microbatches many, which fill no bubble of few; else it
    ranks: of uneven chunks it takes all to wait for the longest of each, which some do not.
    """
    prices = pricing("gpt-7.5b", 4, 64)
    space = Space(prices.capacity.spec, 32, 64, 2048, pins=Pins(zero=1))
    for choice in random.Random(1).sample(list(space.choices()), 200):
        quick, full = prices.quick(choice), prices.full(choice).estimate
        assert sum(full.parts.values()) == pytest.approx(full.seconds, rel=1e-9)
        if choice.schedule == "zero-bubble-v" and prices.micros(choice) < 2 * choice.pp:
            continue  # which has other bubbles
        layers = {len(one) for one in prices.capacity.ranks.layers_of_stages(choice)}
        even = len(layers) == 1 and choice.virtual_stages == 1
        close = even and prices.micros(choice) >= 4 * choice.pp
        assert quick == pytest.approx(full.seconds, rel=0.03 if close else 0.4), choice


def test_a_long_step_is_its_beginning_and_more_of_the_same():
    prices = pricing("gpt-7.5b", 4, 512)
    choice = LayoutChoice(2, 1, 4, 4, 1, 1, False, "ring", "1f1b", 1, "none", None, 1)
    found = prices.full(choice)
    assert found.schedule.micros < prices.micros(choice) == 128
    lists = make_schedule("1f1b", 4, 128)
    stages, update = prices.stages(choice), prices.update(choice)
    whole, _ = step_time(stages, lists, update, prices.spread)
    assert found.estimate.seconds == pytest.approx(whole.seconds, rel=1e-3)


@pytest.mark.parametrize("name", ("gpt3-175b", "llama-70b", "mixtral-8x7b"))
def test_rows_have_the_products_of_the_model(name):
    """FLOPs of a step by rows are those by model/count.py, attention's backward aside; of experts
    and of a table that ranks of tp cut unevenly, within what they pad.
    """
    spec = RECIPES[name]().spec
    for tp in (1, 8):
        share = RankShare(1, 2048, tp)
        works = [block_rows(spec, i, share, OURS) for i in range(spec.layers)]
        works += [make(spec, share, OURS) for make in (embedding_rows, head_rows)]
        rows = [row for work in works for row in (*work.forward, *work.backward)]
        flops = tp * sum(row.flops for row in rows if row.kind == "product")
        wanted = count.training_flops_per_token(spec, 2048)
        wanted -= count.attention_flops_per_token(spec, 2048)
        assert flops == pytest.approx(2048 * wanted, rel=2e-3)
        scores = tp * sum(row.flops for row in rows if row.kind == "attention")
        attention = count.attention_flops_per_token(spec, 2048) / 3
        assert scores == pytest.approx(2048 * attention * 3.5, rel=1e-6)


def test_what_is_gathered_first_has_nothing_to_hide_behind():
    """Of 8 s in four units, 2 s are waited for however long is computed; the rest slows it."""
    assert exposed_seconds(8.0, 100.0, 1 / 4) == pytest.approx(2 + CONTENTION * 6)
    assert exposed_seconds(8.0, 0.0, 1 / 4) == 8
    prices = pricing("gpt-7.5b", 4, 64)
    (choice,) = Space(
        prices.capacity.spec, 32, 64, 2048, 1, pins=Pins(tp=1, pp=1, zero=3, recompute="none")
    ).choices()
    assert prices.update(choice).dp > prices.micros(choice) * 2 * prices._fsdp_seconds(
        choice, prices.capacity.ranks.elements(choice, 0)
    )[1] / (prices.capacity.spec.layers + 1)
