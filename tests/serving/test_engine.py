"""Texts: the same with or without a cache, batch, tp, ZeRO or sequence parallelism; and what is
refused.
"""

import json
import warnings
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch
import torch.distributed as dist
from adapted import low, lows, mixed
from decoders import DECODERS, MOST, PROMPTS, VOCABULARY, decoder
from engine_runs import LONG, run, scored
from tiny_models import build, initialize

from dolmen.conversion import hf_export
from dolmen.conversion.source import open_source
from dolmen.core import mesh as meshes
from dolmen.core.mesh import SINGLE
from dolmen.families import ModelConfig
from dolmen.model import head
from dolmen.parallel import data, simulation
from dolmen.serving import engine
from dolmen.serving.adapters import place_adapters
from dolmen.serving.config import SpeculativeConfig
from dolmen.serving.engine import (
    DraftModel,
    NgramProposer,
    generate,
    load_decoder,
    stop_tokens,
)
from dolmen.serving.request import Limits

NEW = 12
WARM = dict(temperature=1.2, top_k=20, top_p=0.9, seed=3)
# and what its requests are asked with besides: adapters, or drafts
REQUESTED = {"grouped": ("adapted",), "one-kv-qk-norm": ("ngram", "drafted")}


def by_forward(model, prompt: list[int]) -> list[int]:
    """Greedy without a cache: the whole text at every step."""
    text = list(prompt)
    with torch.no_grad():
        for _ in range(NEW):
            text.append(int(model(torch.tensor([text]), head.compute_logits)[0, -1].argmax()))
    return text[len(prompt) :]


@pytest.mark.slow
@pytest.mark.parametrize("name", DECODERS)
def test_greedy_is_the_most_likely_token_of_each_forward(name):
    model = decoder(name)
    texts = [by_forward(model, prompt) for prompt in PROMPTS]
    assert generate(model, PROMPTS, NEW) == texts
    assert len({token for text in texts for token in text}) > 10  # no model that repeats one token


def test_a_prompt_is_read_in_pieces(monkeypatch):
    model, texts = decoder("grouped"), generate(decoder("grouped"), PROMPTS, NEW)
    monkeypatch.setattr(engine, "TOKENS_AT_ONCE", 4)
    assert generate(model, PROMPTS, NEW) == texts


def test_sampling_follows_from_seed_and_prompt_alone():
    model = decoder("grouped")
    texts = generate(model, PROMPTS, NEW, **WARM)
    assert texts == generate(model, PROMPTS, NEW, **WARM)
    assert texts != generate(model, PROMPTS, NEW, **WARM | dict(seed=4)) and texts != generate(
        model, PROMPTS, NEW
    )
    assert texts[:2] == generate(model, PROMPTS[:2], NEW, **WARM)  # whoever else is in the batch
    for first in (PROMPTS[1], [*PROMPTS[1], 1]):  # which is that of the same length
        assert generate(model, [first, PROMPTS[1]], NEW, **WARM)[1] == texts[1]
    assert [t[:5] for t in texts] == generate(model, PROMPTS, 5, **WARM)
    same = generate(model, [PROMPTS[0]] * 8, NEW, **WARM)
    assert len(set(map(tuple, same))) == 8


@pytest.mark.slow
@pytest.mark.parametrize(
    "options",
    [pytest.param({}, id="greedy", marks=pytest.mark.full), pytest.param(WARM, id="warm")],
)
@pytest.mark.parametrize("name", DECODERS)
def test_a_text_is_that_of_its_prompt_alone(name, options):
    """Prompts of 1 to 20 tokens that end at different steps, whatever runs beside them."""
    model = decoder(name)
    prompts = [
        [(7 * i + j) % VOCABULARY for j in range(n)] for i, n in enumerate((20, 1, 9, 1, 2, 20, 13))
    ]
    alone = generate(model, prompts, NEW, **options, batch=1)
    stop = {alone[0][2], alone[3][5], alone[5][8]}
    alone = generate(model, prompts, NEW, stop=stop, **options, batch=1)
    assert len({len(text) for text in alone}) > 1
    for batch in (3, 7):
        assert generate(model, prompts, NEW, stop=stop, **options, batch=batch) == alone, batch


def test_memory_is_that_of_the_texts_that_run():
    """The last new token is not read: a prompt of 3 tokens and 12 new ones are 14 in the cache."""
    model, prompts, held = decoder("grouped"), [[i, 1, 2] for i in range(6)], []
    for batch in (1, 2, 4, 6, 9):
        generate(model, prompts, NEW, batch=batch, on_memory=held.append)
    assert [memory.in_use for memory in held] == [1, 2, 4, 6, 6]
    assert [memory.rectangle for memory in held] == [14, 28, 56, 84, 84]
    assert {memory.bytes_per_token for memory in held} == {2 * 4 * 2 * 2 * 8}
    assert str(held[-1]) == (
        "KV cache, per process: at most 6 pages of 32 tokens in use, 49.2 kB (49.2 kB allocated); "
        "padded to the longest sequence: 21.5 kB"
    )


def test_a_batch_of_none_is_refused():
    with pytest.raises(ValueError, match="batch is 0"):
        generate(decoder("grouped"), PROMPTS, 2, batch=0)


def test_stop_tokens_end_their_own_text_and_are_part_of_it():
    model, seen = decoder("grouped"), []
    whole = generate(model, PROMPTS, NEW)
    stop = {whole[0][3], whole[2][5]}
    want = [
        text[: next((i for i, t in enumerate(text) if t in stop), NEW - 1) + 1] for text in whole
    ]
    assert (
        generate(model, PROMPTS, NEW, stop=stop, on_token=lambda i, t: seen.append((i, t))) == want
    )
    assert len({len(text) for text in want}) > 1
    assert [[t for i, t in seen if i == prompt] for prompt in range(len(PROMPTS))] == want
    assert generate(model, [], NEW) == []


def test_the_model_is_left_as_it_was():
    model = decoder("grouped").train()
    generate(model, PROMPTS, 2)
    assert (
        model.training
        and torch.is_grad_enabled()
        and model(torch.tensor([[1]]), head.compute_logits).requires_grad
    )


def test_a_step_runs_in_inference_mode():
    """Which is behind it when the step has ended: the model can be trained."""
    model, seen = decoder("grouped"), []
    block = model.local_blocks()[0]
    block.register_forward_hook(lambda *_: seen.append(torch.is_inference_mode_enabled()))
    generate(model, PROMPTS[:1], 2)
    assert len(seen) == 2 and all(seen) and not torch.is_inference_mode_enabled()
    model(torch.tensor([PROMPTS[0]])).sum().backward()
    assert all(p.grad is not None for p in block.parameters())


def test_a_compiled_model_is_not_compiled_again_for_every_length():
    def refuse(graph, inputs):
        raise AssertionError("compiled")

    model = decoder("grouped")
    texts = generate(model, PROMPTS, NEW)
    for block in model.layers.values():
        block.compile(backend=refuse)
    assert generate(model, PROMPTS, NEW) == texts


@pytest.mark.parametrize(
    "prompts, new, message",
    [
        ([[1], []], 4, "prompt 1 has 0 tokens"),
        ([[1]], 0, "max_new_tokens is 0: use --max-new-tokens"),
        (
            [[1, VOCABULARY]],
            4,
            f"prompt 0 has tokens 1 to {VOCABULARY}, but the model's vocab_size is {VOCABULARY}",
        ),
        ([[-1]], 4, "prompt 0 has tokens -1"),
        (
            [[1] * 30],
            4,
            "30 tokens and 4 new .* 33 positions, but max_position_embeddings is 32: use "
            "--max-new-tokens 3",
        ),
        (
            [[1] * 40],
            4,
            "40 tokens and 4 new ones read 43 positions, but max_position_embeddings is 32: use a "
            "shorter prompt",
        ),
    ],
)
def test_what_the_model_cannot_take_is_refused(prompts, new, message):
    with pytest.raises(ValueError, match=message):
        generate(decoder("learned"), prompts, new)


def test_the_last_position_is_used():
    """The last new token is not read, so 30 + 3 tokens fit 32 positions. Rope goes on, and
    says so.
    """
    assert len(generate(decoder("learned"), [[1] * 30], 3)[0]) == 3
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        generate(decoder("grouped"), [[1] * 30], 3)
    with pytest.warns(
        UserWarning, match=f"read 33 positions, but max_position_embeddings is {MOST}"
    ):
        assert len(generate(decoder("grouped"), [[1] * 30], 4)[0]) == 4


def test_logits_that_are_not_finite_are_refused():
    model = decoder("grouped")
    with torch.no_grad():
        model.final_norm.weight[0] = torch.nan
    with pytest.raises(ValueError, match="logits of new token 1 of prompt 0 are not finite"):
        generate(model, PROMPTS, 2)


def test_load_takes_the_dtype_of_the_folder(tmp_path):
    model = decoder("one-kv-qk-norm")
    values = dict(model.named_parameters())
    flat = replace(DECODERS["one-kv-qk-norm"], family="qwen3")
    described = ModelConfig({**flat.model.config, "eos_token_id": [2, 3]})
    hf_export.save(tmp_path / "model", described, values.__getitem__, torch.bfloat16)
    assert {p.dtype for p in load_decoder(open_source(tmp_path / "model")).parameters()} == {
        torch.bfloat16
    }
    wide = load_decoder(open_source(tmp_path / "model"), dtype=torch.float32)
    assert not wide.training and all(
        torch.equal(p, values[n].bfloat16().float()) for n, p in wide.named_parameters()
    )
    assert stop_tokens(open_source(tmp_path / "model")) == {2, 3}
    (tmp_path / "model" / "generation_config.json").write_text(json.dumps({"eos_token_id": 5}))
    assert stop_tokens(open_source(tmp_path / "model")) == {5}


FEW = Limits(rows=7, tokens=9, pages=14, page=4)


def texts_of(model) -> dict[str, list[list[int]]]:
    texts = {"greedy": generate(model, PROMPTS, NEW), "warm": generate(model, PROMPTS, NEW, **WARM)}
    everyone = [None, None]
    dist.all_gather_object(everyone, texts)
    assert everyone[0] == everyone[1], "ranks chose different tokens"
    return texts


def is_at_rest(model) -> bool:
    """Whether the optimizer's parameters are the model's again after a text."""
    before = list(map(id, model.parameters()))
    generate(model, PROMPTS[:1], 2)
    return before == list(map(id, model.parameters()))


def asked_of(model, kind: str, mesh: meshes.Mesh = SINGLE) -> tuple[list, dict]:
    """Requests, and adapters where they name some (adapted); or what drafts their tokens."""
    if kind == "adapted":
        known = lows(model.spec)
        return mixed(known), dict(adapters=place_adapters(known, model))
    requests = scored([*PROMPTS, LONG], samples=2)
    if kind == "ngram":
        config = SpeculativeConfig(method="ngram", prompt_lookup_min=1)
        return requests, dict(proposer=NgramProposer(config))
    if kind == "drafted":
        config = SpeculativeConfig(method="draft", model="x", num_speculative_tokens=3)
        return requests, dict(proposer=DraftModel(config, decoder("grouped"), mesh))
    return requests, {}


def requests_of(model, mesh: meshes.Mesh, kind: str = "") -> dict[tuple, tuple]:
    """(id, sample) -> new tokens, log-probabilities of prompt and of these, and how many tokens
    were close to another; texts in pages of 4, of which there are too few for all of them.
    """
    requests, more = asked_of(model, kind, mesh)
    found = run(model, requests, FEW, mesh, **more)
    out = {
        name: (e.tokens, [one.logprob for one in (*e.prompt_logprobs, *e.logprobs)], e.close)
        for name, e in found.items()
    }
    everyone = [None, None]
    dist.all_gather_object(everyone, out)
    assert everyone[0] == everyone[1], "ranks have been told different things"
    return out


def refused_by_both(model, stages: meshes.Mesh) -> None:
    """What the last stage alone has read."""
    bad = low(model.spec, 1, rank=2)
    down = bad.form.pair(max(bad.form.targets))[0]
    assert down.startswith("layers.1.")
    bad.stored[down].value[0, 0] = torch.nan
    with pytest.raises(ValueError, match=f"adapter bad: {down} has values that are not finite"):
        place_adapters({"bad": bad}, model, stages)


def two_ranks():
    cpu = torch.device("cpu")
    split, copied = meshes.build_mesh(1, 2, cpu), meshes.build_mesh(2, 1, cpu)
    stages = meshes.build_mesh(1, 1, cpu, pp=2)
    requests = {
        f"{name} tp": requests_of(decoder(name, split, sequence_parallel=True), split)
        for name in REQUESTED
    }
    for name, kinds in REQUESTED.items():
        model = build(DECODERS[name], stages, schedule=simulation.make_schedule("1f1b", 2, 2))
        initialize(model, seed=0)
        refused_by_both(model, stages)
        requests[f"{name} pp"] = requests_of(model, stages)
        for kind in kinds:
            requests[f"{name} pp, {kind}"] = requests_of(model, stages, kind)
            requests[f"{name} tp, {kind}"] = requests_of(decoder(name, split), split, kind)
    for trained in (
        decoder("grouped", split, sequence_parallel=True),
        decoder("grouped", copied, zero=1),
    ):
        with pytest.raises(ValueError, match="without sequence parallelism and ZeRO"):
            place_adapters(lows(trained.spec), trained)
    options = ({}, dict(sequence_parallel=True, zero=3))
    out = {
        f"{name} {options[i % 2]}": texts_of(decoder(name, split, **options[i % 2]))
        for i, name in enumerate(DECODERS)
    }
    rest = []
    for zero in range(4):
        model = decoder("grouped", copied, zero=zero)
        out[f"grouped zero {zero}"] = texts_of(model)
        rest.append(is_at_rest(model))
    kind = data.FSDPModule  # negative control
    reshard, kind.reshard = kind.reshard, lambda self: None
    forgotten = is_at_rest(decoder("grouped", copied, zero=1))
    kind.reshard = reshard
    return out, rest, forgotten, requests


def test_no_layout_changes_a_text(spawn):
    models = {name: decoder(name) for name in DECODERS}
    want = {
        n: (generate(m, PROMPTS, NEW), generate(m, PROMPTS, NEW, **WARM)) for n, m in models.items()
    }
    texts, rest, forgotten, requests = spawn(2)(two_ranks)
    assert len(texts) == len(DECODERS) + 4
    for layout, text in texts.items():
        assert (text["greedy"], text["warm"]) == want[layout.split()[0]], layout
    assert all(rest) and not forgotten
    for layout, got in requests.items():
        hold_requests(layout, got)


@cache
def requests_alone(name: str, kind: str) -> dict[tuple, Any]:
    """What one process gives for the requests of this kind."""
    model = decoder(name)
    requests, more = asked_of(model, kind)
    # which tokens a draft model's sampled drafts lead to depends on where they begin
    return run(model, requests, FEW if kind == "drafted" else Limits(), **more)


def hold_requests(layout: str, got: dict[tuple, tuple]) -> None:
    """Tokens are those of one process, but behind one that lay close to another; log-probabilities
    are 1e-6 off in the mean, 1e-4 x max(1, |log p| / 10) at worst.
    """
    alone = requests_alone(layout.split()[0], layout.partition(", ")[2])
    assert got.keys() == alone.keys()
    off = []
    for name, (new, logprobs, close) in got.items():
        want = alone[name]
        assert new == want.tokens or close + want.close, (layout, name)
        if new == want.tokens:
            both = [one.logprob for one in (*want.prompt_logprobs, *want.logprobs)]
            off += [abs(a - b) / max(1, -b / 10) for a, b in zip(logprobs, both, strict=True)]
    assert len(off) > 200 and sum(off) / len(off) < 1e-6 and max(off) < 1e-4, layout
