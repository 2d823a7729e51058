"""The training loop: steps, and periodic work as (every, hook). All else, from checkpoints to
plots, is a hook.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch

from dolmen.core import collectives
from dolmen.core.mesh import Mesh
from dolmen.data.loader import Loader
from dolmen.train.step import Metrics, TrainState, optimizer_step
from dolmen.train.watch import Watch

Hook = Callable[[TrainState, Metrics], None]


@dataclass
class Stop:
    """A request to end early, set by a signal's handler on any rank; the ranks agree on it after
    each step.
    """

    signal: int = 0  # seen by this rank, at any time
    agreed_signal: int = 0  # seen by all ranks, after the same step

    def agree(self, mesh: Mesh) -> int:
        """The largest signal number any rank has seen, 0 for none."""
        flag = torch.tensor(self.signal, device=mesh.device)
        self.agreed_signal = int(collectives.reduce_scalar(flag, mesh.world, "max"))
        return self.agreed_signal


def train(
    state: TrainState,
    loader: Loader,
    mesh: Mesh,
    hooks: Iterable[tuple[int, Hook]],
    stop: Stop,
    watch: Watch | None = None,
) -> int:
    """Train from state.step to state.steps; the signal that ended it early, else 0.

    After every step each hook whose `every` divides the number of steps made is called, and all are
    called after the last step, in order.
    """
    hooks, beat, begun = list(hooks), watch.beat if watch else lambda *_: None, state.step
    beat(state.step, "the first batch", True)
    for _, batch in loader.starting_at(state.step, mesh.dp.rank, mesh.dp.size):
        if state.step >= state.steps:
            return 0
        beat(state.step, "a step", state.step == begun)  # the first may compile
        metrics = optimizer_step(state, batch, mesh)
        stopped = stop.agree(mesh)
        last = bool(stopped) or state.step == state.steps
        for every, hook in hooks:
            if last or every and state.step % every == 0:
                beat(state.step, hook.__name__)
                hook(state, metrics)
        if stopped:
            return stopped
        beat(state.step, "the next batch")
    raise AssertionError("batches never run out")
