"""The life of a server: its process, or the processes that share a model over tp.

    main thread of each rank    loads the model, steps the engine (loop.py) until it is stopped
    HttpThread of the first     uvicorn and the application (app.py)

On SIGINT or SIGTERM, the server takes no further request, and open ones have --grace seconds; on a
second signal, none. Then the loop stops on every rank, and the processes end by themselves.

A connection has limits for clients that are slow to send or to read (`LimitedConnection`), since
uvicorn and h11 leave three gaps. They wait without end for the head (request line and headers) of a
request; they bound the bytes of a head only while it is incomplete, so one that arrives at once may
have any size; and they wait without end for a client to read its response, also when they close the
connection, since asyncio's `transport.close()` sends what is buffered first. `LimitedConnection`
closes these gaps, and hands `transport.abort` to the application as `request.state.abort`.
"""

import asyncio
import re
import secrets
import socket
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from http import HTTPStatus
from typing import Any

import h11
import uvicorn
from fastapi import FastAPI
from uvicorn.config import Config
from uvicorn.protocols.http.h11_impl import H11Protocol

from dolmen.conversion.source import ModelSource
from dolmen.core.filesystem import expand
from dolmen.core.log import say
from dolmen.core.mesh import Mesh
from dolmen.core.messages import escape, os_error_as_value
from dolmen.data.template import tokenizer_template
from dolmen.data.tokenizer import PreTrainedTokenizer
from dolmen.files import gate
from dolmen.launch import process
from dolmen.serving import adapters
from dolmen.serving.config import Sampling, ServeConfig, check_key
from dolmen.serving.engine import open_engine
from dolmen.serving.generation import apply_generation_config
from dolmen.serving.http import app
from dolmen.serving.http.loop import EngineLoop, ServerMetrics
from dolmen.serving.http.protocol import ApiError
from dolmen.serving.http.request_parser import RequestParser
from dolmen.serving.http.session import ERROR_TIME, Sessions
from dolmen.serving.request import StepOutput

BLANK_LINE = re.compile(rb"\n\r?\n")


class HeadLimitParser(h11.Connection):
    """h11's parser, which also refuses a complete head of more than `max_bytes`."""

    def __init__(self, max_bytes: int):
        """`max_bytes`: most bytes of a request line and headers."""
        super().__init__(h11.SERVER, max_bytes)
        self.max_bytes = max_bytes

    def next_event(self) -> Any:
        """Return the next event of a request. Raises RemoteProtocolError (431), before it is
        parsed, for request line and headers of more bytes than the limit.
        """
        if self.their_state is h11.IDLE:
            end = BLANK_LINE.search(self.trailing_data[0])
            if end is not None and end.end() > self.max_bytes:
                raise h11.RemoteProtocolError(
                    f"request line and headers exceed {self.max_bytes:,} bytes", 431
                )
        return super().next_event()


class LimitedConnection(H11Protocol):
    """uvicorn's connection with limits. It ends if a head has more than `head_bytes`, or is not
    complete `head_time` seconds after it began (the first one begins with the connection), or if
    the client leaves a response unread for `read_time` seconds. A subclass sets these three.
    """

    head_bytes: int
    head_time: float
    read_time: float

    head_timer: asyncio.TimerHandle | None = None
    read_timer: asyncio.TimerHandle | None = None

    def __init__(self, config: Config, *args: Any, **kwargs: Any):
        """Use a parser that bounds the head of a request, and hand `abort` to the application in
        `request.state`.
        """
        super().__init__(config, *args, **kwargs)
        self.conn = HeadLimitParser(self.head_bytes)
        # uvicorn copies it to the state of each request
        self.app_state = {**self.app_state, "abort": self._abort}

    def connection_made(self, transport: asyncio.Transport) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]  # as uvicorn's
        """Start the time limit within which the first request line and headers must arrive."""
        super().connection_made(transport)
        self._begin_head()

    def data_received(self, data: bytes) -> None:
        """Pass data on to the parser. End the time limit of the head (request line and headers)
        when it is complete; start it with the first bytes of the next one.
        """
        super().data_received(data)
        if self.conn.their_state is not h11.IDLE:  # the head is complete, or nothing more comes
            self._end_head()
        elif self.head_timer is None:
            self._begin_head()

    def connection_lost(self, exc: Exception | None) -> None:
        """Stop the timers of the head and of unread responses."""
        self._end_head()
        self._end_reading()
        super().connection_lost(exc)

    def pause_writing(self) -> None:
        """Start the timer that aborts the connection: the write buffer is full, as the client does
        not read.
        """
        super().pause_writing()
        self._end_reading()
        self.read_timer = self.loop.call_later(self.read_time, self._abort)

    def resume_writing(self) -> None:
        """Stop the timer of unread responses: the client has read."""
        super().resume_writing()
        self._end_reading()

    def on_response_complete(self) -> None:
        """Start the timer of unread responses if the connection closes with data in its buffer."""
        super().on_response_complete()
        # asyncio sends the buffer before it closes, however long the client takes
        if self.transport.is_closing() and self.read_timer is None:
            self.read_timer = self.loop.call_later(self.read_time, self._abort)

    def timeout_keep_alive_handler(self) -> None:
        """Close an idle connection, and abort it ERROR_TIME (1 s) later."""
        super().timeout_keep_alive_handler()
        self.loop.call_later(ERROR_TIME, self._abort)

    def shutdown(self) -> None:
        """Close the connection as the server stops, and abort it ERROR_TIME (1 s) later."""
        super().shutdown()
        if self.transport.is_closing():
            self.loop.call_later(ERROR_TIME, self._abort)

    def _close(self) -> None:
        """Close the connection, and abort it ERROR_TIME (1 s) later if the client does not read."""
        self.transport.close()
        self.loop.call_later(ERROR_TIME, self._abort)

    def _abort(self) -> None:
        """Close the connection at once and drop what is buffered."""
        self.transport.abort()

    def _begin_head(self) -> None:
        """Start the timer that closes the connection if request line and headers are not complete
        in time. For a connection where none runs: an earlier timer would not be cancelled.
        """
        self.head_timer = self.loop.call_later(self.head_time, self._close)

    def _end_head(self) -> None:
        """Stop the timer of request line and headers, if it runs."""
        if self.head_timer is not None:
            self.head_timer.cancel()
            self.head_timer = None

    def _end_reading(self) -> None:
        """Stop the timer of unread responses, if it runs."""
        if self.read_timer is not None:
            self.read_timer.cancel()
            self.read_timer = None


MAX_KEY_BYTES = 4096  # bytes of a file with a key
KEEP_ALIVE = 75  # seconds that a connection may be idle: longer than clients keep theirs


def check(config: ServeConfig, source: ModelSource, tokenizer: PreTrainedTokenizer) -> None:
    """Check all that could fail only after the model is loaded: key, adapters' names, options, and
    the address. Raises ValueError, KeyError or OSError.
    """
    resolve_key(config)
    adapters.parse_adapters(config.adapters, taken=(config.model_name,))
    build_parser(config, source, tokenizer, verbose=False)
    # a port that is taken is found before minutes of loading
    bind_socket(config).close()


def resolve_key(config: ServeConfig) -> str:
    """Return the API key: --key, that of --key-file, or a new random one of 32 characters. Raises
    ValueError for a file whose key has fewer than 8 characters, spaces or characters outside
    printable ASCII.
    """
    if config.key_file is not None:
        key = gate.read_text(expand(config.key_file), MAX_KEY_BYTES).strip()
        check_key(key, f"--key-file {config.key_file}")
        return key
    # 192 random bits
    return config.key or secrets.token_urlsafe(24)


def bind_socket(config: ServeConfig) -> socket.socket:
    """Return a socket that listens at --host and --port. Raises ValueError if it cannot."""
    with os_error_as_value(f"--host {config.host} --port {config.port}"):
        family = socket.AF_INET6 if ":" in config.host else socket.AF_INET
        return socket.create_server((config.host, config.port), family=family, backlog=2048)


def build_parser(
    config: ServeConfig, source: ModelSource, tokenizer: PreTrainedTokenizer, verbose: bool
) -> RequestParser:
    """Return the parser of requests, with the sampling defaults of generation_config.json (else
    temperature 1) and the chat template.

    `verbose`: print the defaults, and a note without a chat template. Raises ValueError for options
    that the model cannot have.
    """
    sampling, lines = apply_generation_config(Sampling(), source.generation_config)
    for line in lines:
        say(line, verbose)
    if sampling.temperature is None:  # not greedy, as OpenAI
        sampling = replace(sampling, temperature=1.0)
    defaults = sampling.sampling_params
    defaults.check()
    template = None
    if tokenizer.chat_template:
        template = tokenizer_template(tokenizer, "", "give a model with one")
    else:
        say("the tokenizer has no chat template: /v1/chat/completions is not served", verbose)
    new_tokens = sampling.max_new_tokens
    parser = RequestParser(config, source, tokenizer, template, defaults, new_tokens)
    _ = parser.max_length  # raises for a --max-length that the model does not have
    return parser


def serve(
    config: ServeConfig,
    source: ModelSource,
    tokenizer: PreTrainedTokenizer,
    mesh: Mesh,
    draft: ModelSource | None = None,
) -> None:
    """Load the model, and the `draft` model of speculative decoding, and serve it until SIGINT or
    SIGTERM, on every rank of `mesh`; the first rank runs the HTTP server. Raises ValueError for a
    bad key or address or options that the model cannot have, and what the engine raises.
    """
    # bound first, so that clients wait in the backlog while the model loads
    listener = bind_socket(config) if mesh.first else None
    parser = build_parser(config, source, tokenizer, verbose=mesh.first)
    with open_engine(
        config, source, tokenizer, mesh, config.limits, config.adapters, draft
    ) as running:
        if config.compile:
            say("compiling decode steps, up to a minute at a first start ...", mesh.first)
            running.warm_up()
        loop = EngineLoop(running, mesh)
        if listener is None:
            with process.stop_handler(lambda _: None):  # the first rank decides when to stop
                loop.run(lambda _: None)
            return
        http = HttpThread(config, parser, loop, listener)
        with process.stop_handler(lambda _: http.stop()):
            http.start()
            try:
                loop.run(http.dispatch)
            finally:
                # also after an exception of the engine: clients get an error, no silence
                http.join()


class HttpThread:
    """The thread of the event loop, which runs uvicorn and talks to clients. Used on the first
    rank.
    """

    def __init__(
        self,
        config: ServeConfig,
        parser: RequestParser,
        loop: EngineLoop,
        listener: socket.socket,
        announce: Callable[[str], None] = lambda text: print(text, flush=True),
    ):
        """`listener`: the bound socket. `announce`: prints the address and the key."""
        self.config, self.loop, self.listener = config, loop, listener
        self.key, self.announce = resolve_key(config), announce
        self.name, names = config.model_name, adapters.parse_adapters(config.adapters)
        metrics = ServerMetrics()
        self.sessions = Sessions(
            loop, parser.tokenizer, metrics, config.capacity, config.time_limit
        )
        endpoints = app.Endpoints(self.name, int(time.time()), parser, self.sessions, list(names))
        application = app.create_app(endpoints, metrics, self.key)
        self.server = uvicorn.Server(_uvicorn_config(application, config))
        self.events = asyncio.new_event_loop()
        self.thread = threading.Thread(target=self._run, name="http", daemon=True)
        self._engine_stopped = asyncio.Event()
        self._stop_requests = 0
        self._error: BaseException | None = None

    def start(self) -> None:
        """Start the thread, which prints the address and serves."""
        self.thread.start()

    def dispatch(self, output: StepOutput) -> None:
        """Hand the result of a step to the sessions, in the event loop. Called by the engine's
        thread.
        """
        if output.new_tokens or output.finished:
            self.events.call_soon_threadsafe(self.sessions.dispatch, output)

    def stop(self) -> None:
        """Stop within --grace seconds; on a second call, at once. May be called by any thread or
        signal handler.
        """
        if not self.events.is_closed():
            self.events.call_soon_threadsafe(self._stop)

    def join(self) -> None:
        """Fail open requests, as the engine has stopped, and wait for the thread to end. Raises the
        thread's exception, if it had one.
        """
        self.events.call_soon_threadsafe(self._fail_all)
        self.thread.join()
        if self._error is not None:
            raise self._error

    @property
    def address(self) -> str:
        """URL of the server."""
        host, port = self.listener.getsockname()[:2]
        return f"http://{f'[{host}]' if ':' in host else host}:{port}"

    def _run(self) -> None:
        """Serve in this thread until the server stops, then stop the engine's loop. Keeps an
        exception for `join`.
        """
        asyncio.set_event_loop(self.events)
        try:
            self.events.run_until_complete(self._serve())
        except BaseException as error:
            self._error = error
        finally:
            self.loop.stop()
            # the engine's thread may still call into this event loop
            self.events.run_until_complete(self._engine_stopped.wait())
            self.events.close()

    async def _serve(self) -> None:
        """Print the address, and serve until `server.should_exit`."""
        self._print_address()
        await self.server.serve(sockets=[self.listener])

    def _print_address(self) -> None:
        """Print the URL, the key if it is a new one, and a warning if the network can reach the
        server.
        """
        config = self.config
        self.announce(f"serving {escape(self.name)} at {self.address}/v1")
        if config.key is None and config.key_file is None:
            self.announce(f"key: {self.key}")
        if not config.local:
            say(
                f"--host {config.host}: the server can be reached over the network, unencrypted; "
                "use a proxy with TLS on shared networks"
            )

    def _stop(self) -> None:
        """Refuse further requests and give open ones --grace seconds; on a second signal fail them
        at once.
        """
        stopping = ApiError(HTTPStatus.SERVICE_UNAVAILABLE, "the server is stopping", retry=False)
        self._stop_requests += 1
        self.server.should_exit = True
        if self._stop_requests == 1:
            say(f"stopping: open requests have {self.config.grace:g} s to finish (--grace)")
            self.sessions.close(stopping)
            self.events.call_later(self.config.grace, self._fail, stopping)
        else:
            self._fail(stopping)

    def _fail(self, problem: ApiError) -> None:
        """End all responses with this error, and abort connections ERROR_TIME (1 s) later."""
        self.sessions.fail(problem)
        for connection in list(self.server.server_state.connections):
            self.events.call_later(ERROR_TIME, connection.transport.abort)

    def _fail_all(self) -> None:
        """Fail the responses that are still open with status 500, and stop uvicorn: the engine has
        stopped.
        """
        self._engine_stopped.set()
        self._fail(
            ApiError(HTTPStatus.INTERNAL_SERVER_ERROR, "the engine has stopped", retry=False)
        )
        self.server.should_exit = True


def _uvicorn_config(application: FastAPI, config: ServeConfig) -> uvicorn.Config:
    """Return uvicorn's options: limited connections, no websockets, no lifespan events, and no
    access log.
    """
    limits = {
        "head_bytes": config.max_head_bytes,
        "head_time": config.head_time,
        "read_time": config.time_limit,
    }
    return uvicorn.Config(
        application,
        http=type("Connection", (LimitedConnection,), limits),
        ws="none",
        loop="asyncio",
        lifespan="off",
        log_config=None,
        log_level="warning",
        access_log=False,
        server_header=False,
        limit_concurrency=config.max_connections + 1,  # uvicorn counts the new connection too
        timeout_keep_alive=KEEP_ALIVE,
        # sessions fail after --grace; 5 s more to send those errors
        timeout_graceful_shutdown=int(config.grace) + 5,
    )
