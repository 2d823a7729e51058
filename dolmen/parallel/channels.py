"""What crosses from one stage of a pipeline to the next and back, and over what.

Sends never wait, each direction between two ranks is a channel of its own (mesh.up, mesh.down), and
receives are posted in the order in which the sender's list sends, which every rank knows. So
whatever order a valid list has, no send waits for a receive that waits for it. (Over NCCL the first
of each channel would; `connect` is called before.) A stage of the same rank is handed its tensor.

A tensor that was sent is let go once it has gone. NCCL's work says so by itself. gloo's says it to
one that waits, who would wait for the receiver, too, and maybe for ever; but when a message comes
back that the receiver has sent after it took ours, ours has gone, and waiting takes no time.

    rank 0   F0 >--y0-->  ...  F1 >--y1-->  ...                 B0: dx0 came, so y0 has gone
    rank 1          y0 > F0 .. B0 >--dx0-->
"""

from collections import deque
from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.distributed as dist
from jaxtyping import Float
from torch import Tensor

from dolmen.core import ranges, transfers
from dolmen.core.mesh import Axis, Mesh
from dolmen.parallel.actions import Action, Schedule


class Message(NamedTuple):
    """What crosses from a stage to its neighbour: activations on their way up (`forward`), or their
    gradient on its way down.
    """

    forward: bool
    micro: int
    stage: int  # which needs it

    @property
    def source(self) -> int:
        """The stage it comes from."""
        return self.stage - 1 if self.forward else self.stage + 1


def message_needed(schedule: Schedule, rank: int, action: Action) -> Message | None:
    """What an action of `rank` waits for: nothing at the end of the line, nor where it is a W."""
    stage = schedule.stage_of(rank, action.chunk)
    message = Message(action.kind == "F", action.micro, stage)
    comes = action.kind != "W" and 0 <= message.source < schedule.stages
    return message if comes else None


def message_made(schedule: Schedule, rank: int, action: Action) -> Message | None:
    """What an action of `rank` sends: nothing at the end of the line, nor where it is a W."""
    stage, forward = schedule.stage_of(rank, action.chunk), action.kind == "F"
    to = stage + 1 if forward else stage - 1
    goes = action.kind != "W" and 0 <= to < schedule.stages
    return Message(forward, action.micro, to) if goes else None


def messages_sent(schedule: Schedule, sender: int, to: int) -> list[Message]:
    """What rank `sender` sends to rank `to` in a step, in order."""
    going = (message_made(schedule, sender, action) for action in schedule.actions[sender])
    return [message for message in going if message and schedule.rank_of(message.stage) == to]


def messages_settled(schedule: Schedule, sender: int, to: int) -> dict[Message, list[Message]]:
    """Of each message that rank `to` sends back to `sender`, those of `sender` that it has taken
    since the one before.
    """
    found: dict[Message, list[Message]] = {}
    taken: list[Message] = []
    for action in schedule.actions[to]:
        needed = message_needed(schedule, to, action)
        if needed is not None and schedule.rank_of(needed.source) == sender:
            taken.append(needed)
        made = message_made(schedule, to, action)
        if made is not None and schedule.rank_of(made.stage) == sender:
            found[made], taken = taken, []
    return found


def axis_of(mesh: Mesh, sender: int, receiver: int) -> Axis:
    """What a tensor from `sender` to `receiver`, ranks of pp, goes over: the same for both."""
    return mesh.up if receiver > sender else mesh.down


class Channels:
    """Sends and receives of this rank in one step, of tensors like those that `boundary` makes."""

    def __init__(self, schedule: Schedule, mesh: Mesh, boundary: Callable[[], Tensor]):
        self.schedule, self.mesh, self.boundary = schedule, mesh, boundary
        me = mesh.pp.rank
        self.coming = {
            sender: deque(messages_sent(schedule, sender, me))
            for sender, receiver in routes(schedule)
            if receiver == me
        }
        self.posted: dict[Message, tuple[dist.Work | None, Tensor]] = {}
        self.going: dict[Message, tuple[dist.Work, Tensor]] = {}
        """In the order of sending: a tensor under way is held here."""
        self.settled = {
            message: gone
            for peer in self.coming
            for message, gone in messages_settled(schedule, me, peer).items()
        }

    def send(self, message: Message, tensor: Float[Tensor, "..."]) -> None:
        """Begin to send `tensor` to the rank of the stage that needs it, or hand it over where that
        is this one. Nobody writes to it any more.
        """
        me, peer = self.mesh.pp.rank, self.schedule.rank_of(message.stage)
        if peer == me:
            self.posted[message] = None, tensor
            return
        tensor = tensor.contiguous()
        work = transfers.start_send(tensor, axis_of(self.mesh, me, peer), peer)
        self.going[message] = work, tensor

    def post(self, message: Message | None) -> None:
        """Post the receives from the rank that sends `message`, up to and including that."""
        if message is None:
            return
        # A receive takes whatever its peer sends next on this channel, for messages carry no name.
        # So which message that is must be known: `coming` has them in the order of the peer's list.
        me, peer = self.mesh.pp.rank, self.schedule.rank_of(message.source)
        while peer != me and message not in self.posted:
            buffer = self.boundary()
            work = transfers.start_receive(buffer, axis_of(self.mesh, peer, me), peer)
            self.posted[self.coming[peer].popleft()] = work, buffer

    def take(self, message: Message | None) -> Tensor | None:
        """The tensor of `message`, of `boundary`'s shape, that has come; None without one. What has
        gone is let go.
        """
        self.going = {m: sent for m, sent in self.going.items() if not sent[0].is_completed()}
        if message is None:
            return None
        self.post(message)
        work, tensor = self.posted.pop(message)
        if work is not None:
            with ranges.mark("pp", "wait"):
                work.wait()
        for gone in self.settled.get(message, ()):
            if gone in self.going:
                self.going.pop(gone)[0].wait()
        return tensor

    def finish(self) -> None:
        """Wait for all that was sent."""
        for work, _ in self.going.values():
            with ranges.mark("pp", "wait"):
                work.wait()


def connect(schedule: Schedule, mesh: Mesh) -> None:
    """Send a number over every channel that `schedule` uses. Every rank of pp calls it with the
    same schedule, before the first `execute`.

    NCCL makes a communicator of two ranks at their first send or receive on a group, and the CPU
    waits there until the other rank has come as far. In a step it may never: before its last
    forward, rank 0 of gpipe posts the receive of its first gradient; rank 1 would come to send
    that, but in its own last forward it reads, on the host, how many tokens each expert gets of
    what rank 0 has yet to send. Once the communicators are there neither waits.

    Any one order of all channels ends: of those that are left, both ranks of the first come to it.
    Pairs that begin at an even rank go first, then those at an odd one, then the two that close the
    ring: so a line of n ranks takes the time of three pairs, not of n.
    """
    for sender, receiver in routes(schedule):
        if mesh.pp.rank not in (sender, receiver):
            continue
        number, channel = torch.zeros(1, device=mesh.device), axis_of(mesh, sender, receiver)
        if mesh.pp.rank == sender:
            transfers.start_send(number, channel, receiver).wait()
        else:
            transfers.start_receive(number, channel, sender).wait()


def routes(schedule: Schedule) -> list[tuple[int, int]]:
    """(sender, receiver) of all that a step sends, in the order in which they are connected."""
    lines = {
        (schedule.rank_of(stage), schedule.rank_of(stage + 1))
        for stage in range(schedule.stages - 1)
    }
    ways = {way for a, b in lines if a != b for way in ((a, b), (b, a))}
    return sorted(ways, key=lambda way: (abs(way[0] - way[1]) > 1, min(way) % 2, min(way), way))
