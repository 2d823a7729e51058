"""What each verb may be told (command.py reads it from words).

Nothing here imports torch or transformers: `--help` and a mistyped option do not owe their seconds.
"""

from dataclasses import dataclass, field, fields, make_dataclass
from typing import Annotated, Any, Literal

import tyro

from dolmen.data.config import TextConfig
from dolmen.training.config import RunConfig


@dataclass(frozen=True)
class TrainOptions:
    """Train a model: a built-in recipe (dolmen recipes) or a YAML file, changed by options."""

    recipe: tyro.conf.Positional[str]
    """Recipe or YAML file."""
    model: Any  # of the class that `train_options` is given
    init: str | None = None
    """Where the weights to start from are, and the model: a transformers directory, a hub id,
    another run or one of its checkpoints.
    """
    out: str | None = None
    """Folder of the run. Default: that of the config.yaml of a run, else runs/NAME."""
    resume: Annotated[bool, tyro.conf.FlagCreatePairsOff] = False
    """Go on from the newest whole checkpoint in --out; at any other layout too."""
    overwrite: Annotated[bool, tyro.conf.FlagCreatePairsOff] = False
    """Throw away the run that --out holds."""
    nproc: int | None = None
    """Processes to start on this machine. Default: as many as the layout needs; the GPUs that are
    visible.
    """
    max_restarts: int = 0
    """Times to start the processes again after a failure; the run goes on by itself from its newest
    whole checkpoint.
    """


SECTIONS = [f for f in fields(RunConfig) if f.name not in ("name", "init", "model")]


def train_options(model: type) -> type[TrainOptions]:
    """TrainOptions with the `model` that `model_options.options` makes for a family, and each
    section of a run.
    """
    sections = [(f.name, f.type, field(default=f.default)) for f in SECTIONS]
    return make_dataclass(
        "TrainOptions",
        [("model", model), *sections],
        bases=(TrainOptions,),
        namespace={"__doc__": TrainOptions.__doc__},
        frozen=True,
    )


@dataclass(frozen=True)
class RecipesOptions:
    """The built-in runs, for `dolmen train RECIPE`; `dolmen train RECIPE --help` shows its
    defaults.
    """


@dataclass(frozen=True)
class ExportOptions:
    """Write a run, a checkpoint or another transformers directory as a transformers directory:
    model.safetensors, config.json, tokenizer. One tensor is in memory at a time.
    """

    source: tyro.conf.Positional[str]
    """A run's folder (its newest whole checkpoint is taken), or one checkpoint in it; a
    transformers directory or hub id.
    """
    to: str
    """Folder to write; it must be empty or not exist."""
    dtype: Literal["float32", "bfloat16", "float16"] | None = None
    """Type of the tensors. Default: that of config.json, of a run that of the model it started
    from, else float32.
    """


@dataclass(frozen=True)
class Split:
    """How the model is split."""

    tp: int = 1
    """Tensor parallelism: processes that share every layer."""

    def __post_init__(self):
        if self.tp < 1:
            raise ValueError(f"layout.tp is {self.tp}: it must be at least 1")


@dataclass(frozen=True)
class VerifyOptions:
    """Compare a model as dolmen computes it with transformers itself: logits, loss, gradients,
    greedy tokens, in float32. Exit code 1 if they differ. Of a run or checkpoint transformers is
    given a temporary export.
    """

    folder: tyro.conf.Positional[str]
    """Transformers directory or hub id; a run's folder (its newest whole checkpoint is taken), or
    one checkpoint in it.
    """
    against: str | None = None
    """What transformers loads. Default: the same."""
    length: int = 64
    """Tokens of the random sequences."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """auto takes the GPUs if any are visible, else the CPU."""
    layout: Split = Split()


@dataclass(frozen=True)
class GenerateOptions:
    """Continue a prompt with a transformers directory, or a run. Prints the prompt and the
    continuation; greedy unless --temperature.
    """

    folder: tyro.conf.Positional[str]
    """Transformers directory or hub id; a run's folder (its newest whole checkpoint is taken), or
    one checkpoint in it.
    """
    prompt: str
    """Text to continue."""
    max_new_tokens: int = 64
    """Most tokens to add; an end-of-text token ends earlier."""
    temperature: float = 0.0
    """0 takes the likeliest token; 1 draws from the model's own distribution."""
    top_k: int | None = None
    """Draw from this many likeliest tokens."""
    top_p: float | None = None
    """Draw from the likeliest tokens that hold this much probability."""
    seed: int = 0
    """Of the draws."""
    dtype: Literal["float32", "bfloat16", "float16"] | None = None
    """Type to compute in. Default: that of config.json."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """auto takes the GPUs if any are visible, else the CPU."""
    layout: Split = Split()


@dataclass(frozen=True)
class EvaluateOptions:
    """How well a transformers directory, or a run, predicts a text, over all of it: loss in nats
    per token, perplexity, bits per byte. The text is read in order, in windows of --sequence-length
    tokens, and each token is predicted once, the end of each document too. A token sees those
    before it in its window, of earlier documents as well unless --data.document-mask; the first of
    a document is predicted from an end-of-text token.
    """

    source: tyro.conf.Positional[str]
    """Transformers directory or hub id; a run's folder (its newest whole checkpoint is taken), or
    one checkpoint in it.
    """
    sequence_length: int | None = None
    """Tokens of a window: a longer one sees more and costs more. Default: max_position_embeddings,
    at most 2048.
    """
    dtype: Literal["float32", "bfloat16", "float16"] | None = None
    """Type to compute in. Default: that of config.json."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """auto takes the GPUs if any are visible, else the CPU."""
    data: TextConfig = TextConfig()
    layout: Split = Split()


@dataclass(frozen=True)
class ScheduleOptions:
    """Time a pipeline schedule, and draw it. Times are of one microbatch through all layers of a
    rank, in any unit.
    """

    schedule: tyro.conf.Positional[str]
    """gpipe, 1f1b, interleaved, zero-bubble, zero-bubble-v, or a .txt or .yaml file with one line
    of actions (F0 F1 B0 B1) per rank.
    """
    pp: int | None = None
    """Pipeline ranks. Default: 4; those of the file."""
    microbatches: int | None = None
    """Microbatches per step. Default: 8; those of the file."""
    virtual_stages: int | None = None
    """Chunks of layers per rank. Default: 1, or 2 where the schedule needs several; those of
    the file.
    """
    out: str | None = None
    """Picture to write, .svg or .png."""
    list: Annotated[bool, tyro.conf.FlagCreatePairsOff] = False
    """Print the actions of each rank, as a file would hold them."""
    forward: float = 1
    """Time of a forward (F)."""
    backward: float = 2
    """Time of a whole backward (B)."""
    input: float = 1
    """Time of the part of a backward that earlier stages wait for (I)."""
    weight: float = 1
    """Time of the rest of it (W)."""
    send: float = 0
    """Time from the end of an action until another rank has its result."""


VERBS = {
    "recipes": RecipesOptions,
    "export": ExportOptions,
    "verify": VerifyOptions,
    "generate": GenerateOptions,
    "evaluate": EvaluateOptions,
    "schedule": ScheduleOptions,
}
