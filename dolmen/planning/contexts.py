"""What an action of a pipeline is like, as far as its rows depend on it; and the smallest pipeline
in which a rank does all that one of ours does.
"""

from collections import deque
from dataclasses import replace
from typing import Any, NamedTuple

from dolmen.parallel.actions import Action, Schedule
from dolmen.parallel.channels import message_made, message_needed, messages_sent, routes
from dolmen.training.config import RunConfig


class Context(NamedTuple):
    """All that the rows of an action depend on, of its place in its rank's list."""

    kind: str
    chunk: int
    first: bool
    """The stage embeds; ..."""
    last: bool
    """... and has the head."""
    needs: str
    """Where its message comes from: "" none, "here", "there"."""
    makes: str
    """Where what it makes goes."""
    posted: int
    """Receives that are begun before it."""
    at_once: int
    """Receives that are begun by itself."""
    before: str
    """The action before, ..."""
    before_here: str
    """... and of the same chunk: what is gathered."""
    more: bool
    """Whether gradients are there already."""
    sent: str
    """The action before, if it sent something: that is let go as this one begins."""
    ends_chunk: bool
    ends: bool
    """It makes the last weight gradients of its chunk, and of all."""


def contexts(schedule: Schedule, rank: int) -> list[Context]:
    """Of each action of a rank."""
    actions = schedule.actions[rank]
    left = [action.chunk for action in actions if action.kind in "BW"]
    coming = {
        sender: deque(messages_sent(schedule, sender, rank))
        for sender, receiver in routes(schedule)
        if receiver == rank
    }
    posted: set[Any] = set()

    def post(action: Action | None) -> int:
        message = message_needed(schedule, rank, action) if action is not None else None
        peer = rank if message is None else schedule.rank_of(message.source)
        number = 0
        while peer != rank and message not in posted:
            posted.add(coming[peer].popleft())
            number += 1
        return number

    def where(stage: int) -> str:
        return "here" if schedule.rank_of(stage) == rank else "there"

    found, before, of_chunk, sent, made = [], "", {}, "", set()
    for action, ahead in zip(actions, [*actions[1:], None], strict=True):
        kind, _, chunk = action
        stage = schedule.stage_of(rank, chunk)
        need, make = message_needed(schedule, rank, action), message_made(schedule, rank, action)
        at_once, begun = post(action), post(ahead)
        makes_gradients = kind in "BW"
        if makes_gradients:
            left.remove(chunk)
        found.append(
            Context(
                kind,
                chunk,
                stage == 0,
                stage == schedule.stages - 1,
                where(need.source) if need else "",
                where(make.stage) if make else "",
                begun,
                at_once,
                before,
                of_chunk.get(chunk, ""),
                chunk in made,
                sent,
                makes_gradients and chunk not in left,
                makes_gradients and not left,
            )
        )
        before = of_chunk[chunk] = f"{kind}.{chunk}"
        sent = before if make and where(make.stage) == "there" else ""
        if makes_gradients:
            made.add(chunk)
    return found


def text_of(context: Context) -> str:
    return " ".join(map(str, context))


def smallest(run: RunConfig, schedule: Schedule, rank: int) -> tuple[RunConfig, Schedule, int]:
    """The run of the smallest pipeline of which a rank's list has all contexts of ours, its
    schedule, and the rank of pp.
    """
    wanted, layout = set(contexts(schedule, rank)), run.layout
    # of two ranks the ends are all, so that what crosses one crosses the other
    sizes = range(layout.pp, layout.pp + 1) if layout.pp <= 2 else range(3, min(layout.pp, 8) + 1)
    most = min(schedule.micros, 4 * sizes[-1] * schedule.chunks)
    of_file = layout.schedule.endswith((".txt", ".yaml"))
    for pp in () if of_file else sizes:
        for micros in range(1, most + 1):
            one = with_pipeline(run, pp, micros)
            try:
                found = one.layout.make_schedule(one.train.global_batch_size, one.microbatch_size)
            except ValueError:  # of so many microbatches there is none
                continue
            for at in range(pp):
                if wanted <= set(contexts(found, at)):
                    return one, found, at
    return with_pipeline(run, layout.pp, schedule.micros), schedule, rank


def with_pipeline(run: RunConfig, pp: int, micros: int) -> RunConfig:
    size, layout = run.microbatch_size, replace(run.layout, pp=pp)
    rows = (layout.dp or 1) * micros * size
    train = replace(run.train, global_batch_size=rows, microbatch_size=size)
    return replace(run, layout=layout, train=train)
