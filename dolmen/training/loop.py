"""The training loop; when Python's garbage collector runs; torch.compile's fallbacks.

When Python's garbage collector runs in training: after the same step on every rank, and not when
by each rank's own count of objects. A whole collection takes 0.1 to 0.3 s, and a step takes as
long as that of the slowest rank.

Tensors are freed without it: tests/training/test_garbage.py holds that a step leaves none in a
cycle. Activation recomputation leaves 28 small objects per layer, and FSDP of torch 2.11 some 30
per layer and microbatch.

torch.compile gives up on a function that it has compiled `torch._dynamo.config.recompile_limit`
times (8), and runs what fits none of those programs uncompiled: correct, slower, and reported only
in torch's log. A run reports it.

The training loop: steps, and periodic work as (every, hook). All else, from checkpoints to
plots, is a hook.
"""

import gc
import logging
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace

from dolmen.core.mesh import Mesh
from dolmen.core.torch_private import strings
from dolmen.data.batch import Batch
from dolmen.launch.watchdog import Watch
from dolmen.training.batches import Batches
from dolmen.training.state import TrainState
from dolmen.training.step import StepMetrics, optimizer_step

YOUNG = 50  # steps between collections of what is new
ALL = 1000  # steps between whole ones: of what was kept for a while, as by a save or a validation


@contextmanager
def manual_gc() -> Iterator[None]:
    """Context manager that disables Python's automatic garbage collection and restores it on
    leaving, if it was enabled; the body calls `collect_garbage` instead.
    """
    was = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was:
            gc.enable()


def collect_garbage(step: int) -> None:
    """Run Python's garbage collector if `step` is a multiple of 50: over all objects for multiples
    of 1,000, otherwise over the younger generations.
    """
    if step % ALL == 0:
        gc.collect()
    elif step % YOUNG == 0:
        gc.collect(1)


class _RecompileLimitHandler(logging.Handler):
    """Logging handler that reports torch.compile's recompile limit in a sentence."""

    def __init__(self, report: Callable[[str], None]):
        """Prepare the handler, which calls `report` with the text of each warning."""
        super().__init__(logging.WARNING)
        self.report = report

    def emit(self, record: logging.LogRecord) -> None:
        """Report a log record in which torch.compile gives up on a function as a warning in one
        sentence; ignore all other records.
        """
        if not record.msg.startswith(strings.GAVE_UP):
            return
        assert record.args is not None, record.msg
        # the arguments of torch's format string (tests/training/test_compiled.py)
        limit, number, function, reason, *_ = record.args
        reason = str(reason).split("#")[0].strip()  # then follow the place and a stack
        self.report(
            f"WARNING: torch.compile gave up on {function} after {number} programs ({limit}): "
            f"further calls run uncompiled, and slower; the last one differed in {reason}"
        )


@contextmanager
def report_recompile_limit(report: Callable[[str], None]) -> Iterator[None]:
    """Context manager: within it, `report` is called with a warning each time torch.compile gives
    up on a function because it was compiled too often, after which calls that fit none of its
    programs run uncompiled.
    """
    handler, logger = _RecompileLimitHandler(report), logging.getLogger(strings.DYNAMO)
    logger.addHandler(handler)
    try:
        yield
    finally:
        logger.removeHandler(handler)


Hook = Callable[[TrainState, StepMetrics], None]


@dataclass
class Stop:
    """A request to end early, set by a signal's handler on any rank; the ranks agree on it in each
    step, with its other numbers: a signal that comes after them is seen in the next.
    """

    signal: int = 0  # seen by this rank, at any time
    agreed_signal: int = 0  # the largest seen by any rank, known to all after the same step
    after: int | None = None  # end after this step


def _step(state: TrainState, batch: Batch, mesh: Mesh, signal: Callable[[], int]) -> StepMetrics:
    """Make one optimizer step of the model, after one of the critic on the same batch, if there is
    one. The metrics returned are the model's, with the critic's in `critic`; skipped if either was.
    """
    if state.critic is None:
        return optimizer_step(state, batch.read_by(state.model.spec), mesh, signal)
    critic = state.critic.state
    # whose routers are its own
    read = replace(batch, experts=None).read_by(critic.model.spec)
    critic_metrics = optimizer_step(critic, read, mesh)
    metrics = optimizer_step(state, batch.read_by(state.model.spec), mesh, signal)
    return replace(
        metrics, critic=critic_metrics, skipped=metrics.skipped or critic_metrics.skipped
    )


def train_steps(
    state: TrainState,
    batches: Batches,
    mesh: Mesh,
    hooks: Iterable[tuple[int, Hook]],
    stop: Stop,
    watch: Watch | None = None,
    around: Callable[[int], AbstractContextManager[object]] = nullcontext,
    generates: bool = False,
) -> int:
    """Train on `batches` from state.step to state.steps, in place, and return the number of the
    signal that ended it early, else 0. All ranks end after the same step.

    Step n, counted from 1, runs within the context around(n). `hooks` are (every, function): after
    each step those whose `every` divides the number of steps made are called, in order, and after
    the last step all of them. `watch` is told each point that is passed. `generates`: batches are
    sampled by a model, so the watchdog allows each as much time as the first.
    """
    hooks, beat, first_step = list(hooks), watch.beat if watch else lambda *_: None, state.step
    beat(state.step, "the first batch", True)
    if state.step >= state.steps:
        return 0
    # the generator may sample a whole iteration before it yields
    for _, batch in batches.starting_at(state.step, mesh.dp.rank, mesh.dp.size):
        beat(state.step, "a step", state.step == first_step)  # the first may compile
        with around(state.step + 1):
            metrics = _step(state, batch, mesh, lambda: stop.signal)
        # the same on every rank, so that all leave the loop after the same step
        stopped = stop.agreed_signal = metrics.signal
        last = bool(stopped) or state.step in (state.steps, stop.after)
        for interval, hook in hooks:
            if last or interval and state.step % interval == 0:
                beat(state.step, hook.__name__)
                # the progress is reported before each part, so that a hang names the part it is in
                hook(state, metrics)
        if last:  # before the next batch, which a model may have to draw
            return stopped
        beat(state.step, "the next batch", generates)
    raise AssertionError("batches never run out")
