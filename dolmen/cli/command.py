"""From the words after `dolmen VERB` to what the verb is asked. A run comes from a recipe or YAML
file, then --init, then options, each over the one before.

    base      the run of a recipe or file
    begun     with the model that it starts from
    start     that model, of the family that options name: the options are its fields
    parse     words over all of it
    asked     the model with what they changed
"""

import os
from dataclasses import replace
from difflib import get_close_matches
from pathlib import Path
from typing import Any, Literal, overload

from dolmen.cli import model_options
from dolmen.cli.options import SECTIONS, VERBS, TrainOptions, train_options
from dolmen.cli.parse import HELP, last, parse
from dolmen.core.config import from_dict
from dolmen.core.errors import BadInput, message
from dolmen.core.paths import refuse_empty
from dolmen.core.words import cut
from dolmen.families import flat
from dolmen.files import gate, kinds
from dolmen.recipes import HERE, RECIPES
from dolmen.training.config import RunConfig

NEUTRAL = "pretrain"  # the recipe of a help that names none


@overload
def read(verb: Literal["train"], argv: list[str]) -> tuple[RunConfig, TrainOptions]: ...
@overload
def read(verb: str, argv: list[str]) -> Any: ...
def read(verb: str, argv: list[str]) -> Any:
    """What the words after `dolmen VERB` ask for, as that verb's `run` takes it. Exits with 0 after
    --help. Raises BadInput.
    """
    try:
        for name in ("out", "to", "init"):
            refuse_empty(f"--{name}", last(argv, name))
        return parse_train(argv) if verb == "train" else parse(VERBS[verb], argv, verb)
    except ValueError as error:  # of the sections together
        raise BadInput(message(error)) from None


def parse_train(argv: list[str]) -> tuple[RunConfig, TrainOptions]:
    """The run and what is not part of it. Exits with 0 after --help, which reads no model and asks
    nothing of the machine. Raises BadInput.
    """
    named, helped = [word for word in argv[:1] if not word.startswith("-")], bool(HELP & {*argv})
    if not named and not helped:
        raise BadInput(
            "name a recipe or a YAML file first: dolmen train quickstart (dolmen recipes "
            "lists them)"
        )
    name = named[0] if named else NEUTRAL
    try:
        run = base(name, here=not helped)
        if not helped:
            run = begun(run, last(argv, "init"))
        start = model_options.start(run.model, last(argv, *model_options.MODEL_TYPE))
        family = start.model.family
        words = model_options.in_todays_names(argv, family)
    except (ValueError, KeyError, OSError) as error:
        raise BadInput(message(error)) from None
    model_cls = model_options.options(family)
    before, cls = model_options.default(model_cls, start.model), train_options(model_cls)
    sections = {section.name: getattr(run, section.name) for section in SECTIONS}
    default = cls(recipe=name, model=before, init=run.init, **sections)
    options = parse(cls, words, "train", default)
    model = model_options.asked(start, before, options.model)
    told = {section.name: getattr(options, section.name) for section in SECTIONS}
    return replace(run, model=model, **told), options


def base(name: str, here: bool = True) -> RunConfig:
    """The run a recipe, as it is `here` or on any machine, or a YAML file stands for. Raises
    BadInput.
    """
    if name in RECIPES:
        made = RECIPES[name]()
        return HERE[name](made) if here and name in HERE else made
    file = Path(name)
    is_folder, is_file = os.path.isdir(file), os.path.isfile(file)  # of any name, however long
    if is_folder and (file / "config.yaml").is_file():
        raise BadInput(f"{name} is a folder: dolmen train {file / 'config.yaml'} takes its run")
    if is_folder:
        raise BadInput(
            f"{name} is a folder; if it is one of data: dolmen train pretrain --data.path {name}"
        )
    if not is_file:
        near = get_close_matches(name, RECIPES, n=1)
        raise BadInput(
            f"{cut(name)} is neither a recipe nor a file: "
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


def begun(run: RunConfig, init: str | None) -> RunConfig:
    """The run with the model that it starts from: that of `init`, or else its own, or else that of
    its own init. Of another run `init` is the checkpoint it has now, however often it is read from
    here on. Raises ValueError, KeyError or OSError.
    """
    source = init or run.init
    if source is None:
        return run
    from dolmen.conversion.source import open_source, pinned  # torch, and few runs are of --init

    source = pinned(source)
    own = run.model is not None and not init
    return replace(run, init=source, model=run.model if own else open_source(source).model)
