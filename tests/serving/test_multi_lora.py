"""Several adapters over one base: a batch that mixes them is what each one, merged into the base by
itself, writes alone; what they are not is refused before any work.
"""

from dataclasses import replace

import pytest
import torch
from adapted import Held, low, lows, merged, mixed
from decoders import DECODERS, PROMPTS, decoder
from engine_runs import run, scored
from tiny_models import build, initialize

from dolmen.core import consensus
from dolmen.core.mesh import SINGLE, Axis, Mesh
from dolmen.model import build as house
from dolmen.serving import adapters
from dolmen.serving.adapters import place_adapters
from dolmen.serving.engine import Engine
from dolmen.serving.request import Limits, Request
from dolmen.serving.scheduler import SequenceGroup

NAMES = (None, "all", "few", "rows")
TIGHT = Limits(rows=9, tokens=11, pages=20, page=4)  # in pieces, and put back


def alone(name: str, known, adapter: str | None, **more):
    """What the model with one of them merged makes of its requests."""
    one = None if adapter is None else known[adapter]
    requests = [replace(r, adapter=None) for r in scored(PROMPTS, adapter, **more)]
    return run(merged(name, one), requests)


def off(got, want) -> float:
    """The largest difference of log-probabilities of prompts and answers."""
    both = [
        [one.logprob for one in (*ended.prompt_logprobs, *ended.logprobs)] for ended in (got, want)
    ]
    pairs = zip(*both, strict=True)
    return max((abs(a - b) / max(1, -b / 10) for a, b in pairs), default=0.0)


def worst(name: str, limits: Limits = Limits(), **more) -> float:
    """Of a mixed batch, beside each adapter merged; `inf` where a token is another one."""
    known = lows(decoder(name).spec)
    model = decoder(name)
    found = run(model, mixed(known, **more), limits, adapters=place_adapters(known, model))
    far = 0.0
    for adapter in NAMES:
        for key, want in alone(name, known, adapter, **more).items():
            got = found.pop(key)
            if got.tokens != want.tokens and not got.close + want.close:
                return float("inf")
            far = max(far, off(got, want) if got.tokens == want.tokens else 0.0)
    assert not found
    return far


@pytest.mark.parametrize("name", ["grouped", "learned", "side-by-side", "latent-queries"])
def test_a_mixed_batch_is_each_adapter_merged(name):
    """Several samples of each prompt too, read in pieces and put back where pages are lacking."""
    assert worst(name) < 1e-5
    assert worst(name, TIGHT, samples=2) < 1e-5


def test_each_is_felt():
    """Else a batch that forgot them would do as well."""
    known = lows(decoder("grouped").spec)
    found = [alone("grouped", known, adapter) for adapter in NAMES]
    texts = [[ended.prompt_logprobs for ended in one.values()] for one in found]
    assert all(a != b for i, a in enumerate(texts) for b in texts[:i])


def test_what_one_has_read_is_of_no_use_to_another(monkeypatch):
    """Keys and values are an adapter's own. Read by the base they give other texts, which the test
    above sees: what a page shared between adapters would be.
    """
    next_chunk = SequenceGroup.next_chunk

    def by_the_base(row, count):
        found = next_chunk(row, count)
        return replace(found, adapter=None) if len(found.tokens) > 1 else found

    monkeypatch.setattr(SequenceGroup, "next_chunk", by_the_base)
    assert worst("grouped") > 1e-2


def test_pages_are_shared_by_samples_of_one_request_alone():
    model = decoder("grouped")
    known = lows(model.spec)
    limits = Limits(page=2)
    requests = [r for r in mixed(known, samples=3) if r.tokens == PROMPTS[1]]
    shared = 0
    with Engine(model, limits=limits, adapters=place_adapters(known, model)) as engine:
        for request in requests:
            engine.add(request)
        while engine.busy:
            engine.step()
            table, running = engine._runner.cache.table, engine._scheduler.running
            for texts in table.shared_pages(table.pages).values():
                assert len({running[text].number for text in texts}) == 1
                shared += len(texts)
    assert shared


def test_the_model_is_left_as_it_was():
    model = decoder("grouped")
    known = lows(model.spec)
    before = run(model, scored(PROMPTS))
    run(model, mixed(known), adapters=place_adapters(known, model))
    assert run(model, scored(PROMPTS)) == before


def test_of_eight_bits_the_base_alone_is_rounded():
    """An adapter of zeros is the base in eight bits, and one that is felt is not."""
    model = decoder("grouped")
    none, felt = low(model.spec, 1, rank=2), low(model.spec, 1, rank=2)
    for weight in none.form.targets:
        up = none.form.pair(weight)[1]
        none.stored[up] = Held(torch.zeros_like(none.stored[up].value))
    extra = place_adapters({"none": none, "felt": felt}, model)
    requests = [*scored(PROMPTS), *scored(PROMPTS, "none"), *scored(PROMPTS, "felt")]
    greedy = replace(requests[0].params, temperature=0.0, top_k=None)
    requests = [replace(r, params=greedy) for r in requests]
    found = run(model, requests, weights="int8", adapters=extra)
    for i in range(len(PROMPTS)):
        base, zeros, other = found[i, 0], found[f"none {i}", 0], found[f"felt {i}", 0]
        assert zeros.tokens == base.tokens and off(zeros, base) < 1e-5
        assert other.tokens != base.tokens or off(other, base) > 1e-3
    exact = run(model, requests, adapters=extra)
    assert any(off(exact[k], found[k]) > 1e-5 for k in found if exact[k].tokens == found[k].tokens)


@pytest.mark.parametrize("value", [torch.nan, 1e39])
def test_values_that_are_no_numbers_are_refused(value):
    """What they make of keys and values lies in one pool with those of other texts."""
    model = decoder("grouped")
    bad = low(model.spec, 2, rank=2)
    down = bad.form.pair(min(bad.form.targets))[0]
    bad.stored[down] = Held(bad.stored[down].value.double())
    bad.stored[down].value[1, 2] = value
    with pytest.raises(ValueError, match=f"adapter bad: {down} has values that are not finite"):
        place_adapters({"good": low(model.spec, 1, rank=2), "bad": bad}, model)


@pytest.mark.parametrize("part, value", [("lora_B", 3e4), ("lora_magnitude", 6e4)])
def test_what_only_its_scale_makes_too_large_is_refused(part, value):
    """Times 6 / 2, or over the lengths of small rows, it is more than 65,504."""
    model = build(DECODERS["grouped"], SINGLE, dtype=torch.float16)
    initialize(model, seed=0)
    known = low(model.spec, 1, rank=2, kind="dora")
    weight = min(known.form.targets)
    with torch.no_grad():
        model.get_parameter(weight).mul_(1e-2)
    known.stored[f"{weight.removesuffix('weight')}lora_B"].value.mul_(1e-2)
    assert place_adapters({"fits": known}, model).names
    name = f"{weight.removesuffix('weight')}{part}"
    known.stored[name].value.fill_(value)
    assert known.stored[name].value.half().isfinite().all()
    with pytest.raises(ValueError, match=f"large: {name} has .*float16: use --dtype float32"):
        place_adapters({"large": known}, model)


def test_what_one_rank_refuses_all_refuse(monkeypatch):
    """A stage reads its own layers alone: one behind it has found what this one cannot see."""
    model, mesh = decoder("grouped"), Mesh(world=Axis("world", 2))
    heard = []

    def gathered(mine):
        heard.append(mine)
        return [mine, "adapter bad: of another stage"]

    monkeypatch.setattr(consensus, "gather_objects", gathered)
    with pytest.raises(ValueError, match="^adapter bad: of another stage$"):
        place_adapters({"bad": low(model.spec, 1, rank=2)}, model, mesh)
    assert heard == [None]


def test_a_stage_may_have_nothing_but_matrices():
    """Of OLMo, whose norms have no weight, in eight bits: all that it had is on meta."""
    spec = decoder("grouped").spec
    stage = house.place(spec, SINGLE)
    stage.packed_only = "int8"
    known = low(spec, 1, rank=2)
    extra = place_adapters({"few": known}, stage).weights
    assert extra.keys() == known.form.targets
    for weight, several in extra.items():
        down, up = (known.stored[name].value for name in known.form.pair(weight))
        pair = several.pairs["few"]
        assert torch.equal(pair.down, down) and torch.equal(pair.up, up * known.form.scale)


@pytest.mark.parametrize(
    "said, message",
    [
        (["fr"], "adapters has 'fr': use --adapters NAME=FOLDER"),
        (["=x"], "use --adapters NAME=FOLDER"),
        (["fr="], "use --adapters NAME=FOLDER"),
        (["fr=a", "fr=b"], "the name 'fr' twice"),
        (["base=a"], "which is the model's own"),
        (["f\nr=a"], "that can be printed"),
        (["x" * 201 + "=a"], "at most 200 characters"),
    ],
)
def test_words_that_name_no_adapter(said, message):
    with pytest.raises(ValueError, match=message):
        adapters.parse_adapters(said, taken=["base"])


def test_a_name_may_have_a_folder_with_an_equals_sign():
    assert adapters.parse_adapters(["fr=a=b", "de=c"]) == {"fr": "a=b", "de": "c"}


def test_a_name_that_is_not_there_is_told_with_those_that_are():
    model = decoder("grouped")
    with Engine(model, adapters=place_adapters(lows(model.spec), model)) as engine:
        with pytest.raises(ValueError, match="no adapter 'fr': name one of all, few, rows"):
            engine.add(Request([1], adapter="fr"))
        assert not engine.busy
    with Engine(model) as engine, pytest.raises(ValueError, match="give --adapters NAME=FOLDER"):
        engine.add(Request([1], adapter="fr"))


def test_what_cannot_be_multiplied_by_itself_is_refused():
    spec = decoder("latent").spec
    expert = next(name for name, param in spec.params.items() if param.stacked)
    ignored = "multi-LoRA serving supports only linear layers.* merge it into the base"
    known = low(spec, 1, rank=2)
    adapters._check(known, spec, "stated")
    for weight, message in (
        (expert, "adapts the experts of"),
        ("layers.1.attn.kv_b.weight", "latent attention"),
        ("head.weight", f"adapts head.weight, but {ignored}"),
        ("layers.1.mlp.router.weight", f"adapts layers.1.mlp.router.weight, but {ignored}"),
        ("embed.weight", ignored),
        ("final_norm.weight", ignored),
    ):
        form = replace(known.form, targets=known.form.targets | {weight})
        with pytest.raises(ValueError, match=message):
            adapters._check(replace(known, form=form), spec, "stated")


def test_none_are_no_adapters():
    assert not place_adapters({}, decoder("grouped")).names
