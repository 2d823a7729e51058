"""A training run in one process of its group: build, start or resume, train with its hooks, save.
`dolmen train` on one CPU and rank 2,071 of a cluster both come through here.
"""

import json
import math
import signal as signals
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
from rich.console import Console

from dolmen.checkpoint.saved import Validation
from dolmen.checkpoint.store import Checkpoints
from dolmen.core import determinism
from dolmen.core.mesh import Mesh
from dolmen.data.batches import Loader
from dolmen.files import write
from dolmen.launch.watch import Watch
from dolmen.optim.optimizer import DTYPES
from dolmen.rl.prompts import PromptLoader
from dolmen.training import batches, critic, folder, loop, mfu, pretraining, reference, report
from dolmen.training.batches import Batches
from dolmen.training.begin import make_state
from dolmen.training.check import check_profile
from dolmen.training.check_out import beginning
from dolmen.training.config import RunConfig
from dolmen.training.hooks import Hooks
from dolmen.training.loop import Stop, limit_told, train_steps
from dolmen.training.new_rows import NewRows
from dolmen.training.start import Start, changed_since, first_does, resume, same_data
from dolmen.training.state import TrainState
from dolmen.training.warn import warnings
from dolmen.training.written import write_config, write_tokenizer


@dataclass(frozen=True)
class Outcome:
    """How a run ended, after `seconds` of all its starts. `signal` is what stopped it early, 0 if
    nothing did. The validation is the last there was, after `val_step` steps, on `val_tokens` of
    the `held_out_tokens`; of each source in nats per token and in bits per byte, and what these
    were before the first step.
    """

    steps: int
    seconds: float
    signal: int
    val_loss: float | None
    val_step: int | None
    val_tokens: int
    held_out_tokens: int
    bits_per_byte: float | None
    validation_files: tuple[str, ...]
    val_sources: dict[str, float]
    val_sources_per_byte: dict[str, float]
    val_sources_before: dict[str, float]


@dataclass(frozen=True)
class _Asked:
    """What `run_training` was called with, and when, on the clock of time.monotonic."""

    run: RunConfig
    out: Path
    mesh: Mesh
    console: Console
    start: Start
    stop: Stop
    watch: Watch
    began: float


def run_training(
    run: RunConfig,
    out: Path,
    mesh: Mesh,
    console: Console,
    *,
    resumed: bool = False,
    overwrite: bool = False,
    start: Start | None = None,
    stop: Stop | None = None,
    watch: Watch | None = None,
) -> Outcome:
    """Train as `run` says, into the folder `out`. Every process of the mesh calls it; `console` is
    quiet on all but one. `start` says more than `resumed` and `overwrite` and is taken instead of
    them.
    """
    asked = _Asked(
        run,
        out,
        mesh,
        console,
        start or Start(resumed, overwrite),
        stop or Stop(),
        watch or Watch(out / "hang", mesh.rank, mesh.size, None, print),
        time.monotonic(),
    )
    with determinism.repeatable(run.train.deterministic):
        return _in_folder(asked)


def _in_folder(asked: _Asked) -> Outcome:
    """`run_training`, which takes the folder."""
    run, out, mesh = asked.run, asked.out, asked.mesh
    begun = beginning(run, out, asked.start.resumed)
    # who starts a run has verified, once per host
    loader = batches.prepare(run, begun, progress=mesh.first, verify=False)
    same_data(loader, mesh)
    if not asked.start.resumed:
        check_profile(run, length(run, loader))
    state = make_state(begun, mesh, length(run, loader))
    if run.objective.name == "ppo":
        state.beside, state.waits = critic.make(begun, state, mesh), run.critic.warmup_steps
    state.text = pretraining.of(run, loader, mesh)
    known = (
        reference.compare(begun, run, state, loader, mesh, out)
        if run.objective.needs_reference
        else {}
    )
    held = first_does(mesh, lambda: folder.take(out, 60 if asked.start.restarted else 0))
    if mesh.first and held is None:
        asked.console.print(
            f"WARNING: the file system of {out} has no locks: nothing keeps a second run out of it"
        )
    try:
        return _train(asked, begun, loader, state, known)
    finally:
        if mesh.first:
            folder.free(out, held)


def _train(
    asked: _Asked,
    begun: RunConfig,
    loader: Loader,
    state: TrainState,
    known: Mapping[str, np.ndarray],
) -> Outcome:
    """`run_training` in a folder that is ours; `known`: what the reference says."""
    run, out, mesh, console = asked.run, asked.out, asked.mesh, asked.console
    start, began = asked.start, asked.began
    if start.overwrite:
        first_does(mesh, lambda: folder.clear_run(out, start.owner))
    checkpoints = Checkpoints(out / "checkpoints", mesh, run.checkpoint.keep)
    saved = None
    if start.resumed:
        saved = resume(state, run, loader, checkpoints, console, start.restarted)
    if saved is not None:
        began -= saved.seconds
    # after another batch size, the same epoch ends after another number of steps, and so do tokens
    for one in (state, *([state.beside.state] if state.beside is not None else [])):
        one.steps = length(run, loader)
        if run.optimizer.warmup_tokens is not None:
            one.warmup = run.warmup_steps
            one.ahead = loader.first(0) / loader.global_batch_size
    state.new_rows = NewRows.of(run.train.new_rows, state.steps)
    if mesh.first and state.step < state.steps:
        folder.claim(out, *folder.WRITTEN)
        write_config(out, run)
        write_tokenizer(out, loader)
        if known:
            reference.keep(out, known)
    peak = mfu.peak(mesh.device, DTYPES[run.train.dtype])
    console.print(report.header(run, state, loader, mesh, peak, str(out)))
    for warning in warnings(run, loader, state.step, state.steps):
        console.print(f"WARNING: {warning}")
    hooks = Hooks(
        run, state, loader, mesh, out, checkpoints, peak, console, asked.stop, asked.watch, began
    )
    hooks.validator.begin(None if saved is None else saved.validation)
    changed = changed_since(saved, run, loader) if saved is not None else []
    hooks.begin(state, start.how, changed)
    first_does(mesh, lambda: batches.forget_other(out, state.step, changed))
    ended = "failed"
    try:
        if saved is None and run.log.validate_sources and loader.held_apart:
            hooks.validate(state, None)
        with _read(asked, begun, loader, state, checkpoints) as read:
            signal = _loop(asked, read, state, hooks)
        checkpoints.finish()
        ended = signals.Signals(signal).name if signal else "done"
    finally:
        hooks.close(state.step, ended)
    if not hooks.finite and not state.scale.dynamic:
        raise FloatingPointError(hooks.too_many_skips(state))
    if saved is not None and saved.step == state.step:  # nothing was left to do
        seconds = saved.seconds
    else:
        seconds = time.monotonic() - began
    return _outcome(state, loader, hooks.validator.last, seconds, signal)


@contextmanager
def _read(
    asked: _Asked,
    begun: RunConfig,
    loader: Loader,
    state: TrainState,
    checkpoints: Checkpoints,
) -> Iterator[Batches]:
    """What the steps read: the data, or what the model draws."""
    if isinstance(loader, PromptLoader):
        run, mesh, out = asked.run, asked.mesh, asked.out
        with batches.drawn(run, begun, loader, state, mesh, out, checkpoints) as phases:
            yield phases
    else:
        yield loader


def _loop(asked: _Asked, read: Batches, state: TrainState, hooks: Hooks) -> int:
    """The steps that are left. What stopped them early, 0 if nothing did."""
    signal = 0
    if state.step >= state.steps:
        asked.console.print(
            f"step {state.step} of {state.steps}: nothing is left to train; raise "
            f"--train.{_told_in(asked.run)} to go on"
        )
    else:
        with limit_told(hooks.line.say), loop.by_hand():
            signal = train_steps(
                state,
                read,
                asked.mesh,
                hooks.table(),
                asked.stop,
                asked.watch,
                hooks.profile.around,
                drawn=asked.run.objective.draws,
            )
    asked.watch.beat(state.step, "the last save", patient=True)
    return signal


def _outcome(
    state: TrainState, loader: Loader, last: Validation | None, seconds: float, signal: int
) -> Outcome:
    return Outcome(
        steps=state.step,
        seconds=seconds,
        signal=signal,
        val_loss=last.loss if last else None,
        val_step=last.step if last else None,
        val_tokens=last.tokens if last else 0,
        held_out_tokens=last.held_out_tokens if last else 0,
        bits_per_byte=last.bits_per_byte if last else None,
        validation_files=tuple(str(f) for f in loader.validation_files),
        val_sources=last.sources if last else {},
        val_sources_per_byte=last.sources_per_byte if last else {},
        val_sources_before=last.sources_before if last else {},
    )


def length(run: RunConfig, loader: Loader) -> int:
    """Steps after which the run ends: those asked for, in steps, tokens or epochs, else one epoch,
    and 20 at least. Batches before the loader's step may have been of another size: what they have
    read counts as what it was.
    """
    if run.train.steps is not None:
        return run.train.steps
    if run.train.tokens is not None:
        samples = math.ceil(run.train.tokens / run.sequence_length) - loader.first(0)
        return max(1, math.ceil(samples / loader.global_batch_size))
    if run.train.epochs is not None:
        return epoch_steps(loader, run.train.epochs)
    return max(20, epoch_steps(loader))


def epoch_steps(loader: Loader, epochs: float = 1.0) -> int:
    """Step after which the training data have been read so often, by the source that lasts
    longest.
    """
    step = 1000
    samples = loader.first(step) - loader.first(0)
    per_step = max(min(loader.mixture.epochs(samples).values()) / step, 1e-12)
    return max(1, round(epochs / per_step - loader.first(0) / loader.global_batch_size))


def _told_in(run: RunConfig) -> str:
    """The option that says how long the run is."""
    asked = (name for name in ("tokens", "epochs") if getattr(run.train, name) is not None)
    return next(asked, "steps")


def summary(outcome: Outcome, out: Path) -> None:
    """What `finish` and a reader need to know of how the run ended, as summary.json."""
    row = {
        name: None if isinstance(value, float) and not math.isfinite(value) else value
        for name, value in asdict(outcome).items()
    }
    write.replace(out / "summary.json", json.dumps(row, indent=1))
