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
from typing import Annotated, Any, NamedTuple
from urllib.parse import parse_qs, urlsplit

from pydantic import Field

from dolmen.core.config import Mark, Name, Port, config
from dolmen.core.filesystem import expand, is_url
from dolmen.core.messages import os_error_as_value, plural
from dolmen.files import gate, storage, write
from dolmen.pages.page import figure as figure_html
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
    out: Name = "show.html"
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


class Figure(NamedTuple):
    """A figure of the page."""

    name: str
    """Name of the figure in page.js."""
    caption: str


class Group(NamedTuple):
    """Figures under one heading; small ones share a row, wide ones have one of their own."""

    heading: str
    figures: tuple[Figure, ...]


GROUPS = (
    Group(
        "Rollouts",
        (
            Figure("reward", "Mean reward of the completions of an iteration."),
            Figure("length", "Mean number of tokens of a completion."),
            Figure("finished", "Fraction of completions that end with an EOS token."),
        ),
    ),
    Group(
        "Loss",
        (
            Figure(
                "loss",
                "Training loss: all values, and a running mean over a twentieth of those shown. "
                "Open marks: validation loss. A cross at the top is a loss that was not finite.",
            ),
        ),
    ),
    Group(
        "Training",
        (
            Figure("rate", "Learning rate."),
            Figure("norm", "Gradient norm before clipping."),
            Figure("skipped", "Skipped steps (loss or gradient not finite, or a spike)."),
            Figure(
                "life",
                "Starts (bars) and checkpoints: filled marks are on disk, open ones have been "
                "deleted. Hatched: steps that were repeated after a restart.",
            ),
        ),
    ),
    Group(
        "Speed and memory",
        (
            Figure("speed", "Tokens per second of all processes, without validation."),
            Figure(
                "mfu", "Model FLOPs utilization, relative to the datasheet's or the measured peak."
            ),
            Figure("held", "Peak memory of the first rank so far."),
            Figure("ranks", "Peak memory of every rank, at the last report."),
        ),
    ),
    Group(
        "Experts",
        (
            Figure(
                "busiest", "Load of the busiest expert relative to the mean, in the worst layer."
            ),
            Figure("loads", "Tokens per expert (columns) and layer (rows) in one step."),
        ),
    ),
)
WIDE = ("loss", "life")
"""Figures that take the width of the page."""


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
            figures="\n".join(map(_group_html, GROUPS)),
            data=escape_script_json(self.data()),
            script=script,
        )


def _shown_folder(folder: Path) -> str:
    """Return how the page names a run's folder: the URL of which it is a local copy or working
    folder, or else its path.
    """
    url = storage.working_url(folder) or storage.working_url(folder, storage.COPIES)
    return url or str(folder)


def escape_script_json(value: Any) -> str:
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


def _group_html(group: Group) -> str:
    """Return the HTML of a section with the group's heading and empty figures, which the page's
    script fills: small ones in a grid, then wide ones.
    """
    wide = "\n".join(_figure_html(figure) for figure in group.figures if figure.name in WIDE)
    small = "\n".join(_figure_html(figure) for figure in group.figures if figure.name not in WIDE)
    grid = f'<div class="grid">\n{small}\n</div>\n' if small else ""
    return f"<section>\n<h2>{escape(group.heading)}</h2>\n{grid}{wide}\n</section>"


def _figure_html(figure: Figure) -> str:
    """Return the HTML of an empty figure with its caption, which the page's script fills."""
    empty = '<div class="plot"></div>\n<p class="read"></p>'
    return figure_html(figure.name, empty, escape(figure.caption))


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
        """Prepare the responses about the runs `watched`. `every`: seconds between the requests of
        an open page for new data.
        """
        self.watched, self.every = watched, every
        self.lock = Lock()
        self.answers: dict[str, tuple[float, Answer]] = {}

    def answer(self, path: str) -> Answer | None:
        """Return the response for the path of a URL: the HTML page for "/", its data as JSON for
        "/data", None for any other. A response older than `every` / 2 seconds is made anew; one
        request at a time.
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
        """Read the runs' new rows, and return the HTML page for the path "/", otherwise its data as
        JSON.
        """
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
        """Bind the server to its address, with a new secret token. Raises OSError for an address
        that is not available.
        """
        # 192 random bits
        self.shown, self.token = shown, secrets.token_urlsafe(24)
        super().__init__((host, port), Handler)

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
            return self._send_text(HTTPStatus.BAD_REQUEST, "not a valid address\n")
        # in constant time: response times do not show how much of the token was right
        if not hmac.compare_digest(token.encode(), self.server.token.encode()):
            return self._send_text(HTTPStatus.FORBIDDEN, "the address lacks its secret token\n")
        answer = self.server.shown.answer(url.path)
        if answer is None:
            return self._send_text(HTTPStatus.NOT_FOUND, "there is no such page\n")
        self._send(HTTPStatus.OK, answer)

    def _send_text(self, status: HTTPStatus, words: str) -> None:
        """Send a complete HTTP response with this status and the plain text `words`."""
        self._send(status, Answer("text/plain; charset=utf-8", words.encode()))

    def _send(self, status: HTTPStatus, answer: Answer) -> None:
        """Send a complete response: status, headers that forbid caching, framing and referrers,
        content type, and body.
        """
        self.send_response(status)
        for name, value in {**ALWAYS, "Content-Type": answer.kind}.items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(answer.body)))
        self.end_headers()
        self.wfile.write(answer.body)

    def log_message(self, format: str, *args: Any) -> None:
        """Do nothing, in place of logging each request to stderr: its URL contains the token."""


def serve(folders: list[Path], config: ShowConfig) -> None:
    """Serve the live page of the runs in `folders` over HTTP until Ctrl-C, after printing its URL.
    Raises ValueError for a folder without a run, and for an address that is not available.
    """
    shown = Shown(Watched(folders), config.every)
    with os_error_as_value(f"--host {config.host} --port {config.port}"):
        server = Server(shown, config.host, config.port)
    print(f"open {server.address}", flush=True)
    print("Ctrl-C stops the server; the open page keeps its last state", flush=True)
    with server:
        server.serve_forever()
