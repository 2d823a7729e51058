"""A training run in one process of its group: build, start or resume, train with its hooks, save. `dolmen train` on one
CPU and rank 2,071 of a cluster both come through here.
"""

import json
import math
import resource
import shutil
import time
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
import yaml
from rich.console import Console

from dolmen.checkpoint.store import Checkpoints
from dolmen.convert import hf
from dolmen.core.config import differences, to_dict
from dolmen.core.mesh import Mesh
from dolmen.data import loader as data_loader
from dolmen.data.loader import Loader
from dolmen.model import count
from dolmen.optim import optimizer as optim
from dolmen.optim.precision import DTYPES, LossScale
from dolmen.train import build, metrics, report
from dolmen.train.check import check_same_model
from dolmen.train.config import RunConfig
from dolmen.train.loop import Stop, train
from dolmen.train.peak import matmul_peak
from dolmen.train.step import Metrics, TrainState
from dolmen.train.validate import evaluate


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
    model = build.build(run.model, mesh, sequence=run.layout.sequence_parallel, zero=run.layout.zero, compute=DTYPES[run.train.dtype], compile=run.train.compile)
    if run.init is None: build.initialize(model, run.train.seed)
    else: build.load(model, lambda write: hf.load(hf.resolve(run.init), run.model, write))
    optimizer = optim.adamw(model, run.optimizer)
    optim.prime(optimizer)
    return TrainState(model, optimizer, run.optimizer, steps, run.layout.zero, run.train.seed, LossScale.of(run.train.dtype))


def resume(state: TrainState, run: RunConfig, loader: Loader, checkpoints: Checkpoints, console: Console) -> None:
    """Put the newest whole checkpoint into `state` and say what changed since; with none, say so and start.

    Raises ValueError if the checkpoint is of another model.
    """
    step = checkpoints.newest()
    if step is None:
        console.print("--resume: nothing is saved here yet, starting from step 0")
        return
    meta = checkpoints.meta(step)
    old, new = meta["run"], to_dict(run)
    check_same_model(old, run, step)
    checkpoints.load(step, optim.tensors(state.model, state.optimizer))
    state.step, state.tokens = step, meta["tokens"]
    optim.set_step(state.optimizer, meta["updates"])
    if state.scale.dynamic: state.scale.value, state.scale.good_steps = meta["loss_scale"]
    console.print(f"resuming from step {step}")
    for line in [d for d in differences(old, new) if not d.startswith("model.")] + data_loader.changes(meta["data"], loader.fingerprint()):
        console.print(f"  changed: {line}")


def run_training(run: RunConfig, out: Path, mesh: Mesh, console: Console, *, resumed: bool = False, overwrite: bool = False,
                 stop: Stop | None = None) -> Outcome:
    """Train as `run` says, into the folder `out`. Every process of the mesh calls it; `console` is quiet on all but one."""
    began = time.monotonic()
    loader = data_loader.prepare(run.data, run.init, run.model.vocab_size, run.sequence_length, run.train.global_batch_size, run.train.seed, progress=mesh.first)
    steps = run.train.steps or max(20, epoch_steps(loader))
    state, stop = make_state(run, mesh, steps), stop or Stop()
    if mesh.first and overwrite: clear(out)
    checkpoints = Checkpoints(out / "checkpoints", mesh, run.checkpoint.keep)
    if resumed: resume(state, run, loader, checkpoints, console)
    if mesh.first:
        write_config(out, run)
        loader.tokenizer.save_pretrained(str(out / "tokenizer"))
    peak = matmul_peak(mesh.device, DTYPES[run.train.dtype])
    console.print(report.header(run, state, loader, mesh, peak, str(out)))
    hooks = Hooks(run, state, loader, mesh, out, checkpoints, peak, console, stop)
    try:
        if state.step >= steps: console.print(f"step {state.step} of {steps}: nothing is left to train; raise --train.steps to go on")
        signal = train(state, loader, mesh, run.microbatch_size, hooks.table(), stop) if state.step < steps else 0
        checkpoints.finish()
    finally:
        hooks.close()
    val_loss, val_tokens, nats = hooks.validation or (None, 0, 0.0)
    whole = val_loss is not None and not signal and val_tokens == loader.validation_tokens
    bits = nats / loader.validation_bytes / math.log(2) if whole else None
    return Outcome(state.step, time.monotonic() - began, signal, val_loss, val_tokens, bits, tuple(str(f) for f in loader.validation_files))


def epoch_steps(loader: Loader) -> int:
    """Steps of one pass over the training data, by the source that lasts longest."""
    per_step = max(min(loader.epochs(1000).values()) / 1000, 1e-12)
    return max(1, round(1 / per_step))


def clear(out: Path) -> None:
    """Empty a run's folder."""
    for child in out.iterdir() if out.is_dir() else ():
        shutil.rmtree(child) if child.is_dir() and not child.is_symlink() else child.unlink()


def write_config(out: Path, run: RunConfig) -> None:
    """config.yaml: the resolved run, which can be run again."""
    out.mkdir(parents=True, exist_ok=True)
    part = out / "config.yaml.part"
    part.write_text(yaml.safe_dump(to_dict(run), sort_keys=False))
    part.rename(out / "config.yaml")


class Hooks:
    """The periodic work of a run, as a table of (every, hook); numbers are shown and written by the first rank alone."""

    def __init__(self, run: RunConfig, state: TrainState, loader: Loader, mesh: Mesh, out: Path, checkpoints: Checkpoints, peak: float,
                 console: Console, stop: Stop):
        self.stop, self.steps = stop, state.steps
        self.run, self.loader, self.mesh, self.out, self.checkpoints = run, loader, mesh, out, checkpoints
        self.flops = count.training_flops_per_token(run.model, run.sequence_length)
        self.peak = peak * mesh.size
        self.since, self.tokens_since, self.validation, self.skipped = time.monotonic(), 0, None, 0
        self.writers = [metrics.MetricsFile(out / "metrics.jsonl", state.step), metrics.TensorBoard(out / "tensorboard", state.step)] if mesh.first else []
        self.line = report.ProgressLine(console, state.step, state.steps)

    def table(self):
        every = self.run.log.validate_every
        validating = max(1, self.steps // 10) if every is None else every
        hooks = [(1, self.count), (self.run.log.every, self.log)]
        if self.loader.validation_tokens: hooks.append((validating, self.validate))
        return [*hooks, (self.run.checkpoint.every, self.save), (1, lambda state, m: self.checkpoints.poll())]

    def count(self, state: TrainState, m: Metrics) -> None:
        self.tokens_since += m.tokens
        self.skipped += m.skipped
        if m.skipped: self.line.say(f"step {state.step}: the gradient is not finite ({m.grad_norm}), the step is skipped" + (f"; loss scale now {state.scale.value:g}" if state.scale.dynamic else ""))

    def log(self, state: TrainState, m: Metrics) -> None:
        now = time.monotonic()
        rate = self.tokens_since / max(1e-9, now - self.since)
        self.since, self.tokens_since = now, 0
        row = {"step": state.step, "loss": m.loss, "grad_norm": m.grad_norm, "lr": m.lr, "tokens": state.tokens, "tokens_per_second": rate,
               "mfu": rate * self.flops / self.peak, "memory_gib": memory_gib(self.mesh), "time": time.time(),
               **{f"epoch/{name}": value for name, value in self.loader.epochs(state.step).items()}}
        if state.scale.dynamic: row |= {"loss_scale": state.scale.value, "skipped_steps": self.skipped}
        for writer in self.writers: writer.write(row)
        if self.mesh.first: self.line.show(row)

    def validate(self, state: TrainState, m: Metrics) -> None:
        if self.stop.agreed_signal: return                                              # the time left is for saving
        whole = state.step == state.steps or self.run.log.validation_tokens == 0
        most = None if whole else max(1, self.run.log.validation_tokens // self.run.sequence_length)
        began = time.monotonic()
        self.validation = loss, tokens, _ = evaluate(state.model, self.loader.validation_batches(most, self.mesh.dp.rank, self.mesh.dp.size), self.mesh)
        self.since += time.monotonic() - began                                          # not the training's time
        for writer in self.writers: writer.write({"step": state.step, "val_loss": loss, "val_tokens": tokens, "time": time.time()})
        self.line.say(f"step {state.step}: validation loss {loss:.4f} on {tokens:,} tokens")

    def save(self, state: TrainState, m: Metrics) -> None:
        meta = {"run": to_dict(self.run), "step": state.step, "tokens": state.tokens, "updates": updates(state), "data": self.loader.fingerprint(),
                "loss_scale": [state.scale.value, state.scale.good_steps], "seed": self.run.train.seed}
        self.checkpoints.save(state.step, optim.tensors(state.model, state.optimizer), meta)

    def close(self) -> None:
        self.line.close()
        for writer in self.writers: writer.close()
        if self.mesh.first: metrics.plot(self.out / "metrics.jsonl", self.out / "loss.png", f"{self.run.name}: {self.run.model.family}, {count.parameters(self.run.model) / 1e6:.1f} M parameters")


def updates(state: TrainState) -> int:
    """Updates AdamW has made: steps less those skipped."""
    return int(next(iter(state.optimizer.state.values()))["step"])


def memory_gib(mesh: Mesh) -> float:
    """Peak memory of this process: the GPU allocator's, or the resident set on CPU."""
    if mesh.device.type == "cuda": return torch.cuda.max_memory_allocated(mesh.device) / 2**30
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20


def summary(outcome: Outcome, out: Path) -> None:
    """What `finish` and a reader need to know of how the run ended, as summary.json."""
    (out / "summary.json").write_text(json.dumps(asdict(outcome), indent=1))
