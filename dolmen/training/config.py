"""A run as data: everything that decides what `dolmen train` does. Recipes return one, YAML files
hold one, and its attribute docstrings are the help of the command line. A rule across sections is
checked in `training/checks/`.
"""

import math
import re
from dataclasses import fields, replace
from functools import cached_property
from typing import Annotated, Literal

from pydantic import Field

from dolmen.core.config import (
    AboveZero,
    Below1,
    Count,
    Name,
    Positive,
    Seed,
    config,
    refuse_unreadable,
    require,
)
from dolmen.core.messages import brief, choices
from dolmen.data.config import DataConfig
from dolmen.evaluation.config import DuringConfig
from dolmen.families import ModelConfig
from dolmen.families.adapters import AdapterConfig
from dolmen.model.layout import Layout
from dolmen.model.spec import ModelSpec
from dolmen.model.training import RouterTraining, Training
from dolmen.objectives.config import ObjectiveConfig
from dolmen.ops.attention_support import AttentionChoice, AttentionOption
from dolmen.ops.numerics import DELAYED, Exact, ExactConfig, Fp8, Fp8Config, Precision
from dolmen.optim.config import OptimizerConfig
from dolmen.rl.config import CriticConfig, PPOConfig, RolloutConfig


@config("checkpoint")
class CheckpointConfig:
    """Checkpoints of a run: asynchronous, readable at any other layout. The last step is always
    saved.
    """

    every: Count = 0
    """Steps between checkpoints; 0 saves the last one only."""
    keep: Count = 2
    """Newest checkpoints kept; 0 keeps all."""
    snapshot_every: Count = 0
    """Steps between snapshots in memory (/dev/shm), each with a copy on another host, from which a
    restart resumes if they are newer than the newest checkpoint; 0: none.
    """
    to: Name | None = None
    """URL to which the run is uploaded too, such as s3://bucket/run: checkpoints as they are saved,
    everything else with them and at the end. --resume downloads what --out lacks. Default: --out,
    if that is a URL.
    """

    def __post_init__(self):
        """Raise ValueError for snapshots in memory together with checkpoints at a URL."""
        if self.snapshot_every and self.to is not None:
            raise ValueError(
                f"checkpoint.snapshot-every ({self.snapshot_every}) needs a folder that all hosts "
                "share, and the run's is a URL (--out or checkpoint.to): leave one of them out"
            )


TRACKER_NAMES = ("tensorboard", "wandb", "trackio")
HANG_SECONDS = 1e8  # three years; clocks of the system count no more than 300


@config("train.new-rows")
class NewRowsConfig:
    """Training of the rows of embedding and head for new tokens (dolmen vocab extend)."""

    share: Below1 = 0.0
    """Share of the steps, at the beginning, in which only these rows are trained. 0: none."""
    first: Positive | None = None
    """Id of the first new token. Default: the one that `dolmen vocab extend` recorded with --init.
    """


@config("train")
class TrainConfig:
    """Length and arithmetic of the run."""

    steps: Positive | None = None
    """Optimizer updates; or --train.tokens, or --train.epochs. Without any of the three: one pass
    over the training data, but at least 20 steps.
    """
    tokens: AboveZero | None = None
    """Length of the run in tokens, rounded up to whole batches, such as 1e9. Excludes steps."""
    epochs: AboveZero | None = None
    """Passes over the training data; or --train.steps, or --train.tokens. With several sources,
    over the one that lasts longest.
    """
    seed: Seed = 0
    """Seed of initial weights and of the order of data."""
    dtype: Literal["float32", "bfloat16", "float16", "float64"] = "float32"
    """Compute dtype. It is that of forward and backward; weights at rest and optimizer state are
    float32. With float64 they are float64 too: on a CPU, to compare runs to 1e-12 in place of 1e-6.
    """
    precision: Precision | None = None
    """Compute matrix products inside layers in eight bits (docs/how-to/fp8.md), with scales from
    previous steps (delayed) or from the current tensor, row or block. Everything else is computed
    in train.dtype. Unset: no 8-bit products.
    """
    fp8: Fp8Config = Fp8Config()
    numerics: Literal["fast", "exact"] = "fast"
    """exact: losses, gradients, weights and moments have the same bits at every layout and
    microbatch size (docs/concepts/numerics.md), for dense models in float32 and bfloat16 on CPUs.
    fast: sums in whatever order takes least time.
    """
    exact: ExactConfig = ExactConfig()
    sequence_length: Positive | None = None
    """Tokens of a training sequence; unset: the smaller of 512 and the model's own maximum."""
    global_batch_size: Positive = 8
    """Sequences of one update, over all processes."""
    microbatch_size: Positive | None = None
    """Sequences per forward of a process; gradients accumulate over the batch. Default: about 4,096
    tokens.
    """
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """auto: GPUs if any are visible, else the CPU. cpu: no GPU. cuda: an error without GPUs."""
    dropout: Below1 = 0.0
    """Dropout after embedding, attention and feed-forward, and on attention probabilities. The
    model's config.json does not change the default.
    """
    router: RouterTraining = RouterTraining()
    new_rows: NewRowsConfig = NewRowsConfig()
    compile: bool = False
    """Compile each block with torch.compile (needs a C++ compiler on CPU)."""
    attention: AttentionOption = "auto"
    """Attention backend. auto: on a GPU the fastest for the run's shape, timed once and remembered
    in --data.cache; with --train.deterministic by rule. flash3 needs a Hopper GPU and the package
    flash_attn_interface (docs/performance.md has what each computes).
    """
    deterministic: bool = False
    """Use only deterministic algorithms on a GPU, so that a resumed run has the same bits; slower.
    On a CPU results are always deterministic.
    """
    spike: Literal["none", "skip"] = "none"
    """Handling of gradient spikes. none: update as in any step. skip: do not update where the
    gradient norm is over --train.spike-factor times its running median.
    """
    spike_factor: Annotated[float, Field(gt=1)] = 10.0
    """Factor over the median gradient norm of the last 64 steps that makes a spike."""
    max_skipped_steps: Positive = 10
    """Skipped steps in a row (loss or gradient not finite, or a spike) that end the run; with
    float16 at least 40, as the loss scale is searched by skipping.
    """
    hang_seconds: Annotated[float, Field(gt=0, le=HANG_SECONDS)] | None = None
    """Seconds without progress after which the run ends and reports the hanging rank with its
    stack; ten times as long at start-up. Default: never.
    """

    @property
    def training(self) -> Training:
        """Training options of this section that act inside the model: dropout, router, fp8, and the
        attention backend as it was requested.
        """
        fp8 = None if self.precision is None else Fp8(self.precision, self.fp8)
        return Training(
            self.dropout, self.router, fp8=fp8, attention=AttentionChoice(self.attention)
        )

    def __post_init__(self):
        """Raise ValueError for options of fp8 that the chosen `precision` does not use."""
        changed = [f.name for f in fields(self.fp8) if getattr(self.fp8, f.name) != f.default]
        if changed and self.precision is None:
            raise ValueError(
                f"train.fp8.{changed[0].replace('_', '-')} is set, but 8-bit training is off: set "
                "--train.precision, such as fp8-tensorwise"
            )
        delayed = [name for name in changed if name in DELAYED]
        if delayed and self.precision != "fp8-delayed":
            raise ValueError(
                f"train.fp8.{delayed[0].replace('_', '-')} is for fp8-delayed, but "
                f"train.precision is {self.precision}: leave it out"
            )


@config("log")
class LogConfig:
    """Logging, validation and profiling."""

    verbose: bool = False
    """Also show kernels, the definition of MFU, the sources of a mixture and an example of the data
    before the first step. Short: -v.
    """
    every: Positive = 1
    """Steps between rows of metrics.jsonl, TensorBoard points and plain progress lines."""
    validate_every: Count | None = None
    """Steps between validations; the last step is always validated. 0: only the last. Default: ten
    validations per run.
    """
    profile: Positive | None = None
    """A step, counted from 1, to record: where its time went, by kind, as a table and a trace in
    `profile/` of the run's folder.
    """
    to: tuple[str, ...] = ("tensorboard",)
    """Experiment trackers that get the metrics, comma-separated: tensorboard, wandb, trackio (the
    last two: pip install 'dolmen[log]'), or none. Without a key W&B logs offline.
    """
    validate_sources: bool = False
    """Also validate each source of --data.path separately, before the first step too, in nats per
    token and bits per byte.
    """
    validation_tokens: Count = 65536
    """Tokens that a validation reads; the last one reads as many as the run has trained on, if
    those are more. 0: the whole validation split.
    """

    @property
    def trackers(self) -> tuple[str, ...]:
        """Names of the experiment trackers in `to`, each once; empty for "none"."""
        names = [name.strip() for part in self.to for name in part.split(",")]
        return () if names == ["none"] else tuple(dict.fromkeys(names))

    def __post_init__(self):
        """Raise ValueError for an unknown experiment tracker in `to`."""
        if unknown := [name for name in self.trackers if name not in TRACKER_NAMES]:
            raise ValueError(
                f"log.to has {brief(unknown[0])}: {choices(unknown[0], TRACKER_NAMES)}"
            )


@config("finish")
class FinishConfig:
    """Steps after training: export, verification, a sample."""

    export: bool = False
    """Write the model to `hf/` in the run's folder, for transformers."""
    verify: bool = False
    """Compare the exported model with transformers: logits, loss, gradient norm, greedy tokens."""
    sample: Name | None = None
    """Prompt of a sample that is generated and printed."""
    compressors: bool = False
    """Report gzip -9 and xz -9 of the validation files next to the loss in bits per byte."""


RunName = Annotated[
    str,
    require(re.compile(r"[^/.][^/]*").fullmatch, "a plain name: it is that of a folder in runs/"),
]


@config()
class RunConfig:
    """One training run."""

    name: RunName = "pretrain"
    """Name of the run; its folder is runs/NAME unless --out is set."""
    init: Name | None = None
    """Initial model: a transformers directory, a hub id or another run. Also a checkpoint of a run,
    or the URL of one of these folders (`s3://bucket/model`). Default: a new model.
    """
    model: ModelConfig | None = None
    """The model, as its config.json."""
    adapter: AdapterConfig = AdapterConfig()
    layout: Layout = Layout()
    data: DataConfig = DataConfig()
    objective: ObjectiveConfig = ObjectiveConfig()
    reward: tuple[Name, ...] = ()
    """Reward: exact, regex:PATTERN, gsm8k, stub, MODULE:FUNCTION or a reward model. `exact` (1 if
    it equals the row's `answer`, up to surrounding white space), `regex:PATTERN` (1 if the pattern
    is found), `gsm8k` (1 if its last number is that of the row's `answer`), `stub` (share of
    vowels, for trying out a run), `MODULE:FUNCTION`, called as function(prompt, completion, row) ->
    number in a worker process, or the folder of a reward model. Several are summed with weights:
    `0.7:gsm8k 0.3:models/reward`.
    """
    environment: Name | None = None
    """Environment of multi-turn rollouts: `MODULE:FUNCTION`, called as function(prompt, turns, row)
    in a worker process after each turn of the model, where `turns` are the texts so far, the last
    one the model's. It returns the next turn as it appears in the text, or None to end. Its tokens
    are masked out of the loss, and count towards --rollout.max-new-tokens.
    """
    rollout: RolloutConfig = RolloutConfig()
    ppo: PPOConfig = PPOConfig()
    critic: CriticConfig = CriticConfig()
    optimizer: OptimizerConfig = OptimizerConfig()
    train: TrainConfig = TrainConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()
    log: LogConfig = LogConfig()
    evaluate: DuringConfig = DuringConfig()
    finish: FinishConfig = FinishConfig()

    def __post_init__(self):
        """Raise ValueError for a model config that dolmen cannot read."""
        if self.model is not None:
            refuse_unreadable("model", self.model.config)

    @property
    def known_model(self) -> ModelConfig:
        """The model of the run, for runs that have been checked to have one (asserted)."""
        assert self.model is not None
        return self.model

    @property
    def spec(self) -> ModelSpec:
        """Spec of the run's model, without what training adds, for runs that have one."""
        return self.known_model.spec

    @cached_property
    def training(self) -> Training:
        """Training options that act inside the model: dropout, router, fp8, adapters, exact
        numerics. Raises ValueError for an adapter that the model cannot have.
        """
        leaves = None
        if self.train.numerics == "exact":
            leaves = Exact(self.train.exact.tp, self.sequence_length, self.train.exact.cp)
        adapter = self.adapter.resolve(self.known_model)
        return replace(self.train.training, adapter=adapter, exact=leaves)

    @property
    def trained(self) -> ModelSpec:
        """Spec of the model that is trained: that of the run's model with what training adds
        (adapters, router biases, fp8 and so on).
        """
        return self.training.apply_to(self.spec)

    @property
    def needs_kl_reference(self) -> bool:
        """True if rollouts are compared with a reference model (KL penalty, or distillation)."""
        if self.objective.name == "ppo":
            return self.ppo.needs_reference
        return self.rollout.needs_reference

    @property
    def sequence_length(self) -> int:
        """Tokens of a training sequence: --train.sequence-length, else 512 or the model's maximum
        if that is less.
        """
        return self.train.sequence_length or min(512, self.spec.max_position_embeddings)

    @property
    def tokens_per_step(self) -> int:
        """Tokens of a global batch, padding included."""
        return self.train.global_batch_size * self.sequence_length

    @property
    def steps(self) -> int | None:
        """Steps of the run by --train.steps or --train.tokens; None if neither is set, so that they
        depend on the data.
        """
        if self.train.steps is not None or self.train.tokens is None:
            return self.train.steps
        return math.ceil(self.train.tokens / self.tokens_per_step)

    @property
    def warmup_steps(self) -> float:
        """Steps of the learning-rate warm-up, by --optimizer.warmup-tokens if set (a fraction is
        possible), else --optimizer.warmup-steps.
        """
        tokens = self.optimizer.warmup_tokens
        return self.optimizer.warmup_steps if tokens is None else tokens / self.tokens_per_step

    def check_length(self) -> None:
        """Raise ValueError for a sequence length over the model's maximum."""
        most = self.spec.max_position_embeddings
        if self.sequence_length > most:
            raise ValueError(
                f"train.sequence-length ({self.sequence_length}) exceeds the model's "
                f"max_position_embeddings ({most}): set --train.sequence-length {most} or less"
            )

    def refuse_compiled(self) -> None:
        """Raise ValueError if train.compile is set, as it cannot be combined with the run's
        pipeline schedule; called only for schedules that split backward.
        """
        if self.train.compile:
            raise ValueError(
                f"train.compile and layout.schedule {self.layout.schedule} exclude each other: a "
                "compiled graph cannot defer its weight gradients; use --train.no-compile, or "
                "--layout.schedule 1f1b or interleaved"
            )

    @property
    def microbatch_size(self) -> int:
        """Sequences that a process computes at once: --train.microbatch-size, else the largest
        divisor of the process's batch with at most 4,096 tokens (4,096 x cp if cp splits
        sequences). In a pipeline it leaves 4 or more microbatches per stage, and a number of
        microbatches that is a multiple of pp, where possible. For rows of pairs or completions
        it is even; 1 where cp splits sequences with exact numerics.
        """
        if self.train.microbatch_size:
            return self.train.microbatch_size
        if self.train.numerics == "exact" and self.layout.cp > 1:
            return 1
        batch = max(1, self.train.global_batch_size // (self.layout.dp or 1))
        pp = self.layout.pp
        most = max(
            1,
            min(
                4096 * self.layout.cp // self.sequence_length,
                batch if pp == 1 else batch // (4 * pp),
            ),
        )
        unit = 2 if self.data.rows in ("pairs", "completions") else 1
        sizes = [d for d in range(unit, max(unit, min(most, batch)) + 1, unit) if batch % d == 0]
        sizes = sizes or [unit]
        return max([d for d in sizes if batch // d % pp == 0] or sizes)
