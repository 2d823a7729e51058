"""What each verb may be told, and from words to it. A run comes from a recipe or YAML file, then
--init, then options, each over the one before.

Nothing here imports torch or transformers: `--help` and a mistyped option do not owe their seconds.
"""

from dataclasses import dataclass, fields, make_dataclass, replace
from difflib import get_close_matches
from pathlib import Path
from typing import Annotated, Any, Literal, overload

import tyro

from dolmen.cli import model_options
from dolmen.cli.errors import BadInput
from dolmen.cli.parse import parse
from dolmen.core.config import from_dict
from dolmen.core.paths import refuse_empty
from dolmen.data.config import TextConfig
from dolmen.families import flat
from dolmen.files import gate, kinds
from dolmen.recipes import RECIPES
from dolmen.train.config import (
    CheckpointConfig,
    DataConfig,
    FinishConfig,
    Layout,
    LogConfig,
    OptimizerConfig,
    RunConfig,
    TrainConfig,
)


@dataclass(frozen=True)
class TrainOptions:
    """Train a model: a built-in recipe (dolmen recipes) or a YAML file, changed by options."""

    recipe: tyro.conf.Positional[str]
    """Recipe or YAML file."""
    model: Any  # of the class that `train_options` is given
    """Fields of the model's config.json, as its family has them."""
    init: str | None = None
    """Directory or hub id of a transformers checkpoint to start from; it decides the model."""
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
    layout: Layout = Layout()
    data: DataConfig = DataConfig()
    optimizer: OptimizerConfig = OptimizerConfig()
    train: TrainConfig = TrainConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()
    log: LogConfig = LogConfig()
    finish: FinishConfig = FinishConfig()


def train_options(model: type) -> type[TrainOptions]:
    """TrainOptions with the `model` that `model_options.options` makes for a family."""
    return make_dataclass(
        "TrainOptions",
        [("model", model)],
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
    """Write a run or checkpoint as a transformers directory: model.safetensors, config.json,
    tokenizer. One tensor is in memory at a time.
    """

    source: tyro.conf.Positional[str]
    """A run's folder (its newest whole checkpoint is taken), or one checkpoint in it."""
    to: str
    """Folder to write; it must be empty or not exist."""
    dtype: Literal["float32", "bfloat16", "float16"] | None = None
    """Type of the tensors. Default: that of the model the run started from, else float32."""


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
    """Compare a transformers directory as dolmen computes it with transformers itself: logits,
    loss, gradients, greedy tokens, in float32. Exit code 1 if they differ.
    """

    folder: tyro.conf.Positional[str]
    """Directory or hub id."""
    against: str | None = None
    """Directory that transformers loads. Default: the same."""
    length: int = 64
    """Tokens of the random sequences."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """auto takes the GPUs if any are visible, else the CPU."""
    layout: Split = Split()


@dataclass(frozen=True)
class GenerateOptions:
    """Continue a prompt with a transformers directory. Prints the prompt and the continuation;
    greedy unless --temperature.
    """

    folder: tyro.conf.Positional[str]
    """Directory or hub id."""
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
    """How well a transformers directory predicts a text, over all of it: loss in nats per token,
    perplexity, bits per byte. The text is read in order, in windows of --sequence-length tokens,
    and each token is predicted once, the end of each document too. A token sees those before it in
    its window, of earlier documents as well unless --data.document-mask; the first of a document is
    predicted from an end-of-text token.
    """

    source: tyro.conf.Positional[str]
    """Directory or hub id."""
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
SECTIONS = ("layout", "data", "optimizer", "train", "checkpoint", "log", "finish")


def base(name: str) -> RunConfig:
    """The run a recipe or YAML file stands for. Raises BadInput."""
    if name in RECIPES:
        return RECIPES[name]()
    file = Path(name)
    if file.is_dir() and (file / "config.yaml").is_file():
        raise BadInput(f"{name} is a folder: dolmen train {file / 'config.yaml'} takes its run")
    if file.is_dir():
        raise BadInput(
            f"{name} is a folder; if it is one of data: dolmen train pretrain --data.path {name}"
        )
    if not file.is_file():
        near = get_close_matches(name, RECIPES, n=1)
        raise BadInput(
            f"{name} is neither a recipe nor a file: "
            + (f"did you mean {near[0]}?" if near else f"recipes are {', '.join(RECIPES)}")
        )
    try:
        return read_run(file)
    except gate.Refused as error:
        raise BadInput(str(error)) from None


def read_run(file: Path) -> RunConfig:
    """The run of a YAML file; what it leaves out is the default. Raises Refused."""
    values = gate.read_yaml(file, kinds.RUN)
    if values is None and (file.parent / "checkpoints").is_dir():
        raise gate.refuse(file, f"is empty, and {file.parent} holds a run: it is damaged")
    name = file.parent.name if file.name == "config.yaml" else file.stem
    try:
        return from_dict(RunConfig, flat.run(values or {}), RunConfig(name=name))
    except ValueError as error:
        raise gate.refuse(file, error) from error


@overload
def read(verb: Literal["train"], argv: list[str]) -> tuple[RunConfig, TrainOptions]: ...
@overload
def read(verb: str, argv: list[str]) -> Any: ...
def read(verb: str, argv: list[str]) -> Any:
    """What the words after `dolmen VERB` ask for, as that verb's `run` takes it. Exits with 0 after
    --help. Raises BadInput.
    """
    try:
        for name in ("--out", "--to", "--init"):
            refuse_empty(name, option_value(argv, name))
        return parse_train(argv) if verb == "train" else parse(VERBS[verb], argv, verb)
    except ValueError as error:  # of the sections together
        raise BadInput(message(error)) from None


def option_value(argv: list[str], name: str) -> str | None:
    """The last value of --name in argv, before everything is parsed."""
    value = None
    for i, word in enumerate(argv):
        if word == name and i + 1 < len(argv):
            value = argv[i + 1]
        if word.startswith(name + "="):
            value = word.split("=", 1)[1]
    return value


def parse_train(argv: list[str]) -> tuple[RunConfig, TrainOptions]:
    """The run and what is not part of it. Exits with 0 after --help. Raises BadInput."""
    name = next((w for w in argv[:1] if not w.startswith("-")), None)
    if name is None and not {"-h", "--help"} & set(argv):
        raise BadInput(
            "name a recipe or a YAML file first: dolmen train quickstart (dolmen recipes "
            "lists them)"
        )
    try:
        run = base(name or "pretrain")
        init = option_value(argv, "--init") or run.init
        if init is not None and not {"-h", "--help"} & set(argv):
            from dolmen.convert import hf  # imports torch, and few runs are of --init

            found = hf.read_config(hf.resolve_model(init))
            run = replace(
                run,
                init=init,
                model=run.model
                if run.model is not None and option_value(argv, "--init") is None
                else found,
            )
        start = model_options.start(run.model, argv)
        family = start.model.family
        words = model_options.in_todays_names(argv, family)
    except (ValueError, KeyError, OSError) as error:
        raise BadInput(message(error)) from None
    model_cls = model_options.options(family)
    before, cls = model_options.default(model_cls, start.model), train_options(model_cls)
    sections = {s: getattr(run, s) for s in SECTIONS}
    default = cls(recipe=name or "pretrain", model=before, init=run.init, **sections)
    options = parse(cls, words, "train", default)
    model = model_options.asked(start, before, options.model)
    return replace(
        run, model=model, init=options.init, **{s: getattr(options, s) for s in SECTIONS}
    ), options


def message(error: Exception) -> str:
    """An exception's text; KeyError quotes its own."""
    return str(error.args[0]) if isinstance(error, KeyError) and error.args else str(error)


assert {f.name for f in fields(RunConfig)} == {"name", "init", "model", *SECTIONS}
