"""Requests that are being answered, as the thread that talks to clients knows them.

    place      a request is taken, or told to come again: so many answers are held at most
    open       its prompts go to the engine's loop
    tell       what a step has brought becomes pieces of text
    pieces     ... which whoever answers the client takes as they come
    close      what has not ended by then is cancelled, and the place is free

A session ends early by a `Problem`, which takes the place of the next piece: its time is over, its
client has gone, the server stops, or the engine has failed.
"""

import asyncio
from collections.abc import AsyncIterator, Iterable
from http import HTTPStatus

from dolmen.data.tokenizer import PreTrainedTokenizer
from dolmen.serving.http.loop import Loop
from dolmen.serving.http.metrics import Metrics, Timer
from dolmen.serving.http.problem import Problem
from dolmen.serving.http.reader import Asked
from dolmen.serving.http.written import Piece, Tokens, Written
from dolmen.serving.request import Chosen, Ended, Happened, LogProb
from dolmen.serving.text import Incremental


class Session:
    """The answers to one request. Made by `Sessions.place`."""

    def __init__(self, sessions: "Sessions", count: int):
        """`count`: of its answers."""
        self.sessions, self.count = sessions, count
        self.timer = Timer(sessions.metrics)
        self.written: list[Written] = []
        self.of_prompts: dict[int, list[LogProb]] = {}
        """By answer: the log-probabilities of its prompt's tokens but the first."""
        self.asked: Asked | None = None
        self._first = 0  # number of its first engine request
        self._coming: asyncio.Queue[Piece | Problem] = asyncio.Queue()
        self._deadline = asyncio.get_running_loop().call_later(
            sessions.seconds, lambda: self.fail(self.late())
        )

    def open(self, asked: Asked) -> None:
        """Its prompts join the engine's next step."""
        own, self.asked = self.sessions, asked
        known = None if asked.top is None else own.tokens
        self.written = [
            Written(index, Incremental(own.tokenizer, asked.stop), known)
            for index in range(self.count)
        ]
        numbers = [own.loop.submit(request) for request in asked.requests]
        self._first = numbers[0]
        own.by_number |= dict.fromkeys(numbers, self)
        own.metrics.prompt.inc(asked.prompt_tokens)

    def fail(self, problem: Problem) -> None:
        """It ends with this."""
        self._coming.put_nowait(problem)

    def close(self) -> None:
        """Nobody waits for it any more."""
        self._deadline.cancel()
        self.sessions.open.discard(self)
        for number in range(self._first, self._first + self._prompts):
            self.sessions.by_number.pop(number, None)
            if any(one.finish is None for one in self._of(number)):
                self.sessions.loop.cancel(number)

    async def pieces(self) -> AsyncIterator[list[Piece]]:
        """Those that have come, until all answers have ended. Raises Problem."""
        while any(one.finish is None for one in self.written) or not self._coming.empty():
            found = [await self._coming.get()]
            while not self._coming.empty():
                found.append(self._coming.get_nowait())
            for one in found:
                if isinstance(one, Problem):
                    raise one
            yield [one for one in found if isinstance(one, Piece)]

    def take(self, chosen: Chosen) -> None:
        """A token, unless its answer has come to a stop string before."""
        one = self._at(chosen.number, chosen.sample)
        if one.finish is not None:
            return
        self.timer.token()
        piece = one.add(chosen)
        if piece is not None:
            self._coming.put_nowait(piece)
        if one.finish is not None:
            self.sessions.loop.cancel(chosen.number, chosen.sample)

    def end(self, ended: Ended) -> None:
        """An answer that the engine writes no more."""
        one = self._at(ended.number, ended.sample)
        self.of_prompts[one.index] = ended.prompt_logprobs
        if one.finish is not None:
            return
        if ended.why == "stop" or ended.why == "length":
            self._coming.put_nowait(one.end(ended.why))
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
        """Answers to one of its prompts."""
        begin = (number - self._first) * self._samples
        return self.written[begin : begin + self._samples]

    def _at(self, number: int, sample: int) -> Written:
        return self._of(number)[sample]

    def late(self) -> Problem:
        """Its time is over."""
        return Problem(
            HTTPStatus.GATEWAY_TIMEOUT,
            f"the request has taken over {self.sessions.seconds:g} seconds, the server's limit",
            code="timeout",
            retry=False,
        )


class Sessions:
    """All of a server. One thread alone calls it, that of its event loop."""

    def __init__(
        self,
        loop: Loop,
        tokenizer: PreTrainedTokenizer,
        metrics: Metrics,
        capacity: int,
        seconds: float,
    ):
        """`capacity`: answers that are taken; `seconds`: that a request may take."""
        self.loop, self.tokenizer, self.metrics = loop, tokenizer, metrics
        self.capacity, self.seconds = capacity, seconds
        self.tokens = Tokens(tokenizer)
        self.open: set[Session] = set()
        self.by_number: dict[int, Session] = {}
        self.closed: Problem | None = None
        """Why none is taken any more."""
        metrics.watch(lambda: loop.load, lambda: self.taken)

    @property
    def taken(self) -> int:
        """Answers of all requests."""
        return sum(session.count for session in self.open)

    def place(self, count: int) -> Session:
        """For a request of so many answers. Raises Problem where there is none."""
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
        session = Session(self, count)
        self.open.add(session)
        return session

    def tell(self, happened: Happened) -> None:
        """What a step has brought."""
        for chosen in happened.chosen:
            session = self.by_number.get(chosen.number)
            if session is not None:
                session.take(chosen)
        for ended in happened.ended:
            session = self.by_number.get(ended.number)
            if session is not None and ended.why != "cancelled":
                session.end(ended)

    def close(self, problem: Problem) -> None:
        """No further request is taken, for this reason."""
        self.closed = problem

    def fail(self, problem: Problem) -> None:
        """All that are open end with this, and no other is taken."""
        self.close(problem)
        sessions: Iterable[Session] = list(self.open)
        for session in sessions:
            session.fail(problem)
