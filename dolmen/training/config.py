"""A run as data: everything that decides what `dolmen train` does. Recipes return one, YAML files
hold one, and its attribute docstrings are the help of the command line. A rule across sections is
checked in `training/checks/`.
"""

import math
from dataclasses import fields, replace
from functools import cached_property
from typing import Annotated, Literal

from pydantic import Field

from dolmen.checkpoint.config import CheckpointConfig
from dolmen.core.config import (
    AboveZero,
    Below1,
    Count,
    Name,
    Positive,
    Seed,
    config,
    refuse_unreadable,
)
from dolmen.core.messages import brief, choices
from dolmen.data.config import DataConfig
from dolmen.evaluation.config import DuringConfig
from dolmen.families import Model
from dolmen.families.adapters import AdapterConfig
from dolmen.model.layout import Layout
from dolmen.model.spec import ModelSpec
from dolmen.model.training import RouterTraining, Training
from dolmen.objectives.config import ObjectiveConfig
from dolmen.ops.fp8_recipe import DELAYED, Fp8, Fp8Config, Precision
from dolmen.optim.config import OptimizerConfig
from dolmen.rl.config import CriticConfig, PPOConfig, RolloutConfig

PROGRAMS = ("tensorboard", "wandb", "trackio")
HANG_SECONDS = 1e8  # three years; clocks of the system count no more than 300


@config("train.new-rows")
class NewRowsConfig:
    """Rows of embedding and head for tokens that a model was given (dolmen vocab extend)."""

    share: Below1 = 0.0
    """Share of the steps, at the beginning, in which they learn alone; then all learns. 0: none."""
    first: Positive | None = None
    """Id of the first new token. Default: as `dolmen vocab extend` has written beside --init."""


@config("train")
class TrainConfig:
    """Length and arithmetic of the run."""

    steps: Positive | None = None
    """Optimizer updates. Unset, with `tokens` and `epochs`: one pass over the training data, but at
    least 20 steps.
    """
    tokens: AboveZero | None = None
    """In place of steps: tokens of all batches, the last one whole; 1e9 is a way to write it."""
    epochs: AboveZero | None = None
    """In place of steps: passes over the training data, of several sources over the one that lasts
    longest.
    """
    seed: Seed = 0
    """Initial weights and order of data depend on it alone."""
    dtype: Literal["float32", "bfloat16", "float16", "float64"] = "float32"
    """Arithmetic of forward and backward; weights at rest and optimizer state are float32. All of
    float64 is float64, for a CPU: two runs that should be equal then differ by 1e-12, not 1e-6.
    """
    precision: Precision | None = None
    """Products of the matrices inside layers in eight bits (docs/how-to/fp8.md), with scales from
    the steps before, or of each tensor, row or block as it is; all else in train.dtype. Unset: all.
    """
    fp8: Fp8Config = Fp8Config()
    sequence_length: Positive | None = None
    """Tokens of a training sequence; unset: the smaller of 512 and the model's own maximum."""
    global_batch_size: Positive = 8
    """Sequences of one update, over all processes."""
    microbatch_size: Positive | None = None
    """Sequences that a process computes at once; gradients accumulate over a batch. Unset: about
    4,096 tokens.
    """
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """auto takes the GPUs if any are visible, else the CPU; cpu never takes one; cuda refuses to
    run where there is none.
    """
    dropout: Below1 = 0.0
    """Dropout after embedding, attention and feed-forward, and on attention probabilities; 0 unless
    asked for, whatever the model's config.json says.
    """
    router: RouterTraining = RouterTraining()
    new_rows: NewRowsConfig = NewRowsConfig()
    compile: bool = False
    """Compile each block with torch.compile (needs a C++ compiler on CPU)."""
    deterministic: bool = False
    """On a GPU, only algorithms that give the same bits every time, so that a resumed run is the
    same to the bit; slower. On a CPU that is always so.
    """
    spike: Literal["none", "skip"] = "none"
    """What a step does whose gradient norm is far over the usual. none: it updates as any other;
    skip: it changes no parameter.
    """
    spike_factor: Annotated[float, Field(gt=1)] = 10.0
    """Far over the usual: over so many times the median norm of the last 64 steps."""
    max_skipped_steps: Positive = 10
    """Steps skipped in a row, for a loss or gradient that is not finite or a spike, that end the
    run; with float16 at least 40.
    """
    hang_seconds: Annotated[float, Field(gt=0, le=HANG_SECONDS)] | None = None
    """Seconds without progress after which the rank that hangs is named, with its stack, and the
    run ends; ten times as long at start-up. Unset: never.
    """

    @property
    def training(self) -> Training:
        """What acts inside the model."""
        fp8 = None if self.precision is None else Fp8(self.precision, self.fp8)
        return Training(self.dropout, self.router, fp8=fp8)

    def __post_init__(self):
        asked = [f.name for f in fields(self.fp8) if getattr(self.fp8, f.name) != f.default]
        if asked and self.precision is None:
            raise ValueError(
                f"train.fp8.{asked[0].replace('_', '-')} is set, and no product is rounded: set "
                "--train.precision, such as fp8-tensorwise"
            )
        delayed = [name for name in asked if name in DELAYED]
        if delayed and self.precision != "fp8-delayed":
            raise ValueError(
                f"train.fp8.{delayed[0].replace('_', '-')} is of fp8-delayed, and train.precision "
                f"is {self.precision}, which remembers nothing: leave it out"
            )


@config("log")
class LogConfig:
    """What one sees."""

    verbose: bool = False
    """Also show kernels, the definition of MFU, the sources of a mixture and an example of the data
    before the first step. Short: -v.
    """
    every: Positive = 1
    """Steps between rows of metrics.jsonl, TensorBoard points and plain progress lines."""
    validate_every: Count | None = None
    """Steps between validations; unset: ten per run; 0: none but the last. The last step is always
    validated.
    """
    profile: Positive | None = None
    """A step, counted from 1, to record: where its time went, by kind, as a table and a trace in
    `profile/` of the run's folder.
    """
    to: tuple[str, ...] = ("tensorboard",)
    """Programs that get the numbers of metrics.jsonl too, with commas between them: tensorboard,
    wandb, trackio (the last two: pip install 'dolmen[log]'), or none. Without a key W&B keeps them
    on this machine.
    """
    validate_sources: bool = False
    """Tell the validation loss of each source of --data.path by itself too, and before the first
    step, in bits per byte as well: as of an old language beside a new one.
    """
    validation_tokens: Count = 65536
    """Held-out tokens a validation reads; the last one as many as the run has trained on, if those
    are more. 0: all, always.
    """

    @property
    def programs(self) -> tuple[str, ...]:
        """Those of `to`, one by one."""
        names = [name.strip() for part in self.to for name in part.split(",")]
        return () if names == ["none"] else tuple(dict.fromkeys(names))

    def __post_init__(self):
        if unknown := [name for name in self.programs if name not in PROGRAMS]:
            raise ValueError(f"log.to has {brief(unknown[0])}: {choices(unknown[0], PROGRAMS)}")


@config("finish")
class FinishConfig:
    """What a run does with its model when training ends."""

    export: bool = False
    """Write the model to `hf/` in the run's folder, for transformers."""
    verify: bool = False
    """Compare the exported model with transformers: logits, loss, gradient norm, greedy tokens."""
    sample: str | None = None
    """A prompt to continue."""
    compressors: bool = False
    """Put the validation loss in bits per byte beside gzip -9 and xz -9 of the held-out files."""


@config()
class RunConfig:
    """One training run."""

    name: str = "pretrain"
    """Name of the run; its folder is runs/NAME unless --out says otherwise."""
    init: Name | None = None
    """Where the weights to start from are: a transformers directory, a hub id, or one checkpoint of
    another run. It decides the model.
    """
    model: Model | None = None
    """The model, as its config.json."""
    adapter: AdapterConfig = AdapterConfig()
    layout: Layout = Layout()
    data: DataConfig = DataConfig()
    objective: ObjectiveConfig = ObjectiveConfig()
    reward: tuple[Name, ...] = ()
    """What judges an answer that the model has drawn: `exact` (1 where it is the row's `answer`,
    white space at the ends aside), `regex:PATTERN` (1 where that is found in it), `gsm8k` (1 where
    its last number is that of the row's `answer`), `stub` (the share of its characters that are
    vowels), `MODULE:FUNCTION`, which is called as function(prompt, completion, row) in a process of
    its own, and gives a number, or the folder of a reward model, whose score it is. Several are
    added up, each times its weight: `0.7:gsm8k 0.3:models/reward`.
    """
    environment: Name | None = None
    """What answers the model in turns: `MODULE:FUNCTION`, called as function(prompt, turns, row) in
    a process of its own when the model has ended its turn, where `turns` are the texts so far, the
    last the model's. It gives what is said next, as it stands in the text, or None at the end. Its
    tokens are not learned from, and count in --rollout.max-new-tokens.
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
        if self.model is not None:
            refuse_unreadable("model", self.model.config)
        if not self.name or "/" in self.name or self.name.startswith("."):
            raise ValueError(
                f"name is {brief(self.name)}: it must be a plain name, as it becomes the folder "
                f"runs/NAME"
            )

    @property
    def known_model(self) -> Model:
        """`model`, of a run that has been checked, so that there is one."""
        assert self.model is not None
        return self.model

    @property
    def tree(self) -> ModelSpec:
        """What its config.json says, of a run that has been checked."""
        return self.known_model.tree

    @cached_property
    def training(self) -> Training:
        """What acts inside the model. Raises ValueError for an adapter that it cannot have."""
        return replace(self.train.training, adapter=self.adapter.of(self.known_model))

    @property
    def trained(self) -> ModelSpec:
        """The model that is trained: what training adds with it."""
        return self.training.apply_to(self.tree)

    @property
    def needs_kl_reference(self) -> bool:
        """Whether what is drawn is compared with the model that the run begins with."""
        if self.objective.name == "ppo":
            return self.ppo.needs_reference
        return self.rollout.needs_reference

    @property
    def sequence_length(self) -> int:
        """Tokens of a training sequence, default filled in."""
        return self.train.sequence_length or min(512, self.tree.max_position_embeddings)

    @property
    def tokens_per_step(self) -> int:
        """Of a global batch."""
        return self.train.global_batch_size * self.sequence_length

    @property
    def steps(self) -> int | None:
        """That are asked for, in steps or in tokens; None where the data say how many there are."""
        if self.train.steps is not None or self.train.tokens is None:
            return self.train.steps
        return math.ceil(self.train.tokens / self.tokens_per_step)

    @property
    def warmup_steps(self) -> float:
        """In which the learning rate rises, whatever they are asked for in."""
        tokens = self.optimizer.warmup_tokens
        return self.optimizer.warmup_steps if tokens is None else tokens / self.tokens_per_step

    def check_length(self) -> None:
        """Raises ValueError for a sequence that is longer than the model's, of a run that has
        one.
        """
        most = self.tree.max_position_embeddings
        if self.sequence_length > most:
            raise ValueError(
                f"train.sequence-length ({self.sequence_length}) is over the model's "
                f"max_position_embeddings ({most}): set --train.sequence-length {most} or less"
            )

    def refuse_compiled(self) -> None:
        """Raises ValueError for blocks that are compiled, of a schedule that splits backward."""
        if self.train.compile:
            raise ValueError(
                f"train.compile and layout.schedule {self.layout.schedule} exclude each other: a "
                "compiled graph cannot leave its weight gradients for later; use "
                "--train.no-compile, or --layout.schedule 1f1b or interleaved"
            )

    @property
    def microbatch_size(self) -> int:
        """Sequences a process computes at once: as given, else the largest divisor of its batch
        within 4,096 tokens; in a pipeline one that leaves 4 microbatches per stage or more, and a
        multiple of pp, where there is one. Of pairs an even one.
        """
        if self.train.microbatch_size:
            return self.train.microbatch_size
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
