"""The page of runs, and a server that keeps it up to date: `dolmen show RUN --serve`.

    GET /?token=SECRET        the page
    GET /data?token=SECRET    what it draws, as it is now

There is nothing else: no name in an address becomes a path, so nothing but these runs is served.
The secret is generated anew at every start, compared in constant time, and needed for all. The
server is that of the standard library, as a run's machine needs no extra for one reader.
"""

import base64
import hashlib
import hmac
import json
import secrets
import time
from html import escape
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Lock
from typing import Annotated, Any
from urllib.parse import parse_qs, urlsplit

from pydantic import Field

from dolmen.core.config import LocalName, Mark, Name, Port, config
from dolmen.core.filesystem import expand, is_url
from dolmen.core.messages import os_error_as_value, plural
from dolmen.files import gate, storage, write
from dolmen.pages.page import fill
from dolmen.watching.run import WatchedRun, differing_options, labels

# Runs as one page that opens anywhere: HTML with its data, its style and its script in it, and
# nothing to fetch (page.html is its frame, chart.js draws curves, page.js figures, tables.js the
# rest).
#
# Everything that comes from a run's files is in one block of JSON, in which nothing can end it; the
# script sets it as text. A policy in the page's head lets no other script run.


@config()
class ShowConfig:
    """Write one HTML page of several runs, during or after training: losses in one figure, learning
    rate, gradient norm, speed, memory, expert load, samples, options and their differences,
    checkpoints, starts.

        dolmen show runs/one runs/two
    """

    runs: Annotated[tuple[str, ...], Mark.POSITIONAL] = ()
    """Folders of runs, or their URLs, of which a copy is read."""
    out: LocalName = "show.html"
    """HTML file to write; it is self-contained."""
    serve: bool = False
    """Serve the page in place of writing it, and update it during training, until Ctrl-C. Its
    address contains a secret token, without which nothing is served.
    """
    host: Name = "127.0.0.1"
    """Address to serve at. Default: reachable from this machine only. 0.0.0.0: from all its
    networks, unencrypted.
    """
    port: Port = 0
    """Port to serve at. Default: a free one."""
    every: Annotated[float, Field(ge=0.1)] = 5.0
    """Seconds between updates of the served page."""

    def __post_init__(self):
        """Raise ValueError unless at least one run is named."""
        if not self.runs:
            raise ValueError("name a run first: dolmen show runs/quickstart")


HERE = Path(__file__).parent
SCRIPTS = ("chart.js", "page.js", "tables.js")


class Watched:
    """Runs whose files are read anew for each page. Raises ValueError for a folder without a
    run.
    """

    def __init__(self, folders: list[Path]):
        """Watch the runs in these folders, each shown under a name that differs from the others'.
        Raises ValueError for a folder without a run.
        """
        names = labels(folders)
        self.runs = [WatchedRun(folder, name) for folder, name in zip(folders, names, strict=True)]

    def data(self) -> dict[str, Any]:
        """Read the rows that were appended to the runs' files since the last call, and return what
        the page draws as plain values: `runs`, all data of each run, and `differs`, the options
        whose values differ between runs.
        """
        for run in self.runs:
            run.read()
        runs = [run.as_dict() for run in self.runs]
        return {"runs": runs, "differs": differing_options(runs)}

    def page(self, every: float | None = None) -> str:
        """Return the page of the runs as one self-contained HTML text, with data, styles and
        scripts. `every`: seconds after which the page's script requests new data, for a page that
        is served; None for one that is written to a file and never changes.
        """
        # the page is one file: style, script and data are written into it
        script = "\n".join(gate.read_text(HERE / name, gate.MIB) for name in SCRIPTS)
        # the hash by which the policy allows this script
        digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
        connect = "" if every is None else "; connect-src 'self'"
        names = ", ".join(run.label for run in self.runs)
        return fill(
            HERE / "page.html",
            gate.read_text(HERE / "page.css", gate.MIB),
            # the only script that may run is ours, by its hash; nothing may be fetched
            policy=f"default-src 'none'; style-src 'unsafe-inline'; img-src data:; "
            f"script-src 'sha256-{digest}'; base-uri 'none'; form-action 'none'{connect}",
            title=escape(names if len(self.runs) <= 4 else plural(len(self.runs), "run")),
            under=escape(", ".join(_shown_folder(run.folder) for run in self.runs)),
            live="" if every is None else f' data-every="{every:g}"',
            data=dump(self.data()),
            script=script,
        )


def _shown_folder(folder: Path) -> str:
    """Return how the page names a run's folder: the URL of which it is a local copy or working
    folder, or else its path.
    """
    url = storage.working_url(folder) or storage.working_url(folder, storage.COPIES)
    return url or str(folder)


def dump(value: Any) -> str:
    """Return a value as JSON that is safe in an HTML <script> element: &, < and > are written as
    \\uXXXX. Raises ValueError for NaN and infinity.
    """
    # "</script>" in a prompt would end the element: no "<" is left
    text = json.dumps(value, allow_nan=False, separators=(",", ":"))
    return text.replace("&", "\\u0026").replace("<", "\\u003c").replace(">", "\\u003e")


def run_folder(name: str) -> Path:
    """Return the local folder of the run `name`, with ~ expanded. For a URL: download the run's
    files that are not in folders below it, and return the folder of these copies. Raises ValueError
    or StorageError.
    """
    if not is_url(name):
        return expand(name)
    storage.pull_files(name, lambda names: [name for name in names if "/" not in name])
    return storage.local_copy(name)


def write_page(folders: list[Path], to: Path) -> Path:
    """Write the HTML page of the runs in `folders` to the new file `to` and return its path. Raises
    ValueError for a folder without a run, and if the file exists or cannot be written.
    """
    to = write.check_new("--out", to)
    # folders are checked before the file is made
    watched = Watched(folders)
    with os_error_as_value(f"--out {to}"):
        write.replace(to, watched.page(), lasting=False)
    return to


PATIENCE = 10.0
"""Seconds after which a connection without a complete request is closed."""
CONTENT_TYPES = {"/": "text/html; charset=utf-8", "/data": "application/json"}
"""Path -> content type of its response; there are no others."""
ALWAYS = {
    "Cache-Control": "no-store",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
}


class Server(ThreadingHTTPServer):
    """HTTP server of the page of `watched` runs, bound to its address, with a new secret token.
    Raises OSError for an address that is not available.
    """

    daemon_threads = True

    def __init__(self, watched: Watched, every: float, host: str, port: int):
        """Bind the server to its address. `every`: seconds between the requests of an open page for
        new data.
        """
        # 192 random bits
        self.token = secrets.token_urlsafe(24)
        self.watched, self.every = watched, every
        self.lock = Lock()
        self.rendered: dict[str, tuple[float, str]] = {}
        super().__init__((host, port), Handler)

    def render(self, path: str) -> str:
        """Return the HTML page for the path "/", its data as JSON for any other. A text older than
        `every` / 2 seconds is made anew, by one request at a time.
        """
        # one reader at a time: runs are read incrementally, and state is shared
        with self.lock:
            rendered_at, text = self.rendered.get(path, (0.0, ""))
            # half of `every`: a page that polls each `every` seconds always gets new data
            if not text or time.monotonic() - rendered_at > self.every / 2:
                text = self.watched.page(self.every) if path == "/" else dump(self.watched.data())
                self.rendered[path] = time.monotonic(), text
            return text

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Ignore an exception of handling a request, such as a connection that the reader has
        closed, which would be printed otherwise.
        """

    @property
    def address(self) -> str:
        """The URL of the page, with the host as configured, the port and the secret token."""
        host, port = self.server_address[:2]
        return f"http://{host}:{port}/?token={self.token}"


class Handler(BaseHTTPRequestHandler):
    """Handles one request."""

    server: Server  # pyright: ignore[reportIncompatibleVariableOverride]
    server_version, sys_version = "dolmen", ""
    timeout = PATIENCE

    def do_GET(self) -> None:
        """Answer a GET request with the page (/) or its data (/data): 400 for a malformed URL, 403
        without the secret token, 404 for any other path.
        """
        try:
            url = urlsplit(self.path)
            # bounded: a long query costs nothing
            token = parse_qs(url.query, max_num_fields=8).get("token", [""])[0]
        except ValueError:
            return self._send(HTTPStatus.BAD_REQUEST, "not a valid address\n")
        # in constant time: response times do not show how much of the token was right
        if not hmac.compare_digest(token.encode(), self.server.token.encode()):
            return self._send(HTTPStatus.FORBIDDEN, "the address lacks its secret token\n")
        if url.path not in CONTENT_TYPES:
            return self._send(HTTPStatus.NOT_FOUND, "there is no such page\n")
        self._send(HTTPStatus.OK, self.server.render(url.path), CONTENT_TYPES[url.path])

    def _send(self, status: HTTPStatus, text: str, kind: str = "text/plain; charset=utf-8") -> None:
        """Send a complete response of the content type `kind`, with headers that forbid caching,
        framing and referrers.
        """
        body = text.encode()
        self.send_response(status)
        length = str(len(body))
        for name, value in {**ALWAYS, "Content-Type": kind, "Content-Length": length}.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None:
        """Do nothing, in place of logging each request to stderr: its URL contains the token."""


def serve(folders: list[Path], config: ShowConfig) -> None:
    """Serve the live page of the runs in `folders` over HTTP until Ctrl-C, after printing its URL.
    Raises ValueError for a folder without a run, and for an address that is not available.
    """
    watched = Watched(folders)
    with os_error_as_value(f"--host {config.host} --port {config.port}"):
        server = Server(watched, config.every, config.host, config.port)
    print(f"open {server.address}", flush=True)
    print("Ctrl-C stops the server; the open page keeps its last state", flush=True)
    with server:
        server.serve_forever()
