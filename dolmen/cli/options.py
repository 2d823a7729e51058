"""From words to a RunConfig: a recipe or YAML file, then --init, then options, each over the one
before.
"""

from dataclasses import dataclass, fields, replace
from difflib import get_close_matches
from pathlib import Path
from typing import Annotated

import tyro
import yaml

from dolmen.cli.errors import BadInput
from dolmen.convert import hf
from dolmen.core.config import from_dict
from dolmen.model.config import ModelConfig
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
    model: ModelConfig
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


SECTIONS = ("layout", "data", "optimizer", "train", "checkpoint", "log", "finish")


def base(name: str) -> RunConfig:
    """The run a recipe or YAML file stands for. Raises BadInput."""
    if name in RECIPES:
        return RECIPES[name]()
    file = Path(name)
    if not file.is_file():
        near = get_close_matches(name, RECIPES, n=1)
        raise BadInput(
            f"{name} is neither a recipe nor a file: "
            + (f"did you mean {near[0]}?" if near else f"recipes are {', '.join(RECIPES)}")
        )
    try:
        values = yaml.safe_load(file.read_text())
        return from_dict(
            RunConfig,
            values or {},
            RunConfig(name=file.parent.name if file.name == "config.yaml" else file.stem),
        )
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise BadInput(f"{name} is not a YAML file: {error}") from None
    except ValueError as error:
        raise BadInput(f"{name}: {error}") from None


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
    """The run and what is not part of it. Exits with 0 after --help, 2 on an unknown option; raises
    BadInput.
    """
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
            found = hf.read_config(hf.resolve(init))
            run = replace(
                run,
                init=init,
                model=run.model
                if run.model is not None and option_value(argv, "--init") is None
                else found,
            )
    except (ValueError, KeyError, OSError) as error:
        raise BadInput(message(error)) from None
    sections = {s: getattr(run, s) for s in SECTIONS}
    default = TrainOptions(
        recipe=name or "pretrain", model=run.model or ModelConfig(), init=run.init, **sections
    )
    options = tyro.cli(TrainOptions, args=argv, default=default, prog="dolmen train")
    model = options.model if run.model is not None or options.model != ModelConfig() else None
    return replace(
        run, model=model, init=options.init, **{s: getattr(options, s) for s in SECTIONS}
    ), options


def message(error: Exception) -> str:
    """An exception's text; KeyError quotes its own."""
    return str(error.args[0]) if isinstance(error, KeyError) and error.args else str(error)


assert {f.name for f in fields(RunConfig)} == {"name", "init", "model", *SECTIONS}
