"""What an engine is asked, and what it tells: plain values, which every rank is given alike."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

from dolmen.serving.options import Options
from dolmen.serving.pages import SIZE

LogProbabilities = Literal["raw", "processed"]
"""Of the model's own distribution, as training sees it; or of the one that is drawn from."""
Why = Literal["stop", "length", "not finite", "cancelled"]
"""Its last token ends it; it has max_new_tokens; its scores are not numbers; it was cancelled."""


@dataclass(frozen=True)
class Request:
    """A prompt, and how it is continued."""

    tokens: Sequence[int]
    """Of the prompt."""
    options: Options = Options()
    id: int | str = 0
    """Draws follow from (seed, id, sample) alone: a row's own id, or its line."""
    seed: int = 0
    samples: int = 1
    """Continuations, each drawn by itself. They share the pages of the prompt."""
    logprobs: LogProbabilities | None = None
    """Which log-probabilities of the new tokens are wanted."""
    top: int = 0
    """So many likeliest tokens are told beside each, with theirs."""
    prompt_logprobs: bool = False
    """Those of the prompt's tokens, too, after its first: always `raw`."""
    adapter: str | None = None
    """The name of the engine's adapter that reads and writes it; None: the base alone does."""


@dataclass(frozen=True)
class LogProb:
    """Of one token."""

    logprob: float
    top: tuple[tuple[int, float], ...] = ()
    """Ids and log-probabilities of the likeliest tokens, from the likeliest on."""


@dataclass(frozen=True)
class Chosen:
    """A new token."""

    number: int
    """Of the request, as `Engine.add` gave it."""
    sample: int
    token: int
    logprob: LogProb | None


@dataclass(frozen=True)
class Ended:
    """A sample that has ended."""

    number: int
    sample: int
    id: int | str
    tokens: list[int]
    """The new ones; the last is one that stops where it stopped at one."""
    why: Why
    logprobs: list[LogProb]
    """Of each new token, where they were asked for."""
    prompt_logprobs: list[LogProb]
    """Of each token of the prompt but the first, where they were asked for."""
    close: int
    """Tokens beside which another lay within `sample.CLOSE`: in another batch or layout it may
    have been that one.
    """


@dataclass(frozen=True)
class Happened:
    """In one step."""

    chosen: list[Chosen] = field(default_factory=list)
    ended: list[Ended] = field(default_factory=list)
    read: int = 0
    """Tokens that the model has read."""


@dataclass(frozen=True)
class Limits:
    """What an engine may take at once."""

    rows: int = 256
    """Texts in a forward, each sample counted."""
    tokens: int = 1 << 12
    """Tokens of a forward (max_batch_tokens). A prompt that sees both ways is read whole, however
    long it is.
    """
    pages: int | None = None
    """Pages of the cache. A text that no page is left for is put back and read again later, the
    youngest first. None: as many as the texts need.
    """
    page: int = SIZE
    """Tokens of a page."""

    def __post_init__(self) -> None:
        known = dict(rows=self.rows, tokens=self.tokens, pages=self.pages, page=self.page)
        for name, value in known.items():
            if value is not None and value < 1:
                raise ValueError(f"limits.{name} is {value}: it must be at least 1")
