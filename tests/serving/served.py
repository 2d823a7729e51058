"""A server in this process: the engine's loop and the one that talks to clients in a thread each,
as `dolmen serve` has them, and clients of it.
"""

import json
import shutil
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import openai

from dolmen.conversion.source import open_source, tokenizer_folder
from dolmen.core.mesh import SINGLE
from dolmen.data.tokenizer import load_tokenizer
from dolmen.optim.optimizer import DTYPES
from dolmen.serving import adapters
from dolmen.serving.config import ServeConfig
from dolmen.serving.engine import Engine, load_decoder, stop_tokens
from dolmen.serving.http import server
from dolmen.serving.http.loop import EngineLoop

KEY = "a-key-of-tests"
TEMPLATE = (
    "{% for t in tools or [] %}[{{ t.function.name }}]{% endfor %}"
    "{% for m in messages %}{% if m.content == 'no' %}{{ raise_exception('not that') }}{% endif %}"
    "<{{ m.role[0] }}>{{ m.content }}"
    "{% for c in m.tool_calls or [] %}({{ c.function.arguments.x }}){% endfor %}"
    "{{ '\\n' }}{% endfor %}{% if add_generation_prompt %}<a>{% endif %}"
)


def chatty(model: Path, folder: Path, positions: int = 512) -> Path:
    """The model, with a chat template and more positions."""
    shutil.copytree(model, folder)
    change(folder / "tokenizer_config.json", chat_template=TEMPLATE)
    change(folder / "config.json", max_position_embeddings=positions)
    return folder


def change(file: Path, **fields: object) -> None:
    file.write_text(json.dumps(json.loads(file.read_text()) | fields))


class Served:
    """Once `start` has come back, it answers."""

    def __init__(self, folder: Path, **config: object):
        said = {"port": 0, "key": KEY, "dtype": "float32", "grace": 5.0, **config}
        self.config = ServeConfig(folder=str(folder), **said)
        source = open_source(self.config.folder)
        tokenizer = load_tokenizer(tokenizer_folder(source), option="", probe=False)
        self.model = load_decoder(source, dtype=DTYPES["float32"])
        self.parser = server.build_parser(self.config, source, tokenizer, verbose=False)
        known = tokenizer.get_vocab().values()
        low = adapters.open_adapters(adapters.parse_adapters(self.config.adapters), source)
        self.engine = Engine(
            self.model,
            stop=stop_tokens(source),
            known=known,
            limits=self.config.limits,
            adapters=adapters.place_adapters(low, self.model),
        )
        self.announced: list[str] = []
        self.loop = EngineLoop(self.engine, SINGLE)
        listener = server.bind_socket(self.config)
        self.http = server.HttpThread(
            self.config, self.parser, self.loop, listener, self.announced.append
        )
        self.url = self.http.address
        self.failed: BaseException | None = None
        self.thread = threading.Thread(target=self._run)

    def _run(self) -> None:
        with self.engine:
            self.http.start()
            try:
                self.loop.run(self.http.dispatch)
            except BaseException as error:
                self.failed = error
            finally:
                self.http.join()

    def client(self, **options: object) -> openai.OpenAI:
        said = {"api_key": KEY, "max_retries": 0, "timeout": 60.0, **options}
        return openai.OpenAI(base_url=f"{self.url}/v1", **said)

    def several(self) -> openai.AsyncOpenAI:
        """A client that asks much at once."""
        limits = httpx.Limits(max_connections=None)
        http = httpx.AsyncClient(limits=limits, timeout=120)
        return openai.AsyncOpenAI(
            base_url=f"{self.url}/v1", api_key=KEY, max_retries=0, http_client=http
        )

    def post(self, path: str, **options: object) -> httpx.Response:
        """As no library would ask."""
        headers = {"authorization": f"Bearer {KEY}", **options.pop("headers", {})}
        return httpx.post(self.url + path, headers=headers, timeout=60, **options)

    def get(self, path: str, key: str | None = KEY) -> httpx.Response:
        headers = {} if key is None else {"authorization": f"Bearer {key}"}
        return httpx.get(self.url + path, headers=headers)

    @property
    def idle(self) -> bool:
        """Whether nothing is held of any request."""
        sessions = self.http.sessions
        left = sessions.open or sessions.by_number or self.engine.busy or self.engine.pages
        return not left and self.loop.load.running == 0


@contextmanager
def serving(folder: Path, **config: object) -> Iterator[Served]:
    """Within, the model is served."""
    served = Served(folder, **config)
    served.thread.start()
    until(lambda: served.http.server.started)
    try:
        yield served
    finally:
        served.http.stop()
        served.http.stop()
        served.thread.join(30)
        assert not served.thread.is_alive() and not served.http.thread.is_alive()


def until(found: Callable[[], object], seconds: float = 30.0) -> None:
    """Waits for what another thread does."""
    end = time.monotonic() + seconds
    while not found():
        assert time.monotonic() < end, "it has not happened"
        time.sleep(0.01)
