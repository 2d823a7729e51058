r"""Executes one rank's list of a pipeline schedule: the only thing that runs a training step, on
one process or on many.

    1f1b, two ranks of one stage, two microbatches; F and B take equally long:

    rank 0, stage 0   | F0 | F1 |    | B0 |    | B1 |
                            \    \      /         /          y goes up, the gradient of y down
                             y0   y1  dy0       dy1
                              \    \  /         /
    rank 1, stage 1        | F0 | B0 | F1 | B1 |

For each action of its list a rank

    takes   the tensor that the action needs, waiting until it has arrived
    posts   the receives of what the next action needs
    does    the action
    sends   the result, without waiting

    F   y = stage(x)           keeps x and the edge of y's graph, not y's values; y goes up
    B   dx and all dW          backward through that graph, which is then freed; dx goes down
    I   dx only                the same, but the products leave their dW in `work.later`, from where
                               they are taken and kept under this microbatch
    W   dW                     computes the kept dW; nothing is taken or sent

Where a schedule has I at all, its B is I and W at once. The executor counts which action is the
last to make weight gradients, of a chunk and of the step; when gradients then cross fsdp is decided
in parallel/data.py.

Sends never wait, each direction between two ranks is a channel of its own (mesh.up, mesh.down), and
receives are posted in the order in which the sender's list sends, which every rank knows. So in
whatever order a valid list is, no send waits for a receive that waits for it. (Over NCCL the first
message of each channel would; `connect` is called before.) Two chunks on one rank hand their
tensors over directly.

A sent tensor is released once it has left. NCCL's work object reports that by itself. gloo's
reports it only to a caller that waits, who would wait for the receiver, too, and perhaps for ever;
but when a message comes back that the receiver sent after it took ours, ours has left, and waiting
takes no time.

    rank 0   F0 >--y0-->  ...  F1 >--y1-->  ...                 B0: dx0 came, so y0 has left
    rank 1          y0 > F0 .. B0 >--dx0-->
"""

from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.distributed as dist
from jaxtyping import Float
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, get_gradient_edge

from dolmen.core import profiling, transfers
from dolmen.core.mesh import Axis, Mesh
from dolmen.parallel.data import Reduction
from dolmen.parallel.schedule import Action, Schedule
from dolmen.parallel.tensor import Deferred


class StageMessage(NamedTuple):
    """One tensor sent from a stage to its neighbour: activations on their way up (`forward`), or
    their gradient on its way down.
    """

    forward: bool
    micro: int
    stage: int  # which needs it

    @property
    def source(self) -> int:
        """Index of the stage that sends this message."""
        return self.stage - 1 if self.forward else self.stage + 1


def message_in(schedule: Schedule, rank: int, action: Action) -> StageMessage | None:
    """Return the message that an action of `rank` waits for; None if it needs none: W, F of the
    first stage, or B and I of the last stage.
    """
    stage = schedule.stage_of(rank, action.chunk)
    message = StageMessage(action.kind == "F", action.micro, stage)
    comes = action.kind != "W" and 0 <= message.source < schedule.stages
    return message if comes else None


def message_out(schedule: Schedule, rank: int, action: Action) -> StageMessage | None:
    """Return the message that an action of `rank` sends; None if it sends none: W, F of the last
    stage, or B and I of the first stage.
    """
    stage, forward = schedule.stage_of(rank, action.chunk), action.kind == "F"
    to = stage + 1 if forward else stage - 1
    goes = action.kind != "W" and 0 <= to < schedule.stages
    return StageMessage(forward, action.micro, to) if goes else None


def messages_sent(schedule: Schedule, sender: int, to: int) -> list[StageMessage]:
    """Return the messages that rank `sender` sends to rank `to` in a step, in the order of
    sending.
    """
    going = (message_out(schedule, sender, action) for action in schedule.actions[sender])
    return [message for message in going if message and schedule.rank_of(message.stage) == to]


def acknowledged_messages(
    schedule: Schedule, sender: int, to: int
) -> dict[StageMessage, list[StageMessage]]:
    """Map each message that rank `to` sends back to `sender` to the messages of `sender` that `to`
    has received since its previous one: the message's arrival proves that those have left.
    """
    senders: dict[StageMessage, list[StageMessage]] = {}
    taken: list[StageMessage] = []
    for action in schedule.actions[to]:
        needed = message_in(schedule, to, action)
        if needed is not None and schedule.rank_of(needed.source) == sender:
            taken.append(needed)
        message = message_out(schedule, to, action)
        if message is not None and schedule.rank_of(message.stage) == sender:
            senders[message], taken = taken, []
    return senders


def channel_axis(mesh: Mesh, sender: int, receiver: int) -> Axis:
    """Return the axis (mesh.up or mesh.down) whose group carries messages from rank `sender` to
    rank `receiver` of pp.
    """
    return mesh.up if receiver > sender else mesh.down


class Channels:
    """Sends and receives of this rank in one step. `boundary()` allocates a tensor like those that
    cross stages.
    """

    def __init__(self, schedule: Schedule, mesh: Mesh, boundary: Callable[[], Tensor]):
        """List the messages that this rank will receive in one step of `schedule`, per sender in
        the order of sending; nothing is sent.
        """
        self.schedule, self.mesh, self.boundary = schedule, mesh, boundary
        me = mesh.pp.rank
        self.coming = {
            sender: deque(messages_sent(schedule, sender, me))
            for sender, receiver in routes(schedule)
            if receiver == me
        }
        self.posted: dict[
            StageMessage, tuple[dist.Work | transfers.HostReceive | None, Tensor]
        ] = {}
        self.going: dict[StageMessage, tuple[dist.Work, Tensor]] = {}
        """In the order of sending: a tensor under way is held here."""
        self.settled = {
            message: gone
            for peer in self.coming
            for message, gone in acknowledged_messages(schedule, me, peer).items()
        }

    def send(self, message: StageMessage, tensor: Float[Tensor, "..."]) -> None:
        """Start sending `tensor` to the rank of the stage that needs it, without waiting, or keep
        it for this rank's own `take` where that is this rank. Nobody may write to it afterwards.
        """
        me, peer = self.mesh.pp.rank, self.schedule.rank_of(message.stage)
        if peer == me:
            self.posted[message] = None, tensor
            return
        tensor = tensor.contiguous()
        work = transfers.start_send(tensor, channel_axis(self.mesh, me, peer), peer)
        self.going[message] = work, tensor

    def post(self, message: StageMessage | None) -> None:
        """Start the receives from the rank that sends `message`, in the order of its sends, up to
        and including this one, without waiting; None: do nothing.
        """
        if message is None:
            return
        # A receive takes whatever its peer sends next on this channel, for messages carry no name.
        # So which message that is must be known: `coming` has them in the order of the peer's list.
        me, peer = self.mesh.pp.rank, self.schedule.rank_of(message.source)
        while peer != me and message not in self.posted:
            buffer = self.boundary()
            work = transfers.start_receive(buffer, channel_axis(self.mesh, peer, me), peer)
            self.posted[self.coming[peer].popleft()] = work, buffer

    def take(self, message: StageMessage | None) -> Tensor | None:
        """Wait until `message` has arrived and return its tensor; None for None. Also releases sent
        tensors that have left.
        """
        self.going = {m: sent for m, sent in self.going.items() if not sent[0].is_completed()}
        if message is None:
            return None
        self.post(message)
        work, tensor = self.posted.pop(message)
        if work is not None:
            with profiling.record_range("pp", "wait"):
                work.wait()
        for gone in self.settled.get(message, ()):
            if gone in self.going:
                self.going.pop(gone)[0].wait()
        return tensor

    def finish(self) -> None:
        """Wait until all sent tensors have left, at the end of a step."""
        for work, _ in self.going.values():
            with profiling.record_range("pp", "wait"):
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
        number, channel = torch.zeros(1, device=mesh.device), channel_axis(mesh, sender, receiver)
        if mesh.pp.rank == sender:
            transfers.start_send(number, channel, receiver).wait()
        else:
            transfers.start_receive(number, channel, sender).wait()


def routes(schedule: Schedule) -> list[tuple[int, int]]:
    """Return each (sender, receiver) pair of different ranks of pp that exchange messages in a
    step, in the order in which `connect` connects them.
    """
    lines = {
        (schedule.rank_of(stage), schedule.rank_of(stage + 1))
        for stage in range(schedule.stages - 1)
    }
    ways = {way for a, b in lines if a != b for way in ((a, b), (b, a))}
    return sorted(ways, key=lambda way: (abs(way[0] - way[1]) > 1, min(way) % 2, min(way), way))


@dataclass
class StepWork:
    """The callbacks and model parts that a step's actions use on this rank."""

    forward: Callable[[int, int, Tensor | None], Tensor]
    """(chunk, microbatch, x or None on the first stage) -> y, or on the last stage the scalar to go
    backward from.
    """
    boundary: Callable[[], Tensor]
    """An empty tensor like those that cross stages."""
    reduction: Reduction | None = None
    """None where nothing goes backward."""
    chunks: Sequence[Sequence[nn.Module]] = ((),)
    """Units of communication over fsdp of each chunk."""
    later: Deferred | None = None
    """Queue where the backward of a product leaves its weight gradients, if the schedule splits it:
    that of the model's TensorParallel.
    """
    observe: Callable[[Action], None] = lambda action: None
    """Called after each action."""


class _Step:
    """The four kinds of action, and what this rank holds between them: per microbatch and chunk
    under way, the autograd graph from F to B or I, and the deferred weight gradients from I to W.
    """

    def __init__(self, schedule: Schedule, mesh: Mesh, work: StepWork):
        """Prepare a step of `schedule` on this rank of `mesh`, with the callbacks and modules in
        `work`.
        """
        self.schedule, self.rank, self.work = schedule, mesh.pp.rank, work
        self.splits = schedule.splits_backward
        self.channels = Channels(schedule, mesh, work.boundary)
        self.graphs: dict[tuple[int, int], tuple[Tensor | None, GradientEdge | None]] = {}
        self.products: dict[tuple[int, int], list[Callable[[], None]]] = {}
        # Actions yet to come that make weight gradients, of each chunk. They are counted off, since
        # a list need not do its microbatches in order: the last B of a list may be of any.
        self.left = Counter(a.chunk for a in schedule.actions[self.rank] if a.kind in "BW")

    def forward(self, action: Action, x: Tensor | None) -> None:
        """Run action F on x (None on the first stage): keep the graph for backward unless this is
        forward only, and send the output to the next stage, if there is one.
        """
        if x is not None:
            # what came over a channel is a leaf, in whose .grad backward leaves what goes on down
            x.requires_grad_(torch.is_grad_enabled())
        y = self.work.forward(action.chunk, action.micro, x)
        if self.work.reduction is not None:
            # Backward begins from the edge of y's graph and reads no value of y, so y itself goes
            # as soon as it is sent: at 4,096 tokens of 4,096 in bf16 that is 32 MiB less per
            # microbatch under way, of which the first rank has as many as there are ranks.
            edge = get_gradient_edge(y) if y.requires_grad else None  # None: all is frozen
            self.graphs[action.micro, action.chunk] = x, edge
        message = message_out(self.schedule, self.rank, action)
        if message is not None:
            self.channels.send(message, y.detach())

    def backward(self, action: Action, dy: Tensor | None) -> None:
        """Run B, the whole backward of a microbatch, from the gradient of y (None on the last
        stage); send dx to the stage before. The last backward of the step also makes FSDP reduce
        the gradients. In a schedule that splits backward, B is I and then W.
        """
        if self.splits:
            # the products of this model leave their dW to us in every backward, in a whole one too
            self.inputs(action, dy)
            self.weights(action)
            return
        self.left[action.chunk] -= 1
        last = self.left.total() == 0
        self._reduction.prepare_backward(
            self.work.chunks[action.chunk], self.left[action.chunk] == 0, last
        )
        if not self._run_backward_graph(action, dy) and last:
            self._reduction.accumulate_weight_gradients(last)  # no backward, so no hook of FSDP's
        self._reduction.end_backward(action.micro, last)

    def inputs(self, action: Action, dy: Tensor | None) -> None:
        """Run I: compute dx from dy (None on the last stage), send it to the stage before, and keep
        the weight gradients of this microbatch deferred, for W.
        """
        self._run_backward_graph(action, dy)
        # all that was left there is of this backward: whatever was before it has been taken
        assert self.work.later is not None, "the schedule splits backward, but its Work does not"
        self.products[action.micro, action.chunk] = self.work.later.take()
        self._reduction.end_backward(action.micro, last=False)

    def weights(self, action: Action) -> None:
        """Run W: compute the weight gradients that I deferred for this microbatch, and reduce all
        gradients over fsdp if these are the last of the step.
        """
        self.left[action.chunk] -= 1
        for product in self.products.pop((action.micro, action.chunk)):
            product()
        done = self.left.total() == 0
        self._reduction.accumulate_weight_gradients(done)
        self._reduction.end_backward(action.micro, done)

    @property
    def _reduction(self) -> Reduction:
        """The step's `Reduction`; asserts that it has one."""
        assert self.work.reduction is not None, "the schedule has a backward, but its Work does not"
        return self.work.reduction

    def _run_backward_graph(self, action: Action, dy: Tensor | None) -> bool:
        """Run autograd from dy (None on the last stage: from the loss) to x, and send dx to the
        stage before. Returns False where there was no graph, as all is frozen; True else.
        """
        x, edge = self.graphs.pop((action.micro, action.chunk))
        if edge is not None:
            torch.autograd.backward(edge, dy)
        message = message_out(self.schedule, self.rank, action)
        if message is not None:
            assert x is not None and x.grad is not None, action
            self.channels.send(message, x.grad)
        return edge is not None


def execute(schedule: Schedule, mesh: Mesh, work: StepWork) -> None:
    """Run this rank's list of actions of one step, `schedule.actions[mesh.pp.rank]`, with the
    callbacks in `work`; return when all sent tensors have left. Collective: every rank of pp calls
    it with the same schedule.
    """
    step, actions = _Step(schedule, mesh, work), schedule.actions[mesh.pp.rank]
    needs = [message_in(schedule, mesh.pp.rank, action) for action in actions]
    # The receives of an action are posted before the action ahead of it is done, so that what it
    # needs arrives meanwhile. One ahead is enough: those of a channel are posted in the order in
    # which its sender sends, so this posts all that come before it, too.
    for action, message, ahead in zip(actions, needs, (*needs[1:], None), strict=True):
        came = step.channels.take(message)
        step.channels.post(ahead)
        match action.kind:
            case "F":
                step.forward(action, came)
            case "B":
                step.backward(action, came)
            case "I":
                step.inputs(action, came)
            case "W":
                step.weights(action)
        work.observe(action)
    step.channels.finish()


def forward_only(schedule: Schedule) -> Schedule:
    """Return the schedule with the forwards (F actions) alone, in their order, for evaluation."""
    forwards = tuple(tuple(a for a in actions if a.kind == "F") for actions in schedule.actions)
    return Schedule(
        f"{schedule.name}, forward only",
        schedule.ranks,
        schedule.micros,
        schedule.chunks,
        forwards,
        schedule.placement,
    )
