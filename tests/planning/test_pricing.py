"""Seconds in closed form against the simulated lists, and rows in closed form against counts."""

import random
from collections import Counter
from collections.abc import Iterable

import pytest

from dolmen.model import count
from dolmen.parallel import schedule as schedules
from dolmen.planning.capacity import Capacity
from dolmen.planning.hardware import read_cluster
from dolmen.planning.ledger import Row
from dolmen.planning.operations import Program, Share, block_rows
from dolmen.planning.outline import Outline
from dolmen.planning.pricing import Pricing
from dolmen.planning.space import Choice, Pins, Space
from dolmen.planning.step import Spread, step_time
from dolmen.recipes import RECIPES


def pricing(name: str, nodes: int, batch: int) -> Pricing:
    tree = RECIPES[name]().tree
    cluster = read_cluster(f"dgx-a100:{nodes}")
    spread = Spread(0.2, 0, False)
    return Pricing(Outline(tree, 2048), Capacity(tree, 2048), cluster, batch, "bf16", spread)


def test_the_closed_form_is_what_a_simulation_takes():
    """Within 3 % where chunks are even and microbatches many, which fill no bubble of few; else it
    ranks.
    """
    prices = pricing("gpt-7.5b", 4, 64)
    space = Space(prices.outline.tree, 32, 64, 2048, pins=Pins(zero=1))
    for choice in random.Random(1).sample(list(space.choices()), 200):
        quick, full = prices.quick(choice), prices.full(choice).estimate
        assert sum(full.parts.values()) == pytest.approx(full.seconds, rel=1e-9)
        if choice.schedule == "zero-bubble-v" and prices.micros(choice) < 2 * choice.pp:
            continue  # which has other bubbles
        layers = {len(one) for one in prices.capacity.ranks.layers_of_stages(choice)}
        even = len(layers) == 1 and choice.virtual_stages == 1
        close = even and prices.micros(choice) >= 4 * choice.pp
        assert quick == pytest.approx(full.seconds, rel=0.03 if close else 0.35), choice


def test_a_long_step_is_its_beginning_and_more_of_the_same():
    prices = pricing("gpt-7.5b", 4, 512)
    choice = Choice(2, 1, 4, 4, 1, 1, False, "ring", "1f1b", 1, "none", None, 1)
    found = prices.full(choice)
    assert found.schedule.micros < prices.micros(choice) == 128
    lists = schedules.make("1f1b", 4, 128)
    stages, update = prices.stages(choice), prices.update(choice)
    whole, _ = step_time(stages, lists, update, prices.spread)
    assert found.estimate.seconds == pytest.approx(whole.seconds, rel=1e-3)


@pytest.mark.parametrize("name", ("gpt3-175b", "llama-70b", "mixtral-8x7b"))
def test_rows_have_the_products_of_the_model(name):
    """FLOPs of a step by rows are those by model/count.py, attention's backward aside; of experts
    and of a table that ranks of tp cut unevenly, within what they pad.
    """
    tree = RECIPES[name]().tree
    for tp in (1, 8):
        choice = Choice(tp, 1, 1, 1, 1, 1, False, "ring", "1f1b", 1, "none", None, 1)
        outline = Outline(tree, 2048)
        works = [outline.block(i, choice) for i in range(tree.layers)]
        works += [outline.embedding(choice), outline.head(choice)]
        rows = [row for work in works for one in work for row in one]
        flops = tp * sum(row.flops for row in rows if row.kind == "product")
        wanted = count.training_flops_per_token(tree, 2048)
        wanted -= count.attention_flops_per_token(tree, 2048)
        assert flops == pytest.approx(2048 * wanted, rel=2e-3)
        scores = tp * sum(row.flops for row in rows if row.kind == "attention")
        attention = count.attention_flops_per_token(tree, 2048) / 3
        assert scores == pytest.approx(2048 * attention * 3.5, rel=1e-6)


@pytest.mark.parametrize("name", ("gpt3-175b", "llama-70b"))
@pytest.mark.parametrize("sequence_parallel", (False, True))
def test_rows_of_our_step_and_of_published_programs_compute_and_send_alike(name, sequence_parallel):
    """The intervals of a plan are made of the errors of the latter (forecast.py). Of scores
    model/count.py counts a token more: that with itself is whole.
    """
    tree = RECIPES[name]().tree
    choice = Choice(8, 1, 1, 1, 1, 1, sequence_parallel, "ring", "1f1b", 1, "none", None, 1)
    ours = Outline(tree, 2048).block(0, choice)
    share = Share(1, 2048, tp=8, sequence_parallel=sequence_parallel)
    theirs = block_rows(tree.blocks[0], tree.hidden_size, share, Program("flash", "compiled"))
    for one, other in (
        (done(ours.forward), done(theirs.forward)),
        (done((*ours.inputs, *ours.weights)), done(theirs.backward)),
    ):
        assert one.pop("attention") * 2048 == other.pop("attention") * 2049
        assert one == other


def done(rows: Iterable[Row]) -> Counter:
    """FLOPs, and bytes by collective; two of half the size are one."""
    out = Counter()
    for row in rows:
        out[row.op if row.kind == "collective" else row.kind] += row.flops + row.payload
    return Counter({name: number for name, number in out.items() if number})
