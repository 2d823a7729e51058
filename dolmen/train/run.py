"""A training run in one process of its group: build, start or resume, train with its hooks, save.
`dolmen train` on one CPU and rank 2,071 of a cluster both come through here.
"""

import json
import math
import os
import shutil
import time
from dataclasses import asdict, dataclass
from pathlib import Path

import yaml
from rich.console import Console

from dolmen.checkpoint.store import Checkpoints
from dolmen.convert import hf
from dolmen.core.config import differences, to_dict
from dolmen.core.mesh import Mesh
from dolmen.data import loader as data_loader
from dolmen.data.loader import Loader
from dolmen.model.config import parameter_shapes
from dolmen.optim import optimizer as optim
from dolmen.optim.precision import DTYPES, LossScale
from dolmen.train import build, report
from dolmen.train.check import check_same_model, take_lock
from dolmen.train.config import RunConfig
from dolmen.train.hooks import Hooks
from dolmen.train.loop import Stop, train
from dolmen.train.peak import matmul_peak
from dolmen.train.spike import SpikePolicy
from dolmen.train.start import OWNER, Start
from dolmen.train.step import TrainState
from dolmen.train.watch import Watch


@dataclass(frozen=True)
class Outcome:
    """How a run ended. `signal` is what stopped it early, 0 if nothing did."""

    steps: int
    seconds: float
    signal: int
    val_loss: float | None
    val_tokens: int
    bits_per_byte: float | None
    validation_files: tuple[str, ...]


def make_state(run: RunConfig, mesh: Mesh, steps: int) -> TrainState:
    """The model with its initial values and an optimizer at step 0."""
    schedule = run.layout.make_schedule(run.train.global_batch_size, run.microbatch_size)
    model = build.build(
        run.model,
        mesh,
        run.layout,
        schedule,
        compute=DTYPES[run.train.dtype],
        compile=run.train.compile,
    )
    if run.init is None:
        build.initialize(model, run.train.seed)
    else:
        build.load(
            model,
            lambda write: hf.load(
                hf.resolve(run.init), run.model, write, only=dict(model.named_parameters())
            ),
        )
    optimizer = optim.adamw(model, run.optimizer)
    optim.prime(optimizer)
    spike = SpikePolicy(run.train.spike_factor if run.train.spike == "skip" else None)
    return TrainState(
        model,
        optimizer,
        run.optimizer,
        steps,
        run.layout.zero,
        schedule,
        run.train.seed,
        LossScale.of(run.train.dtype),
        spike,
    )


def resume(
    state: TrainState,
    run: RunConfig,
    loader: Loader,
    checkpoints: Checkpoints,
    console: Console,
    restarted: bool = False,
) -> None:
    """Put the newest whole checkpoint into `state` and say what changed since; with none, say so
    and start.

    Raises ValueError if the checkpoint is of another model, Damaged if it is; after a restart,
    which nobody watches, a damaged one is put aside and the one before it taken.
    """
    found = load_newest(state, run, checkpoints, console, restarted)
    if found is None:
        console.print(
            f"{'restart' if restarted else '--resume'}: nothing is saved here yet, starting from "
            f"step 0"
        )
        return
    step, meta = found
    old, new = meta["run"], to_dict(run)
    state.step, state.tokens = step, meta["tokens"]
    optim.set_step(state.optimizer, meta["updates"])
    if state.scale.dynamic:
        state.scale.value, state.scale.good_steps = meta["loss_scale"]
    state.spike.load(meta.get("norms", []))
    console.print(f"resuming from step {step}")
    for line in [
        d for d in differences(old, new) if not d.startswith("model.")
    ] + data_loader.changes(meta["data"], loader.fingerprint()):
        console.print(f"  changed: {line}")


def load_newest(
    state: TrainState, run: RunConfig, checkpoints: Checkpoints, console: Console, fall_back: bool
) -> tuple[int, dict] | None:
    """Load the newest whole checkpoint: (its step, its meta); None if there is none. With
    `fall_back` the newest that is not damaged.
    """
    steps = checkpoints.steps()
    everywhere = {f"{kind}/{name}" for name in parameter_shapes(run.model) for kind in optim.KINDS}
    for step in reversed(steps):
        try:
            meta = checkpoints.meta(step)
        except ValueError as caught:
            error = caught
        else:
            check_same_model(meta["run"], run, step)
            try:
                checkpoints.load(step, optim.tensors(state.model, state.optimizer), everywhere)
            except ValueError as caught:
                error = caught
            else:
                return step, meta
        if not fall_back or step == steps[0]:
            raise checkpoints.damaged(step, error) from None
        aside = checkpoints.put_aside(step)
        console.print(
            f"WARNING: the newest checkpoint, of step {step}, is damaged ({error}); it is kept as "
            f"{aside}, and the run goes on from the one before"
        )
    return None


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
    began = time.monotonic()
    start = start or Start(resumed, overwrite)
    watch = watch or Watch(out / "hang", mesh.rank, mesh.size, None, print)
    loader = data_loader.prepare(
        run.data,
        run.init,
        run.model.vocab_size,
        run.sequence_length,
        run.train.global_batch_size,
        run.train.seed,
        progress=mesh.first,
    )
    steps = run.train.steps or max(20, epoch_steps(loader))
    state = make_state(run, mesh, steps)
    lock = take_lock(out, 60 if start.restarted else 0) if mesh.first else None
    try:
        return _train(run, out, mesh, console, loader, state, start, stop or Stop(), watch, began)
    finally:
        if lock is not None:
            os.close(lock)


def _train(
    run: RunConfig,
    out: Path,
    mesh: Mesh,
    console: Console,
    loader: Loader,
    state: TrainState,
    start: Start,
    stop: Stop,
    watch: Watch,
    began: float,
) -> Outcome:
    """`run_training` in a folder that is ours."""
    if mesh.first and start.overwrite:
        clear(out, start.owner)
    checkpoints = Checkpoints(out / "checkpoints", mesh, run.checkpoint.keep)
    if start.resumed:
        resume(state, run, loader, checkpoints, console, start.restarted)
    steps = state.steps
    if mesh.first and state.step < steps:
        write_config(out, run)
        loader.tokenizer.save_pretrained(str(out / "tokenizer"))
    peak = matmul_peak(mesh.device, DTYPES[run.train.dtype])
    console.print(report.header(run, state, loader, mesh, peak, str(out)))
    hooks = Hooks(run, state, loader, mesh, out, checkpoints, peak, console, stop, watch)
    try:
        if state.step >= steps:
            console.print(
                f"step {state.step} of {steps}: nothing is left to train; raise --train.steps "
                f"to go on"
            )
        signal = train(state, loader, mesh, hooks.table(), stop, watch) if state.step < steps else 0
        watch.beat(state.step, "the last save", patient=True)
        checkpoints.finish()
    finally:
        hooks.close()
    if not hooks.finite and not state.scale.dynamic:
        raise FloatingPointError(hooks.too_many_skips(state))
    val_loss, val_tokens, nats = hooks.validation or (None, 0, 0.0)
    whole = val_loss is not None and not signal and val_tokens == loader.validation_tokens
    bits = nats / loader.validation_bytes / math.log(2) if whole else None
    return Outcome(
        state.step,
        time.monotonic() - began,
        signal,
        val_loss,
        val_tokens,
        bits,
        tuple(str(f) for f in loader.validation_files),
    )


def epoch_steps(loader: Loader) -> int:
    """Steps of one pass over the training data, by the source that lasts longest."""
    per_step = max(min(loader.epochs(1000).values()) / 1000, 1e-12)
    return max(1, round(1 / per_step))


def clear(out: Path, owner: str = "") -> None:
    """Empty a run's folder, and then say in it who has: `owner`'s restarts will not."""
    for child in out.iterdir():
        shutil.rmtree(child) if child.is_dir() and not child.is_symlink() else child.unlink()
    if owner:
        (out / OWNER).write_text(owner)


def write_config(out: Path, run: RunConfig) -> None:
    """config.yaml: the resolved run, which can be run again."""
    out.mkdir(parents=True, exist_ok=True)
    part = out / "config.yaml.part"
    part.write_text(yaml.safe_dump(to_dict(run), sort_keys=False))
    part.rename(out / "config.yaml")


def summary(outcome: Outcome, out: Path) -> None:
    """What `finish` and a reader need to know of how the run ended, as summary.json."""
    row = {
        name: None if isinstance(value, float) and not math.isfinite(value) else value
        for name, value in asdict(outcome).items()
    }
    (out / "summary.json").write_text(json.dumps(row, indent=1))
