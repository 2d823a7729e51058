"""The HTTP application: endpoints, authentication, error handlers, and how responses are sent.

    POST /v1/completions, /v1/chat/completions     with the key
    GET  /v1/models, /v1/models/NAME, /metrics     with the key
    GET  /health                                   without

The event loop never waits for arithmetic: one other thread parses and tokenizes bodies (a tokenizer
is not safe for several at once), and the model computes in a third. A response is sent whole or as
server-sent events:

    data: {"object": "chat.completion.chunk", ...}

    data: [DONE]

A client that disconnects is noticed while its response is written, and its request is cancelled. An
error in the middle of a stream is an event with an `error`.
"""

import asyncio
import hmac
import json
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, asynccontextmanager
from dataclasses import replace
from http import HTTPStatus
from typing import Any, TypeVar

from fastapi import FastAPI
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response
from starlette.types import ASGIApp, Receive, Scope, Send

from dolmen.files import kinds
from dolmen.serving.http import protocol
from dolmen.serving.http.loop import CONTENT_TYPE, ServerMetrics
from dolmen.serving.http.protocol import (
    ApiError,
    ChatCompletionRequest,
    CompletionRequest,
    StreamOptions,
    bad_request,
)
from dolmen.serving.http.request_parser import ParsedRequest, RequestParser
from dolmen.serving.http.responses import (
    ChatFormat,
    ChoiceFormat,
    CompletionFormat,
    EchoedPrompt,
)
from dolmen.serving.http.session import Session, Sessions

BODY_TIME = 30.0  # seconds in which a body must arrive
DISCONNECTED = 499  # status in the metrics of a client that has disconnected, as nginx has it
DONE = b"data: [DONE]\n\n"


async def read_body(request: Request, max_bytes: int) -> bytes:
    """Read and return the body of a request. Raises ApiError with status 413 if it has more than
    `max_bytes`, with 408 if it does not arrive within BODY_TIME (30 s), and if the client
    disconnects.
    """
    length = request.headers.get("content-length", "0")
    large = ApiError(
        HTTPStatus.REQUEST_ENTITY_TOO_LARGE,
        f"the body has more than {max_bytes:,} bytes, the limit of this server",
    )
    # refused before reading; without a length, or with a false one, the loop below counts
    if length.isascii() and length.isdigit() and int(length[:20]) > max_bytes:
        raise large
    body = bytearray()
    try:
        async with asyncio.timeout(BODY_TIME):
            async for chunk in request.stream():
                body += chunk
                if len(body) > max_bytes:
                    raise large
    except TimeoutError:
        raise ApiError(
            HTTPStatus.REQUEST_TIMEOUT, f"the body has not arrived within {BODY_TIME:g} seconds"
        ) from None
    except ClientDisconnect:
        raise _disconnect_error() from None
    return bytes(body)


def error_response(problem: ApiError) -> Response:
    """Return the HTTP response of an error: its status, JSON body and headers."""
    return JSONResponse(problem.body, problem.status, problem.headers)


def _disconnect_error() -> ApiError:
    """Return the error that fails the session of a client that has disconnected; nobody receives
    it.
    """
    return ApiError(HTTPStatus.BAD_REQUEST, "the client has disconnected", code="disconnected")


@asynccontextmanager
async def fail_on_disconnect(session: Session, receive: Receive) -> AsyncIterator[None]:
    """Watch the connection within this context: the session fails as soon as its client
    disconnects.
    """

    async def watch() -> None:
        """Wait for the disconnect message, then fail the session."""
        while (await receive())["type"] != "http.disconnect":
            pass
        session.fail(_disconnect_error())

    task = asyncio.create_task(watch())
    try:
        yield
    finally:
        task.cancel()


class CompletionResponse(Response):
    """Sends the completions of an open session, as JSON or as server-sent events, and closes it.

    Not a StreamingResponse: that starts its iterator only after the headers have been sent, so a
    client that disconnects before would leave the session open, and it hides the final status.
    """

    def __init__(
        self,
        path: str,
        session: Session,
        format: ChoiceFormat,
        stream: bool,
        options: StreamOptions | None,
    ):
        """`path`: endpoint, for the metrics. `stream`: send server-sent events. `options`: with
        include_usage the last event has the token counts; None: it has not.
        """
        self.path, self.session, self.format = path, session, format
        self.stream, self.include_usage = stream, options is not None and options.include_usage
        # Starlette calls it after a response; there is none
        self.background = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the completions of the session, as JSON or as events, while watching for a client
        that disconnects; then close the session, and count the request with its final status.
        """
        # counted if the send is cancelled because the connection is gone
        status = DISCONNECTED
        try:
            async with fail_on_disconnect(self.session, receive):
                status = await (
                    self._send_events(send) if self.stream else self._send_json(scope, send)
                )
        finally:
            self.session.close()
            self.session.timer.end(self.path, status)

    async def _send_json(self, scope: Scope, send: Send) -> int:
        """Wait for all completions, send them (or the error) as one JSON object, and return the
        status.
        """
        try:
            deltas = [delta async for some in self.session.deltas() for delta in some]
            response: Response = JSONResponse(self.format.response(deltas))
        except ApiError as problem:
            if problem.code == "disconnected":
                return DISCONNECTED
            response = error_response(problem)
        await response(scope, _receive_nothing, send)
        return response.status_code

    async def _send_events(self, send: Send) -> int:
        """Send the completions as server-sent events, and return the status for the metrics: 200,
        or that of an error in the middle, which is sent as an event.
        """
        # the status is sent before the first token: later errors can only be events
        headers = [(b"content-type", b"text/event-stream"), (b"cache-control", b"no-store")]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        try:
            await _send(send, b"".join(map(_event, self.format.first_chunks())))
            async for deltas in self.session.deltas():
                # one write for all deltas of a step
                await _send(send, b"".join(_event(self.format.chunk(delta)) for delta in deltas))
            if self.include_usage:
                await _send(send, _event(self.format.usage_chunk()))
            await _send(send, DONE, more=False)
            return HTTPStatus.OK
        except ApiError as problem:
            if problem.code == "disconnected":
                return DISCONNECTED
            await _send(send, _event(problem.body), more=False)
            return problem.status


def _event(value: dict[str, Any]) -> bytes:
    """Encode a JSON value as a server-sent event."""
    text = json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    return b"data: " + text.encode() + b"\n\n"


async def _send(send: Send, body: bytes, more: bool = True) -> None:
    """Send a part of a response's body; `more`: further parts follow."""
    await send({"type": "http.response.body", "body": body, "more_body": more})


async def _receive_nothing() -> Any:
    """Stand in for `receive` where the request has been read already. Raises RuntimeError."""
    raise RuntimeError("the request has been read")


Body = TypeVar("Body", CompletionRequest, ChatCompletionRequest)
Result = TypeVar("Result")
PUBLIC = ("/health",)
"""Paths that need no key."""


class Endpoints:
    """Request handlers of the endpoints. The model and each of its adapters is a model with a name
    of its own.
    """

    def __init__(
        self,
        name: str,
        created: int,
        parser: RequestParser,
        sessions: Sessions,
        adapters: Sequence[str] = (),
    ):
        """`created`: time of the start, in Unix seconds. `adapters`: names of the LoRA adapters."""
        self.name, self.created, self.names = name, created, (name, *adapters)
        self.parser, self.sessions = parser, sessions
        self.max_body_bytes = parser.config.max_body_bytes
        # depth and number of values stay bounded
        self.body_limits = replace(kinds.REQUEST_BODY, size=self.max_body_bytes)
        # one: a tokenizer is not safe for several threads, and bodies queue
        self.thread = ThreadPoolExecutor(1, "parser")

    async def completions(self, request: Request) -> Response:
        """Answer POST /v1/completions: parse the body, submit its prompts to the engine, and return
        a response that will send the completions, as JSON or as events. Raises ApiError.
        """
        body = await self._body(request, CompletionRequest)
        parsed, session = await self._open_session(request, body, self.parser.parse_completion)
        with ExitStack() as failed:
            failed.callback(session.close)
            echo = self._echo(body, parsed)
            token_texts = self.sessions.token_texts
            format = CompletionFormat(body.model, parsed, session.completions, echo, token_texts)
            failed.pop_all()
        return _respond(request, body, session, format)

    async def chat(self, request: Request) -> Response:
        """Answer POST /v1/chat/completions: parse the body, submit the chat to the engine, and
        return a response that will send the completions, as JSON or as events. Raises ApiError.
        """
        body = await self._body(request, ChatCompletionRequest)
        parsed, session = await self._open_session(request, body, self.parser.parse_chat)
        format = ChatFormat(body.model, parsed, session.completions)
        return _respond(request, body, session, format)

    async def models(self) -> Response:
        """Answer GET /v1/models: a list with the base model and each adapter."""
        return JSONResponse({"object": "list", "data": [self._model(name) for name in self.names]})

    async def model(self, name: str) -> Response:
        """Answer GET /v1/models/NAME with the entry of that model or adapter. Raises ApiError (404)
        for an unknown name.
        """
        self._check_model_name(name)
        return JSONResponse(self._model(name))

    async def health(self) -> Response:
        """Answer GET /health with status ok. Raises ApiError (503) while the server stops."""
        if self.sessions.closed is not None:
            raise self.sessions.closed
        return JSONResponse({"status": "ok"})

    async def metrics(self) -> Response:
        """Answer GET /metrics with all counters of the server, in Prometheus' text format."""
        return Response(self.sessions.metrics.text(), media_type=CONTENT_TYPE)

    def _model(self, name: str) -> dict[str, Any]:
        """Return the entry of a model in /v1/models; that of an adapter names the base model as
        `parent`.
        """
        fields = {"id": name, "object": "model", "created": self.created, "owned_by": "dolmen"}
        return fields if name == self.name else fields | {"parent": self.name}

    def _check_model_name(self, name: str) -> None:
        """Raise ApiError (404), which lists up to 20 known names, for an unknown model."""
        if name not in self.names:
            known = ", ".join(map(repr, self.names[:20]))
            raise ApiError(
                HTTPStatus.NOT_FOUND,
                f"there is no model {name[:200]!r} here: use {known}",
                "model",
                "model_not_found",
            )

    async def _body(self, request: Request, cls: type[Body]) -> Body:
        """Read a request's body and parse it to `cls`. Raises ApiError, also for an unknown model
        (404), and for stream_options without stream (400).
        """
        data = await read_body(request, self.max_body_bytes)
        body = await self._run_in_thread(lambda: protocol.parse_body(data, cls, self.body_limits))
        self._check_model_name(body.model)
        if body.stream_options is not None and not body.stream:
            raise bad_request("stream_options needs stream: true", "stream_options")
        return body

    async def _open_session(
        self, request: Request, body: Body, parse: Callable[[Body], ParsedRequest]
    ) -> tuple[ParsedRequest, Session]:
        """Admit a request to the queue, parse it, and submit it to the engine. The response has to
        close the session; an error here closes it. Raises ApiError, also when the request's time is
        over.
        """
        # before tokenizing, which is what costs time when the queue is full
        session = self.sessions.admit(body.num_prompts * body.num_samples, request.state.abort)
        # LoRA adapters are chosen by the name of the model
        adapter = None if body.model == self.name else body.model
        with ExitStack() as failed:
            failed.callback(session.close)
            try:
                async with asyncio.timeout(self.sessions.seconds):
                    parsed = await self._run_in_thread(lambda: parse(body).for_adapter(adapter))
            except TimeoutError:
                raise session.timeout_error() from None
            session.submit(parsed)
            failed.pop_all()
            return parsed, session

    async def _run_in_thread(self, work: Callable[[], Result]) -> Result:
        """Run `work` in the parser's thread without blocking the event loop, and return its
        result.
        """
        return await asyncio.get_running_loop().run_in_executor(self.thread, work)

    def _echo(self, body: CompletionRequest, parsed: ParsedRequest) -> list[EchoedPrompt]:
        """Return the prompts as text and tokens if they are echoed, else an empty list."""
        if not parsed.echo:
            return []
        tokens = [list(request.tokens) for request in parsed.requests]
        texts = [
            prompt if isinstance(prompt, str) else self.parser.tokenizer.decode(prompt)
            for prompt in body.prompt_list
        ]
        return [EchoedPrompt(text, ids) for text, ids in zip(texts, tokens, strict=True)]


def _respond(
    request: Request, body: Body, session: Session, format: ChoiceFormat
) -> CompletionResponse:
    """Return the response that sends the completions of a session in a format."""
    path, stream = request.url.path, bool(body.stream)
    return CompletionResponse(path, session, format, stream, body.stream_options)


class KeyMiddleware:
    """Answers requests without the API key with status 401, before their bodies are read."""

    def __init__(self, app: ASGIApp, key: str):
        """`key`: what clients send as a Bearer token."""
        self.app, self.key = app, f"Bearer {key}".encode()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass a request on if it has the key or its path is public, else send the error."""
        if scope["type"] == "http" and scope["path"] not in PUBLIC:
            header = dict(scope["headers"]).get(b"authorization", b"")
            # constant time: the duration does not show how much of a key is right
            if not hmac.compare_digest(header, self.key):
                problem = ApiError(
                    HTTPStatus.UNAUTHORIZED,
                    "the key is missing or wrong: send the header `Authorization: Bearer KEY`",
                    code="invalid_api_key",
                )
                await error_response(problem)(scope, receive, send)
                return
        await self.app(scope, receive, send)


def create_app(endpoints: Endpoints, metrics: ServerMetrics, key: str) -> FastAPI:
    """Return the FastAPI application: routes, API key, and error handlers that answer in OpenAI's
    format.
    """
    # bodies are parsed by `protocol`, so a generated schema would be empty
    app = FastAPI(title="dolmen", openapi_url=None)
    app.add_middleware(KeyMiddleware, key=key)

    def count_error(path: str, status: int) -> None:
        """Count an error response, by path and status."""
        metrics.requests.labels(path, str(int(status))).inc()

    async def api_error(request: Request, error: Exception) -> Response:
        """Answer an ApiError with its status and JSON body, and count it."""
        assert isinstance(error, ApiError), "registered for this class"
        count_error(_path(request), error.status)
        return error_response(error)

    async def http_error(request: Request, error: Exception) -> Response:
        """Answer errors of Starlette, such as 404 and 405, in OpenAI's format, and count them."""
        assert isinstance(error, HTTPException), "registered for this class"
        count_error(_path(request), error.status_code)
        text = f"{request.method} {request.url.path[:200]}: {error.detail}"
        return error_response(ApiError(HTTPStatus(error.status_code), text))

    async def internal_error(request: Request, _: Exception) -> Response:
        """Answer any other exception with status 500, and count it; its text stays in the log."""
        count_error(_path(request), HTTPStatus.INTERNAL_SERVER_ERROR)
        # no details: they may contain prompts of other clients
        text = "internal error: see the log of the server"
        return error_response(ApiError(HTTPStatus.INTERNAL_SERVER_ERROR, text, retry=False))

    app.add_exception_handler(ApiError, api_error)
    app.add_exception_handler(HTTPException, http_error)
    app.add_exception_handler(Exception, internal_error)
    routes: list[tuple[str, str, Callable[..., Awaitable[Response]]]] = [
        ("POST", "/v1/completions", endpoints.completions),
        ("POST", "/v1/chat/completions", endpoints.chat),
        ("GET", "/v1/models", endpoints.models),
        ("GET", "/v1/models/{name:path}", endpoints.model),
        ("GET", "/health", endpoints.health),
        ("GET", "/metrics", endpoints.metrics),
    ]
    for method, path, endpoint in routes:
        app.add_api_route(path, endpoint, methods=[method], response_model=None)
    return app


def _path(request: Request) -> str:
    """Return the endpoint's route for metrics; unknown addresses share the name "other"."""
    route = request.scope.get("route")
    return route.path if route is not None else "other"
