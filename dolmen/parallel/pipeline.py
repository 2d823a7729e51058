"""Carries out one rank's list of a pipeline schedule: the only thing that runs a training step, on
one process or on many.

    stage s   F: receive x from s - 1, compute y, send it to s + 1
              B: receive dy from s + 1, compute dx, send it to s - 1

Sends never wait. Each direction between two ranks is a channel of its own (mesh.up, mesh.down), and
receives are posted in the order in which the sender's list sends, which every rank knows, one
action ahead of their use: so whatever order a valid list has, no send waits for a receive that
waits for it. (Over NCCL the first of each channel would; `connect` is called before.) Of y only the
edge of its graph is kept, not its values.
"""

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge

from dolmen.core import collectives, ranges
from dolmen.core.mesh import Axis, Mesh
from dolmen.parallel.actions import Action, Schedule
from dolmen.parallel.data import Reduction

Message = tuple[bool, int, int]  # forward or backward, microbatch, stage that needs it


@dataclass
class Work:
    """What the actions of one step do, on this rank."""

    forward: Callable[[int, int, Tensor | None], Tensor]
    """(chunk, microbatch, x or None on the first stage) -> y, or on the last stage the scalar to go
    backward from.
    """
    boundary: Callable[[], Tensor]
    """An empty tensor like those that cross stages."""
    reduction: Reduction | None = None
    """None where nothing goes backward."""
    parts: Sequence[Sequence[nn.Module]] = ((),)
    """Units of communication over fsdp of each chunk."""
    later: list[Callable[[], None]] | None = None
    """Where the backward of a product leaves its weight gradients, if the schedule splits it
    (parallel/tensor.py).
    """
    observe: Callable[[Action], None] = lambda action: None
    """Called after each action."""


class _Channels:
    """Sends and receives of this rank; a stage of the same rank is handed its tensor."""

    def __init__(self, schedule: Schedule, mesh: Mesh, boundary: Callable[[], Tensor]):
        self.schedule, self.mesh, self.boundary = schedule, mesh, boundary
        self.coming = {
            peer: deque(_sent(schedule, peer, mesh.pp.rank))
            for peer in range(schedule.ranks)
            if peer != mesh.pp.rank
        }
        self.posted: dict[Message, tuple[dist.Work | None, Tensor]] = {}
        self.going: deque[tuple[dist.Work, Tensor]] = deque()

    def send(self, message: Message, tensor: Tensor) -> None:
        me, peer = self.mesh.pp.rank, self.schedule.rank_of(message[2])
        if peer == me:
            self.posted[message] = None, tensor
            return
        while self.going and self.going[0][0].is_completed():
            self.going.popleft()
        tensor = tensor.contiguous()
        work = collectives.start_send(tensor, _channel(self.mesh, me, peer), peer)
        self.going.append((work, tensor))

    def post(self, message: Message | None, source: int) -> None:
        """Post the receives from the rank of stage `source` up to and including that of
        `message`.
        """
        me = self.mesh.pp.rank
        peer = self.schedule.rank_of(source) if message else me
        if message is None or peer == me:
            return
        while message not in self.posted:
            buffer = self.boundary()
            work = collectives.start_receive(buffer, _channel(self.mesh, peer, me), peer)
            self.posted[self.coming[peer].popleft()] = work, buffer

    def take(self, message: Message, source: int) -> Tensor:
        self.post(message, source)
        work, tensor = self.posted.pop(message)
        if work is not None:
            with ranges.mark("pp", "wait"):
                work.wait()
        return tensor

    def finish(self) -> None:
        for work, _ in self.going:
            with ranges.mark("pp", "wait"):
                work.wait()


def _channel(mesh: Mesh, sender: int, receiver: int) -> Axis:
    """What a tensor from `sender` to `receiver`, ranks of pp, goes over: the same for both."""
    return mesh.up if receiver > sender else mesh.down


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
    for sender, receiver in _routes(schedule):
        if mesh.pp.rank not in (sender, receiver):
            continue
        number, channel = torch.zeros(1, device=mesh.device), _channel(mesh, sender, receiver)
        if mesh.pp.rank == sender:
            collectives.start_send(number, channel, receiver).wait()
        else:
            collectives.start_receive(number, channel, sender).wait()


def _routes(schedule: Schedule) -> list[tuple[int, int]]:
    """(sender, receiver) of all that a step sends, in the order in which they are connected."""
    lines = {
        (schedule.rank_of(stage), schedule.rank_of(stage + 1))
        for stage in range(schedule.stages - 1)
    }
    ways = {way for a, b in lines if a != b for way in ((a, b), (b, a))}
    return sorted(ways, key=lambda way: (abs(way[0] - way[1]) > 1, min(way) % 2, min(way), way))


def _sent(schedule: Schedule, sender: int, to: int) -> list[Message]:
    """What rank `sender` sends to rank `to` in a step, in order."""
    out = []
    for action in schedule.actions[sender]:
        if action.kind == "W":
            continue
        there = schedule.stage_of(sender, action.chunk) + (1 if action.kind == "F" else -1)
        if 0 <= there < schedule.stages and schedule.rank_of(there) == to:
            out.append((action.kind == "F", action.micro, there))
    return out


def execute(schedule: Schedule, mesh: Mesh, work: Work) -> None:
    """Carry out `schedule.actions[mesh.pp.rank]`. Every rank of pp calls it with the same
    schedule.
    """
    channels, actions = _Channels(schedule, mesh, work.boundary), schedule.actions[mesh.pp.rank]
    live: dict[tuple[int, int], tuple[Tensor | None, object]] = {}
    weights: dict[tuple[int, int], list[Callable[[], None]]] = {}
    lasts = _lasts(actions)

    def needed(action: Action) -> tuple[Message | None, int]:
        """What an action waits for, and the stage it comes from."""
        stage, forward = schedule.stage_of(mesh.pp.rank, action.chunk), action.kind == "F"
        source = stage - 1 if forward else stage + 1
        comes = action.kind != "W" and 0 <= source < schedule.stages
        return ((forward, action.micro, stage) if comes else None), source

    def weights_now(at: tuple[int, int], i: int) -> None:
        for run in weights.pop(at):
            run()
        work.reduction.weights(i == lasts[None])

    for i, action in enumerate(actions):
        stage, at = schedule.stage_of(mesh.pp.rank, action.chunk), (action.micro, action.chunk)
        message, source = needed(action)
        got = channels.take(message, source) if message else None
        if i + 1 < len(actions):
            channels.post(*needed(actions[i + 1]))
        if action.kind == "F":
            x = got.requires_grad_(torch.is_grad_enabled()) if got is not None else None
            y = work.forward(action.chunk, action.micro, x)
            if work.reduction is not None:
                # None: all is frozen
                live[at] = (x, get_gradient_edge(y) if y.requires_grad else None)
            if stage + 1 < schedule.stages:
                channels.send((True, action.micro, stage + 1), y.detach())
            del y
        elif action.kind == "W":
            weights_now(at, i)
        else:
            x, edge = live.pop(at)
            if not schedule.splits_backward:
                work.reduction.before(
                    work.parts[action.chunk], i == lasts[action.chunk], i == lasts[None]
                )
            if edge is not None:
                torch.autograd.backward(edge, got)
            if x is not None:
                channels.send((False, action.micro, stage - 1), x.grad)
            if schedule.splits_backward:
                weights[at] = work.later.copy()
                work.later.clear()
                if action.kind == "B":
                    weights_now(at, i)
            del x, edge  # and with them the graph
        work.observe(action)
    channels.finish()


def _lasts(actions: Sequence[Action]) -> dict[int | None, int]:
    """Index of the last action that computes weight gradients, by chunk; None: of any chunk."""
    out = {}
    for i, action in enumerate(actions):
        if action.kind in "BW":
            out[action.chunk] = out[None] = i
    return out


def forward_only(schedule: Schedule) -> Schedule:
    """The forwards of a schedule, in its order."""
    kept = tuple(tuple(a for a in actions if a.kind == "F") for actions in schedule.actions)
    return Schedule(
        f"{schedule.name}, forward only",
        schedule.ranks,
        schedule.micros,
        schedule.chunks,
        kept,
        schedule.placement,
    )
