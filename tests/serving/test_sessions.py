"""Sessions of a server's requests: places in the queue, tokens to their completions, and what is
cancelled, with an engine that only takes notes; and how a pool of pages grows.
"""

import asyncio
from types import SimpleNamespace

import pytest

from dolmen.serving.block_table import BlockTable
from dolmen.serving.http.loop import ServerMetrics
from dolmen.serving.http.protocol import ApiError
from dolmen.serving.http.request_parser import ParsedRequest
from dolmen.serving.http.session import Sessions
from dolmen.serving.request import FinishedSequence, NewToken, StepOutput


class Letters:
    """A tokenizer of letters: token 65 is A."""

    def encode(self, text: str, **_) -> list[int]:
        return [ord(letter) for letter in text]

    def decode(self, tokens: list[int], **_) -> str:
        return "".join(map(chr, tokens))

    def get_vocab(self) -> dict[str, int]:
        return {chr(token): token for token in range(128)}


class Notes:
    """What an engine's loop was told."""

    def __init__(self):
        self.submitted, self.cancelled = 7, []
        self.load = SimpleNamespace(running=2, pages=5)

    def submit(self, request) -> int:
        self.submitted += 1
        return self.submitted

    def cancel(self, number: int, sample: int | None = None) -> None:
        self.cancelled.append((number, sample))


def make(capacity: int = 6, seconds: float = 60.0) -> tuple[Sessions, Notes]:
    notes = Notes()
    return Sessions(notes, Letters(), ServerMetrics(), capacity, seconds), notes


def request(prompts: int, stop: tuple[str, ...] = ()) -> ParsedRequest:
    return ParsedRequest([SimpleNamespace(tokens=[1, 2, 3])] * prompts, stop, None, False)


def finished(number: int, sample: int, why: str, tokens: int = 2, **more) -> FinishedSequence:
    return FinishedSequence(number, sample, 0, [65] * tokens, why, [], [], 0, **more)


def run(test):
    """Run a coroutine in an event loop, as the server's thread does."""
    return asyncio.run(test)


async def texts_of(session) -> list[tuple[int, str, str | None]]:
    return [(d.index, d.text, d.finish) async for deltas in session.deltas() for d in deltas]


def test_a_place_is_taken_by_each_completion_until_its_session_closes():
    async def test():
        sessions, _ = make(capacity=5)
        first = sessions.admit(3, lambda: None)
        assert sessions.num_completions == 3
        with pytest.raises(ApiError, match="3 completions are running or waiting, of at most 5"):
            sessions.admit(3, lambda: None)
        with pytest.raises(ApiError, match="6 completions are requested, .* at most 5"):
            sessions.admit(6, lambda: None)
        second = sessions.admit(2, lambda: None)
        value = sessions.metrics.registry.get_sample_value
        # two run in the engine, so three wait
        assert value("dolmen_completions_running") == 2 and value("dolmen_cache_pages") == 5
        assert value("dolmen_completions_waiting") == 3
        for session in (first, second):
            session._first, session._num_prompts = 0, 0  # nothing was submitted
            session.close()
        assert sessions.num_completions == 0 and value("dolmen_completions_waiting") == 0
        sessions.close(ApiError(503, "the server stops"))
        with pytest.raises(ApiError, match="the server stops"):
            sessions.admit(1, lambda: None)

    run(test())


def test_tokens_reach_the_completion_of_their_prompt_and_sample():
    async def test():
        sessions, notes = make()
        session = sessions.admit(4, lambda: None)
        session.submit(request(2))  # requests 8 and 9, two samples each
        other = sessions.admit(1, lambda: None)
        other.submit(request(1))
        new = [
            NewToken(n, s, ord(letter), None)
            for n, s, letter in (
                (9, 1, "d"),
                (8, 0, "a"),
                (9, 0, "c"),
                (8, 1, "b"),
                (10, 0, "x"),
                (99, 0, "?"),
            )
        ]
        ends = [finished(9, 1, "stop"), finished(8, 1, "length"), finished(8, 0, "cancelled")]
        sessions.dispatch(StepOutput(new, ends))
        sessions.dispatch(StepOutput([], [finished(8, 0, "stop"), finished(9, 0, "length")]))
        found: dict[int, str] = {}
        reasons = {}
        for index, text, why in await texts_of(session):
            found[index] = found.get(index, "") + text
            reasons |= {index: why} if why else {}
        assert found == {0: "a", 1: "b", 2: "c", 3: "d"}
        assert reasons == {0: "stop", 1: "length", 2: "length", 3: "stop"}
        session.close()
        assert notes.cancelled == [] and set(sessions.by_number) == {10}
        other.close()
        assert notes.cancelled == [(10, None)] and not sessions.by_number and not sessions.open

    run(test())


def test_a_stop_string_ends_one_sample_alone():
    async def test():
        sessions, notes = make()
        session = sessions.admit(2, lambda: None)
        session.submit(request(1, stop=("!",)))
        sessions.dispatch(StepOutput([NewToken(8, 1, ord(c), None) for c in "hi!more"]))
        assert notes.cancelled == [(8, 1)]
        assert [c.finish for c in session.completions] == [None, "stop"]
        assert session.completions[1].count == 3 and session.completions[1].text.whole == "hi"
        session.close()
        assert notes.cancelled == [(8, 1), (8, None)]

    run(test())


@pytest.mark.parametrize("how", ("not finite", "the engine", "the time"))
def test_a_session_that_fails_tells_it_in_place_of_the_next_delta(how, monkeypatch):
    async def test():
        monkeypatch.setattr("dolmen.serving.http.session.ERROR_TIME", 0.01)
        sessions, notes = make(seconds=0.01 if how == "the time" else 60.0)
        aborted = []
        session = sessions.admit(1, lambda: aborted.append(1))
        session.submit(request(1))
        if how == "not finite":
            sessions.dispatch(StepOutput([], [finished(8, 0, "not finite", tokens=4)]))
        elif how == "the engine":
            sessions.fail(ApiError(500, "it broke"))
            with pytest.raises(ApiError, match="it broke"):
                sessions.admit(1, lambda: None)
        said = {
            "not finite": "the logits of new token 5 are not finite",
            "the engine": "it broke",
            "the time": "exceeded the server's time limit of 0.01 seconds",
        }
        with pytest.raises(ApiError, match=said[how]) as error:
            await texts_of(session)
        assert (error.value.status == 504) == (how == "the time")
        # who does not read the error is left after a while
        await asyncio.sleep(0.05)
        assert aborted == [1]
        session.close()
        assert notes.cancelled == [(8, None)]

    run(test())


def test_drafts_and_prompts_are_counted():
    async def test():
        sessions, _ = make()
        session = sessions.admit(2, lambda: None)
        session.submit(request(2))
        more = dict(num_draft_tokens=9, num_accepted_tokens=4)
        ends = [finished(8, 0, "stop", **more), finished(77, 0, "stop", num_draft_tokens=1)]
        sessions.dispatch(StepOutput([], ends))
        value = sessions.metrics.registry.get_sample_value
        assert value("dolmen_spec_decode_num_draft_tokens_total") == 10
        assert value("dolmen_spec_decode_num_accepted_tokens_total") == 4
        assert value("dolmen_prompt_tokens_total") == 6
        session.close()

    run(test())


def test_a_pool_of_pages_grows_by_a_quarter_at_least():
    """So that pages of a growing cache are copied a few times each, however it grows."""
    table, sizes = BlockTable(8), [0]
    for needed in range(1, 2001):
        table._grow_pool(needed)
        sizes += [table.total] if table.total != sizes[-1] else []
        assert table.total >= needed and len(table._free) == table.total
    assert all(after >= before * 5 // 4 for before, after in zip(sizes, sizes[1:], strict=False))
    assert sizes[:5] == [0, 1, 2, 3, 4] and len(sizes) < 40 and sizes[-1] < 2500
    table._grow_pool(9000)
    assert table.total == 9000 and sorted(table._free) == [*range(9000)]
