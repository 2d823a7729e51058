"""A model that is served: the life of the process, or of those that share a model over tp.

    main thread of each rank    loads the model, steps the engine (loop.py) until it is told to stop
    first rank's http thread    uvicorn and the application (app.py)

Asked to end (Ctrl-C, SIGTERM), the server takes no further request and gives those it has --grace
seconds; asked again, none. Then the loop stops on every rank, and the processes end by themselves.
"""

import asyncio
import secrets
import socket
import threading
import time
from collections.abc import Callable
from http import HTTPStatus

import uvicorn
from fastapi import FastAPI

from dolmen.conversion.source import Source, open_alike, open_source, tokenizer_folder
from dolmen.core.log import say
from dolmen.core.mesh import Mesh
from dolmen.core.paths import expand
from dolmen.data.template import own_template
from dolmen.data.tokenizer import PreTrainedTokenizer, load_tokenizer
from dolmen.files import gate
from dolmen.launch import process
from dolmen.optim.optimizer import DTYPES
from dolmen.serving import adapters, engine
from dolmen.serving.config import Sampling
from dolmen.serving.defaults import resolved
from dolmen.serving.engine import Engine
from dolmen.serving.http import app
from dolmen.serving.http.config import ServeConfig, check_key
from dolmen.serving.http.connections import ending_after
from dolmen.serving.http.loop import Loop
from dolmen.serving.http.metrics import Metrics
from dolmen.serving.http.problem import Problem
from dolmen.serving.http.reader import Reader
from dolmen.serving.http.session import Sessions
from dolmen.serving.request import Happened

KEY_SIZE = 4096  # bytes of a file with a key
KEEP_ALIVE = 75  # seconds that a connection may be idle: longer than clients keep theirs


def check(config: ServeConfig) -> None:
    """Raises ValueError, KeyError or OSError for what would be refused once the model is loaded."""
    key_of(config)
    source = open_source(config.folder)
    adapters.named(config.adapters, taken=(config.called,))
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
    asked, lines = resolved(Sampling(), source.generation_config)
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
    beside = adapters.opened(adapters.named(config.adapters), source, mesh)
    ends, known = engine.stop_tokens(source), tokenizer.get_vocab().values()
    with Engine(
        model,
        stop=ends,
        known=known,
        limits=config.limits,
        mesh=mesh,
        weights=config.weights,
        adapters=adapters.placed(beside, model, mesh),
    ) as running:
        loop = Loop(running, mesh)
        if bound is None:
            with process.on_stop(lambda _: None):  # the first rank says when
                loop.run(lambda _: None)
            return
        front = Front(config, reader, loop, bound)
        with process.on_stop(lambda _: front.stop()):
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
        self.name, names = config.called, adapters.named(config.adapters)
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

    def tell(self, happened: Happened) -> None:
        """What a step has brought, for the sessions. The engine's thread."""
        if happened.chosen or happened.ended:
            self.events.call_soon_threadsafe(self.sessions.tell, happened)

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
        self.told(f"serving {self.name} at {self.address}/v1")
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
            self.events.call_later(self.config.grace, self.sessions.fail, stopping)
        else:
            self.sessions.fail(stopping)

    def _engine_ended(self) -> None:
        """Answers that are open, where there are any, cannot be ended."""
        self._ended.set()
        self.sessions.fail(
            Problem(HTTPStatus.INTERNAL_SERVER_ERROR, "the engine has ended", retry=False)
        )
        self.server.should_exit = True


def _configured(made: FastAPI, config: ServeConfig) -> uvicorn.Config:
    return uvicorn.Config(
        made,
        http=ending_after(config.head_time),
        ws="none",
        loop="asyncio",
        lifespan="off",
        log_config=None,
        log_level="warning",
        access_log=False,
        server_header=False,
        limit_concurrency=config.max_connections + 1,  # itself among those it counts
        h11_max_incomplete_event_size=config.max_head_bytes,
        timeout_keep_alive=KEEP_ALIVE,
        timeout_graceful_shutdown=int(config.grace) + 5,
    )
