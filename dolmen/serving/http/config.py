"""Configuration of `dolmen serve`. Imports neither torch nor the server."""

import ipaddress
from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field

from dolmen.core.config import Count, Mark, Name, NonNegative, Port, Positive, config
from dolmen.core.filesystem import expand
from dolmen.model.layout import Split
from dolmen.serving.request import Limits

MIB = 2**20


@config(kw_only=True)
class ServeConfig:
    """Serve a model over HTTP, by OpenAI's interface: completions and chat completions, streamed or
    whole, to many clients at once. Needs an extra: pip install 'dolmen[serve]'.

        dolmen serve MODEL --port 8000
    """

    folder: Annotated[str, Mark.POSITIONAL]
    """Model to serve: anything that `dolmen generate` takes."""
    host: Name = "127.0.0.1"
    """Address to serve at. Default: this machine alone; 0.0.0.0 is every network that it is on,
    unencrypted.
    """
    port: Port = 8000
    """Port to serve at; 0: any that is free, which is printed."""
    key: str | None = None
    """Key that requests must bring. Default: one that is made by each start, and printed once.
    Users of this machine see the words of a command: --key-file is for one that lasts.
    """
    key_file: str | None = None
    """File whose one line is the key."""
    name: Name | None = None
    """Name of the model in requests. Default: that of its folder."""
    adapters: tuple[str, ...] = ()
    """Adapters over the model, NAME=FOLDER each: folders that PEFT or dolmen export --adapters has
    written, or runs with adapters. Each is a model of its name, which requests choose.
    """
    max_length: Annotated[int, Field(ge=2)] | None = None
    """Most tokens of a prompt and its answer together. Default: those the model was made for."""
    max_rows: Positive = Limits.rows
    """Most answers that are written at once; further ones wait."""
    max_waiting: Count = 1024
    """Most answers that wait; further requests are told to come again (429)."""
    max_batch_tokens: Positive = Limits.tokens
    """Most tokens that one forward reads."""
    max_cache_tokens: Annotated[int, Field(ge=Limits.page)] | None = None
    """Tokens that the cache may hold; where it is full, the youngest answers wait. Default: as many
    as --max-rows answers need.
    """
    max_body_bytes: Annotated[int, Field(ge=1024)] = 4 * MIB
    """Most bytes of a request."""
    max_connections: Positive = 4096
    """Connections that are open; who asks over a further one is told to come again (503)."""
    max_head_bytes: Annotated[int, Field(ge=1024)] = 16 * 1024
    """Most bytes of a request's first line and headers."""
    head_time: Annotated[float, Field(ge=0.1)] = 10.0
    """Seconds in which these must come; a connection without them is closed."""
    time_limit: Annotated[float, Field(ge=0.1)] = 600.0
    """Seconds that a request may take, with its time in the queue; then it ends with an error."""
    grace: NonNegative = 30.0
    """Seconds that answers have to end in, once the server has been asked to stop."""
    dtype: Literal["float32", "bfloat16", "float16"] | None = None
    """Type to compute in. Default: that of config.json."""
    weights: Literal["stated", "int8"] = "stated"
    """stated: in `dtype`. int8: the rows of matrices as eight bits and a scale each, on a CPU."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """auto takes the GPUs if any are visible, else the CPU."""
    layout: Split = Split()

    def __post_init__(self):
        if self.key is not None and self.key_file is not None:
            raise ValueError("--key and --key-file are both given: use one of them")
        if self.key is not None:
            check_key(self.key, "--key")

    @property
    def called(self) -> str:
        """The name of the model in requests."""
        return self.name or Path(expand(self.folder)).resolve().name

    @property
    def limits(self) -> Limits:
        """Those of the engine."""
        tokens = self.max_cache_tokens
        pages = None if tokens is None else tokens // Limits.page
        return Limits(rows=self.max_rows, tokens=self.max_batch_tokens, pages=pages)

    @property
    def capacity(self) -> int:
        """Answers that are taken, written or waiting."""
        return self.max_rows + self.max_waiting

    @property
    def local(self) -> bool:
        """Whether this machine alone can ask."""
        try:
            return ipaddress.ip_address(self.host).is_loopback
        except ValueError:
            return self.host == "localhost"


def check_key(key: str, option: str) -> None:
    """Raises ValueError for a key that no header can hold, or that is soon guessed."""
    if not (key.isascii() and key.isprintable()) or " " in key:
        raise ValueError(f"{option} must be of printable ASCII characters, without spaces")
    if len(key) < 8:
        raise ValueError(f"{option} has {len(key)} characters: give 8 or more")
