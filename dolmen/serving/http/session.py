"""Sessions: the requests in progress, as the thread of the event loop sees them.

    Sessions.admit      takes a request, or refuses it (429): the number of completions is bounded
    Session.submit      submits its prompts to the engine's loop
    Sessions.dispatch    hands the tokens of a step to their sessions, which turn them into text
    Session.deltas      yields deltas of text as they come
    Session.close       cancels what is unfinished, and frees its place

A session fails by an `ApiError` in place of the next delta: its time limit is over, its client has
disconnected, the server stops, or the engine has failed. Whatever happens, `close` is called once:
it is what frees pages of the KV cache and the place in the queue.
"""

import asyncio
from collections.abc import AsyncIterator, Callable, Iterable
from http import HTTPStatus

from dolmen.data.tokenizer import PreTrainedTokenizer
from dolmen.serving.generation import Detokenizer
from dolmen.serving.http.loop import EngineLoop, RequestTimer, ServerMetrics
from dolmen.serving.http.protocol import ApiError
from dolmen.serving.http.request_parser import ParsedRequest
from dolmen.serving.http.responses import CompletionStream, Delta, TokenTexts
from dolmen.serving.request import FinishedSequence, NewToken, StepOutput

ERROR_TIME = 1.0  # seconds in which a client must read the error that ends its response


class Session:
    """The completions of one request. Created by `Sessions.admit`."""

    def __init__(self, sessions: "Sessions", count: int, abort: Callable[[], None]):
        """`count`: number of its completions, over all prompts. `abort`: closes the client's
        connection at once. Starts the time limit.
        """
        self.sessions, self.count, self.abort = sessions, count, abort
        self._aborting: asyncio.TimerHandle | None = None
        self.timer = RequestTimer(sessions.metrics)
        self.completions: list[CompletionStream] = []
        self._num_prompts = 0
        self._first = 0  # number of its first engine request
        # unbounded, but a completion has at most max_new_tokens
        # deltas
        self._queue: asyncio.Queue[Delta | ApiError] = asyncio.Queue()
        self._deadline = asyncio.get_running_loop().call_later(
            sessions.seconds, lambda: self.fail(self.timeout_error())
        )

    def submit(self, request: ParsedRequest) -> None:
        """Submit the request's prompts to the engine for its next step, and register this session
        for their tokens. Counts the prompt tokens in the metrics.
        """
        sessions = self.sessions
        token_texts = None if request.top is None else sessions.token_texts
        self.completions = [
            CompletionStream(index, Detokenizer(sessions.tokenizer, request.stop), token_texts)
            for index in range(self.count)
        ]
        numbers = [sessions.loop.submit(r) for r in request.requests]
        self._first, self._num_prompts = numbers[0], len(numbers)
        sessions.by_number |= dict.fromkeys(numbers, self)
        sessions.metrics.prompt.inc(request.prompt_tokens)

    def fail(self, problem: ApiError) -> None:
        """End the session with an error in place of the next delta. The connection is aborted
        ERROR_TIME (1 s) later, unless the session is closed: a client that does not read would keep
        its place in the queue.
        """
        self._queue.put_nowait(problem)
        if self._aborting is None:
            self._aborting = asyncio.get_running_loop().call_later(ERROR_TIME, self.abort)

    def close(self) -> None:
        """Cancel unfinished completions, stop the timers, and free the session's place in the
        queue.
        """
        self._deadline.cancel()
        if self._aborting is not None:
            self._aborting.cancel()
        self.sessions.open.discard(self)
        for number in range(self._first, self._first + self._num_prompts):
            self.sessions.by_number.pop(number, None)
            # the engine frees the pages before its next step
            if any(completion.finish is None for completion in self._completions_of(number)):
                self.sessions.loop.cancel(number)

    async def deltas(self) -> AsyncIterator[list[Delta]]:
        """Yield lists of deltas as they come, until all completions are finished. Raises ApiError
        if the session has failed.
        """
        while (
            any(completion.finish is None for completion in self.completions)
            or not self._queue.empty()
        ):
            items = [await self._queue.get()]
            # all that has come while the client was read to: one write for many tokens
            while not self._queue.empty():
                items.append(self._queue.get_nowait())
            for item in items:
                if isinstance(item, ApiError):
                    raise item
            yield [item for item in items if isinstance(item, Delta)]

    def add_token(self, token: NewToken) -> None:
        """Add a sampled token to its completion and queue the delta, if any; a token of a finished
        completion is ignored. A token that finishes it (for example at a stop string) cancels the
        sample in the engine.
        """
        completion = self._completions_of(token.number)[token.sample]
        if completion.finish is not None:
            return
        self.timer.token()
        delta = completion.add(token)
        if delta is not None:
            self._queue.put_nowait(delta)
        if completion.finish is not None:
            self.sessions.loop.cancel(token.number, token.sample)

    def finish(self, finished: FinishedSequence) -> None:
        """Finish a completion for the engine's reason, or fail the session if its logits are not
        finite.
        """
        completion = self._completions_of(finished.number)[finished.sample]
        # before the last delta, from which the response is built
        completion.prompt_logprobs = finished.prompt_logprobs
        if completion.finish is not None:
            return
        if finished.finish_reason == "stop" or finished.finish_reason == "length":
            self._queue.put_nowait(completion.end(finished.finish_reason))
        else:
            self.fail(
                ApiError(
                    HTTPStatus.INTERNAL_SERVER_ERROR,
                    f"the logits of new token {len(finished.tokens) + 1} are not finite: the model "
                    "has diverged, or needs --dtype float32",
                    retry=False,
                )
            )

    def _completions_of(self, number: int) -> list[CompletionStream]:
        """Return the completions of the prompt that is engine request `number`, one per sample."""
        # engine numbers of a request are consecutive, as one thread submits them
        samples = self.count // self._num_prompts
        begin = (number - self._first) * samples
        return self.completions[begin : begin + samples]

    def timeout_error(self) -> ApiError:
        """Return the error (504) of a request over the time limit."""
        return ApiError(
            HTTPStatus.GATEWAY_TIMEOUT,
            f"the request has exceeded the server's time limit of {self.sessions.seconds:g} "
            "seconds",
            code="timeout",
            retry=False,
        )


class Sessions:
    """All open sessions of a server, and who gets which tokens. Called only by the thread of its
    event loop.
    """

    def __init__(
        self,
        loop: EngineLoop,
        tokenizer: PreTrainedTokenizer,
        metrics: ServerMetrics,
        capacity: int,
        seconds: float,
    ):
        """`capacity`: most completions that run or wait. `seconds`: time limit of a request."""
        self.loop, self.tokenizer, self.metrics = loop, tokenizer, metrics
        self.capacity, self.seconds = capacity, seconds
        self.token_texts = TokenTexts(tokenizer)
        self.open: set[Session] = set()
        self.by_number: dict[int, Session] = {}
        self.closed: ApiError | None = None
        """Error of further requests; None while the server admits them."""
        metrics.register_gauges(lambda: loop.load, lambda: self.num_completions)

    @property
    def num_completions(self) -> int:
        """Number of completions of all open sessions, running or waiting."""
        return sum(session.count for session in self.open)

    def admit(self, count: int, abort: Callable[[], None]) -> Session:
        """Return a new session for `count` completions. Raises ApiError if the queue is full (429),
        if `count` exceeds it (400), or if the server stops (503).
        """
        if self.closed is not None:
            raise self.closed
        if count > self.capacity:
            raise ApiError(
                HTTPStatus.BAD_REQUEST,
                f"{count:,} completions are requested, but the server allows at most "
                f"{self.capacity:,}",
                param="n",
            )
        # bounds the memory of waiting requests; clients retry
        if self.num_completions + count > self.capacity:
            raise ApiError(
                HTTPStatus.TOO_MANY_REQUESTS,
                f"{self.num_completions:,} completions are running or waiting, of at most "
                f"{self.capacity:,}: try again later",
                code="queue_full",
            )
        session = Session(self, count, abort)
        # counts towards the capacity from here on
        self.open.add(session)
        return session

    def dispatch(self, output: StepOutput) -> None:
        """Hand the tokens and finished samples of a step to their sessions; those of closed
        sessions are dropped.
        """
        for token in output.new_tokens:
            session = self.by_number.get(token.number)
            if session is not None:
                session.add_token(token)
        for finished in output.finished:
            self.metrics.drafted.inc(finished.num_draft_tokens)
            self.metrics.accepted.inc(finished.num_accepted_tokens)
            session = self.by_number.get(finished.number)
            if session is not None and finished.finish_reason != "cancelled":
                session.finish(finished)

    def close(self, problem: ApiError) -> None:
        """Answer further requests with this error; open ones continue."""
        self.closed = problem

    def fail(self, problem: ApiError) -> None:
        """Fail all open sessions with this error, and refuse further requests."""
        self.close(problem)
        # a copy, as failed sessions leave `open`
        sessions: Iterable[Session] = list(self.open)
        for session in sessions:
            session.fail(problem)
