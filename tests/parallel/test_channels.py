"""What a rank that has sent knows of it, without processes."""

from collections.abc import Iterator
from itertools import pairwise

import pytest

from dolmen.parallel.pipeline import (
    StageMessage,
    acknowledged_messages,
    message_in,
    message_out,
    messages_sent,
    routes,
)
from dolmen.parallel.schedule import Schedule
from dolmen.parallel.simulation import make_schedule

NAMES = {"gpipe": 1, "1f1b": 1, "interleaved": 2, "zero-bubble": 1, "zero-bubble-v": 2}


def lists() -> Iterator[Schedule]:
    for name, chunks in NAMES.items():
        for ranks in (2, 3, 4):
            yield make_schedule(name, ranks, 4 * ranks, chunks)


def held(schedule: Schedule, rank: int) -> int:
    """The most tensors at once that have been sent, and are not known to have gone."""
    settled: dict[StageMessage, list[StageMessage]] = {}
    for sender, peer in routes(schedule):
        if sender == rank:
            settled |= acknowledged_messages(schedule, rank, peer)
    going: set[StageMessage] = set()
    most = 0
    for action in schedule.actions[rank]:
        needed = message_in(schedule, rank, action)
        if needed is not None:
            going -= set(settled.get(needed, ()))
        made = message_out(schedule, rank, action)
        if made is not None and schedule.rank_of(made.stage) != rank:
            going.add(made)
            most = max(most, len(going))
    return most


def test_what_is_known_to_have_gone_was_taken_before_the_answer_was_made():
    for schedule in lists():
        for rank, peer in routes(schedule):
            order = {str(action): i for i, action in enumerate(schedule.actions[peer])}
            took, made = {}, {}
            for action in schedule.actions[peer]:
                took[message_in(schedule, peer, action)] = order[str(action)]
                made[message_out(schedule, peer, action)] = order[str(action)]
            settled = acknowledged_messages(schedule, rank, peer)
            assert {*settled} == {*messages_sent(schedule, peer, rank)}
            seen = [message for gone in settled.values() for message in gone]
            assert len(seen) == len({*seen}) and {*seen} <= {*messages_sent(schedule, rank, peer)}
            for answer, gone in settled.items():
                assert all(took[message] <= made[answer] for message in gone)


@pytest.mark.parametrize("name", ("1f1b", "interleaved", "zero-bubble", "zero-bubble-v"))
def test_what_is_held_does_not_grow_with_microbatches(name):
    for rank in range(3):
        most = [held(make_schedule(name, 3, n, NAMES[name]), rank) for n in (12, 24, 48)]
        assert all(a == b for a, b in pairwise(most)) and most[0] <= 4 * NAMES[name]
