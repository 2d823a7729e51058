"""What a server refuses, and how it survives its clients: errors as OpenAI's library knows them,
those who go away, those who ask for too much, and its own end.
"""

import asyncio
import gc
import json
import socket
import threading
import time
from types import SimpleNamespace

import httpx
import openai
import pytest
import served
import tinyrun
import torch
from served import KEY, serving, until
from starlette.requests import Request
from tokenizers.pre_tokenizers import ByteLevel

from dolmen.conversion.source import open_source
from dolmen.core.messages import BadInput
from dolmen.data.tokenizer import bytes_of, load_tokenizer
from dolmen.serving.config import ServeConfig
from dolmen.serving.generation import Detokenizer
from dolmen.serving.http import app, server
from dolmen.serving.http.protocol import ApiError
from dolmen.serving.http.request_parser import RequestParser
from dolmen.serving.http.responses import CompletionStream, TokenTexts, top_logprobs
from dolmen.serving.http.session import Session
from dolmen.serving.request import LogProb, NewToken, SamplingParams

material, one_thread = tinyrun.material, tinyrun.one_thread

LONG = dict(model="model", prompt="abc", temperature=0, max_tokens=500)
GOOD = {"model": "model", "prompt": "abc", "max_tokens": 2}
CHAT = {"model": "model", "messages": [{"role": "user", "content": "ab"}], "max_tokens": 2}
COMPLETIONS, CHATS = "/v1/completions", "/v1/chat/completions"


def byte_letters() -> list[str]:
    """The letter that byte-level BPE writes for each byte (GPT-2's table)."""
    plain = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = iter(range(256, 512))
    return [chr(byte if byte in plain else next(others)) for byte in range(256)]


BYTES = byte_letters()


@pytest.fixture(scope="module")
def model(material, tmp_path_factory):
    return served.chatty(material.model, tmp_path_factory.mktemp("chatty") / "model")


@pytest.fixture(scope="module")
def service(model):
    with serving(model, max_body_bytes=20_000) as made:
        yield made


def without(body: dict, name: str) -> dict:
    return {key: value for key, value in body.items() if key != name}


def said(*messages: dict) -> dict:
    return CHAT | {"messages": list(messages)}


CALL = {"function": {"name": "f", "arguments": "[1"}}
BAD = {
    "prompt of another type": (GOOD | {"prompt": {"a": 1}}, "prompt"),
    "no prompt": (without(GOOD, "prompt"), "prompt"),
    "an empty list": (GOOD | {"prompt": []}, "prompt"),
    "a mixed list": (GOOD | {"prompt": ["a", 1]}, "prompt"),
    "an empty list of ids": (GOOD | {"prompt": [[]]}, "tokens"),
    "ids out of the vocabulary": (GOOD | {"prompt": [1, 300]}, "vocab_size"),
    "ids below it": (GOOD | {"prompt": [-1]}, "vocab_size"),
    "a lone surrogate": (GOOD | {"prompt": "\ud800"}, "surrogate"),
    "temperature of another type": (GOOD | {"temperature": "hot"}, "temperature"),
    "temperature below 0": (GOOD | {"temperature": -1}, "temperature"),
    "temperature of no size": (GOOD | {"temperature": 5e-324}, "temperature"),
    "top_p of 0": (GOOD | {"top_p": 0}, "top_p"),
    "true for a number": (GOOD | {"max_tokens": True}, "max_tokens"),
    "half a token": (GOOD | {"max_tokens": 1.5}, "max_tokens"),
    "fewer than no tokens": (GOOD | {"max_tokens": -1}, "max_tokens"),
    "huge max_tokens": (GOOD | {"max_tokens": 10**9}, "for both together"),
    "beyond 64 bits": (GOOD | {"max_tokens": 10**30}, "64 bits"),
    "n of 0": (GOOD | {"n": 0}, "n:"),
    "n beyond all": (GOOD | {"n": 10**6}, "n:"),
    "another best_of": (GOOD | {"best_of": 4}, "best_of"),
    "a suffix": (GOOD | {"suffix": "x"}, "suffix is not supported"),
    "an unknown field": (GOOD | {"guided_json": {}}, "guided_json"),
    "an empty stop": (GOOD | {"stop": ""}, "stop"),
    "an empty stop among others": (GOOD | {"stop": ["a", ""]}, "stop"),
    "a bias out of the vocabulary": (GOOD | {"logit_bias": {"300": 1}}, "logit_bias"),
    "a bias of no id": (GOOD | {"logit_bias": {"a": 1}}, "logit_bias"),
    "a bias beyond all": (GOOD | {"logit_bias": {"1": 1e300}}, "logit_bias"),
    "a seed of another type": (GOOD | {"seed": "x"}, "seed"),
    "more minimum than maximum": (GOOD | {"min_tokens": 3}, "min_tokens"),
    "logprobs beyond all": (GOOD | {"logprobs": 21}, "logprobs"),
    "echoed logprobs as a stream": (GOOD | {"logprobs": 1, "echo": True, "stream": True}, "echo"),
    "stream options of no stream": (GOOD | {"stream_options": {}}, "stream"),
    "no messages": (said(), "messages"),
    "an unknown role": (said({"role": "king", "content": "x"}), "role"),
    "a message without content": (said({"role": "user"}), "content"),
    "an image": (
        said({"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}),
        "messages",
    ),
    "what the template refuses": (said({"role": "user", "content": "no"}), "not that"),
    "a call that is no JSON": (
        said({"role": "assistant", "tool_calls": [CALL]}, {"role": "user", "content": "x"}),
        "arguments",
    ),
    "a forced call": (CHAT | {"tool_choice": "required"}, "tool_choice"),
    "a format": (CHAT | {"response_format": {"type": "json_object"}}, "response_format"),
    "two maxima": (CHAT | {"max_completion_tokens": 3}, "max_completion_tokens"),
    "top_logprobs alone": (CHAT | {"top_logprobs": 2}, "top_logprobs"),
}


def refused(answer: httpx.Response, status: int, word: str) -> dict:
    assert answer.status_code == status, answer.text
    reported = answer.json()["error"]
    assert set(reported) == {"message", "type", "param", "code"} and word in reported["message"], (
        reported
    )
    return reported


@pytest.mark.parametrize("name", BAD)
def test_what_is_malformed_is_told(name, service):
    body, word = BAD[name]
    path = COMPLETIONS if "prompt" in body or "messages" not in body else CHATS
    refused(service.post(path, content=json.dumps(body).encode()), 400, word)


BODIES = {
    b"": "JSON",
    b"{": "JSON",
    b"\xff": "UTF-8",
    b"[]": "",
    b'"x"': "",
    b'{"model": "model", "prompt": "a", "temperature": NaN}': "NaN",
    b'{"model": "model", "prompt": "a", "temperature": 1e999}': "1e308",
    b'{"model": "model", "prompt": "a", "prompt": "b"}': "twice",
    b"[" * 9000: "brackets",
    b'{"model": "model", "prompt": ' + b"9" * 9000 + b"}": "JSON",
}


@pytest.mark.parametrize("body", BODIES, ids=range(len(BODIES)))
def test_what_is_no_request_is_told(body, service):
    for path in (COMPLETIONS, CHATS):
        refused(service.post(path, content=body), 400, BODIES[body])


def test_other_refusals(service):
    refused(service.post(COMPLETIONS, json=GOOD | {"model": "x"}), 404, "'model'")
    with pytest.raises(openai.NotFoundError, match="there is no model"):
        service.client().models.retrieve("x/y")
    refused(service.get("/v2"), 404, "GET /v2")
    refused(service.get(COMPLETIONS), 405, "GET")
    large = b'{"prompt": "' + b"a" * 30_000
    refused(service.post(COMPLETIONS, content=large), 413, "20,000 bytes")
    chunks = (large[i : i + 1000] for i in range(0, len(large), 1000))  # without a length
    refused(service.post(COMPLETIONS, content=chunks), 413, "20,000 bytes")
    until(lambda: service.idle)
    assert service.post(COMPLETIONS, json=GOOD).status_code == 200


def test_a_body_that_says_it_is_too_long_is_not_read():
    sent = iter([{"type": "http.request", "body": b"a" * 20}])

    async def receive():
        return next(sent)

    def body(length: int):
        headers = [(b"content-length", str(length).encode())]
        request = Request({"type": "http", "method": "POST", "headers": headers}, receive)
        return asyncio.run(app.read_body(request, 20))

    with pytest.raises(ApiError, match="more than 20 bytes"):
        body(21)
    assert body(20) == b"a" * 20


def test_nobody_asks_without_the_key(service):
    for key in ("wrong", KEY[:-1], KEY + "x", ""):
        with pytest.raises(openai.AuthenticationError, match="key is missing or wrong"):
            service.client(api_key=key or "none").completions.create(**GOOD)
    for path in ("/v1/models", "/metrics", "/", "/docs", "/openapi.json", "//health"):
        assert refused(service.get(path, key=None), 401, "key")["code"] == "invalid_api_key"
    for value in (b"\xff\xfe", b"Basic " + KEY.encode(), KEY.encode()):
        answer = service.post(COMPLETIONS, json=GOOD, headers={"authorization": value})
        refused(answer, 401, "key")


def connected(own) -> socket.socket:
    return socket.create_connection(own.http.listener.getsockname(), timeout=20)


def test_who_does_not_say_what_it_wants_is_left(model):
    """A head that does not come, in part or at all, of the first request or the second; one that is
    too long; and connections beyond those that are taken.
    """
    health = b"GET /health HTTP/1.1\r\nHost: a\r\n"
    with serving(model, max_connections=3, max_head_bytes=2048, head_time=0.3) as own:
        for started in (b"", b"GET /hea", health):
            with connected(own) as one:
                one.sendall(started)
                assert one.recv(100) == b""
        with connected(own) as one:
            one.sendall(health + b"\r\n")
            time.sleep(0.6)  # idle, and not ended
            one.sendall(health)
            said = b""
            while some := one.recv(1000):
                said += some
            assert said.startswith(b"HTTP/1.1 200 ") and said.count(b"HTTP/1.1") == 1
        with connected(own) as one:
            one.sendall(health + b"x: " + b"a" * 3000)
            assert one.recv(1000).startswith(b"HTTP/1.1 400 ")
        until(lambda: not own.http.server.server_state.connections)
        with connected(own) as one:  # whole, and in one piece
            one.sendall(health + b"x: " + b"a" * 3000 + b"\r\n\r\n")
            assert one.recv(1000).startswith(b"HTTP/1.1 400 ")
        with connected(own) as one:
            one.sendall(health + b"x: " + b"a" * (2048 - len(health) - 7) + b"\r\n\r\n")
            assert one.recv(1000).startswith(b"HTTP/1.1 200 ")
    with serving(model, max_connections=3) as own:
        several = [connected(own) for _ in range(3)]
        until(lambda: len(own.http.server.server_state.connections) == 3)
        assert own.get("/health").status_code == 503
        several.pop().close()
        until(lambda: len(own.http.server.server_state.connections) == 2)
        assert own.get("/health").status_code == 200
        for one in several:
            one.close()


@pytest.mark.slow
def test_who_goes_away_holds_nothing(service):
    """Many times, in mid-stream and while a whole answer is written."""

    def leave() -> None:
        with service.client().completions.create(**LONG, n=3, stream=True) as stream:
            next(iter(stream))
            assert service.engine.pages
        with pytest.raises(openai.APITimeoutError):
            service.client(timeout=0.05).completions.create(**LONG, n=3)

    before = service.http.sessions.metrics.new._value.get()
    leave()
    until(lambda: service.idle)
    held = service.engine._runner.cache.table.total
    for _ in range(4):
        leave()
    until(lambda: service.idle)
    gc.collect()
    alive = [one for one in gc.get_objects() if type(one) in (Session, CompletionStream)]
    assert not alive
    assert service.engine._runner.cache.table.total <= 2 * held
    written = service.http.sessions.metrics.new._value.get() - before
    assert written < 5 * 6 * 500 / 2  # most of what was asked for was not written
    assert service.post(COMPLETIONS, json=GOOD).status_code == 200


def test_an_answer_that_has_its_stop_string_is_written_no_more(service):
    """By the engine either: its pages are for others."""
    text = service.client().completions.create(**LONG | {"max_tokens": 60}).choices[0].text
    before = service.engine.step
    read = []
    service.engine.step = lambda: (output := before(), read.append(output.num_tokens))[0]
    try:
        found = service.client().completions.create(**LONG, stop=text[10:13])
        until(lambda: service.idle)
    finally:
        del service.engine.step
    assert found.choices[0].text == text[: text.index(text[10:13])]
    assert found.usage.completion_tokens < 40 and sum(read) < 100


def test_a_request_has_so_much_time(model):
    with serving(model, time_limit=0.3) as own:
        own.engine.step = slowly(own.engine.step)
        with pytest.raises(openai.InternalServerError, match="time limit of 0.3 seconds") as raised:
            own.client(max_retries=3).completions.create(**LONG)
        assert raised.value.status_code == 504
        with pytest.raises(openai.APIError, match="time limit of 0.3 seconds"):
            for _ in own.client().completions.create(**LONG, stream=True):
                pass
        until(lambda: own.idle)


def stalled(own) -> socket.socket:
    """A client that asks for a long stream and reads nothing of it."""
    own.http.listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
    body = json.dumps(LONG | {"stream": True, "logprobs": 20, "n": 3}).encode()
    head = f"POST {COMPLETIONS} HTTP/1.1\r\nHost: a\r\nAuthorization: Bearer {KEY}\r\n"
    client = socket.socket()
    client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2048)
    client.connect(own.http.listener.getsockname())
    client.sendall(head.encode() + f"Content-Length: {len(body)}\r\n\r\n".encode() + body)
    return client


def writing_waits(own) -> bool:
    """Whether a response waits for its client to read."""
    found = own.http.server.server_state.connections
    return any(one.flow.write_paused for one in found)


def test_the_time_limit_holds_for_a_client_that_stops_reading(model):
    with serving(model) as own, stalled(own):
        until(lambda: writing_waits(own))
        (session,) = own.http.sessions.open
        own.http.events.call_soon_threadsafe(
            session.fail, session.timeout_error()
        )  # as its timer does
        until(lambda: own.idle and not own.http.server.server_state.connections)


def test_a_client_that_stops_reading_does_not_hold_up_the_end(model, caplog):
    """Neither in mid-stream, nor with a whole response unread; and no traceback is logged."""
    with serving(model, grace=0.1) as own, stalled(own):
        until(lambda: writing_waits(own))
        own.http.stop()
        own.thread.join(4)  # uvicorn itself cancels what is left after 5 seconds
        assert not own.thread.is_alive() and own.failed is None
    assert "Traceback" not in caplog.text and "completing" not in caplog.text


def slowly(step):
    def waited():
        time.sleep(0.01)
        return step()

    return waited


def test_a_full_queue_is_told(model):
    with serving(model, max_rows=1, max_waiting=1) as own:
        own.engine.step = slowly(own.engine.step)
        client = own.client()
        with client.completions.create(**LONG, stream=True) as first:
            next(iter(first))
            second = threading.Thread(target=lambda: client.completions.create(**GOOD))
            second.start()
            until(lambda: own.http.sessions.num_completions == 2)
            with pytest.raises(openai.RateLimitError, match="2 completions are running or waiting"):
                client.completions.create(**GOOD)
        second.join()
        assert client.completions.create(**GOOD).choices[0].finish_reason == "length"
        with pytest.raises(openai.BadRequestError, match="3 completions are requested"):
            client.completions.create(**GOOD, n=3)


@pytest.mark.slow
def test_a_small_cache_puts_answers_back_and_ends_them_all(model):
    """Pages for two answers and a half, and eight answers."""
    with serving(model, max_cache_tokens=160) as own:
        requested = LONG | {"max_tokens": 60}
        one = own.client().completions.create(**requested).choices[0].text
        found = own.client().completions.create(**requested, n=8)
        assert {choice.text for choice in found.choices} == {one}
        with pytest.raises(openai.BadRequestError, match="for both together"):
            own.client().completions.create(**LONG | {"max_tokens": 200})


def test_asked_to_end_it_lets_answers_end(model):
    with serving(model) as own:
        stream = own.client().completions.create(**LONG | {"max_tokens": 40}, stream=True)
        next(iter(stream))
        own.http.stop()
        assert sum(len(chunk.choices[0].text) for chunk in stream) > 20
        own.thread.join(20)
        assert not own.thread.is_alive() and own.failed is None
        with pytest.raises(httpx.ConnectError):
            own.get("/health")


def test_asked_again_it_ends_at_once(model):
    with serving(model, grace=60.0) as own:
        own.engine.step = slowly(own.engine.step)
        stream = own.client().completions.create(**LONG, stream=True)
        next(iter(stream))
        own.http.stop()
        own.http.stop()
        with pytest.raises(openai.APIError, match="is stopping"):
            list(stream)
        own.thread.join(20)
        assert not own.thread.is_alive()


def test_an_engine_that_fails_is_told_and_ends_the_server(model):
    with serving(model) as own:

        def fail():
            raise RuntimeError("out of memory")

        own.engine.step = fail
        with pytest.raises(openai.InternalServerError, match="the engine has stopped"):
            own.client().completions.create(**GOOD)
        own.thread.join(20)
        assert str(own.failed) == "out of memory"


def test_scores_that_are_no_numbers_are_told(model):
    with serving(model) as own:
        with torch.no_grad():
            next(own.model.parameters()).fill_(float("nan"))
        with pytest.raises(openai.InternalServerError, match="not finite"):
            own.client().completions.create(**GOOD)
        until(lambda: own.idle)


def test_what_is_refused_before_the_model_is_loaded(model, tmp_path):
    source = open_source(model)
    tokenizer = load_tokenizer(str(source.tokenizer), probe=False)

    def check(**said):
        server.check(ServeConfig(folder=str(model), **{"port": 0} | said), source, tokenizer)

    check()
    with pytest.raises(ValueError, match="--key has 3 characters"):
        check(key="abc")
    with pytest.raises(ValueError, match="--key must be of printable ASCII"):
        check(key="with a space")
    short = tmp_path / "key"
    short.write_text("abc\n")
    with pytest.raises(ValueError, match=r"--key-file .*key has 3 characters"):
        check(key_file=str(short))
    short.write_text("long-enough\n")
    assert server.resolve_key(ServeConfig(folder="x", key_file=str(short))) == "long-enough"
    learned = SimpleNamespace(max_position_embeddings=512, longest=512)
    limited = SimpleNamespace(model=SimpleNamespace(spec=learned))
    config = ServeConfig(folder=str(model), max_length=600)
    with pytest.raises(ValueError, match="--max-length is 600, and max_position_embeddings 512"):
        _ = RequestParser(config, limited, None, None, SamplingParams(), None).max_length
    for name in (
        "max_rows",
        "max_batch_tokens",
        "time_limit",
        "max_cache_tokens",
        "max_body_bytes",
        "max_connections",
        "max_head_bytes",
        "head_time",
    ):
        with pytest.raises(ValueError, match=f"--{name.replace('_', '-')} is 0"):
            check(**{name: 0})
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(ValueError, match=f"--port {port}: Address already in use"):
            check(port=port)


def test_a_key_is_made_for_each_start_and_told(model, capsys):
    messages = []
    for _ in range(2):
        with serving(model, key=None, host="0.0.0.0") as own:
            assert own.announced[1] == f"key: {own.http.key}" and len(own.http.key) > 30
            messages.append(own.http.key)
    assert messages[0] != messages[1]
    assert "--host 0.0.0.0: the server can be reached over the network" in capsys.readouterr().err


def test_log_probabilities_end_where_a_stop_string_begins(material):
    tokenizer = load_tokenizer(str(material.tokenizer), probe=False)
    ids = tokenizer.encode("abc defghij", add_special_tokens=False)
    texts = [tokenizer.decode([one]) for one in ids]
    assert len(ids) > 4
    stop = "".join(texts[2:4])
    own = CompletionStream(0, Detokenizer(tokenizer, [stop]), TokenTexts(tokenizer))
    made = [own.add(NewToken(0, 0, token, LogProb(-1.0))) for token in ids[:4]]
    entries = [entry for piece in made if piece for entry in piece.entries]
    assert [entry.sampled.text for entry in entries] == texts[:2]
    assert [entry.offset for entry in entries] == [0, len(texts[0])]
    assert "".join(piece.text for piece in made if piece) == "".join(texts[:2])
    assert own.finish == "stop" and made[-1].finish == "stop"


def test_bytes_that_are_no_character_move_the_offset_of_the_next_token(material):
    """Two bytes that begin no character are two characters of the text, which "C" comes after; a
    stop string there leaves its log-probability out.
    """
    tokenizer = load_tokenizer(str(material.tokenizer), probe=False)
    ids = tokenizer.convert_tokens_to_ids([BYTES[0xB1], BYTES[0xCB], "C"])
    for stop, offsets in ((["C"], [0, 1]), ([], [0, 1, 2])):
        own = CompletionStream(0, Detokenizer(tokenizer, stop), TokenTexts(tokenizer))
        made = [own.add(NewToken(0, 0, token, LogProb(-1.0))) for token in ids]
        made.append(None if stop else own.end("length"))
        entries = [entry for piece in made if piece for entry in piece.entries]
        assert [entry.offset for entry in entries] == offsets


def test_parts_of_characters_are_named_by_their_bytes(service):
    """As OpenAI does; by the letters that `tokenizers` itself has for bytes."""
    tokens = TokenTexts(service.parser.tokenizer)
    vocabulary = service.parser.tokenizer.get_vocab()
    (letters,) = (pair[0] for pair in ByteLevel(add_prefix_space=False).pre_tokenize_str("天"))
    parts = [tokens.token_logprob(vocabulary[letter], -1.0) for letter in letters]
    assert len({one.text for one in parts}) == 1
    assert [one.bytes for one in parts] == [[byte] for byte in "天".encode()]
    assert [one.name for one in parts] == [r"bytes:\xe5", r"bytes:\xa4", r"bytes:\xa9"]
    equal = [tokens.token_logprob(vocabulary["a"], value) for value in (-1.0, -2.0)]
    assert top_logprobs([*equal, *parts]) == {"a": -1.0} | {one.name: -1.0 for one in parts}
    assert bytes_of("<0xA4>") == b"\xa4" and bytes_of("天") is None
    found = service.client().completions.create(**GOOD, logprobs=20)
    reported = found.choices[0].logprobs.top_logprobs
    assert [len(likely) for likely in reported] == [20, 20]  # a random model's, half of them bytes
    assert any(name.startswith("bytes:") for likely in reported for name in likely)
    chat = service.client().chat.completions.create(**CHAT, logprobs=True, top_logprobs=20)
    for entry in chat.choices[0].logprobs.content:
        assert len({one.token for one in entry.top_logprobs}) == 20
        assert all(one.bytes for one in entry.top_logprobs)


def test_the_extra_is_asked_for(model, monkeypatch):
    from dolmen.cli import generation

    monkeypatch.setattr(generation, "find_spec", lambda name: None)
    with pytest.raises(BadInput, match=r"pip install 'dolmen\[serve\]'"):
        generation.run_serve(None)
