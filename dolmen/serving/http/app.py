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
    """Return the body. Raises ApiError if it has more than `max_bytes` or comes too late."""
    length = request.headers.get("content-length", "0")
    large = ApiError(
        HTTPStatus.REQUEST_ENTITY_TOO_LARGE,
        f"the body has more than {max_bytes:,} bytes, the limit of this server",
    )
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
    """Return the response of an error."""
    return JSONResponse(problem.body, problem.status, problem.headers)


def _disconnect_error() -> ApiError:
    return ApiError(HTTPStatus.BAD_REQUEST, "the client has disconnected", code="disconnected")


@asynccontextmanager
async def fail_on_disconnect(session: Session, receive: Receive) -> AsyncIterator[None]:
    """Within this context, the session fails when its client disconnects."""

    async def watch() -> None:
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
        self.path, self.session, self.format = path, session, format
        self.stream, self.include_usage = stream, options is not None and options.include_usage
        self.background = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
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
        """Send the response as one JSON object and return its status."""
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
        """Send server-sent events and return the status, that of an error in the middle too."""
        headers = [(b"content-type", b"text/event-stream"), (b"cache-control", b"no-store")]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        try:
            await _send(send, b"".join(map(_event, self.format.first_chunks())))
            async for deltas in self.session.deltas():
                await _send(send, b"".join(_event(self.format.chunk(one)) for one in deltas))
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
    """Encode a server-sent event."""
    text = json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    return b"data: " + text.encode() + b"\n\n"


async def _send(send: Send, body: bytes, more: bool = True) -> None:
    await send({"type": "http.response.body", "body": body, "more_body": more})


async def _receive_nothing() -> Any:
    raise RuntimeError("the request has been read")


Body = TypeVar("Body", CompletionRequest, ChatCompletionRequest)
Result = TypeVar("Result")
PUBLIC = ("/health",)
"""Paths that need no key."""


class Endpoints:
    """The endpoints of one model and its adapters, each a model of its own name."""

    def __init__(
        self,
        name: str,
        created: int,
        parser: RequestParser,
        sessions: Sessions,
        adapters: Sequence[str] = (),
    ):
        self.name, self.created, self.names = name, created, (name, *adapters)
        self.parser, self.sessions = parser, sessions
        self.max_body_bytes = parser.config.max_body_bytes
        self.body_limits = replace(kinds.ASKED, size=self.max_body_bytes)
        self.thread = ThreadPoolExecutor(1, "parser")

    async def completions(self, request: Request) -> Response:
        """Answer POST /v1/completions."""
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
        """Answer POST /v1/chat/completions."""
        body = await self._body(request, ChatCompletionRequest)
        parsed, session = await self._open_session(request, body, self.parser.parse_chat)
        format = ChatFormat(body.model, parsed, session.completions)
        return _respond(request, body, session, format)

    async def models(self) -> Response:
        """Answer GET /v1/models."""
        return JSONResponse({"object": "list", "data": [self._model(name) for name in self.names]})

    async def model(self, name: str) -> Response:
        """Answer GET /v1/models/NAME."""
        self._check_model_name(name)
        return JSONResponse(self._model(name))

    async def health(self) -> Response:
        """Answer GET /health; while the server stops, an error."""
        if self.sessions.closed is not None:
            raise self.sessions.closed
        return JSONResponse({"status": "ok"})

    async def metrics(self) -> Response:
        """Answer GET /metrics, in Prometheus' format."""
        return Response(self.sessions.metrics.text(), media_type=CONTENT_TYPE)

    def _model(self, name: str) -> dict[str, Any]:
        fields = {"id": name, "object": "model", "created": self.created, "owned_by": "dolmen"}
        return fields if name == self.name else fields | {"parent": self.name}

    def _check_model_name(self, name: str) -> None:
        if name not in self.names:
            known = ", ".join(map(repr, self.names[:20]))
            raise ApiError(
                HTTPStatus.NOT_FOUND,
                f"there is no model {name[:200]!r} here: use {known}",
                "model",
                "model_not_found",
            )

    async def _body(self, request: Request, cls: type[Body]) -> Body:
        data = await read_body(request, self.max_body_bytes)
        body = await self._run_in_thread(lambda: protocol.parse_body(data, cls, self.body_limits))
        self._check_model_name(body.model)
        if body.stream_options is not None and not body.stream:
            raise bad_request("stream_options needs stream: true", "stream_options")
        return body

    async def _open_session(
        self, request: Request, body: Body, parse: Callable[[Body], ParsedRequest]
    ) -> tuple[ParsedRequest, Session]:
        """Admit a request and submit it. The response closes the session; so does an error here.
        Raises ApiError.
        """
        session = self.sessions.admit(body.num_prompts * body.num_samples, request.state.abort)
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
        return await asyncio.get_running_loop().run_in_executor(self.thread, work)

    def _echo(self, body: CompletionRequest, parsed: ParsedRequest) -> list[EchoedPrompt]:
        """Return the prompts, if they are sent before the completions."""
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
    path, stream = request.url.path, bool(body.stream)
    return CompletionResponse(path, session, format, stream, body.stream_options)


class KeyMiddleware:
    """Refuses requests without the key, before their bodies are read."""

    def __init__(self, app: ASGIApp, key: str):
        self.app, self.key = app, f"Bearer {key}".encode()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope["path"] not in PUBLIC:
            header = dict(scope["headers"]).get(b"authorization", b"")
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
    """Return the application: routes, authentication and error handlers."""
    app = FastAPI(title="dolmen", openapi_url=None)
    app.add_middleware(KeyMiddleware, key=key)

    def count_error(path: str, status: int) -> None:
        metrics.requests.labels(path, str(int(status))).inc()

    async def api_error(request: Request, error: Exception) -> Response:
        assert isinstance(error, ApiError), "registered for this class"
        count_error(_path(request), error.status)
        return error_response(error)

    async def http_error(request: Request, error: Exception) -> Response:
        assert isinstance(error, HTTPException), "registered for this class"
        count_error(_path(request), error.status_code)
        text = f"{request.method} {request.url.path[:200]}: {error.detail}"
        return error_response(ApiError(HTTPStatus(error.status_code), text))

    async def internal_error(request: Request, _: Exception) -> Response:
        count_error(_path(request), HTTPStatus.INTERNAL_SERVER_ERROR)
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
    """Return the endpoint's path for metrics; unknown addresses share one name."""
    route = request.scope.get("route")
    return route.path if route is not None else "other"
