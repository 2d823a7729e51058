"""The HTTP application: endpoints, authentication, error handlers, and how responses are sent.

    POST /v1/completions, /v1/chat/completions     with the key
    GET  /v1/models, /v1/models/NAME, /metrics     with the key
    GET  /health                                   for anybody

The event loop never waits for arithmetic: one other thread parses and tokenizes bodies (a tokenizer
is not safe for several at once), and the model computes in a third. A response is sent whole or as
server-sent events:

    data: {"object": "chat.completion.chunk", ...}

    data: [DONE]

A client that goes away is noticed while its response is written, and its request is cancelled. An
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
from dolmen.serving.http.loop import KIND, Metrics
from dolmen.serving.http.protocol import Chat, Completion, Problem, StreamOptions, bad
from dolmen.serving.http.reader import Asked, Reader
from dolmen.serving.http.responses import ChatForm, CompletionForm, Echo, Form
from dolmen.serving.http.session import Piece, Session, Sessions

PATIENCE = 30.0  # seconds in which a body must come
GONE = 499  # as others log a client that has gone away; nobody is told
DONE = b"data: [DONE]\n\n"


async def body_of(request: Request, most: int) -> bytes:
    """Return the body. Raises Problem if it has more than `most` bytes or comes too late."""
    said = request.headers.get("content-length", "0")
    large = Problem(
        HTTPStatus.REQUEST_ENTITY_TOO_LARGE,
        f"the body has more than {most:,} bytes, the most that a request may have",
    )
    if said.isascii() and said.isdigit() and int(said[:20]) > most:
        raise large
    found = bytearray()
    try:
        async with asyncio.timeout(PATIENCE):
            async for chunk in request.stream():
                found += chunk
                if len(found) > most:
                    raise large
    except TimeoutError:
        raise Problem(
            HTTPStatus.REQUEST_TIMEOUT, f"the body has not come within {PATIENCE:g} seconds"
        ) from None
    except ClientDisconnect:
        raise _gone() from None
    return bytes(found)


def told(problem: Problem) -> Response:
    """Return the error response of a problem."""
    return JSONResponse(problem.body, problem.status, problem.headers)


def _gone() -> Problem:
    return Problem(HTTPStatus.BAD_REQUEST, "the client has gone away", code="gone")


@asynccontextmanager
async def watched(session: Session, receive: Receive) -> AsyncIterator[None]:
    """Within, the session fails when its client disconnects."""

    async def watch() -> None:
        while (await receive())["type"] != "http.disconnect":
            pass
        session.fail(_gone())

    task = asyncio.create_task(watch())
    try:
        yield
    finally:
        task.cancel()


class Answer(Response):
    """Sends the completions of an open session, whole or as events, and closes it."""

    def __init__(
        self, path: str, session: Session, form: Form, stream: bool, options: StreamOptions | None
    ):
        self.path, self.session, self.form = path, session, form
        self.stream, self.usage = stream, options is not None and options.include_usage
        self.background = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        status = GONE
        try:
            async with watched(self.session, receive):
                status = await (self._events(send) if self.stream else self._whole(scope, send))
        finally:
            self.session.close()
            self.session.timer.end(self.path, status)

    async def _whole(self, scope: Scope, send: Send) -> int:
        """Send the whole response and return its status."""
        try:
            pieces = [piece async for some in self.session.pieces() for piece in some]
            answer: Response = JSONResponse(self.form.answer(pieces))
        except Problem as problem:
            if problem.code == "gone":
                return GONE
            answer = told(problem)
        await answer(scope, _nothing, send)
        return answer.status_code

    async def _events(self, send: Send) -> int:
        """Send server-sent events and return the status, which an error may change later."""
        headers = [(b"content-type", b"text/event-stream"), (b"cache-control", b"no-store")]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        try:
            await _send(send, b"".join(map(_event, self.form.first())))
            async for pieces in self.session.pieces():
                await _send(send, b"".join(self._event(piece) for piece in pieces))
            if self.usage:
                await _send(send, _event(self.form.last()))
            await _send(send, DONE, more=False)
            return HTTPStatus.OK
        except Problem as problem:
            if problem.code == "gone":
                return GONE
            await _send(send, _event(problem.body), more=False)
            return problem.status

    def _event(self, piece: Piece) -> bytes:
        return _event(self.form.piece(piece))


def _event(value: dict[str, Any]) -> bytes:
    text = json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    return b"data: " + text.encode() + b"\n\n"


async def _send(send: Send, body: bytes, more: bool = True) -> None:
    await send({"type": "http.response.body", "body": body, "more_body": more})


async def _nothing() -> Any:
    raise RuntimeError("nothing more is read of a request")


Body = TypeVar("Body", Completion, Chat)
Done = TypeVar("Done")
OPEN = ("/health",)


class Service:
    """The endpoints of one model and its adapters, each a model of its own name. Created in the
    thread of the event loop.
    """

    def __init__(
        self,
        name: str,
        created: int,
        reader: Reader,
        sessions: Sessions,
        adapters: Sequence[str] = (),
    ):
        self.name, self.created, self.names = name, created, (name, *adapters)
        self.reader, self.sessions = reader, sessions
        self.most = reader.config.max_body_bytes
        self.kind = replace(kinds.ASKED, size=self.most)
        self.thread = ThreadPoolExecutor(1, "reader")

    async def completions(self, request: Request) -> Response:
        body = await self._body(request, Completion)
        asked, session = await self._opened(request, body, self.reader.completion)
        with ExitStack() as failed:
            failed.callback(session.close)
            form = CompletionForm(body.model, session, self._echo(body, asked))
            failed.pop_all()
        return _answer(request, body, session, form)

    async def chat(self, request: Request) -> Response:
        body = await self._body(request, Chat)
        _, session = await self._opened(request, body, self.reader.chat)
        return _answer(request, body, session, ChatForm(body.model, session))

    async def models(self) -> Response:
        return JSONResponse({"object": "list", "data": [self._model(name) for name in self.names]})

    async def model(self, name: str) -> Response:
        self._known(name)
        return JSONResponse(self._model(name))

    async def health(self) -> Response:
        if self.sessions.closed is not None:
            raise self.sessions.closed
        return JSONResponse({"status": "ok"})

    async def metrics(self) -> Response:
        return Response(self.sessions.metrics.text(), media_type=KIND)

    def _model(self, name: str) -> dict[str, Any]:
        said = {"id": name, "object": "model", "created": self.created, "owned_by": "dolmen"}
        return said if name == self.name else said | {"parent": self.name}

    def _known(self, name: str) -> None:
        if name not in self.names:
            known = ", ".join(map(repr, self.names[:20]))
            raise Problem(
                HTTPStatus.NOT_FOUND,
                f"there is no model {name[:200]!r} here: ask for {known}",
                "model",
                "model_not_found",
            )

    async def _body(self, request: Request, cls: type[Body]) -> Body:
        data = await body_of(request, self.most)
        body = await self._in_thread(lambda: protocol.parsed(data, cls, self.kind))
        self._known(body.model)
        if body.stream_options is not None and not body.stream:
            raise bad("stream_options is of stream: true", "stream_options")
        return body

    async def _opened(
        self, request: Request, body: Body, read: Callable[[Body], Asked]
    ) -> tuple[Asked, Session]:
        """Open a session for a request, which the response closes. Raises Problem."""
        session = self.sessions.place(body.prompts * body.samples, request.state.abort)
        adapter = None if body.model == self.name else body.model
        with ExitStack() as failed:
            failed.callback(session.close)
            try:
                async with asyncio.timeout(self.sessions.seconds):
                    asked = await self._in_thread(lambda: read(body).by(adapter))
            except TimeoutError:
                raise session.late() from None
            session.open(asked)
            failed.pop_all()
            return asked, session

    async def _in_thread(self, work: Callable[[], Done]) -> Done:
        return await asyncio.get_running_loop().run_in_executor(self.thread, work)

    def _echo(self, body: Completion, asked: Asked) -> list[Echo]:
        """Return the prompts, if they are sent before the completions."""
        if not asked.echo:
            return []
        tokens = [list(request.tokens) for request in asked.requests]
        texts = [
            one if isinstance(one, str) else self.reader.tokenizer.decode(one) for one in body.each
        ]
        return [Echo(text, own) for text, own in zip(texts, tokens, strict=True)]


def _answer(request: Request, body: Body, session: Session, form: Form) -> Answer:
    return Answer(request.url.path, session, form, bool(body.stream), body.stream_options)


class Guard:
    """Refuses requests without the key, before anything of them is read."""

    def __init__(self, app: ASGIApp, key: str):
        self.app, self.key = app, f"Bearer {key}".encode()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope["path"] not in OPEN:
            given = dict(scope["headers"]).get(b"authorization", b"")
            if not hmac.compare_digest(given, self.key):
                problem = Problem(
                    HTTPStatus.UNAUTHORIZED,
                    "the key is missing or wrong: send the header `Authorization: Bearer KEY`",
                    code="invalid_api_key",
                )
                await told(problem)(scope, receive, send)
                return
        await self.app(scope, receive, send)


def made(service: Service, metrics: Metrics, key: str) -> FastAPI:
    """Return the application."""
    app = FastAPI(title="dolmen", openapi_url=None)
    app.add_middleware(Guard, key=key)

    def refused(path: str, status: int) -> None:
        metrics.requests.labels(path, str(int(status))).inc()

    async def problem(request: Request, error: Exception) -> Response:
        assert isinstance(error, Problem), "it is registered for these"
        refused(_path(request), error.status)
        return told(error)

    async def unknown(request: Request, error: Exception) -> Response:
        assert isinstance(error, HTTPException), "it is registered for these"
        refused(_path(request), error.status_code)
        asked = f"{request.method} {request.url.path[:200]}"
        return told(Problem(HTTPStatus(error.status_code), f"{asked}: {error.detail}"))

    async def broken(request: Request, _: Exception) -> Response:
        refused(_path(request), HTTPStatus.INTERNAL_SERVER_ERROR)
        text = "the server has failed in a way that nobody foresaw: its log says more"
        return told(Problem(HTTPStatus.INTERNAL_SERVER_ERROR, text, retry=False))

    app.add_exception_handler(Problem, problem)
    app.add_exception_handler(HTTPException, unknown)
    app.add_exception_handler(Exception, broken)
    routes: list[tuple[str, str, Callable[..., Awaitable[Response]]]] = [
        ("POST", "/v1/completions", service.completions),
        ("POST", "/v1/chat/completions", service.chat),
        ("GET", "/v1/models", service.models),
        ("GET", "/v1/models/{name:path}", service.model),
        ("GET", "/health", service.health),
        ("GET", "/metrics", service.metrics),
    ]
    for method, path, endpoint in routes:
        app.add_api_route(path, endpoint, methods=[method], response_model=None)
    return app


def _path(request: Request) -> str:
    """Return the endpoint's path for metrics; unknown addresses share one name."""
    route = request.scope.get("route")
    return route.path if route is not None else "other"
