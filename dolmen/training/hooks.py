"""Periodic work of a run as (every, hook): numbers, validation, checkpoints. Shown and written by
the first rank alone.
"""

import math
import resource
import sys
import time
from pathlib import Path

import torch
from rich.console import Console
from torch.distributed.checkpoint.api import CheckpointException

from dolmen.checkpoint.memory import MemorySnapshots
from dolmen.checkpoint.saved import Saved
from dolmen.checkpoint.store import Checkpoints
from dolmen.core.config import to_dict
from dolmen.core.device import describe_device
from dolmen.core.log import size
from dolmen.core.mesh import Mesh
from dolmen.core.messages import cut, plural
from dolmen.data.base_loader import Loader
from dolmen.launch.watchdog import Watch
from dolmen.model import count
from dolmen.optim.optimizer import DTYPES
from dolmen.training import balance, loop, metrics, report
from dolmen.training.checks import warn
from dolmen.training.config import RunConfig
from dolmen.training.evaluate import RunEvaluator, Validator
from dolmen.training.folder import claim
from dolmen.training.goodput import GoodputTimer
from dolmen.training.initialize import make_evaluation_generator
from dolmen.training.loop import Hook, Stop
from dolmen.training.metrics import (
    CallbackWriter,
    HistoryFile,
    MetricsCallback,
    TrackedRun,
    TrackerThread,
)
from dolmen.training.mfu import Peak
from dolmen.training.profile import Profile
from dolmen.training.receipt import RECEIPTS, Receipts
from dolmen.training.state import TrainState
from dolmen.training.step import StepMetrics

SKIPS_SCALED = 40  # steps in a row that a search for the loss scale may skip, at least


class TrainingHooks:
    """The periodic work of a run, as a table of (every, hook). Every rank calls each hook, as some
    contain collectives; the first rank alone prints and writes.

    `started_at` is the start of the run by time.monotonic(), moved back by the seconds of earlier
    starts.
    """

    def __init__(
        self,
        run: RunConfig,
        state: TrainState,
        loader: Loader,
        mesh: Mesh,
        out: Path,
        checkpoints: Checkpoints,
        peak: Peak,
        console: Console,
        stop: Stop,
        watch: Watch,
        started_at: float,
        on_metrics: MetricsCallback | None,
        timeline: GoodputTimer,
        snapshots: MemorySnapshots | None,
    ):
        """Open metrics.jsonl and history.jsonl and start the experiment trackers (first rank), and
        prepare validation, evaluation and profile. `checkpoints`, `snapshots`: where states are
        saved; `peak`: FLOP/s for MFU; `started_at`: start of the run by time.monotonic(), moved
        back by the seconds of earlier starts; `on_metrics`: called with each row, on every rank.
        """
        self.stop = stop
        # a dynamic loss scale starts at 2^16 and is halved at each overflow: 16 skipped steps in a
        # row are a search, not a failure
        self.max_skips = (
            max(run.train.max_skipped_steps, SKIPS_SCALED)
            if state.scale.dynamic
            else run.train.max_skipped_steps
        )
        self.run = run
        self.loader = loader
        self.mesh = mesh
        self.out = out
        self.checkpoints, self.snapshots = checkpoints, snapshots
        self.flops = count.training_flops_per_token(run.trained, run.sequence_length)
        self.peak = peak
        self.began = started_at
        self.timeline = timeline
        title = f"{run.name}: held-out pairs"
        self.validator = Validator(run.log, run.sequence_length, title, loader, mesh, out, watch)
        # by the starts before
        # steps without an update that are not part of the critic's warm-up
        self.skipped = state.step - state.updates - min(state.step, state.critic_warmup_steps)
        self.skipped_in_a_row, self.finite = 0, True
        self.disagreed = False  # trainer and generator have, which is reported once
        self.rewards_differed = False  # within an iteration of this start
        self.record = metrics.MetricsFile(out / "metrics.jsonl", state.step) if mesh.first else None
        self.receipts = None
        if run.train.numerics == "exact":
            if mesh.first:
                claim(out, RECEIPTS)
            self.receipts = Receipts(out / RECEIPTS, state.step, mesh, DTYPES[run.train.dtype])
        self.history = HistoryFile(out / metrics.HISTORY if mesh.first else None)
        # steps between validations, evaluations and rows per rank, where no option is set
        self.first, self.tenth = state.step + 1, max(1, state.steps // 10)
        self.profile = Profile(run.log.profile, mesh, out)
        self.evaluator = None
        if run.evaluate.enabled:
            self.evaluator = RunEvaluator(
                run.evaluate,
                run.known_model,
                loader.tokenizer,
                make_evaluation_generator(run, mesh),
                mesh,
                out,
            )
        self.line = report.ProgressLine(console, state.step, state.steps)
        self.run_id = metrics.run_id(out / metrics.HISTORY, state.step) if mesh.first else ""
        self.trackers = [] if self.record is None else self._start_trackers(state.step)
        self.writers = [] if self.record is None else [self.record, *self.trackers]
        if on_metrics is not None:
            self.writers.append(CallbackWriter(on_metrics))
        self.since, self.tokens_since = time.monotonic(), 0

    def _start_trackers(self, step: int) -> list[TrackerThread]:
        """Start a thread for each experiment tracker in --log.to, for a run that starts at `step`,
        and return them.
        """
        run_config = self.run
        run = TrackedRun(self.out, run_config.name, self.run_id, step, to_dict(run_config))
        return [TrackerThread(name, run, self.line.say) for name in run_config.log.trackers]

    def table(self) -> list[tuple[int, Hook]]:
        """Return the hooks of the run as (number of steps between calls, method), in the order in
        which they are called after a step: counting, logging, validation, evaluation, saves and so
        on, those that the options ask for. 0 stands for the last step only.
        """
        # order matters: `count` may end the run before anything is written, and `save` comes after
        # validation, whose result is part of the checkpoint
        interval = self.run.log.validate_every
        validating = self.tenth if interval is None else interval
        hooks = [(1, self.count), (self.run.log.every, self.log)]
        if self.receipts is not None:
            hooks.insert(1, (1, self.receipts.add))
        if self.run.log.profile is not None:
            hooks.append((self.run.log.profile, self.write_profile))
        if self.loader.validation_tokens and self.stop.after is None:
            hooks.append((validating, self.validate))
        if self.evaluator is not None:
            hooks.append((self.run.evaluate.every or self.tenth, self.evaluate))
        return [
            *hooks,
            (1, self.ranks),
            (self.run.checkpoint.every, self.save),
            (self.run.checkpoint.snapshot_every, self.snapshot),
            (1, self.poll),
            (1, self.collect_garbage),
        ]

    def count(self, state: TrainState, m: StepMetrics) -> None:
        """Count the step's tokens and whether it was skipped. Prints why a step was skipped; once,
        that trainer and generator disagree on log-probabilities; and after the last step, that all
        rewards of the run were equal. Raises FloatingPointError after `max_skips` skipped steps in
        a row.
        """
        self.tokens_since += m.tokens
        self.skipped += m.skipped
        self.skipped_in_a_row = self.skipped_in_a_row + 1 if m.skipped else 0
        self.finite = m.finite
        if not self.disagreed and (
            mismatch := warn.logprob_mismatch(self.run, self.loader.extra_metrics, state.step - 1)
        ):
            self.disagreed = True
            self.line.say(f"WARNING: {mismatch}")
        # without rollouts there is no such metric
        numbers = self.loader.extra_metrics
        self.rewards_differed |= numbers.get("rollout/reward_std", 1.0) != 0
        if state.step == state.steps and not self.rewards_differed:
            self.line.say(f"WARNING: {warn.constant_reward(numbers)}")
        if m.skipped:
            scale = f"; loss scale now {state.scale.value:g}" if state.scale.dynamic else ""
            self.line.say(f"step {state.step}: {self.reason(m)}, the step is skipped{scale}")
        if self.skipped_in_a_row >= self.max_skips:
            raise FloatingPointError(self.too_many_skips(state))

    def reason(self, m: StepMetrics) -> str:
        """Return the reason why a step was skipped, as text: a loss or gradient that is not finite,
        or a gradient norm over the spike threshold, of the critic or of the model.
        """
        if m.critic is not None and m.critic.skipped:
            return f"of the critic {self.reason(m.critic)}"
        if not math.isfinite(m.loss):
            return f"the loss is not finite ({m.loss})"
        if not math.isfinite(m.grad_norm):
            return f"the gradient is not finite ({m.grad_norm})"
        return (
            f"the gradient norm {m.grad_norm:.3g} exceeds {self.run.train.spike_factor:g} times "
            "its running median"
        )

    def too_many_skips(self, state: TrainState) -> str:
        """Return the error message of a run that ends because steps were skipped, with the
        documents of its last batch.
        """
        batch = "\n  ".join(self.loader.documents(state.step - 1))
        return (
            f"the last {plural(self.skipped_in_a_row, 'step')}, up to step {state.step}, were "
            "skipped, because of a non-finite loss or gradient or a spike, and changed no "
            "parameter: check the initial weights and the data, or use a lower --optimizer.lr "
            f"(--train.max-skipped-steps ends a run). The last batch was\n  {batch}"
        )

    def log(self, state: TrainState, m: StepMetrics) -> None:
        """Write a row with the step's losses, gradient norm, learning rate, tokens per second and
        MFU since the last row, peak memory and so on to metrics.jsonl, the trackers and the
        callback, and show it in the progress line. Completions sampled since the last row go to the
        trackers before it.
        """
        now = time.monotonic()
        # `since` is moved by validation, evaluation and profile: they are not the training's time
        rate = self.tokens_since / max(1e-9, now - self.since)
        self.since, self.tokens_since = now, 0
        flops = rate * self.flops
        self.peak = self.peak.raise_to(flops / self.mesh.size)
        row = {
            "step": state.step,
            "loss": m.loss,
            "grad_norm": m.grad_norm,
            "lr": m.lr,
            "tokens": state.tokens,
            "tokens_per_second": rate,
            **self.peak.utilization(flops, self.mesh.size),
            "memory_gib": memory_gib(self.mesh),
            "time": time.time(),
            "seconds": now - self.began,
            **m.router,
            **m.objective,
            **critic_row(m.critic),
            **self.loader.extra_metrics,
            **{f"epoch/{name}": value for name, value in self.loader.epochs(state.step).items()},
        }
        if state.scale.dynamic:
            row["loss_scale"] = state.scale.value
        # the column appears with the first skipped step
        if state.scale.dynamic or self.skipped:
            row["skipped_steps"] = self.skipped
        completions, self.loader.completions = self.loader.completions, []
        if completions:  # before the row: the steps of a tracker may only rise
            for tracker in self.trackers:
                tracker.write_completions(completions)
        for writer in self.writers:
            writer.write(row)
        if self.mesh.first:
            self.line.show(row)

    def ranks(self, state: TrainState, m: StepMetrics) -> None:
        """Append peak memory per rank, in GiB, and load per expert in this step to history.jsonl:
        after the first step of each start, and ten times in a run. Other steps do nothing.
        """
        if state.step != self.first and state.step % self.tenth:
            return
        # a collective: all ranks decide by `step` alone whether they come here
        if self.mesh.size > 1:
            self.timeline.add_waits()
        per_rank = [round(gib, 4) for gib in metrics.gather_ranks(memory_gib(self.mesh), self.mesh)]
        row: dict[str, object] = {"memory_gib": per_rank}
        if m.tallies is not None and (load := balance.expert_loads(self.run.spec, m.tallies)):
            row["router_load"] = load
        self.history.add(state.step, row)

    def write_profile(self, state: TrainState, m: StepMetrics) -> None:
        """Write the profile of the step that --log.profile names, right after it, and print its
        table; do nothing after other steps. Its time is left out of tokens per second. Collective.
        """
        if state.step != self.run.log.profile:
            return
        started_at = time.monotonic()

        def facts(seconds: float) -> dict[str, float]:
            """Return tokens per second and MFU of a step that took `seconds`."""
            rate = m.tokens / seconds
            utilization = self.peak.utilization(rate * self.flops, self.mesh.size)
            return {"tokens_per_second": rate, **utilization}

        for line in self.profile.write(facts):
            self.line.say(line)
        self.since += time.monotonic() - started_at  # not the training's time

    def validate(self, state: TrainState, m: StepMetrics | None) -> None:
        """Compute the loss on the validation split, write the result to metrics.jsonl and the
        trackers, and print it. `m` is not read, and None before the first step. Does nothing once a
        stop signal was agreed on; its time is left out of tokens per second.
        """
        if self.stop.agreed_signal:
            return  # the time left is for saving
        started_at = time.monotonic()
        row, lines = self.validator.measure(state)
        self.since += time.monotonic() - started_at  # not the training's time
        row |= {"time": time.time(), "seconds": started_at - self.began}
        for writer in self.writers:
            writer.write(row)
        for line in lines:
            self.line.say(line)

    def evaluate(self, state: TrainState, m: StepMetrics) -> None:
        """Score the model on the tasks of --evaluate.tasks and generate after the prompts of
        --evaluate.samples; write the scores to metrics.jsonl and the trackers and the samples to
        samples.jsonl, and print the scores and the first sample. Does nothing once a stop signal
        was agreed on.
        """
        if self.evaluator is None or self.stop.agreed_signal:
            return  # the time left is for saving
        started_at = time.monotonic()
        scores, samples = self.evaluator.scores(state), self.evaluator.samples(state)
        self.since += time.monotonic() - started_at  # not the training's time
        if scores:
            for writer in self.writers:
                writer.write({"step": state.step, **scores, "time": time.time()})
            summary = ", ".join(f"{name[6:]} {value:.4f}" for name, value in scores.items())
            self.line.say(f"step {state.step}: {summary}")
        if samples:
            first = " ".join(f"{self.evaluator.prompts[0]}{samples[0]}".split())
            self.line.say(f"step {state.step}: {cut(first)}")

    def save(self, state: TrainState, m: StepMetrics) -> None:
        """Start to save a checkpoint of this step, in the background, and add a row to
        history.jsonl. Every rank calls it.
        """
        if self.receipts is not None:
            self.receipts.sync()
        self.checkpoints.save(state.step, state.tensors(), self._checkpoint_state(state).meta())
        self.history.add(state.step, {"saved": True})

    def snapshot(self, state: TrainState, m: StepMetrics) -> None:
        """Start to save a snapshot of this step in the hosts' memory, in the background, if the
        step is a multiple of --checkpoint.snapshot-every. Every rank calls it. A snapshot that
        fails is reported, and the run continues with the one before.
        """
        # the last step, after which every hook is called, is a checkpoint
        if self.snapshots is None or state.step % self.run.checkpoint.snapshot_every:
            return
        try:
            self.snapshots.save(state.step, state.tensors(), self._checkpoint_state(state).meta())
        except (OSError, RuntimeError, CheckpointException) as error:
            warning = "the last snapshot in memory was not saved"
            if self.mesh.first:
                self.line.say(f"WARNING: {warning}: {error}")
            elif not isinstance(error, CheckpointException):  # which all ranks raise alike
                print(f"WARNING: rank {self.mesh.rank}: {warning}: {error}", file=sys.stderr)

    def _checkpoint_state(self, state: TrainState) -> Saved:
        """Return what a checkpoint of this step stores besides tensors (state.json): options, step,
        tokens, data position, loss scale, last validation and so on.
        """
        return Saved(
            run=to_dict(self.run),
            step=state.step,
            tokens=state.tokens,
            updates=state.updates,
            inherited=state.inherited,
            # the position in the data, in samples: another batch size can continue from it
            samples=self.loader.first(state.step),
            seconds=time.monotonic() - self.began,
            data=self.loader.fingerprint(),
            loss_scale=(state.scale.value, state.scale.good_steps),
            norms=tuple(state.spike.state()),
            validation=self.validator.last_finite,
            critic=None if state.critic is None else state.critic.save(),
        )

    def poll(self, state: TrainState, m: StepMetrics) -> None:
        """Raise NotSaved, on every rank, if the last save in the background has failed; without
        this hook it would be raised at the next save. A save in progress is not waited for.
        """
        if self.checkpoints.poll():
            self.checkpoints.finish()

    def collect_garbage(self, state: TrainState, m: StepMetrics) -> None:
        """Run Python's garbage collector after steps that are multiples of 50, so that all ranks do
        it after the same steps (`loop.collect_garbage`).
        """
        loop.collect_garbage(state.step)

    def begin(self, state: TrainState, how: str, changed: list[str]) -> None:
        """Add the row of a start of the run to history.jsonl: steps, processes, device, parameters
        and so on. `how`: "new", "resumed" or "restarted"; `changed`: the options and data that
        differ from the start before, a line each.
        """
        row = {
            "begun": how,
            "run_id": self.run_id,
            "steps": state.steps,
            "processes": self.mesh.size,
            "device": describe_device(self.mesh.device, self.run.train.device),
            "parameters": count.parameters(self.run.spec),
            "changed": changed,
        }
        if self.record is not None:  # what was made after `step` is made again
            # `dolmen show` marks the steps up to here as repeated
            row["reached"] = max(state.step, self.record.reached)
            # goodput.json of a killed process may be a second old
            self.timeline.reached = max(self.timeline.reached, self.record.reached)
        self.history.add(state.step, row)

    def close(self, step: int, ended: str) -> None:
        """Add how the run `ended` after `step` ("done", "failed" or a signal's name) to
        history.jsonl, close all files, trackers and the progress line, and draw loss.png (first
        rank).
        """
        self.history.add(step, {"ended": ended})
        self.history.close()
        if self.evaluator is not None:
            self.evaluator.close()
        self.profile.close()
        if self.receipts is not None:
            self.receipts.close()
        self.line.close()
        for writer in self.writers:
            writer.close()
        parameters = size(count.parameters(self.run.spec))
        title = f"{self.run.name}: {self.run.known_model.model_type}, {parameters} parameters"
        if self.mesh.first:
            metrics.plot(self.out / "metrics.jsonl", self.out / "loss.png", title)


def memory_gib(mesh: Mesh) -> float:
    """Return the peak memory of this process so far, in GiB: allocated on its GPU by torch, or on a
    CPU the resident set.
    """
    if mesh.device.type == "cuda":
        return torch.cuda.max_memory_allocated(mesh.device) / 2**30
    # Linux counts it in KiB
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20


def critic_row(m: StepMetrics | None) -> dict[str, float]:
    """Return the metrics of the critic's step as `critic/NAME`, for a row of metrics.jsonl; empty
    for None.
    """
    if m is None:
        return {}
    objective = {name.removeprefix("objective/"): value for name, value in m.objective.items()}
    numbers = {"loss": m.loss, "grad_norm": m.grad_norm, "lr": m.lr, **m.router, **objective}
    return {f"critic/{name}": value for name, value in numbers.items()}
