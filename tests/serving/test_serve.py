"""`dolmen serve` as the `openai` library meets it: the text of `model.generate`, whole or streamed,
alone or among 200 others.
"""

import asyncio
import json
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import openai
import pytest
import served
import tinyrun
import torch
from prometheus_client.parser import text_string_to_metric_families
from safetensors.torch import save_file
from served import serving, until

import dolmen as package
from dolmen.conversion import peft
from dolmen.conversion.source import open_source
from dolmen.core.mesh import SINGLE
from dolmen.serving.config import ServeConfig, SpeculativeConfig
from dolmen.serving.engine import Engine, NgramProposer
from dolmen.serving.http import loop, server
from dolmen.serving.request import Request, SamplingParams

material, one_thread = tinyrun.material, tinyrun.one_thread

PROMPTS = ["abc def", "hij", "a b c d e f g h i j", "jjj"]
HELLO = [{"role": "system", "content": "ab"}, {"role": "user", "content": "cd"}]
WARM = dict(temperature=1.3, seed=7, max_tokens=24)
TIMED = ("first_token", "request")  # dolmen_..._seconds


def test_decode_steps_are_compiled_before_the_address_is_printed(monkeypatch, capsys):
    done: list[str] = []
    engine = SimpleNamespace(warm_up=lambda: done.append("compiled"))
    http = SimpleNamespace(
        start=lambda: done.append("served"), join=lambda: None, stop=None, dispatch=None
    )
    for name, value in {
        "bind_socket": SimpleNamespace(),
        "build_parser": None,
        "open_engine": nullcontext(engine),
        "EngineLoop": SimpleNamespace(run=lambda on_step: None),
        "HttpThread": http,
    }.items():
        monkeypatch.setattr(server, name, lambda *_, value=value, **__: value)
    for compile in (False, True):
        source: Any = None
        server.serve(ServeConfig(folder="model", compile=compile), source, source, SINGLE)
    assert done == ["served", "compiled", "served"]
    assert "compiling decode steps" in capsys.readouterr().err


@pytest.fixture(scope="module")
def model(material, tmp_path_factory):
    return served.chatty(material.model, tmp_path_factory.mktemp("chatty") / "model")


@pytest.fixture(scope="module")
def service(model):
    with serving(model) as made:
        yield made


@pytest.fixture(scope="module")
def client(service):
    return service.client()


@pytest.fixture(scope="module")
def alone(model):
    """A prompt, as `model.generate` goes on with it."""
    loaded = package.load(model, dtype="float32")

    def text(prompt, **options):
        found = loaded.generate(prompt, **options)
        return [one.text for one in found] if isinstance(found, list) else found.text

    return text


def pieces(stream) -> tuple[dict[int, str], dict[int, str], list]:
    """Of each answer of a stream its text, how it ended, and what was said of its tokens."""
    texts, ends, metrics = {}, {}, []
    for chunk in stream:
        for choice in chunk.choices:
            new = choice.text if hasattr(choice, "text") else choice.delta.content
            assert choice.index not in ends
            texts[choice.index] = texts.get(choice.index, "") + (new or "")
            if choice.logprobs is not None:
                metrics.append((choice.index, choice.logprobs))
            if choice.finish_reason:
                ends[choice.index] = choice.finish_reason
    return texts, ends, metrics


def test_completions_are_those_of_generate(client, alone):
    found = client.completions.create(model="model", prompt=PROMPTS, temperature=0, max_tokens=20)
    assert [one.index for one in found.choices] == [0, 1, 2, 3]
    assert [one.text for one in found.choices] == [
        alone(prompt, max_new_tokens=20, temperature=0) for prompt in PROMPTS
    ]
    assert {one.finish_reason for one in found.choices} == {"length"}
    ids = [1, 5, 9]
    by_ids = client.completions.create(model="model", prompt=ids, temperature=0)
    assert by_ids.choices[0].text == alone(ids, max_new_tokens=16, temperature=0)
    assert by_ids.usage.model_dump(exclude_none=True) == {
        "prompt_tokens": 3,
        "completion_tokens": 16,
        "total_tokens": 19,
    }


def test_a_chat_is_its_template_continued(client, alone):
    found = client.chat.completions.create(
        model="model", messages=HELLO, temperature=0, max_completion_tokens=12
    )
    text = alone("<s>ab\n<u>cd\n<a>", max_new_tokens=12, temperature=0)
    assert found.choices[0].message.content == text
    parts = [{"type": "text", "text": "c"}, {"type": "text", "text": "d"}]
    again = [{"role": "developer", "content": "ab"}, {"role": "user", "content": parts}]
    same = client.chat.completions.create(
        model="model", messages=again, temperature=0, max_tokens=12, logprobs=True
    )
    assert same.choices[0].message.content == text
    reported = same.choices[0].logprobs.content
    assert b"".join(bytes(one.bytes) for one in reported).decode(errors="replace") == text


def test_tools_and_calls_reach_the_template(client, alone):
    tool = {"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}
    call = {"id": "1", "type": "function", "function": {"name": "look", "arguments": '{"x": "ab"}'}}
    chat = [
        {"role": "user", "content": "cd"},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "1", "content": "ef"},
    ]
    request = dict(model="model", messages=chat, temperature=0, max_tokens=8)
    found = client.chat.completions.create(**request, tools=[tool], tool_choice="auto")
    text = "<u>cd\n<a>(ab)\n<t>ef\n<a>"
    assert found.choices[0].message.content == alone("[look]" + text, max_new_tokens=8)
    found = client.chat.completions.create(**request, tools=[tool], tool_choice="none")
    assert found.choices[0].message.content == alone(text, max_new_tokens=8)


STREAMED = {
    "greedy": dict(temperature=0, max_tokens=30),
    "several": dict(**WARM, n=3),
    "stopped": dict(temperature=0, max_tokens=30, n=2),
    "penalties": dict(**WARM, presence_penalty=0.5, frequency_penalty=-0.3, top_p=0.9),
}


@pytest.mark.parametrize("name", STREAMED)
def test_what_is_streamed_is_what_is_sent_whole(name, client, alone):
    request = dict(model="model", prompt=PROMPTS[0], logprobs=2, **STREAMED[name])
    if name == "stopped":
        request["stop"] = [alone(PROMPTS[0], max_new_tokens=30)[8:11], "never there"]
    whole = client.completions.create(**request)
    texts, ends, metrics = pieces(client.completions.create(**request, stream=True))
    assert texts == {one.index: one.text for one in whole.choices}
    assert ends == {one.index: one.finish_reason for one in whole.choices}
    if name == "stopped":
        assert set(ends.values()) == {"stop"}
    for one in whole.choices:
        streamed = [part for index, part in metrics if index == one.index]
        for field in ("tokens", "token_logprobs", "text_offset"):
            parts = [getattr(part, field) for part in streamed]
            assert sum(parts, []) == getattr(one.logprobs, field), field
    chat = {name: value for name, value in request.items() if name not in ("prompt", "logprobs")}
    chat |= dict(messages=HELLO, stream_options={"include_usage": True})
    whole = client.chat.completions.create(**{**chat, "stream_options": openai.omit})
    chunks = list(client.chat.completions.create(**chat, stream=True))
    assert chunks[-1].usage == whole.usage and not chunks[-1].choices
    texts, ends, _ = pieces(chunks)
    assert texts == {one.index: one.message.content for one in whole.choices}
    assert ends == {one.index: one.finish_reason for one in whole.choices}


def test_several_answers_are_drawn_each_by_itself(client):
    request = dict(model="model", prompt=PROMPTS[:2], **WARM)
    four = client.completions.create(**request, n=4)
    assert [one.index for one in four.choices] == [*range(8)]
    assert len({one.text for one in four.choices}) == 8
    two = client.completions.create(**request, n=2)
    texts = [one.text for one in four.choices]
    assert [one.text for one in two.choices] == texts[:2] + texts[4:6]


def test_prompts_of_a_request_draw_each_by_itself(client):
    """The same prompt twice; and without a seed each request draws anew."""
    request = dict(model="model", prompt=["abc", "abc"], temperature=1.3, max_tokens=24)
    found = [client.completions.create(**request).choices for _ in range(2)]
    assert len({one.text for choices in found for one in choices}) == 4


def test_log_probabilities_are_the_engines(service, client):
    reader = service.parser.tokenizer
    tokens = reader("abc def")["input_ids"]
    found = client.completions.create(
        model="model", prompt="abc def", temperature=0, max_tokens=9, logprobs=3
    )
    reported = found.choices[0].logprobs
    options = SamplingParams(temperature=0, max_new_tokens=9)
    with Engine(service.model, known=reader.get_vocab().values()) as engine:
        engine.add(Request(tokens, options, logprobs="raw", top=3, prompt_logprobs=True))
        while engine.busy:
            ended = engine.step().finished
    assert reported.token_logprobs == pytest.approx(
        [one.logprob for one in ended[0].logprobs], abs=1e-4
    )
    for likely, one in zip(reported.top_logprobs, ended[0].logprobs, strict=True):
        assert max(likely.values()) == pytest.approx(one.top[0][1], abs=1e-4)
    echo = client.completions.create(
        model="model", prompt="abc def", temperature=0, max_tokens=0, logprobs=0, echo=True
    )
    of_prompt = echo.choices[0].logprobs
    assert echo.choices[0].text == "abc def" == "".join(of_prompt.tokens)
    assert of_prompt.token_logprobs[0] is None
    assert of_prompt.token_logprobs[1:] == pytest.approx(
        [one.logprob for one in ended[0].prompt_logprobs], abs=1e-4
    )


def test_a_bias_decides_and_minimum_tokens_hold(client, service):
    tokens = service.parser.tokenizer
    token = tokens.get_vocab()["j"]
    request = dict(model="model", prompt="abc", temperature=0, max_tokens=5)
    found = client.completions.create(**request, logit_bias={str(token): 100})
    assert found.choices[0].text == "jjjjj"
    end = {str(tokens.eos_token_id): 100}
    found = client.completions.create(**request, logit_bias=end)
    assert (found.choices[0].text, found.choices[0].finish_reason) == ("", "stop")
    found = client.completions.create(**request, logit_bias=end, extra_body={"min_tokens": 3})
    assert found.usage.completion_tokens == 4


@pytest.mark.slow
def test_two_hundred_at_once_are_all_answered(service, alone):
    """Each as alone; and what a seed draws is the same, whatever else runs."""
    prompts = [f"{'abcdefghij'[i % 10]} {'abc ' * (i % 7)}{i}" for i in range(200)]
    texts = alone(prompts, max_new_tokens=12, temperature=0)
    sampled = dict(model="model", prompt="abc", n=2, **WARM)
    before = [one.text for one in service.client().completions.create(**sampled).choices]

    async def send_request():
        async with service.several() as client:
            own = [client.completions.create(**sampled) for _ in range(3)]
            greedy = [
                client.completions.create(
                    model="model", prompt=prompt, temperature=0, max_tokens=12
                )
                for prompt in prompts
            ]
            return await asyncio.gather(*own, *greedy)

    answers = asyncio.run(send_request())
    for answer in answers[:3]:
        assert [one.text for one in answer.choices] == before
    assert [answer.choices[0].text for answer in answers[3:]] == texts
    until(lambda: service.idle)


def test_what_runs_together_shares_forwards(service):
    """Continuous batching: one that begins while others are written costs no forward of its own."""
    steps = []
    step = service.engine.step
    service.engine.step = lambda: steps.append(service.engine.running) or step()

    async def send_request():
        async with service.several() as client:
            every = [
                client.completions.create(model="model", prompt=str(i), max_tokens=40)
                for i in range(20)
            ]
            return await asyncio.gather(*every)

    try:
        assert len(asyncio.run(send_request())) == 20
    finally:
        del service.engine.step
    assert max(steps) > 10 and len([n for n in steps if n]) < 200


def test_models_health_and_metrics(service, client):
    assert [one.id for one in client.models.list()] == ["model"]
    assert client.models.retrieve("model").owned_by == "dolmen"
    assert service.get("/health", key=None).json() == {"status": "ok"}

    def number(name: str, **labels: str) -> float:
        text = service.get("/metrics").text
        return sum(
            sample.value
            for family in text_string_to_metric_families(text)
            for sample in family.samples
            if sample.name == name and labels.items() <= sample.labels.items()
        )

    names = ("dolmen_prompt_tokens_total", "dolmen_generated_tokens_total")
    before = [number(name) for name in names]
    done = number("dolmen_requests_total", path="/v1/completions", status="200")
    bad = number("dolmen_requests_total", status="400")
    client.completions.create(model="model", prompt=[1, 2, 3], max_tokens=6, n=2)
    service.post("/v1/completions", content=b"{")
    assert [number(name) for name in names] == [before[0] + 3, before[1] + 12]
    assert number("dolmen_requests_total", path="/v1/completions", status="200") == done + 1
    assert number("dolmen_requests_total", status="400") == bad + 1
    assert number("dolmen_request_seconds_count") >= done + 1
    assert number("dolmen_cache_pages") == number("dolmen_completions_running") == 0
    drafts = "dolmen_spec_decode_num_draft_tokens_total"
    assert number(drafts) == 0
    config = SpeculativeConfig(method="ngram", prompt_lookup_min=1)
    service.engine._proposer = NgramProposer(config)
    try:
        only = {"model": "model", "logit_bias": {"1": 100}}  # one token, again and again
        client.completions.create(prompt=[1, 2] * 4, max_tokens=9, **only)
    finally:
        service.engine._proposer = None
    assert 0 < number("dolmen_spec_decode_num_accepted_tokens_total") <= number(drafts)


def test_a_request_is_timed_from_its_start(monkeypatch):
    """First token and end, by a clock that is set; a token after the first is counted alone."""
    clock = iter((10.0, 12.0, 17.0))
    monkeypatch.setattr(loop, "time", SimpleNamespace(monotonic=lambda: next(clock)))
    metrics = loop.ServerMetrics()
    timer = loop.RequestTimer(metrics)
    timer.token()
    timer.token()
    timer.end("/v1/completions", 200)
    sums = [metrics.registry.get_sample_value(f"dolmen_{name}_seconds_sum") for name in TIMED]
    counts = [metrics.registry.get_sample_value(f"dolmen_{name}_seconds_count") for name in TIMED]
    assert sums == [2.0, 7.0] and counts == [1, 1]
    assert metrics.registry.get_sample_value("dolmen_generated_tokens_total") == 2


def test_generation_config_says_what_a_request_leaves_open(model, tmp_path, alone):
    folder = tmp_path / "named"
    served.shutil.copytree(model, folder)
    said = {"do_sample": True, "temperature": 0.01, "top_k": 1, "max_new_tokens": 5}
    served.change(folder / "generation_config.json", **said)
    with serving(folder, name="other") as own:
        found = own.client().completions.create(model="other", prompt="abc")
        assert found.choices[0].text == alone("abc", max_new_tokens=5, temperature=0)
        assert found.usage.completion_tokens == 5
        chat = own.client().chat.completions.create(model="other", messages=HELLO, temperature=0)
        assert chat.usage.completion_tokens == 5
        assert own.announced[0] == f"serving other at {own.url}/v1"


def test_a_chat_without_a_limit_fills_what_the_model_has(model):
    with serving(model, max_length=40) as own:
        request = {"model": "model", "messages": HELLO, "extra_body": {"min_tokens": 25}}
        assert own.client().chat.completions.create(**request).usage.total_tokens == 40
        body = {"model": "model", "prompt": "abc", "max_tokens": 38}
        reported = own.post("/v1/completions", json=body).json()["error"]
        assert reported["code"] == "context_length_exceeded" and "40" in reported["message"]
        assert json.dumps(reported)


def test_each_adapter_is_a_model_of_its_name(model, alone, tmp_path):
    """Listed, chosen by the field `model`, and mixed in one batch."""
    folders = {
        name: written(tmp_path / name, model, seed) for seed, name in enumerate(("fr", "de"))
    }
    loaded = package.load(model, dtype="float32", adapters=folders)
    said = tuple(f"{name}={folder}" for name, folder in folders.items())
    with serving(model, adapters=said) as made:
        client = made.client()
        assert [one.id for one in client.models.list()] == ["model", "fr", "de"]
        assert client.models.retrieve("de").parent == "model"
        requested = [(name, prompt) for prompt in PROMPTS for name in ("model", "fr", "de")]

        async def all_of_them():
            async with made.several() as several:
                each = [
                    several.completions.create(
                        model=name, prompt=prompt, temperature=0, max_tokens=12
                    )
                    for name, prompt in requested
                ]
                return await asyncio.gather(*each)

        found = asyncio.run(all_of_them())
        for (name, prompt), answer in zip(requested, found, strict=True):
            adapter = None if name == "model" else name
            want = loaded.generate(prompt, max_new_tokens=12, temperature=0, adapter=adapter)
            assert (answer.model, answer.choices[0].text) == (name, want.text)
        assert len({answer.choices[0].text for answer in found}) > len(PROMPTS)
        chat = dict(messages=HELLO, temperature=0, max_completion_tokens=8)
        texts = [
            client.chat.completions.create(model=name, **chat).choices[0].message.content
            for name in ("model", "fr")
        ]
        assert texts[0] != texts[1]
        with pytest.raises(openai.NotFoundError, match="use 'model', 'fr', 'de'"):
            client.completions.create(model="law", prompt="a")
        until(lambda: made.idle)


def written(folder, base, seed: int):
    """An adapter that is felt, as PEFT writes it."""
    source, chance = open_source(base), torch.Generator().manual_seed(seed)
    tensors = {}
    for module, weight in peft._modules(source.model).items():
        if weight.endswith((".q.weight", ".up.weight", ".down.weight")):
            out, inp = source.spec.params[weight].shape
            for kind, shape in zip(peft.KINDS[:2], ((3, inp), (out, 3)), strict=True):
                sampled = torch.randn(shape, generator=chance)
                tensors[f"{peft.PREFIX}{module}.{kind}"] = sampled
    folder.mkdir()
    save_file(tensors, folder / peft.WEIGHTS)
    said = {"peft_type": "LORA", "r": 3, "lora_alpha": 3, "bias": "none"}
    said["target_modules"] = sorted({name.split(".")[-3] for name in tensors})
    (folder / peft.CONFIG).write_text(json.dumps(said))
    return folder
