"""Requests that are being answered, as the thread that talks to clients knows them.

    place      takes a request, or refuses it (429): the number of completions is bounded
    open       submits its prompts to the engine's loop
    tell       turns the result of a step into pieces of text
    pieces     yields them as they come
    close      cancels what has not ended, and frees the place

A session ends early by a `Problem`, which takes the place of the next piece: its time is over, its
client has gone, the server stops, or the engine has failed.

`Written` turns the tokens of one completion into pieces of text with their log-probabilities. A
piece is text that is certain (text.py): whole characters, and nothing that may be the beginning of
a stop string. A response that is sent whole is its pieces put together, so it equals the one that
is streamed.

    tokens          Hel   lo   \\n   \\n  Bye            with the stop string \\n\\n
    pieces         "Hel" "lo"   -    end: "stop"        the line end waited, and is not part of it
"""

import asyncio
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from http import HTTPStatus
from typing import Literal

from dolmen.data.tokenizer import PreTrainedTokenizer, bytes_of
from dolmen.serving.detokenizer import UNFINISHED, Detokenizer
from dolmen.serving.http.loop import Loop, Metrics, Timer
from dolmen.serving.http.protocol import Problem
from dolmen.serving.http.reader import Asked
from dolmen.serving.request import FinishedSequence, LogProb, NewToken, StepOutput

LAST = 1.0  # seconds in which a client must read the error that ends its response early

Finish = Literal["stop", "length"]
LEAST = -9999.0
"""Log-probability reported for a token of probability 0, as OpenAI does; JSON has no infinity."""


@dataclass(frozen=True)
class Likely:
    """A token, as text, and its log-probability."""

    text: str
    logprob: float
    part: bytes | None = None
    """Bytes of a token that is a part of a character and so has no text of its own."""

    @property
    def bytes(self) -> list[int] | None:
        """Its UTF-8 bytes; None if they are not known."""
        if self.part is None and UNFINISHED in self.text:
            return None
        return list(self.text.encode() if self.part is None else self.part)

    @property
    def escaped(self) -> str:
        r"""Its text, or the bytes of a part of a character, as \xe4\xbd: no two parts alike."""
        if self.part is None:
            return self.text
        return "".join(f"\\x{byte:02x}" for byte in self.part)

    @property
    def name(self) -> str:
        r"""The same as a key of OpenAI's completions: bytes:\xe4\xbd."""
        return self.text if self.part is None else f"bytes:{self.escaped}"


@dataclass(frozen=True)
class Entry:
    """Log-probabilities of one token of a completion."""

    own: Likely
    top: Sequence[Likely]
    offset: int
    """Characters of the completion before it."""


@dataclass(frozen=True)
class Piece:
    """The next part of a completion."""

    index: int
    """Index of the completion within its request."""
    text: str
    entries: Sequence[Entry] = ()
    finish: Finish | None = None
    """Finish reason, on the last piece."""


class Tokens:
    """Texts of single tokens, each as it is decoded behind other text."""

    def __init__(self, tokenizer: PreTrainedTokenizer):
        ids = tokenizer.encode("a", add_special_tokens=False)
        before = tokenizer.decode(ids)

        @lru_cache(maxsize=1 << 16)
        def text(token: int) -> str:
            both = tokenizer.decode([*ids, token])
            return both.removeprefix(before) if both.startswith(before) else both

        self.text = text
        self.written = {number: token for token, number in tokenizer.get_vocab().items()}

    def likely(self, token: int, logprob: float) -> Likely:
        text = self.text(token)
        part = bytes_of(self.written.get(token, text)) if UNFINISHED in text else None
        return Likely(text, max(logprob, LEAST), part)

    def entry(self, token: int, found: LogProb, offset: int) -> Entry:
        """Return the entry of a sampled token, or of a token of the prompt."""
        top = [self.likely(one, value) for one, value in found.top]
        return Entry(self.likely(token, found.logprob), top, offset)


@dataclass(eq=False)
class Written:
    """A completion until now."""

    index: int
    text: Detokenizer
    known: Tokens | None
    """None: no log-probabilities are requested."""
    count: int = 0
    """Number of tokens, with the one that ended it."""
    finish: Finish | None = None
    _shown: int = 0
    _waiting: list[Entry] = field(default_factory=list)

    def add(self, chosen: NewToken) -> Piece | None:
        """Add a token and return the piece that is certain now, if any."""
        offset = len(self.text.whole)
        self.count += 1
        if self.known is not None and chosen.logprob is not None:
            self._waiting.append(self.known.entry(chosen.token, chosen.logprob, offset))
        new = self.text.add(chosen.token)
        self._shown += len(new)
        if self.text.stopped is not None:
            return self._last(new, "stop")
        entries = self._certain(self._shown)
        return Piece(self.index, new, entries) if new or entries else None

    def end(self, why: Finish) -> Piece:
        """End the completion and return its last piece."""
        new = self.text.end()
        return self._last(new, "stop" if self.text.stopped is not None else why)

    def _last(self, new: str, why: Finish) -> Piece:
        self.finish = why
        cut = self.text.stopped is not None
        entries = self._certain(len(self.text.whole)) if cut else self._waiting
        self._waiting = []
        return Piece(self.index, new, entries, why)

    def _certain(self, end: int) -> list[Entry]:
        """Take the entries of tokens that begin before the character `end`."""
        found = [entry for entry in self._waiting if entry.offset < end]
        self._waiting = self._waiting[len(found) :]
        return found


class Session:
    """The completions of one request. Created by `Sessions.place`."""

    def __init__(self, sessions: "Sessions", count: int, abort: Callable[[], None]):
        """`count`: its completions; `abort`: ends the client's connection."""
        self.sessions, self.count, self.abort = sessions, count, abort
        self._aborting: asyncio.TimerHandle | None = None
        self.timer = Timer(sessions.metrics)
        self.written: list[Written] = []
        self.of_prompts: dict[int, list[LogProb]] = {}
        """Completion -> log-probabilities of its prompt's tokens but the first."""
        self.asked: Asked | None = None
        self._first = 0  # number of its first engine request
        self._coming: asyncio.Queue[Piece | Problem] = asyncio.Queue()
        self._deadline = asyncio.get_running_loop().call_later(
            sessions.seconds, lambda: self.fail(self.late())
        )

    def open(self, asked: Asked) -> None:
        """Submit its prompts to the engine's next step."""
        own, self.asked = self.sessions, asked
        known = None if asked.top is None else own.tokens
        self.written = [
            Written(index, Detokenizer(own.tokenizer, asked.stop), known)
            for index in range(self.count)
        ]
        numbers = [own.loop.submit(request) for request in asked.requests]
        self._first = numbers[0]
        own.by_number |= dict.fromkeys(numbers, self)
        own.metrics.prompt.inc(asked.prompt_tokens)

    def fail(self, problem: Problem) -> None:
        """End with this error. A client that does not read it within LAST seconds is cut off: a
        response that waits for its client would otherwise keep the place.
        """
        self._coming.put_nowait(problem)
        if self._aborting is None:
            self._aborting = asyncio.get_running_loop().call_later(LAST, self.abort)

    def close(self) -> None:
        """Cancel what has not ended, and free its place."""
        self._deadline.cancel()
        if self._aborting is not None:
            self._aborting.cancel()
        self.sessions.open.discard(self)
        for number in range(self._first, self._first + self._prompts):
            self.sessions.by_number.pop(number, None)
            if any(one.finish is None for one in self._of(number)):
                self.sessions.loop.cancel(number)

    async def pieces(self) -> AsyncIterator[list[Piece]]:
        """Yield pieces as they come, until all completions have ended. Raises Problem."""
        while any(one.finish is None for one in self.written) or not self._coming.empty():
            found = [await self._coming.get()]
            while not self._coming.empty():
                found.append(self._coming.get_nowait())
            for one in found:
                if isinstance(one, Problem):
                    raise one
            yield [one for one in found if isinstance(one, Piece)]

    def take(self, chosen: NewToken) -> None:
        """Take a sampled token, unless its completion has ended in a stop string."""
        one = self._at(chosen.number, chosen.sample)
        if one.finish is not None:
            return
        self.timer.token()
        piece = one.add(chosen)
        if piece is not None:
            self._coming.put_nowait(piece)
        if one.finish is not None:
            self.sessions.loop.cancel(chosen.number, chosen.sample)

    def end(self, ended: FinishedSequence) -> None:
        """Take the end of a completion."""
        one = self._at(ended.number, ended.sample)
        self.of_prompts[one.index] = ended.prompt_logprobs
        if one.finish is not None:
            return
        if ended.finish_reason == "stop" or ended.finish_reason == "length":
            self._coming.put_nowait(one.end(ended.finish_reason))
        else:
            self.fail(
                Problem(
                    HTTPStatus.INTERNAL_SERVER_ERROR,
                    f"the scores of new token {len(ended.tokens) + 1} are not finite: the model "
                    "has diverged, or needs --dtype float32",
                    retry=False,
                )
            )

    @property
    def _prompts(self) -> int:
        return 0 if self.asked is None else len(self.asked.requests)

    @property
    def _samples(self) -> int:
        return self.count // max(self._prompts, 1)

    def _of(self, number: int) -> list[Written]:
        """Completions of one of its prompts."""
        begin = (number - self._first) * self._samples
        return self.written[begin : begin + self._samples]

    def _at(self, number: int, sample: int) -> Written:
        return self._of(number)[sample]

    def late(self) -> Problem:
        """Return the error of a request over the time limit."""
        return Problem(
            HTTPStatus.GATEWAY_TIMEOUT,
            f"the request has taken over {self.sessions.seconds:g} seconds, the server's limit",
            code="timeout",
            retry=False,
        )


class Sessions:
    """All sessions of a server. Only the thread of its event loop calls it."""

    def __init__(
        self,
        loop: Loop,
        tokenizer: PreTrainedTokenizer,
        metrics: Metrics,
        capacity: int,
        seconds: float,
    ):
        """`capacity`: completions that run or wait at most; `seconds`: time limit of a request."""
        self.loop, self.tokenizer, self.metrics = loop, tokenizer, metrics
        self.capacity, self.seconds = capacity, seconds
        self.tokens = Tokens(tokenizer)
        self.open: set[Session] = set()
        self.by_number: dict[int, Session] = {}
        self.closed: Problem | None = None
        """Error of further requests; None while the server takes them."""
        metrics.watch(lambda: loop.load, lambda: self.taken)

    @property
    def taken(self) -> int:
        """Completions of all requests."""
        return sum(session.count for session in self.open)

    def place(self, count: int, abort: Callable[[], None]) -> Session:
        """Return a session for `count` completions. Raises Problem if the queue is full."""
        if self.closed is not None:
            raise self.closed
        if count > self.capacity:
            raise Problem(
                HTTPStatus.BAD_REQUEST,
                f"{count:,} answers are asked for, and the server takes {self.capacity:,} at most",
                param="n",
            )
        if self.taken + count > self.capacity:
            raise Problem(
                HTTPStatus.TOO_MANY_REQUESTS,
                f"{self.taken:,} answers are being written or wait, of {self.capacity:,} at most: "
                "come again",
                code="queue_full",
            )
        session = Session(self, count, abort)
        self.open.add(session)
        return session

    def tell(self, output: StepOutput) -> None:
        """Hand the result of a step to its sessions."""
        for chosen in output.new_tokens:
            session = self.by_number.get(chosen.number)
            if session is not None:
                session.take(chosen)
        for ended in output.finished:
            session = self.by_number.get(ended.number)
            if session is not None and ended.finish_reason != "cancelled":
                session.end(ended)

    def close(self, problem: Problem) -> None:
        """Refuse further requests with this error."""
        self.closed = problem

    def fail(self, problem: Problem) -> None:
        """End all open sessions with this error, and refuse further requests."""
        self.close(problem)
        sessions: Iterable[Session] = list(self.open)
        for session in sessions:
            session.fail(problem)
