r"""Carries out one rank's list of a pipeline schedule: the only thing that runs a training step, on
one process or on many.

    1f1b, two ranks of one stage, two microbatches; F and B take equally long:

    rank 0, stage 0   | F0 | F1 |    | B0 |    | B1 |
                            \    \      /         /          y goes up, the gradient of y down
                             y0   y1  dy0       dy1
                              \    \  /         /
    rank 1, stage 1        | F0 | B0 | F1 | B1 |

For each action of its list a rank

    takes   what the action needs, and waits until it is there
    posts   the receives of what the next action needs
    does    the action
    sends   what came of it, and does not wait

    F   y = stage(x)           keeps x and the edge of y's graph, not y's values; y goes up
    B   dx and all dW          backward through that graph, which is then gone; dx goes down
    I   dx alone               the same, but the products leave their dW in `work.later`, from where
                               they are taken and kept under this microbatch
    W   dW                     computes what is kept; nothing is taken or sent

Where a schedule has I at all, its B is I and W at once. Which action is the last to make weight
gradients, of a chunk and of all, is counted here; what follows, when gradients cross fsdp, is said
in parallel/data.py. How tensors cross, and why no valid list can lock, in parallel/channels.py.
"""

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, get_gradient_edge

from dolmen.core.mesh import Mesh
from dolmen.parallel.actions import Action, Schedule
from dolmen.parallel.channels import Channels, message_made, message_needed
from dolmen.parallel.data import Reduction
from dolmen.parallel.tensor import Deferred


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
    chunks: Sequence[Sequence[nn.Module]] = ((),)
    """Units of communication over fsdp of each chunk."""
    later: Deferred | None = None
    """Where the backward of a product leaves its weight gradients, if the schedule splits it: that
    of the model's TensorParallel.
    """
    observe: Callable[[Action], None] = lambda action: None
    """Called after each action."""


class _Step:
    """The four kinds of action, and what this rank holds between them: of each microbatch and chunk
    under way, from F to B or I the graph, from I to W the weight gradients that are left.
    """

    def __init__(self, schedule: Schedule, mesh: Mesh, work: Work):
        self.schedule, self.rank, self.work = schedule, mesh.pp.rank, work
        self.splits = schedule.splits_backward
        self.channels = Channels(schedule, mesh, work.boundary)
        self.graphs: dict[tuple[int, int], tuple[Tensor | None, GradientEdge | None]] = {}
        self.products: dict[tuple[int, int], list[Callable[[], None]]] = {}
        # Actions yet to come that make weight gradients, of each chunk. They are counted off, since
        # a list need not do its microbatches in order: the last B of a list may be of any.
        self.left = Counter(a.chunk for a in schedule.actions[self.rank] if a.kind in "BW")

    def forward(self, action: Action, x: Tensor | None) -> None:
        """F."""
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
        message = message_made(self.schedule, self.rank, action)
        if message is not None:
            self.channels.send(message, y.detach())

    def backward(self, action: Action, dy: Tensor | None) -> None:
        """B."""
        if self.splits:
            # the products of this model leave their dW to us in every backward, in a whole one too
            self.inputs(action, dy)
            self.weights(action)
            return
        self.left[action.chunk] -= 1
        last = self.left.total() == 0
        self._reduction.before_backward(
            self.work.chunks[action.chunk], self.left[action.chunk] == 0, last
        )
        if not self._through_the_graph(action, dy) and last:
            self._reduction.after_weights(last)  # no backward, so no hook of FSDP's

    def inputs(self, action: Action, dy: Tensor | None) -> None:
        """I."""
        self._through_the_graph(action, dy)
        # all that was left there is of this backward: whatever was before it has been taken
        assert self.work.later is not None, "the schedule splits backward, its Work does not"
        self.products[action.micro, action.chunk] = self.work.later.take()

    def weights(self, action: Action) -> None:
        """W."""
        self.left[action.chunk] -= 1
        for product in self.products.pop((action.micro, action.chunk)):
            product()
        self._reduction.after_weights(self.left.total() == 0)

    @property
    def _reduction(self) -> Reduction:
        assert self.work.reduction is not None, "the schedule goes backward, its Work does not"
        return self.work.reduction

    def _through_the_graph(self, action: Action, dy: Tensor | None) -> bool:
        """dx from dy, or on the last stage from the loss itself (None), and to the stage before;
        whether there was a graph, as there is none where all is frozen.
        """
        x, edge = self.graphs.pop((action.micro, action.chunk))
        if edge is not None:
            torch.autograd.backward(edge, dy)
        message = message_made(self.schedule, self.rank, action)
        if message is not None:
            assert x is not None and x.grad is not None, action
            self.channels.send(message, x.grad)
        return edge is not None


def execute(schedule: Schedule, mesh: Mesh, work: Work) -> None:
    """Carry out `schedule.actions[mesh.pp.rank]`. Every rank of pp calls it with the same
    schedule.
    """
    step, actions = _Step(schedule, mesh, work), schedule.actions[mesh.pp.rank]
    needs = [message_needed(schedule, mesh.pp.rank, action) for action in actions]
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
