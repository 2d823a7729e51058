"""Configuration of `dolmen serve`. Imports neither torch nor the server."""

import ipaddress
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from dolmen.core.paths import expand
from dolmen.serving.config import Split
from dolmen.serving.request import Limits

MIB = 2**20


@dataclass(frozen=True, kw_only=True)
class ServeConfig:
    """A model, and who may request how much of it."""

    folder: str
    """Model to serve: anything that `dolmen generate` takes."""
    host: str = "127.0.0.1"
    """Address to serve at. Default: this machine alone; 0.0.0.0 is every network that it is on,
    unencrypted.
    """
    port: int = 8000
    """Port to serve at; 0: any that is free, which is printed."""
    key: str | None = None
    """Key that requests must bring. Default: one that is made by each start, and printed once.
    Users of this machine see the words of a command: --key-file is for one that lasts.
    """
    key_file: str | None = None
    """File whose one line is the key."""
    name: str | None = None
    """Name of the model in requests. Default: that of its folder."""
    adapters: tuple[str, ...] = ()
    """Adapters over the model, NAME=FOLDER each: folders that PEFT or dolmen export --adapters has
    written, or runs with adapters. Each is a model of its name, which requests choose.
    """
    max_length: int | None = None
    """Most tokens of a prompt and its answer together. Default: those the model was made for."""
    max_rows: int = Limits.rows
    """Most answers that are written at once; further ones wait."""
    max_waiting: int = 1024
    """Most answers that wait; further requests are told to come again (429)."""
    max_batch_tokens: int = Limits.tokens
    """Most tokens that one forward reads."""
    max_cache_tokens: int | None = None
    """Tokens that the cache may hold; where it is full, the youngest answers wait. Default: as many
    as --max-rows answers need.
    """
    max_body_bytes: int = 4 * MIB
    """Most bytes of a request."""
    max_connections: int = 4096
    """Connections that are open; who asks over a further one is told to come again (503)."""
    max_head_bytes: int = 16 * 1024
    """Most bytes of a request's first line and headers."""
    head_time: float = 10.0
    """Seconds in which these must come; a connection without them is closed."""
    time_limit: float = 600.0
    """Seconds that a request may take, with its time in the queue; then it ends with an error."""
    grace: float = 30.0
    """Seconds that answers have to end in, once the server has been asked to stop."""
    dtype: Literal["float32", "bfloat16", "float16"] | None = None
    """Type to compute in. Default: that of config.json."""
    weights: Literal["stated", "int8"] = "stated"
    """stated: in `dtype`. int8: the rows of matrices as eight bits and a scale each, on a CPU."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """auto takes the GPUs if any are visible, else the CPU."""
    layout: Split = Split()

    def __post_init__(self):
        if not self.host.strip():
            raise ValueError("--host is empty: give an address, such as 127.0.0.1")
        if not 0 <= self.port < 2**16:
            raise ValueError(f"--port is {self.port}: it must be from 0 to {2**16 - 1}")
        if self.key is not None and self.key_file is not None:
            raise ValueError("--key and --key-file are both given: use one of them")
        if self.key is not None:
            check_key(self.key, "--key")
        if self.name is not None and not self.name.strip():
            raise ValueError("--name is empty: give one, or leave it out")
        least = dict(max_length=2, max_rows=1, max_waiting=0, max_batch_tokens=1)
        least |= dict(max_cache_tokens=Limits.page, max_body_bytes=1024)
        least |= dict(max_connections=1, max_head_bytes=1024)
        for name, low in least.items():
            value = self.__dict__[name]
            if value is not None and value < low:
                raise ValueError(
                    f"--{name.replace('_', '-')} is {value}: it must be at least {low}"
                )
        for name, low in (("head_time", 0.1), ("time_limit", 0.1), ("grace", 0.0)):
            value = self.__dict__[name]
            if not low <= value < math.inf:
                raise ValueError(
                    f"--{name.replace('_', '-')} is {value}: it must be at least {low} seconds"
                )

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
