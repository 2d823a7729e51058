"""Speculative decoding: the same tokens as without it where drafts are certain, the same
distribution where they were sampled, and a cache that has forgotten what was rejected.
"""

import math
from collections import Counter
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from decoders import DECODERS, MOST, PROMPTS, VOCABULARY, decoder
from engine_runs import LONG, run, several, tokens
from tiny_models import Flat, build, initialize, tiny

from dolmen.cli import generation
from dolmen.core import device as devices
from dolmen.core.mesh import SINGLE
from dolmen.core.messages import BadInput
from dolmen.model import head
from dolmen.model.layout import Layout
from dolmen.serving import sampling
from dolmen.serving.config import SpeculativeConfig
from dolmen.serving.engine import DraftModel, Engine, NgramProposer
from dolmen.serving.kv_cache import KVCache
from dolmen.serving.processes import Resolved
from dolmen.serving.request import Limits, Request, SamplingParams
from dolmen.serving.scheduler import Draft, Scheduler
from dolmen.serving.speculation import check_draft

NGRAM = SpeculativeConfig(method="ngram", prompt_lookup_min=1)
BY_MODEL = SpeculativeConfig(method="draft", model="x", num_speculative_tokens=3)
NEW = 12
GREEDY = SamplingParams(temperature=0, max_new_tokens=NEW)
PENALIZED = SamplingParams(
    temperature=1.0,
    top_k=20,
    repetition_penalty=1.3,
    frequency_penalty=0.2,
    logit_bias={7: 2.0, 9: -math.inf},
    min_new_tokens=4,
    stop=(11, 12, 13, 14),
    max_new_tokens=NEW,
)


class KnownText:
    """Drafts the tokens that a run without drafts gave, each `wrong`-th of them replaced."""

    def __init__(self, texts, wrong: int = 3, count: int = 4):
        self.texts, self.wrong, self.num_speculative_tokens = texts, wrong, count

    inference = NgramProposer.inference

    def propose(self, groups, counts):
        drafts = {}
        for key, group in groups.items():
            known = self.texts[group.request.id, group.samples[0]]
            first = len(group.new_tokens)
            own = known[first : first + counts[key]]
            for i in range(len(own)):
                if (first + i) % self.wrong == 0:
                    own[i] = (own[i] + 1) % VOCABULARY
            drafts[key] = Draft(own, [None] * len(own))
        return drafts


def doubled(name: str = "grouped"):
    """In fp64, in which near ties do not occur."""
    return decoder(name).double()


@pytest.mark.parametrize("params", [GREEDY, PENALIZED], ids=["greedy", "penalties"])
@pytest.mark.parametrize("name", DECODERS)
def test_certain_drafts_change_no_token_and_no_log_probability(name, params):
    model = doubled(name)
    requests = [replace(r, logprobs="processed", top=2) for r in several(PROMPTS, 1, params)]
    want = run(model, requests)
    drafts = KnownText(tokens(want))
    got = run(model, requests, proposer=drafts)
    assert tokens(got) == tokens(want)
    assert {n: e.finish_reason for n, e in got.items()} == {
        n: e.finish_reason for n, e in want.items()
    }
    for name, ended in got.items():
        for a, b in zip(ended.logprobs, want[name].logprobs, strict=True):
            assert math.isclose(a.logprob, b.logprob, abs_tol=1e-12)
            assert [t for t, _ in a.top] == [t for t, _ in b.top]
    assert 0 < sum(e.num_accepted_tokens for e in got.values())
    assert sum(e.num_accepted_tokens for e in got.values()) < sum(
        e.num_draft_tokens for e in got.values()
    )


def test_differences_in_fp32_are_near_ties():
    """Products of other numbers of rows differ in the last bits, so tokens may: only where a
    runner-up is as likely, which is counted.
    """
    model = decoder("grouped")
    prompts = [[(5 * i + j * j) % VOCABULARY for j in range(3 + i)] for i in range(16)]
    requests = [replace(r, logprobs="raw", top=2) for r in several(prompts, 1, GREEDY)]
    want = run(model, requests)
    got = run(model, requests, proposer=KnownText(tokens(want)))
    for name, ended in want.items():
        both = zip(ended.tokens, got[name].tokens, strict=True)
        first = next((i for i, (a, b) in enumerate(both) if a != b), None)
        if first is not None:
            best, second = (value for _, value in ended.logprobs[first].top)
            assert best - second < sampling.CLOSE and ended.close


def test_a_forward_yields_several_tokens():
    model = doubled()
    want = run(model, several(PROMPTS[:1], 1, GREEDY))
    steps = 0
    with Engine(model, proposer=KnownText(tokens(want), wrong=99)) as engine:
        engine.add(*several(PROMPTS[:1], 1, GREEDY))
        while engine.busy:
            engine.step()
            steps += 1
    # 1 of the prompt, then 4 drafts and one more, twice, then the last without a draft
    assert steps == 4
    assert (engine.acceptance.drafted, engine.acceptance.accepted) == (8, 8)
    assert str(engine.acceptance) == "accepted 8 of 8 drafted tokens (100%)"


@pytest.mark.parametrize(
    "limits",
    [
        Limits(pages=9, page=4),
        Limits(pages=14, page=4, rows=4),
        Limits(tokens=7),
        Limits(tokens=3, rows=2),
    ],
    ids=["preempted", "pages", "tokens", "few tokens"],
)
def test_preemption_forks_and_limits_change_no_token(limits):
    """Samples share the pages of their prompt, and rejected drafts lie behind these."""
    model, requests = doubled(), several([LONG[:9], *PROMPTS[:3]], 3, PENALIZED)
    want = run(model, requests)
    got = run(model, requests, limits, proposer=KnownText(tokens(want)))
    assert tokens(got) == tokens(want)


def test_limits_preempt_and_drop_drafts(monkeypatch):
    """That the pages above are few enough for what they are to show."""
    preempted, original = [], Scheduler.preempt
    monkeypatch.setattr(
        Scheduler, "preempt", lambda self, key: (preempted.append(key), original(self, key))
    )
    requests = several([LONG[:9], *PROMPTS[:3]], 3, PENALIZED)
    run(doubled(), requests, Limits(pages=9, page=4), proposer=NgramProposer(NGRAM))
    assert preempted


def test_rejected_tokens_are_forgotten():
    """Negative control: without the roll-back the next token is read behind rejected drafts."""
    model, requests = doubled(), several(PROMPTS, 1, GREEDY)
    want = run(model, requests)
    proposer = KnownText(tokens(want), wrong=2)
    assert tokens(run(model, requests, proposer=proposer)) == tokens(want)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(KVCache, "truncate", lambda self, sequence, length: None)
        with Engine(model, proposer=proposer) as engine:
            for request in requests:
                engine.add(request)
            found = {}
            while engine.busy:
                found |= {(e.id, e.sample): e.tokens for e in engine.step().finished}
    assert found != tokens(want)


def test_rope_that_depends_on_the_length_is_computed_again():
    rope = dict(rope_type="dynamic", rope_theta=10000.0, factor=2.0)
    sizes = dict(hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4)
    config = tiny(
        "llama",
        **sizes,
        vocab_size=VOCABULARY,
        max_position_embeddings=16,
        initializer_range=0.3,
        rope_parameters=rope,
    )
    model = build(config, SINGLE)
    initialize(model, seed=0)
    model = model.double()
    assert model.spec.by_length
    requests = several([LONG[:9]], 2, replace(PENALIZED, stop=(), max_new_tokens=14))
    with pytest.warns(UserWarning, match="max_position_embeddings"):
        want = run(model, requests)
        got = run(model, requests, proposer=KnownText(tokens(want), wrong=7))
    assert tokens(got) == tokens(want)


@pytest.mark.parametrize(
    "text, count, expected",
    [
        ([1, 2, 3, 9, 1, 2, 3], 2, [9, 1]),
        ([1, 2, 3, 9, 1, 2, 3], 6, [9, 1, 2, 3, 9, 1]),  # on and on
        ([1, 2, 8, 4, 1, 2, 9, 5, 1, 2], 1, [9]),  # the latest place
        ([7, 1, 2, 8, 5, 1, 2, 9, 7, 1, 2], 1, [8]),  # the longest match first
        ([4, 4, 4], 3, [4, 4, 4]),
        ([1, 2, 3], 4, []),
        ([5], 4, []),
        ([1, 2, 3, 9, 1, 2, 3], 0, []),
        ([60000, 55296, 1, 60000, 55296], 1, [1]),  # a surrogate is a token like any other
    ],
)
def test_prompt_lookup(text, count, expected):
    config = SpeculativeConfig(method="ngram", prompt_lookup_max=3, prompt_lookup_min=2)
    assert NgramProposer(config).lookup(text, count) == expected


def test_prompt_lookup_drafts_what_repeats():
    model, texts = doubled(), [[5, 6, 7, 8] * 5, [9, 3] * 8]
    requests = several(texts, 2, PENALIZED)
    got = run(model, requests, proposer=NgramProposer(NGRAM))
    assert tokens(got) == tokens(run(model, requests))
    assert sum(e.num_draft_tokens for e in got.values()) > 5


def test_a_draft_model_that_is_the_model_is_always_right():
    model = doubled()
    for params in (GREEDY, PENALIZED):
        got = run(model, several(PROMPTS, 2, params), proposer=DraftModel(BY_MODEL, doubled()))
        drafted = sum(e.num_draft_tokens for e in got.values())
        # what follows a stop token is not accepted, as the sequence has ended
        ended = sum(e.finish_reason == "stop" for e in got.values())
        accepted = sum(e.num_accepted_tokens for e in got.values())
        assert drafted - 3 * ended <= accepted and drafted > 50


@pytest.mark.parametrize("limits", [Limits(), Limits(tokens=5), Limits(pages=9, page=4)])
def test_greedy_drafts_of_a_model_change_no_token(limits):
    model, other = doubled(), doubled()
    initialize(other, seed=1)
    other = other.double()
    requests = several([LONG[:9], *PROMPTS], 2, GREEDY)
    proposer = DraftModel(BY_MODEL, other, limits=limits)
    got = run(model, requests, limits, proposer=proposer)
    assert tokens(got) == tokens(run(model, requests))


# The distribution. Completions of 4 tokens over a vocabulary of 3 have 81 outcomes. Those of N
# samples are compared with the exact probabilities by Pearson's chi-squared test at a level of
# 1e-6: that is the probability, over seeds, that a right sampler fails. (The seed is fixed, so it
# fails always or never.) The wrong ones below exceed the threshold.
SAMPLES, LEVEL, FEW = 2000, 1e-6, 3
WARM = SamplingParams(temperature=0.8, repetition_penalty=1.2, max_new_tokens=4)


def small_model(seed: int):
    config = Flat(
        vocab_size=FEW,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=1,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=MOST,
        initializer_range=0.3,
    )
    model = build(config, SINGLE)
    initialize(model, seed=seed)
    return model.double()


def exact_probabilities(model, prompt, params) -> dict[tuple[int, ...], float]:
    """By forwards of each whole text, without an engine."""
    known = {(): 1.0}
    for _ in range(params.max_new_tokens):
        longer = {}
        for text, probability in known.items():
            whole = [*prompt, *text]
            with torch.no_grad():
                scores = model(torch.tensor([whole]), head.compute_logits)[0, -1:]
            each = sampling.process(scores, [whole], params, [len(prompt)])[0].softmax(-1)
            longer |= {(*text, i): probability * float(p) for i, p in enumerate(each)}
        known = longer
    return known


def p_value(proposer, params=WARM, seed: int = 0) -> float:
    """Of the chi-squared test: how probable a deviation is that is as large as that of samples."""
    model, prompt = small_model(0), [0, 2, 1]
    requests = [Request(prompt, params, seed=seed, samples=SAMPLES)]
    found = Counter(map(tuple, tokens(run(model, requests, proposer=proposer)).values()))
    expected = exact_probabilities(model, prompt, params)
    assert math.isclose(sum(expected.values()), 1)
    # rare outcomes are counted together: the distribution of the statistic needs 5 expected ones
    rare = [text for text, p in expected.items() if p * SAMPLES < 5]
    # what top-k filters out has probability 0, and is not found at all
    assert not any(found[text] for text in rare if not expected[text])
    rare = [text for text in rare if expected[text]]
    cells = [[text] for text, p in expected.items() if p * SAMPLES >= 5] + ([rare] if rare else [])
    statistic = 0.0
    for cell in cells:
        want = SAMPLES * sum(expected[text] for text in cell)
        statistic += (sum(found[text] for text in cell) - want) ** 2 / want
    degrees = torch.tensor((len(cells) - 1) / 2, dtype=torch.float64)
    return float(torch.special.gammaincc(degrees, torch.tensor(statistic / 2).double()))


def drafts_of_another():
    return DraftModel(replace(BY_MODEL, num_speculative_tokens=2), small_model(1))


@pytest.mark.parametrize("params", [WARM, replace(WARM, top_k=2)], ids=["warm", "top-k"])
def test_the_distribution_is_that_of_the_model(params):
    assert p_value(None, params) > LEVEL  # of the test itself
    assert p_value(drafts_of_another(), params) > LEVEL


def test_the_distribution_with_ngram_drafts():
    proposer = NgramProposer(replace(NGRAM, num_speculative_tokens=2))
    assert p_value(proposer) > LEVEL


def accept_all(target, drafts, proposal):
    """Wrong: the distribution is the draft model's."""
    return torch.full_like(target, -math.inf).scatter(-1, drafts[:, None], 0.0)


def resample_from_target(target, drafts, proposal):
    """Wrong: a rejected draft is sampled again from p, not from what p has more than q."""
    p, q = target.softmax(-1), proposal.softmax(-1)
    accept = (p.gather(-1, drafts[:, None]) / q.gather(-1, drafts[:, None])).clamp(max=1)
    return ((1 - accept) * p).scatter_add(-1, drafts[:, None], accept).log()


@pytest.mark.parametrize("wrong", [accept_all, resample_from_target])
def test_wrong_distributions_are_found(wrong, monkeypatch):
    """Negative control."""
    monkeypatch.setattr(sampling, "condition_on_draft", wrong)
    assert p_value(drafts_of_another()) < LEVEL


def test_the_mean_over_drafts_is_the_target():
    """By enumeration: sum over d of q(d) times the mixture is p, whatever p and q are."""
    chance = torch.Generator().manual_seed(0)
    p, q = torch.randn(2, 50, 7, generator=chance, dtype=torch.float64) * 2
    p[0], q[0, 3], p[1, 2] = q[0], -math.inf, -math.inf
    p[0, 3] = -math.inf
    mean = torch.zeros_like(p)
    for draft in range(7):
        drafts = torch.full((50,), draft)
        mixture = sampling.condition_on_draft(p, drafts, q).softmax(-1)
        share = q.softmax(-1)[:, draft]
        mean += share[:, None] * mixture
        # a draft is accepted as often as is possible
        accepted = (p.softmax(-1)[:, draft] / share).clamp(max=1)
        seen = share > 0
        assert torch.allclose(mixture[seen, draft], accepted[seen])
        assert torch.allclose(mixture[~seen], p.softmax(-1)[~seen])
    assert torch.allclose(mean, p.softmax(-1), atol=1e-14)


def test_options_that_do_not_fit_are_refused():
    for options, text in {
        (("method", "draft"),): "method draft needs a model",
        (("method", "ngram"), ("model", "x")): "no other takes one",
        (("method", "ngram"), ("prompt_lookup_min", 9)): r"prompt-lookup-min \(9\) exceeds",
        (("method", "ngram"), ("num_speculative_tokens", 0)): "num-speculative-tokens is 0",
    }.items():
        with pytest.raises(ValueError, match=text):
            SpeculativeConfig(**dict(options))


def test_a_draft_model_with_fewer_positions_drafts_where_it_has_some():
    """It drafts up to its last position, and nothing behind it."""
    model = doubled("learned")
    config = replace(DECODERS["learned"], max_position_embeddings=16)
    short = build(config, SINGLE)
    initialize(short, seed=1)
    requests = several(PROMPTS, 1, GREEDY)
    drafts = DraftModel(BY_MODEL, short.double())
    lengths = []
    propose, drafts.propose = drafts.propose, lambda *args: counted(*args)

    def counted(groups, counts):
        out = propose(groups, counts)
        lengths.extend((len(groups[key].tokens), len(d.tokens)) for key, d in out.items())
        return out

    assert tokens(run(model, requests, proposer=drafts)) == tokens(run(model, requests))
    assert max(length + drafted for length, drafted in lengths if drafted) == 17


def test_a_draft_model_has_the_same_vocabulary_and_is_causal():
    spec = DECODERS["grouped"].spec
    check_draft(spec, spec)
    with pytest.raises(ValueError, match="vocab_size of 3, but the model has 71"):
        check_draft(small_model(0).spec, spec)
    with pytest.raises(ValueError, match="bidirectional mask or prefix"):
        check_draft(tiny("bert", vocab_size=VOCABULARY).spec, spec)


def test_the_first_model_is_compared_with_its_draft():
    model, draft = (
        SimpleNamespace(spec=spec) for spec in (DECODERS["grouped"].spec, small_model(0).spec)
    )
    opened = Resolved("generate", ("model", "draft"), (model, draft), Layout(), devices.CPU)
    assert opened.source is model
    with pytest.raises(BadInput, match="vocab_size of 3, but the model has 71"):
        generation._check_draft(opened)
