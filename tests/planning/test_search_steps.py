"""The steps of a search, each compared with all layouts of a small cluster."""

from dataclasses import replace

import pytest

from dolmen.planning import search
from dolmen.planning.config import PlanConfig, PlanRequest, StepConfig
from dolmen.planning.question import Question
from dolmen.planning.space import LayoutChoice, Pins
from dolmen.recipes import RECIPES

SIZES = ("tp", "pp", "cp", "ep", "microbatch_size")


@pytest.fixture(scope="module")
def question() -> Question:
    step = StepConfig(sequence_length=16384, global_batch_size=4)
    config = PlanConfig(cluster="hgx-h100:1", train=step, headroom=0.5)
    return Question.from_request(PlanRequest("llama-8b", RECIPES["llama-8b"](), config))


def differing(first: LayoutChoice, second: LayoutChoice) -> set[str]:
    """Options with another value; dp follows from others, and layers from recomputation."""
    names = {n for n, a, b in zip(first._fields, first, second, strict=True) if a != b} - {"dp"}
    return names - ({"recompute_layers"} if "recompute" in names else set())


def one_step(name: str, value, other) -> bool:
    """Whether `other` is the next value of an option: a size doubled or its largest divisor."""
    if name in SIZES:
        below = [n for n in range(1, value) if value % n == 0]
        return other == 2 * value or other == max(below, default=0)
    if name == "virtual_stages":
        return value > 1 and other > 1 and abs(value - other) == 1
    return name in ("zero", "sequence_parallel", "recompute")


def test_neighbours_are_all_layouts_one_step_away(question):
    choices = [*question.space().choices()]
    assert len(choices) > 300
    for choice in choices[:: len(choices) // 12]:
        expected = set()
        for other in choices:
            if len(names := differing(choice, other)) == 1:
                (name,) = names
                if one_step(name, getattr(choice, name), getattr(other, name)):
                    expected.add(other)
        found = {other for other in search.neighbours(question, choice) if other != choice}
        single = {other for other in found if len(differing(choice, other)) == 1}
        assert expected <= found, (choice, expected - found)
        assert single <= expected, (choice, single - expected)
        for other in single:
            (name,) = differing(choice, other)
            text = search.difference(choice, other)
            assert f"{name.replace('_', '-')} {getattr(other, name)}" in text and "dp" not in text


def test_the_fastest_of_each_kind_are_listed(question):
    """Beside all layouts: ties are broken by memory; ZeRO and the form of cp make no kind."""
    found = search.search_layouts(question, best=7)
    choices = [*question.space().choices()]
    size = {choice: question.fullest_bytes(choice) for choice in choices}
    fitting = [choice for choice in choices if size[choice] <= question.memory]
    assert (found.considered, found.fitting) == (len(choices), len(fitting))
    kinds: dict = {}
    for choice in fitting:
        # what recomputes though it need not is slower, and is not timed
        if choice.recompute == "selective" and choice._replace(recompute="none") in size:
            if size[choice._replace(recompute="none")] <= question.memory:
                continue
        seconds = round(question.pricing.quick(choice), 6)
        key = seconds, size[choice], choice.context == "gather", choice
        kinds.setdefault(choice._replace(zero=1, context="ring"), []).append(key)
    fastest = sorted(min(keys) for keys in kinds.values())
    assert found.best == [choice for *_, choice in fastest][:7]
    largest = min(bytes_ for choice, bytes_ in size.items() if bytes_ > question.memory)
    assert found.nearest is not None and found.nearest[0] == largest == size[found.nearest[1]]


def test_changes_are_sorted_and_save_seconds_or_memory(question):
    choice = search.search_layouts(question, best=1).best[0]
    now, here = question.pricing.full(choice).estimate.seconds, question.fullest_bytes(choice)
    found = [*search.changes(question, choice, now)]
    assert [change.seconds for change in found] == sorted(change.seconds for change in found)
    expected = {}
    for other in {*search.neighbours(question, choice)} - {choice}:
        seconds = question.pricing.full(other).estimate.seconds
        bytes_ = question.fullest_bytes(other)
        if seconds < now or bytes_ <= 0.99 * here:
            expected[search.difference(choice, other)] = seconds, bytes_, bytes_ <= question.memory
    assert {change.words: tuple(change)[1:] for change in found} == expected and expected


@pytest.mark.parametrize(
    "nodes, most, other",
    [
        (1, 64, [2, 4]),
        (8, 8, [1, 2, 4]),
        (8, 16, [1, 2, 4, 16]),
        (6, 24, [3, 12, 24]),
        (12, 40, [3, 6, 24]),
    ],
)
def test_other_fleets_are_whole_parts_and_multiples(nodes, most, other):
    assert search.sizes(nodes, most) == other


def test_a_step_is_bound_by_what_takes_a_tenth_besides_products():
    assert search.bound({"product": 8.0, "attention": 1.0, "tp": 1.0}) == "compute"
    assert search.bound({"product": 8.0, "attention": 0.9, "tp": 1.1}) == "tp"
    assert search.bound({"product": 6.0, "optimizer": 1.1, "memory": 1.0, "tp": 1.9}) == "memory"
    assert search.bound({"tp": 1.0, "pp": 2.0}) == "bubble" and search.bound({}) == "compute"


def test_nodes_are_doubled_until_a_layout_fits(question):
    """The first power of two, and none on a cluster that has one node fewer."""
    step, pins = StepConfig(global_batch_size=64, microbatch_size=1), Pins(tp=8, recompute="full")
    config = PlanConfig(cluster="dgx-a100:1", layout=pins, train=step)
    large = Question.from_request(PlanRequest("gpt3-175b", RECIPES["gpt3-175b"](), config))
    enough = search.enough_nodes(large)
    assert enough is not None and enough > 2

    def fits(nodes: int) -> bool:
        placed = replace(large, cluster=replace(large.cluster, nodes=nodes))
        return any(placed.fits(choice) for choice in placed.space().choices())

    assert fits(enough) and not fits(enough // 2)
    tiers = large.cluster.tiers
    few = (*tiers[:-1], replace(tiers[-1], nodes=enough - 1))
    assert search.enough_nodes(replace(large, cluster=replace(large.cluster, tiers=few))) is None
