"""A training run in one process of its group: build, start or resume, train with its hooks, save.
`dolmen train` on one CPU and rank 2,071 of a cluster both come through here.
"""

import json
import math
import signal as signals
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import NamedTuple

import numpy as np
from rich.console import Console

from dolmen.checkpoint.memory import MemorySnapshots, clear_memory, memory_folder, restore
from dolmen.checkpoint.saved import Saved, Validation
from dolmen.checkpoint.store import Checkpoints
from dolmen.core import determinism
from dolmen.core.mesh import Mesh
from dolmen.data.base_loader import Loader
from dolmen.data.tokenizer import PreTrainedTokenizer
from dolmen.files import gate, kinds, write
from dolmen.launch import process
from dolmen.launch.watchdog import Watch
from dolmen.optim.optimizer import DTYPES
from dolmen.rl.prompts import PromptLoader
from dolmen.training import batches, folder, loop, mfu, mirror, reference, report
from dolmen.training.batches import Batches
from dolmen.training.checks.run import check_profile
from dolmen.training.checks.warn import warnings
from dolmen.training.config import CheckpointConfig, RunConfig
from dolmen.training.goodput import FILE, GoodputTimer, JoinTimes
from dolmen.training.hooks import TrainingHooks
from dolmen.training.initialize import make_critic, make_pretraining, make_state
from dolmen.training.loop import Stop, report_recompile_limit, train_steps
from dolmen.training.metrics import MetricsCallback
from dolmen.training.request import write_config
from dolmen.training.resolve import (
    ResolvedRun,
    checkpoint_to_resume,
    fill_in_length,
    load_data,
    open_data,
    resolve,
    run_steps,
)
from dolmen.training.start import StartMode, changes_since, on_first_rank, require_same_data, resume
from dolmen.training.state import NewRows, TrainState


@dataclass(frozen=True)
class Outcome:
    """The result of a run, written to summary.json. `seconds` counts all its starts; `signal` is
    the signal that stopped it early, or 0.

    The validation is the last one of the run, after step `val_step`, on `val_tokens` of the
    `held_out_tokens` of the validation split. Losses per source are in nats per token,
    `val_sources_per_byte` and `val_sources_before` (before the first step) in bits per byte.

    `goodput` has the shares of wall time by phase, `slow_ranks` those that others waited for one
    rank (training/goodput.py); both as the first rank has measured them.

    `writer` is the line with which the first rank has claimed the URL of the run
    (checkpoint/remote.py), "" without a URL.
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
    goodput: dict[str, float]
    slow_ranks: dict[str, float]
    writer: str = ""


class Prepared(NamedTuple):
    """A resolved and checked run, with its data loader."""

    resolved: ResolvedRun
    loader: Loader


@dataclass(frozen=True)
class _Job:
    """The parts of a run in one process. `began` is its start by time.monotonic(), moved back by
    the seconds of earlier starts.
    """

    resolved: ResolvedRun
    loader: Loader
    out: Path
    mesh: Mesh
    console: Console
    start: StartMode
    stop: Stop
    watch: Watch
    checkpoints: Checkpoints
    began: float
    on_metrics: MetricsCallback | None
    timeline: GoodputTimer

    @property
    def config(self) -> RunConfig:
        """Options of the run, resolved (`resolved.config`)."""
        return self.resolved.config


def run_training(
    config: RunConfig,
    out: Path,
    mesh: Mesh,
    console: Console,
    *,
    resumed: bool = False,
    overwrite: bool = False,
    start: StartMode | None = None,
    stop: Stop | None = None,
    watch: Watch | None = None,
    prepared: Prepared | None = None,
    on_metrics: MetricsCallback | None = None,
    joined: JoinTimes | None = None,
) -> Outcome:
    """Train as `config` specifies, in the folder `out`; return the outcome. Every process of the
    mesh calls it; `console` prints on one of them only.

    start:      the agreed way to start; else made from `resumed` and `overwrite`
    stop:       set by a signal handler, to end early with a checkpoint
    prepared:   `config` as this process has already resolved it, with its data
    on_metrics: called with each row of metrics, on every rank; memory and times are this rank's
    joined:     when this process was started and has joined the others
    """
    timeline = GoodputTimer(joined)
    started_at, start = time.monotonic(), start or StartMode(resumed, overwrite)
    # around everything: weights are sampled within too
    with determinism.deterministic_mode(config.train.deterministic):
        resolved, loader = prepared or prepare(config, out, mesh, start)
        job = _Job(
            resolved,
            loader,
            out,
            mesh,
            console,
            start,
            stop or Stop(),
            watch or Watch(out / "hang", mesh.rank, mesh.size, None, print),
            open_checkpoints(resolved.config.checkpoint, out, mesh),
            started_at,
            on_metrics,
            timeline,
        )
        job.watch.pass_point = timeline.pass_point
        # before the first collective that depends on the data
        require_same_data(loader, mesh)
        if not start.resumed:
            check_profile(resolved.config.log.profile, run_steps(resolved.config, loader))
        # the reference of DPO is the model before anything is resumed into it
        state = make_initial(job)
        references = {}
        if resolved.config.objective.needs_reference:
            references = reference.add_reference_logprobs(resolved, state, loader, mesh, out)
        with _lock(job):
            return _train(job, state, references)


def open_checkpoints(config: CheckpointConfig, out: Path, mesh: Mesh) -> Checkpoints:
    """Return the store of checkpoints of the run in the folder `out`, and at its URL if it has one;
    no file is read. Makes a process group if there are several ranks (collective).
    """
    remote = None if config.to is None else mirror.open_checkpoints(config.to, out)
    return Checkpoints(out / "checkpoints", mesh, config.keep, remote=remote)


def prepare(config: RunConfig, out: Path, mesh: Mesh, start: StartMode) -> Prepared:
    """Resolve, in one of the run's processes, a run that was checked before, and open its data; the
    data are not verified again. A run that resumes may read the newest checkpoint in `out` in place
    of initial models that no longer exist. Return the resolved run and its data loader.
    """
    checkpoint = checkpoint_to_resume(out, start.resumed)
    resolved = resolve(config, mesh.size, checkpoint)
    data = open_data(resolved, progress=mesh.first, verify=False)
    return Prepared(resolved, load_data(resolved, data, progress=mesh.first, verify=False))


def make_initial(job: _Job) -> TrainState:
    """Return the training state of the run at step 0: model with its initial weights, optimizer,
    for PPO the critic with its warm-up, and the pretraining loss of PPO-ptx if requested.
    """
    config, loader, mesh = job.config, job.loader, job.mesh
    state = make_state(job.resolved, mesh, run_steps(config, loader))
    if config.objective.name == "ppo":
        state.critic, state.critic_warmup_steps = (
            make_critic(job.resolved, state, mesh),
            config.critic.warmup_steps,
        )
    state.pretraining = make_pretraining(config, loader, mesh)
    return state


@contextmanager
def _lock(job: _Job) -> Iterator[None]:
    """Context manager: the first rank holds the lock of the run's folder, and has claimed its URL,
    so that no second run uses them. Raises Unusable, on every rank, if another run holds the
    folder, or has taken the URL from a run that is restarted; a restart waits up to 60 seconds for
    the lock. Prints a warning where the file system has no locks. Collective.
    """
    patience = 60 if job.start.restarted else 0
    descriptor = on_first_rank(job.mesh, lambda: folder.lock_folder(job.out, patience))
    if job.mesh.first and descriptor is None:
        job.console.print(
            f"WARNING: the file system of {job.out} does not support locks, so a second run in "
            "the same folder cannot be prevented"
        )
    remote = job.checkpoints.remote
    try:
        if remote is not None:
            on_first_rank(job.mesh, lambda: remote.claim(process.job(), job.start.restarted))
        yield
    finally:
        if job.mesh.first:
            folder.unlock_folder(job.out, descriptor)


def _train(job: _Job, state: TrainState, references: Mapping[str, np.ndarray]) -> Outcome:
    """Train in the run's folder, whose lock is held: empty it (--overwrite) or resume, write
    config.yaml and tokenizer, run the remaining steps with all hooks, and close the files. Return
    the outcome. `references`: the reference model's log-probabilities by key, to be stored. Raises
    FloatingPointError if loss or gradient of the last step was not finite, unless the loss scale is
    dynamic.
    """
    if job.start.overwrite:
        on_first_rank(job.mesh, lambda: folder.clear_run(job.out, job.start.owner))
    elif process.agent() or (process.recovered_job() and not job.start.restarted):
        on_first_rank(job.mesh, lambda: folder.record_jobs(job.out, job.start.owner))
    snapshots = _open_snapshots(job)
    saved = None
    if job.start.resumed:
        job.timeline.switch("restore")
        saved = resume(
            state, job.config, job.loader, job.checkpoints, job.console, job.start.restarted
        )
    job.timeline.switch("start")
    if saved is not None:
        # elapsed times count the earlier starts of the run
        job = replace(job, began=job.began - saved.seconds)
    set_length(job, state)
    config = fill_in_length(job.config, job.loader)
    job = replace(job, resolved=replace(job.resolved, config=config))
    # a run that has ended keeps the config.yaml that it ended with
    if job.mesh.first and state.step < state.steps:
        write_inputs(job, references)
    if job.mesh.first:
        idle, start = state.step >= state.steps, job.start
        job.timeline.open(job.out / FILE, saved is not None, start.restarted, idle, state.step)
    hooks = _open_hooks(job, state, saved, snapshots)
    ended = "failed"
    try:
        if saved is None and job.config.log.validate_sources and job.loader.validation_by_source:
            hooks.validate(state, None)
        signal = _run_steps(job, state, hooks)
        job.checkpoints.finish()
        if snapshots is not None:
            snapshots.close(done=not signal)
        ended = signals.Signals(signal).name if signal else "done"
    finally:
        hooks.close(state.step, ended)
    # a run whose last loss is not finite has diverged, even if too few steps were skipped to end it
    if not hooks.finite and not state.scale.dynamic:
        raise FloatingPointError(hooks.too_many_skips(state))
    if saved is not None and saved.step == state.step:  # nothing was left to do
        # the time of this start is not training
        seconds = saved.seconds
    else:
        seconds = time.monotonic() - job.began
    return _outcome(state, job, hooks.validator.last, seconds, signal)


def _open_snapshots(job: _Job) -> MemorySnapshots | None:
    """Return the run's store of snapshots in the hosts' memory; None without
    --checkpoint.snapshot-every. If this start is a restart, the newest snapshot is first written to
    disk as a checkpoint if it is newer than those there; then, in any case, old ones are deleted.
    Collective.
    """
    if not job.config.checkpoint.snapshot_every:
        return None
    owner = job.start.owner or process.parent()
    memory = memory_folder(job.out, owner.splitlines()[0])
    if job.start.restarted:
        restored = restore(memory, job.out / "checkpoints", job.mesh)
        if restored is not None:
            job.console.print(
                f"the snapshot of step {restored} in memory is newer than any checkpoint"
            )
    else:
        clear_memory(memory, job.mesh)
    return MemorySnapshots(memory, process.parent(), job.mesh)


def set_length(job: _Job, state: TrainState) -> None:
    """Set in `state` what depends on the data and the batch size: the number of steps, the
    learning-rate warm-up and offset (of the critic's state too), and the frozen phase of new
    vocabulary rows. Done again on resume, as with another batch size an epoch, or a number of
    tokens, ends at another step.
    """
    config, loader = job.config, job.loader
    for trained in (state, *([state.critic.state] if state.critic is not None else [])):
        trained.steps = run_steps(config, loader)
        if config.optimizer.warmup_tokens is not None:
            trained.warmup = config.warmup_steps
            # schedules count tokens, in steps of the current batch size: those before count as what
            # they read
            trained.lr_step_offset = loader.first(0) / loader.global_batch_size
    state.new_rows = NewRows.from_config(config.train.new_rows, state.steps)


def write_inputs(job: _Job, references: Mapping[str, np.ndarray]) -> None:
    """Write config.yaml, the tokenizer's files and the reference log-probabilities (if any) into
    the run's folder, for later starts of the run and users of its model. Only the first rank calls
    it.
    """
    folder.claim(job.out, *folder.WRITTEN)
    write_config(job.out, job.resolved.reusable)
    write_tokenizer(job.out, job.loader.tokenizer)
    if references:
        reference.store(job.out, references)


def write_tokenizer(out: Path, tokenizer: PreTrainedTokenizer) -> None:
    """Write the tokenizer's files into `out/tokenizer`, each atomically, and add them to the
    folder's list of what dolmen wrote. (`save_pretrained` would write through symbolic links, so it
    writes to a temporary folder first.)
    """
    with tempfile.TemporaryDirectory() as saved:
        tokenizer.save_pretrained(saved)
        for file in sorted(path for path in Path(saved).rglob("*") if path.is_file()):
            to = "tokenizer" / file.relative_to(saved)
            write.replace(write.folder(out, to.parent) / file.name, gate.read_bytes(file, 2**32))
    folder.claim_files(out, "tokenizer")


def _open_hooks(
    job: _Job, state: TrainState, saved: Saved | None, snapshots: MemorySnapshots | None
) -> TrainingHooks:
    """Print the run's header and warnings, open its files of metrics and history, and return the
    periodic work of the run (hooks). `saved`: what the checkpoint that was resumed stores, or None.
    Stored rollouts that were made with options that have changed since are deleted.
    """
    config, loader, mesh, console, out = job.config, job.loader, job.mesh, job.console, job.out
    peak = mfu.peak(mesh.device, DTYPES[config.train.dtype])
    console.print(report.header(config, state, loader, mesh, peak, str(out)))
    for warning in warnings(job.resolved, loader, state.step, state.steps):
        console.print(f"WARNING: {warning}")
    hooks = TrainingHooks(
        config,
        state,
        loader,
        mesh,
        out,
        job.checkpoints,
        peak,
        console,
        job.stop,
        job.watch,
        job.began,
        job.on_metrics,
        job.timeline,
        snapshots,
    )
    hooks.validator.begin(None if saved is None else saved.validation)
    changed = changes_since(saved, config, loader) if saved is not None else []
    hooks.begin(state, job.start.how, changed)
    on_first_rank(mesh, lambda: batches.forget_other(out, state.step, changed))
    return hooks


def _run_steps(job: _Job, state: TrainState, hooks: TrainingHooks) -> int:
    """Train the remaining steps with all hooks; return the signal that stopped them early, or 0.
    Prints a note if no step is left.
    """
    signal = 0
    with _open_batches(job, state) as read:
        if state.step >= state.steps:
            job.console.print(
                f"step {state.step} of {state.steps}: nothing left to train; increase "
                f"--train.{length_option(job.config)} to continue"
            )
        else:
            timeline = job.timeline
            timeline.generates = job.config.objective.uses_rollouts
            with (
                report_recompile_limit(hooks.line.say),
                loop.manual_gc(),
                timeline.sampler.sampling() if job.mesh.size > 1 else nullcontext(),
            ):
                signal = train_steps(
                    state,
                    read,
                    job.mesh,
                    hooks.table(),
                    job.stop,
                    job.watch,
                    hooks.profile.around,
                    generates=timeline.generates,
                )
                if job.mesh.size > 1:
                    timeline.add_waits()
        job.watch.beat(state.step, "the last save", patient=True)
    return signal


@contextmanager
def _open_batches(job: _Job, state: TrainState) -> Iterator[Batches]:
    """Context manager: yield the source of the run's batches: its data loader, or for GRPO and PPO
    rollouts of its own model.
    """
    if isinstance(job.loader, PromptLoader):
        with batches.rollout_batches(
            job.resolved, job.loader, state, job.mesh, job.out, job.checkpoints
        ) as rollouts:
            yield rollouts
    else:
        yield job.loader


def _outcome(
    state: TrainState, job: _Job, last: Validation | None, seconds: float, signal: int
) -> Outcome:
    """Return the outcome of the run: steps, `seconds`, the `signal` that ended it, results of the
    `last` validation (None: none), and goodput. Stops the goodput timer.
    """
    loader, timeline, remote = job.loader, job.timeline, job.checkpoints.remote
    timeline.close()
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
        goodput=timeline.shares(),
        slow_ranks=timeline.slow_ranks(),
        writer="" if remote is None else remote.writer,
    )


def length_option(config: RunConfig) -> str:
    """Return which option of --train sets the length of the run, for messages: "tokens" or "epochs"
    if that is set, else "steps".
    """
    stated = (name for name in ("tokens", "epochs") if getattr(config.train, name) is not None)
    return next(stated, "steps")


def summary(outcome: Outcome, out: Path) -> None:
    """Write the outcome of the run as summary.json into its folder `out`; numbers that are not
    finite become null.
    """
    row = {
        name: None if isinstance(value, float) and not math.isfinite(value) else value
        for name, value in asdict(outcome).items()
    }
    write.replace(out / "summary.json", json.dumps(row, indent=1))


def read_summary(out: Path) -> Outcome:
    """Return the outcome of a run from the summary.json in its folder. Raises Refused where it is
    missing or malformed.
    """
    row = gate.read_json(out / "summary.json", kinds.SUMMARY)
    return Outcome(**{**row, "validation_files": tuple(row["validation_files"])})
