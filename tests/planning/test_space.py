"""Which layouts are searched, and what each rank of one holds, against the house's own rules and
lists of actions.
"""

import itertools
import random
from dataclasses import replace

import pytest
from tiny_models import Flat, Tiny, with_num_layers

from dolmen.model import count
from dolmen.model.layout import Layout
from dolmen.ops.kernels import H100, HALF, choose
from dolmen.parallel.simulation import make_schedule, simulate
from dolmen.planning.capacity import LOGITS, Capacity, microbatches_in_flight
from dolmen.planning.ranks import stages_of
from dolmen.planning.space import LayoutChoice, Pins, Space
from dolmen.recipes import RECIPES

DENSE = Flat(
    vocab_size=64,
    hidden_size=48,
    intermediate_size=96,
    num_hidden_layers=5,
    num_attention_heads=6,
    num_key_value_heads=2,
    head_dim=8,
).spec
SPARSE = with_num_layers(Tiny(RECIPES["mixtral-8x7b"]().spec), 4).spec
SIZES = (1, 2, 3, 4, 6, 8, 12, 24)


def brute(spec, gpus: int, batch: int, length: int) -> set[LayoutChoice]:
    """What `Layout.check` takes of everything, less what has no effect."""
    found = set()
    names = [("1f1b", 1), ("gpipe", 1), ("zero-bubble", 1), ("zero-bubble-v", 2)]
    names += [("interleaved", chunks) for chunks in range(2, 8)]
    for tp, cp, pp, ep in itertools.product(SIZES, SIZES, SIZES, (1, 2, 3, 4, 6, 8)):
        dp, rest = divmod(gpus, tp * cp * pp)
        if rest or not dp or cp * 4096 > length > 0 and cp > 1:
            continue
        for name, chunks in names if pp > 1 else names[:1]:
            for micro, stream in itertools.product(range(1, batch + 1), (False, True)):
                layout = Layout(
                    tp=tp,
                    cp=cp,
                    pp=pp,
                    dp=dp,
                    ep=ep,
                    schedule=name,
                    virtual_stages=chunks,
                    sequence_parallel=stream,
                )
                try:
                    layout.check(spec, length, batch, micro)
                except ValueError:
                    continue
                if stream and tp == 1:
                    continue
                for zero in (0, 1, 2, 3) if dp * cp > 1 else (1,):
                    for context in ("ring", "gather") if cp > 1 else ("ring",):
                        for again in ("none", "selective", "full"):
                            found.add(
                                LayoutChoice(
                                    *(tp, cp, pp, dp, ep, zero, stream, context, name, chunks),
                                    *(again, None, micro),
                                )
                            )
    return found


@pytest.mark.parametrize(
    "spec, gpus, batch, length",
    [(DENSE, 12, 12, 8), (DENSE, 6, 4, 8), (SPARSE, 8, 4, 8192), (DENSE, 24, 6, 16384)],
    ids=("dense", "six", "experts", "context"),
)
def test_layouts_are_those_that_the_house_takes(spec, gpus, batch, length):
    found = list(Space(spec, gpus, batch, length).choices())
    assert len(found) == len(set(found))
    assert set(found) == brute(spec, gpus, batch, length)


def test_what_is_pinned_is_so_and_nothing_else_changes():
    space = Space(DENSE, 12, 12, 8)
    every = set(space.choices())
    for pins, name in (
        (Pins(tp=2), "tp"),
        (Pins(recompute="full"), "recompute"),
        (Pins(schedule="interleaved"), "schedule"),
        (Pins(dp=6), "dp"),
        (Pins(sequence_parallel=True), "sequence_parallel"),
    ):
        pinned = set(replace(space, pins=pins).choices())
        wanted = {c for c in every if getattr(c, name) == pins.specified[name]}
        assert pinned == wanted and pinned
    # where there is nothing to shard over, every stage of ZeRO is the same
    third = set(replace(space, pins=Pins(zero=3)).choices())
    assert third == {c for c in every if c.zero == 3 or c.dp == 1}
    three = replace(space, pins=Pins(recompute_layers=1))
    assert {c.recompute for c in three.choices()} == {"full"}


@pytest.mark.parametrize(
    "space, message",
    [
        (
            Space(DENSE, 12, 7, 8, pins=Pins(tp=2, pp=1)),
            "train.global-batch-size (7) is not divisible",
        ),
        (Space(DENSE, 12, 12, 8, pins=Pins(tp=5)), "layout.tp (5) is not a divisor of the 12"),
        (Space(DENSE, 10, 10, 8, pins=Pins(tp=5)), "not divisible by tp (5)"),
        (Space(DENSE, 12, 12, 8, pins=Pins(pp=12)), "12 stages"),
        (Space(DENSE, 12, 12, 8, pins=Pins(tp=2, dp=12)), "but there are 12"),
        (Space(DENSE, 12, 12, 8, pins=Pins(ep=2)), "the model has none"),
        (Space(DENSE, 12, 12, 8, microbatch_size=5), "train.microbatch-size"),
        (
            Space(DENSE, 12, 12, 8, pins=Pins(recompute="full", recompute_layers=9)),
            "exceeds num_hid",
        ),
    ],
)
def test_what_no_layout_can_do_is_told_with_the_knob(space, message):
    assert not list(space.choices())
    with pytest.raises(ValueError, match="^[^\n]*$") as refusal:
        space.refuse()
    assert message in str(refusal.value)


@pytest.mark.parametrize("name", ("gpipe", "1f1b", "interleaved", "zero-bubble", "zero-bubble-v"))
def test_microbatches_in_flight_are_those_of_the_lists(name):
    for ranks, micros in itertools.product(range(2, 8), range(1, 22)):
        chunks = {"interleaved": 3, "zero-bubble-v": 2}.get(name, 1)
        if name == "interleaved" and micros % ranks:
            continue
        lists = make_schedule(name, ranks, micros, chunks)
        found = [microbatches_in_flight(name, ranks, micros, chunks, rank) for rank in range(ranks)]
        assert found == pytest.approx(simulate(lists).peak, abs=1e-12)
        choice = LayoutChoice(1, 1, ranks, 1, 1, 1, False, "ring", name, chunks, "none", None, 1)
        for rank in range(ranks):
            here = [lists.stage_of(rank, chunk) for chunk in range(chunks)]
            assert stages_of(choice, rank) == here


@pytest.mark.parametrize("name", ("gpt-1t", "mixtral-8x7b"))
def test_the_fullest_rank_is_the_fullest_of_all(name):
    run = RECIPES[name]()
    space = Space(run.spec, 256, 256, 2048)
    capacity = Capacity(run.spec, 2048)
    every = list(space.choices())
    # of few microbatches those of zero-bubble-v lie on the last ranks
    short = [c for c in every if 256 // c.dp // c.microbatch_size < c.pp]
    few = [c for c in short if c.schedule == "zero-bubble-v"]
    generator = random.Random(0)
    for choice in [*generator.sample(every, 300), *generator.sample(few, 50)]:
        every = capacity.stages(choice, 256)
        most = max(one.total for one in every)
        assert capacity.fullest(choice, 256) == pytest.approx(most, abs=len(every))


def test_every_parameter_is_held_once_and_a_tied_table_twice():
    """At ZeRO 0, of one rank of tp: what two ranks of tp both hold is small."""
    spec = RECIPES["gpt-1.7b"]().spec
    table = spec.params["embed.weight"].elements
    for pp, name, chunks, twice in (
        (1, "1f1b", 1, 0),
        (3, "1f1b", 1, 1),
        (3, "zero-bubble-v", 2, 0),
    ):
        choice = LayoutChoice(1, 1, pp, 4, 1, 0, False, "ring", name, chunks, "none", None, 1)
        found = sum(one.live.parameter for one in Capacity(spec, 2048).stages(choice, 96))
        assert found == 4 * (count.parameters(spec) + twice * table)


def test_states_follow_the_forms_of_zero():
    """Docs/zero.md: parameters and moments P / d, copies P, gradients between microbatches P or
    P / d; bytes of a rank, without activations.
    """
    spec = RECIPES["gpt-1.7b"]().spec
    p = count.parameters(spec)
    for zero in (0, 1, 2, 3):
        choice = LayoutChoice(1, 1, 1, 8, 1, zero, False, "ring", "1f1b", 1, "none", None, 1)
        live = Capacity(spec, 2048).stage_memory(choice, 0, 64).live
        shard = p if zero == 0 else -(-p // 8)
        assert (live.parameter, live.optimizer) == (4 * shard, 8 * shard)
        assert (live.compute == 2 * p) == (zero < 3)
        assert live.gradient == (4 * shard if zero >= 2 else 0)
        assert (live.unsharded >= 4 * p) == (zero < 2)


def test_logits_of_a_chunk_are_those_of_a_gpu():
    assert choose(H100, HALF[1], 128).logits_at_once == LOGITS
