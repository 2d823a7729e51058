"""A request with a body, and the answer to it, whole or as events of a stream (SSE).

    data: {"object": "chat.completion.chunk", ...}

    data: [DONE]

A client that goes away is noticed while its answer is written, and what it has asked for is
cancelled. What fails in mid-stream is an event with an `error`.
"""

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from http import HTTPStatus
from typing import Any

from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response
from starlette.types import Receive, Scope, Send

from dolmen.serving.http.problem import Problem
from dolmen.serving.http.protocol import StreamOptions
from dolmen.serving.http.replies import Form
from dolmen.serving.http.session import Session
from dolmen.serving.http.written import Piece

PATIENCE = 30.0  # seconds in which a body must come
GONE = 499  # as others log a client that has gone away; nobody is told
DONE = b"data: [DONE]\n\n"


async def body_of(request: Request, most: int) -> bytes:
    """All of it. Raises Problem where it has more bytes, or is not there in time."""
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
    """A problem, as an answer."""
    return JSONResponse(problem.body, problem.status, problem.headers)


def _gone() -> Problem:
    return Problem(HTTPStatus.BAD_REQUEST, "the client has gone away", code="gone")


@asynccontextmanager
async def watched(session: Session, receive: Receive) -> AsyncIterator[None]:
    """Within, the session fails once its client has gone."""

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
    """To a session that has been opened, which it closes."""

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
        """-> The status of the answer."""
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
        """-> The status of the answer, or what it would have been."""
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
