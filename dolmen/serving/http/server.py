"""The life of a server: its process, or the processes that share a model over tp.

    main thread of each rank    loads the model, steps the engine (loop.py) until it is told to stop
    first rank's http thread    uvicorn and the application (app.py)

Asked to end (Ctrl-C, SIGTERM), the server takes no further request and gives those it has --grace
seconds; asked again, none. Then the loop stops on every rank, and the processes end by themselves.

A connection has limits for clients that are slow to send or to read (`limited`), since uvicorn and
h11 leave three gaps. They wait without end for the head (request line and headers) of a request;
they bound the bytes of a head only while it is incomplete, so one that arrives at once may have any
size; and they wait without end for a client to read its response, also when they close the
connection, since asyncio's `transport.close()` sends what is buffered first. `limited` closes these
gaps, and hands `transport.abort` to the application as `request.state.abort`.
"""

import asyncio
import re
import secrets
import socket
import threading
import time
from collections.abc import Callable
from http import HTTPStatus
from typing import Any

import h11
import uvicorn
from fastapi import FastAPI
from uvicorn.config import Config
from uvicorn.protocols.http.h11_impl import H11Protocol

from dolmen.conversion.source import Source, open_alike, open_source, tokenizer_folder
from dolmen.core.filesystem import expand
from dolmen.core.log import say
from dolmen.core.mesh import Mesh
from dolmen.core.messages import escape
from dolmen.data.template import own_template
from dolmen.data.tokenizer import PreTrainedTokenizer, load_tokenizer
from dolmen.files import gate
from dolmen.launch import process
from dolmen.optim.optimizer import DTYPES
from dolmen.serving import adapters, engine
from dolmen.serving.config import Sampling
from dolmen.serving.engine import Engine
from dolmen.serving.generation_config import apply_generation_config
from dolmen.serving.http import app
from dolmen.serving.http.config import ServeConfig, check_key
from dolmen.serving.http.loop import Loop, Metrics
from dolmen.serving.http.protocol import Problem
from dolmen.serving.http.reader import Reader
from dolmen.serving.http.session import LAST, Sessions
from dolmen.serving.request import StepOutput

BLANK_LINE = re.compile(rb"\n\r?\n")


class Parser(h11.Connection):
    """h11's parser, which also refuses a complete head of more than `most` bytes."""

    def __init__(self, most: int):
        super().__init__(h11.SERVER, most)
        self.most = most

    def next_event(self) -> Any:
        if self.their_state is h11.IDLE:
            end = BLANK_LINE.search(self.trailing_data[0])
            if end is not None and end.end() > self.most:
                raise h11.RemoteProtocolError(f"the head has over {self.most:,} bytes", 431)
        return super().next_event()


def limited(head_bytes: int, head_time: float, read_time: float) -> type[H11Protocol]:
    """Return a protocol for uvicorn. A connection ends if a head has more than `head_bytes`, or is
    not complete `head_time` seconds after it began (the first one begins with the connection), or
    if the client leaves a response unread for `read_time` seconds.
    """

    class Connection(H11Protocol):
        head_timer: asyncio.TimerHandle | None = None
        read_timer: asyncio.TimerHandle | None = None

        def __init__(self, config: Config, *args: Any, **kwargs: Any):
            super().__init__(config, *args, **kwargs)
            self.conn = Parser(head_bytes)
            self.app_state = {**self.app_state, "abort": self._abort}

        def connection_made(self, transport: asyncio.Transport) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]  # as uvicorn's
            super().connection_made(transport)
            self._begin_head()

        def data_received(self, data: bytes) -> None:
            super().data_received(data)
            if self.conn.their_state is not h11.IDLE:  # the head is here, or nothing more comes
                self._end_head()
            elif self.head_timer is None:
                self._begin_head()

        def connection_lost(self, exc: Exception | None) -> None:
            self._end_head()
            self._end_reading()
            super().connection_lost(exc)

        def pause_writing(self) -> None:
            super().pause_writing()
            self._end_reading()
            self.read_timer = self.loop.call_later(read_time, self._abort)

        def resume_writing(self) -> None:
            super().resume_writing()
            self._end_reading()

        def on_response_complete(self) -> None:
            super().on_response_complete()
            if self.transport.is_closing() and self.read_timer is None:
                self.read_timer = self.loop.call_later(read_time, self._abort)

        def timeout_keep_alive_handler(self) -> None:
            super().timeout_keep_alive_handler()
            self.loop.call_later(LAST, self._abort)

        def shutdown(self) -> None:
            super().shutdown()
            if self.transport.is_closing():
                self.loop.call_later(LAST, self._abort)

        def _close(self) -> None:
            self.transport.close()
            self.loop.call_later(LAST, self._abort)

        def _abort(self) -> None:
            self.transport.abort()

        def _begin_head(self) -> None:
            self.head_timer = self.loop.call_later(head_time, self._close)

        def _end_head(self) -> None:
            if self.head_timer is not None:
                self.head_timer.cancel()
                self.head_timer = None

        def _end_reading(self) -> None:
            if self.read_timer is not None:
                self.read_timer.cancel()
                self.read_timer = None

    return Connection


KEY_SIZE = 4096  # bytes of a file with a key
KEEP_ALIVE = 75  # seconds that a connection may be idle: longer than clients keep theirs


def check(config: ServeConfig) -> None:
    """Raises ValueError, KeyError or OSError for what would be refused once the model is loaded."""
    key_of(config)
    source = open_source(config.folder)
    adapters.parse_adapters(config.adapters, taken=(config.called,))
    reader_of(config, source, load_tokenizer(tokenizer_folder(source), option=""), tell=False)
    listening(config).close()


def key_of(config: ServeConfig) -> str:
    """The key that requests must bring."""
    if config.key_file is not None:
        key = gate.read_text(expand(config.key_file), KEY_SIZE).strip()
        check_key(key, f"--key-file {config.key_file}")
        return key
    return config.key or secrets.token_urlsafe(24)


def listening(config: ServeConfig) -> socket.socket:
    """Bound to where it is asked to be. Raises ValueError where that cannot be had."""
    try:
        family = socket.AF_INET6 if ":" in config.host else socket.AF_INET
        return socket.create_server((config.host, config.port), family=family, backlog=2048)
    except OSError as error:
        raise ValueError(
            f"--host {config.host} --port {config.port}: {error.strerror or error}"
        ) from None


def reader_of(
    config: ServeConfig, source: Source, tokenizer: PreTrainedTokenizer, tell: bool
) -> Reader:
    """Raises ValueError for what of `config` does not go with the model. `tell`s the defaults."""
    asked, lines = apply_generation_config(Sampling(), source.generation_config)
    for line in lines:
        say(line, tell)
    options = (
        asked.of_tokens if asked.temperature is not None else Sampling(temperature=1.0).of_tokens
    )
    options.check()
    template = None
    if tokenizer.chat_template:
        template = own_template(tokenizer, "", "give a model with one")
    else:
        say("the tokenizer has no chat template: /v1/chat/completions is not served", tell)
    reader = Reader(config, source, tokenizer, template, options, asked.max_new_tokens)
    _ = reader.most
    return reader


def serve(config: ServeConfig, mesh: Mesh) -> None:
    """Until it is asked to end, on every rank of `mesh`. Raises ValueError as `check`, and what the
    engine raises.
    """
    source = open_alike(config.folder, mesh)
    tokenizer = load_tokenizer(tokenizer_folder(source), option="")
    bound = listening(config) if mesh.first else None
    reader = reader_of(config, source, tokenizer, tell=mesh.first)
    dtype = DTYPES[config.dtype] if config.dtype else None
    model = engine.load_placed(source, mesh, dtype, config.weights)
    beside = adapters.open_adapters(adapters.parse_adapters(config.adapters), source, mesh)
    ends, known = engine.stop_tokens(source), tokenizer.get_vocab().values()
    with Engine(
        model,
        stop=ends,
        known=known,
        limits=config.limits,
        mesh=mesh,
        weights=config.weights,
        adapters=adapters.place_adapters(beside, model, mesh),
    ) as running:
        loop = Loop(running, mesh)
        if bound is None:
            with process.stop_handler(lambda _: None):  # the first rank says when
                loop.run(lambda _: None)
            return
        front = Front(config, reader, loop, bound)
        with process.stop_handler(lambda _: front.stop()):
            front.start()
            try:
                loop.run(front.tell)
            finally:
                front.end()


class Front:
    """The thread that talks to clients."""

    def __init__(
        self,
        config: ServeConfig,
        reader: Reader,
        loop: Loop,
        bound: socket.socket,
        told: Callable[[str], None] = lambda text: print(text, flush=True),
    ):
        """`told`: what a person reads as it begins."""
        self.config, self.reader, self.loop, self.bound = config, reader, loop, bound
        self.key, self.told = key_of(config), told
        self.name, names = config.called, adapters.parse_adapters(config.adapters)
        metrics = Metrics()
        self.sessions = Sessions(
            loop, reader.tokenizer, metrics, config.capacity, config.time_limit
        )
        service = app.Service(self.name, int(time.time()), reader, self.sessions, list(names))
        self.server = uvicorn.Server(_configured(app.made(service, metrics, self.key), config))
        self.events = asyncio.new_event_loop()
        self.thread = threading.Thread(target=self._run, name="http", daemon=True)
        self._ended = asyncio.Event()
        self._asked = 0  # to stop
        self._failed: BaseException | None = None

    def start(self) -> None:
        """It begins to listen."""
        self.thread.start()

    def tell(self, output: StepOutput) -> None:
        """What a step has brought, for the sessions. The engine's thread."""
        if output.new_tokens or output.finished:
            self.events.call_soon_threadsafe(self.sessions.tell, output)

    def stop(self) -> None:
        """Asked to end. Any thread, a signal's handler too."""
        if not self.events.is_closed():
            self.events.call_soon_threadsafe(self._stop)

    def end(self) -> None:
        """The engine steps no more, however it has ended: nor does this, once it is through. Raises
        what has ended it before.
        """
        self.events.call_soon_threadsafe(self._engine_ended)
        self.thread.join()
        if self._failed is not None:
            raise self._failed

    @property
    def address(self) -> str:
        """Where clients find it."""
        host, port = self.bound.getsockname()[:2]
        return f"http://{f'[{host}]' if ':' in host else host}:{port}"

    def _run(self) -> None:
        asyncio.set_event_loop(self.events)
        try:
            self.events.run_until_complete(self._serve())
        except BaseException as error:
            self._failed = error
        finally:
            self.loop.stop()
            self.events.run_until_complete(self._ended.wait())
            self.events.close()

    async def _serve(self) -> None:
        self._tell()
        await self.server.serve(sockets=[self.bound])

    def _tell(self) -> None:
        config = self.config
        self.told(f"serving {escape(self.name)} at {self.address}/v1")
        if config.key is None and config.key_file is None:
            self.told(f"key: {self.key}")
        if not config.local:
            say(
                f"--host {config.host}: others reach it over the network, unencrypted; use a proxy "
                "with TLS where that is not yours alone"
            )

    def _stop(self) -> None:
        stopping = Problem(HTTPStatus.SERVICE_UNAVAILABLE, "the server is stopping", retry=False)
        self._asked += 1
        self.server.should_exit = True
        if self._asked == 1:
            say(f"stopping: answers that are being given have {self.config.grace:g} s (--grace)")
            self.sessions.close(stopping)
            self.events.call_later(self.config.grace, self._fail, stopping)
        else:
            self._fail(stopping)

    def _fail(self, problem: Problem) -> None:
        """End all responses with this error, and what is left of connections LAST seconds later."""
        self.sessions.fail(problem)
        for connection in list(self.server.server_state.connections):
            self.events.call_later(LAST, connection.transport.abort)

    def _engine_ended(self) -> None:
        """Answers that are open, where there are any, cannot be ended."""
        self._ended.set()
        self._fail(Problem(HTTPStatus.INTERNAL_SERVER_ERROR, "the engine has ended", retry=False))
        self.server.should_exit = True


def _configured(made: FastAPI, config: ServeConfig) -> uvicorn.Config:
    return uvicorn.Config(
        made,
        http=limited(config.max_head_bytes, config.head_time, config.time_limit),
        ws="none",
        loop="asyncio",
        lifespan="off",
        log_config=None,
        log_level="warning",
        access_log=False,
        server_header=False,
        limit_concurrency=config.max_connections + 1,  # itself among those it counts
        timeout_keep_alive=KEEP_ALIVE,
        timeout_graceful_shutdown=int(config.grace) + 5,
    )
