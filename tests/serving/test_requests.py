"""Requests come and go between steps: samples of a prompt, texts of different options, bounds on
rows, tokens and pages, cancelling; and log-probabilities, which are those of a forward without a
cache, as training computes them.
"""

import math
from contextlib import nullcontext

import pytest
import torch
from decoders import DECODERS, PROMPTS, VOCABULARY, decoder
from engine_runs import LONG, SCORED, WARM, run, scored, several, tokens

from dolmen.model import head
from dolmen.serving import sampling
from dolmen.serving.block_table import PAGE_SIZE, BlockTable
from dolmen.serving.config import GenerateConfig, GenerateLayout
from dolmen.serving.engine import Engine, run_whole
from dolmen.serving.request import Limits, Request, SamplingParams
from dolmen.serving.scheduler import Scheduler, SequenceGroup


@pytest.fixture(scope="module")
def model():
    return decoder("grouped")


@pytest.mark.slow
@pytest.mark.parametrize("name", ["grouped", "latent", "window", "alibi-in-keys"])
def test_samples_share_their_prompt_and_each_is_what_it_is_alone(name):
    """In pages of 4, prompts fill some, or some and half of another."""
    model, prompts = decoder(name), [PROMPTS[1], LONG, LONG[:2]]
    together = run(model, several(prompts, 4), Limits(page=4))
    assert len(together) == len({tuple(t) for t in tokens(together).values()}) == 4 * len(prompts)
    alone = run(model, several(prompts, 4), Limits(rows=1))  # prompts are read for each
    assert tokens(alone) == tokens(together)
    backwards = run(model, several(prompts, 4)[::-1], Limits(rows=7, tokens=9, page=4))
    assert tokens(backwards) == tokens(together)


def test_a_prompt_of_many_samples_is_held_once(model):
    """Of a prompt of three pages and a part, 8 samples hold three pages and 8 times one."""
    prompt = [1] * (3 * PAGE_SIZE + 5)
    request = Request(prompt, SamplingParams(max_new_tokens=3), samples=8)
    with pytest.warns(UserWarning, match="max_position_embeddings"), Engine(model) as engine:
        engine.add(request)
        engine.step()
        assert engine._runner.cache.table.in_use == 3 + 8
        engine.step()
        assert engine.running == 8 and engine.usage.in_use == 3 + 8


def test_texts_of_different_options_keep_to_their_own(model):
    options = [
        SamplingParams(temperature=0, max_new_tokens=6),
        WARM,
        SamplingParams(repetition_penalty=1.5, temperature=0, max_new_tokens=9),
        SamplingParams(logit_bias={5: 100.0}, max_new_tokens=3),
        SamplingParams(stop=(1, 2, 3, 4), min_new_tokens=7, max_new_tokens=10),
        SamplingParams(temperature=0, presence_penalty=100, max_new_tokens=9),
    ]
    requests = [Request(PROMPTS[1], one, id=i) for i, one in enumerate(options)]
    together = run(model, requests)
    for request in requests:
        assert tokens(run(model, [request])).items() <= tokens(together).items()
    assert together[3, 0].tokens == [5, 5, 5]
    assert len(together[4, 0].tokens) >= 7
    assert len(set(together[5, 0].tokens)) == 9 > len(set(together[0, 0].tokens))


def test_where_pages_are_lacking_the_youngest_wait_and_nothing_changes(model):
    """Pages of 8: a text takes up to 4, two samples of a prompt 6."""
    requests = several([LONG, LONG[:9], LONG[3:]], 2, SamplingParams(max_new_tokens=12))
    free = run(model, requests)
    reads = []
    with Engine(model, limits=Limits(pages=5, page=8)) as engine:
        for request in requests:
            engine.add(request)
        found = {}
        while engine.busy:
            output = engine.step()
            reads.append(output.num_tokens)
            assert engine._runner.cache.table.in_use <= 5
            found |= {(e.id, e.sample): e for e in output.finished}
    assert tokens(found) == tokens(free)
    assert sum(reads) > 20 + 9 + 17 + 6 * 11  # some were read again
    with pytest.raises(ValueError, match="6 pages of 8 tokens, but the KV cache has 5: .* 21$"):
        engine.add(Request(LONG, SamplingParams(max_new_tokens=22)))


@pytest.mark.parametrize("pages", [5, 6])
def test_a_prompt_is_read_where_there_are_just_the_pages_of_its_samples(pages):
    """Beside a text of 16 tokens, a prompt of 10 whose second page 3 samples copy: 6 pages of 8
    tokens, as the block table has them in the end.
    """
    table = BlockTable(8)
    scheduler = Scheduler(Limits(pages=pages, page=8), False, table)
    for number, length, samples, read in ((0, 16, 1, 15), (1, 10, 3, 0)):
        request = Request(range(length), samples=samples)
        group = SequenceGroup(
            number, request, range(samples), None, list(request.tokens), length, read
        )
        scheduler.running[number] = group
    table.append({0: 15})
    new = scheduler.schedule()
    assert new == ({0: 1, 1: 10} if pages == 6 else {0: 1})
    assert [group.number for group in scheduler.waiting] == ([] if pages == 6 else [1])
    table.append({0: 1, 1: 10})
    for child in (2, 3):
        table.fork(1, child)
    assert table.in_use == 6


def test_what_is_cancelled_frees_its_pages_and_disturbs_nobody(model):
    requests = several(PROMPTS[:3], 2)
    want = tokens(run(model, requests))
    with Engine(model, limits=Limits(rows=5)) as engine:
        first, second, third = map(engine.add, requests)
        engine.step()
        engine.step()
        held = engine._runner.cache.table.in_use
        had = engine.cancel(second)
        assert [e.finish_reason for e in had] == ["cancelled"] * 2 and [
            len(e.tokens) for e in had
        ] == [2, 2]
        assert engine._runner.cache.table.in_use == held - 2
        assert engine.cancel(second) == [] == engine.cancel(99)
        assert len(engine.cancel(third)) == 2  # it waits
        found = {}
        while engine.busy:
            found |= {(e.id, e.sample): e.tokens for e in engine.step().finished}
    assert found == {name: want[name] for name in want if name[0] == "row 0"}


def test_a_forward_reads_at_most_so_many_tokens(model):
    with Engine(model, limits=Limits(tokens=7)) as engine:
        for request in several([LONG, *PROMPTS], 3):
            engine.add(request)
        read = []
        while engine.busy:
            read.append(engine.step().num_tokens)
            assert engine.running <= 7
    assert max(read) == 7 and min(read) > 0


@torch.no_grad()
def expected(model, text: list[int]) -> torch.Tensor:
    """log p of each token but the first, by a forward of the whole text, as training makes them."""
    labels = torch.tensor([text[1:]])

    def end(hidden, own: head.LMHead):
        return own.log_probabilities(hidden, labels)

    return run_whole(model, torch.tensor([text[:-1]]), end)[0].double()


def hold(found: dict, prompts: list[list[int]], model) -> None:
    """1e-6 in the mean, 1e-4 x max(1, |log p| / 10) at worst, in fp32."""
    off, scale = [], []
    for prompt, ((_, _), ended) in zip(prompts, sorted(found.items()), strict=True):
        want = expected(model, [*prompt, *ended.tokens])
        got = [one.logprob for one in (*ended.prompt_logprobs, *ended.logprobs)]
        off.append((torch.tensor(got, dtype=torch.float64) - want).abs())
        scale.append((want.abs() / 10).clamp(min=1))
    assert torch.cat(off).mean() < 1e-6
    assert (torch.cat(off) / torch.cat(scale)).max() < 1e-4


@pytest.mark.slow
@pytest.mark.parametrize("name", DECODERS)
def test_log_probabilities_are_those_of_training(name):
    model, prompts = decoder(name), [*PROMPTS, LONG]
    hold(run(model, scored(prompts), Limits(rows=3, tokens=9)), prompts, model)


def test_other_weights_and_other_positions_are_seen_in_log_probabilities(model):
    """Negative controls."""
    prompts, other = [*PROMPTS, LONG], decoder("grouped")
    found = run(model, scored(prompts))
    with torch.no_grad():
        other.head.weight.mul_(1.001)  # one step of training behind
    with pytest.raises(AssertionError):
        hold(found, prompts, other)
    inputs_of, later = model.position_inputs, decoder("grouped")
    later.position_inputs = lambda part, positions, lengths: inputs_of(
        part, positions + (positions > 9), lengths
    )
    with pytest.raises(AssertionError):
        hold(run(later, scored(prompts)), prompts, model)


def test_processed_log_probabilities_and_the_likeliest(model):
    """`processed` are of the distribution that is drawn from; `top` lists the likeliest of it."""
    request = Request(LONG, SCORED, logprobs="processed", top=4)
    ended = run(model, [request])[0, 0]
    text = list(LONG)
    for token, one in zip(ended.tokens, ended.logprobs, strict=True):
        with torch.no_grad():
            scores = model(torch.tensor([text]), head.compute_logits)[0, -1:].double()
        want = sampling.process(scores, [text], SCORED).log_softmax(-1)[0]
        assert abs(one.logprob - want[token]) < 1e-5
        best = want.topk(4)
        assert [t for t, _ in one.top] == best.indices.tolist()
        assert torch.tensor([p for _, p in one.top]).sub(best.values).abs().max() < 1e-5
        text.append(token)


def test_a_prompt_is_scored_without_a_new_token(model):
    request = Request(
        LONG,
        SamplingParams(max_new_tokens=0),
        prompt_logprobs=True,
        top=1,
        samples=1,
        logprobs="raw",
    )
    ended = run(model, [request], Limits(tokens=6))[0, 0]
    assert (ended.tokens, ended.logprobs, ended.finish_reason) == ([], [], "length")
    want = expected(model, LONG)
    got = torch.tensor([one.logprob for one in ended.prompt_logprobs], dtype=torch.float64)
    assert len(got) == len(LONG) - 1 and (got - want).abs().max() < 1e-5
    with torch.no_grad():
        best = model(torch.tensor([LONG]), head.compute_logits)[0, :-1].argmax(-1)
    assert [one.top[0][0] for one in ended.prompt_logprobs] == best.tolist()


@pytest.mark.parametrize(
    "change, message",
    [
        (dict(samples=0), "samples is 0: use --num-samples"),
        (dict(top=VOCABULARY + 1), f"{VOCABULARY + 1} top log-probabilities"),
        (
            dict(params=SamplingParams(stop=(VOCABULARY,))),
            f"logit_bias or stop has token {VOCABULARY}",
        ),
        (
            dict(params=SamplingParams(min_new_tokens=65)),
            "exceeds max_new_tokens",
        ),
    ],
)
def test_what_has_no_meaning_is_refused(model, change, message):
    with Engine(model) as engine:
        with pytest.raises(ValueError, match=message):
            engine.add(Request(**dict(tokens=[1]) | change))
        assert not engine.busy


@pytest.mark.parametrize(
    "option, value, message",
    [
        ("temperature", 1e-320, "temperature is 1e-320: it must be 0 .greedy., or at least"),
        ("repetition_penalty", 0, "repetition-penalty is 0: it must be over 0"),
        ("presence_penalty", math.inf, "presence-penalty is inf: it must be finite"),
        ("min_p", 1.5, "min-p is 1.5: it must be at most 1"),
        ("min_new_tokens", -1, "min-new-tokens is -1: it must be at least 0"),
        ("logit_bias", {1: math.nan}, "logit-bias is {1: nan}: it must be ids of the vocabulary"),
        ("logit_bias", {1: math.inf}, "logit-bias is {1: inf}: it must be ids of the vocabulary"),
        ("logit_bias", {-1: 2.0}, "logit-bias is {-1: 2.0}: it must be ids of the vocabulary"),
    ],
)
def test_a_sampling_parameter_out_of_range_is_refused(option, value, message):
    with pytest.raises(ValueError, match=message):
        SamplingParams(**{option: value})


@pytest.mark.parametrize(
    "options, message",
    [
        ({}, "missing --prompt"),
        ({"prompt": ("a",), "input": "a.txt"}, "--prompt and --input are both given"),
        ({"prompt": ("a",), "max_input_tokens": 5}, "--max-input-tokens needs --input FILE"),
        ({"prompt": ("a",), "skip_bad": True}, "--skip-bad needs --input FILE"),
        ({"prompt": ("a",), "num_samples": 2}, "--num-samples and --layout.dp need --input FILE"),
        ({"prompt": ("a",), "layout": GenerateLayout(dp=2)}, "--layout.dp need --input FILE"),
        ({"prompt": ("a",)}, None),
        ({"input": "a.txt", "num_samples": 2, "layout": GenerateLayout(dp=2)}, None),
    ],
)
def test_prompts_come_from_the_command_or_from_a_file(options, message):
    config = GenerateConfig(folder="model", **options)
    with nullcontext() if message is None else pytest.raises(ValueError, match=message):
        config.check_source()


@pytest.mark.parametrize("limit", ["rows", "tokens", "pages", "page"])
def test_a_limit_below_one_is_refused(limit):
    assert Limits(**{limit: 1})
    with pytest.raises(ValueError, match=f"limits.{limit} is 0: it must be at least 1"):
        Limits(**{limit: 0})
