"""What is served, and to whom.

    POST /v1/completions, /v1/chat/completions     with the key
    GET  /v1/models, /v1/models/NAME, /metrics     with the key
    GET  /health                                   for anybody

The event loop never waits for arithmetic: bodies are read, and become tokens, in one thread besides
(a tokenizer is not made for several at once), and the model computes in another one.
"""

import asyncio
import hmac
from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import replace
from http import HTTPStatus
from typing import Any, TypeVar

from fastapi import FastAPI, Request
from starlette.exceptions import HTTPException
from starlette.responses import JSONResponse, Response
from starlette.types import ASGIApp, Receive, Scope, Send

from dolmen.files import kinds
from dolmen.serving.http import protocol
from dolmen.serving.http.exchange import Answer, body_of, told
from dolmen.serving.http.metrics import KIND, Metrics
from dolmen.serving.http.problem import Problem, bad
from dolmen.serving.http.protocol import Chat, Completion
from dolmen.serving.http.reader import Asked, Reader
from dolmen.serving.http.replies import ChatForm, CompletionForm, Echo, Form
from dolmen.serving.http.session import Session, Sessions

Body = TypeVar("Body", Completion, Chat)
Done = TypeVar("Done")
OPEN = ("/health",)


class Service:
    """The endpoints of one model, and of its adapters, each a model of its own name. Made in the
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
        asked, session = await self._opened(body, self.reader.completion)
        with ExitStack() as failed:
            failed.callback(session.close)
            form = CompletionForm(body.model, session, self._echo(body, asked))
            failed.pop_all()
        return _answer(request, body, session, form)

    async def chat(self, request: Request) -> Response:
        body = await self._body(request, Chat)
        _, session = await self._opened(body, self.reader.chat)
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

    async def _opened(self, body: Body, read: Callable[[Body], Asked]) -> tuple[Asked, Session]:
        """A session of what is asked, which the answer closes. Raises Problem."""
        session = self.sessions.place(body.prompts * body.samples)
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
        """The prompts, where they are to be told."""
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
    """Nobody without the key, before anything of a request is read."""

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
    """The application."""
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
    """Of the endpoint: others have one name together, lest every address become a series."""
    route = request.scope.get("route")
    return route.path if route is not None else "other"
