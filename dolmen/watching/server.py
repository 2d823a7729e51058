"""A page that is kept up to date: `dolmen show RUN --serve`.

    GET /?token=SECRET        the page
    GET /data?token=SECRET    what it draws, as it is now

There is nothing else: no name in an address becomes a path, so nothing but these runs is served.
The secret is generated anew at every start, compared in constant time, and needed for all. The
server is that of the standard library, as a run's machine needs no extra for one reader.
"""

import hmac
import json
import secrets
import time
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Lock
from typing import Any, NamedTuple
from urllib.parse import parse_qs, urlsplit

from dolmen.core.messages import os_error_as_value
from dolmen.watching.config import ShowConfig
from dolmen.watching.page import Watched

PATIENCE = 10.0
"""Seconds after which a connection without a complete request is closed."""
ALWAYS = {
    "Cache-Control": "no-store",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
}


class Answer(NamedTuple):
    """The body of a response and its content type."""

    kind: str
    body: bytes


class Shown:
    """The two responses that are served, rendered again when older than `every` / 2 seconds, by one
    request at a time.
    """

    def __init__(self, watched: Watched, every: float):
        self.watched, self.every = watched, every
        self.lock = Lock()
        self.answers: dict[str, tuple[float, Answer]] = {}

    def answer(self, path: str) -> Answer | None:
        """Return the page for "/" and its data for "/data", at most `every` / 2 seconds old; None
        for any other path.
        """
        if path not in ("/", "/data"):
            return None
        # one reader at a time: runs are read incrementally, and state is shared
        with self.lock:
            time_rendered, response = self.answers.get(path, (0.0, None))
            # half of `every`: a page that polls each `every` seconds always gets new data
            if response is None or time.monotonic() - time_rendered > self.every / 2:
                response = self._render(path)
                self.answers[path] = time.monotonic(), response
            return response

    def _render(self, path: str) -> Answer:
        """Return a new page, or new data as JSON."""
        if path == "/":
            return Answer("text/html; charset=utf-8", self.watched.page(self.every).encode())
        text = json.dumps(self.watched.data(), allow_nan=False, separators=(",", ":"))
        return Answer("application/json", text.encode())


class Server(ThreadingHTTPServer):
    """HTTP server of one page, bound to its address, with a new secret token. Raises OSError for an
    address that is not available.
    """

    daemon_threads = True

    def __init__(self, shown: Shown, host: str, port: int):
        # 192 random bits
        self.shown, self.token = shown, secrets.token_urlsafe(24)
        super().__init__((host, port), Handler)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Ignore the error of a connection that the reader has closed."""

    @property
    def address(self) -> str:
        """The URL with the token, by the host that was configured."""
        host, port = self.server_address[:2]
        return f"http://{host}:{port}/?token={self.token}"


class Handler(BaseHTTPRequestHandler):
    """Handles one request."""

    server: Server  # pyright: ignore[reportIncompatibleVariableOverride]
    server_version, sys_version = "dolmen", ""
    timeout = PATIENCE

    def do_GET(self) -> None:
        """Answer a GET request: 403 without the token, 404 for any path but / and /data."""
        try:
            url = urlsplit(self.path)
            # bounded: a long query costs nothing
            token = parse_qs(url.query, max_num_fields=8).get("token", [""])[0]
        except ValueError:
            return self._say(HTTPStatus.BAD_REQUEST, "not a valid address\n")
        # in constant time: response times do not show how much of the token was right
        if not hmac.compare_digest(token.encode(), self.server.token.encode()):
            return self._say(HTTPStatus.FORBIDDEN, "the address lacks its secret token\n")
        answer = self.server.shown.answer(url.path)
        if answer is None:
            return self._say(HTTPStatus.NOT_FOUND, "there is no such page\n")
        self._send(HTTPStatus.OK, answer)

    def _say(self, status: HTTPStatus, words: str) -> None:
        """Send a response of plain text with this status."""
        self._send(status, Answer("text/plain; charset=utf-8", words.encode()))

    def _send(self, status: HTTPStatus, answer: Answer) -> None:
        """Send a response with its headers; caching, framing and referrers are forbidden."""
        self.send_response(status)
        for name, value in {**ALWAYS, "Content-Type": answer.kind}.items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(answer.body)))
        self.end_headers()
        self.wfile.write(answer.body)

    def log_message(self, format: str, *args: Any) -> None:
        """Write no log: its addresses would contain the token."""


def serve(folders: list[Path], config: ShowConfig) -> None:
    """Serve the page of the runs until Ctrl-C, after printing its address. Raises ValueError for a
    folder without a run, and for an address that is not available.
    """
    shown = Shown(Watched(folders), config.every)
    with os_error_as_value(f"--host {config.host} --port {config.port}"):
        server = Server(shown, config.host, config.port)
    print(f"open {server.address}", flush=True)
    print("Ctrl-C stops the server; the open page keeps its last state", flush=True)
    with server:
        server.serve_forever()
