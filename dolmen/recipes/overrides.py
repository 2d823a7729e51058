"""The run of a recipe, a YAML file or a RunConfig, and changes of its options: keywords of Python,
nested mappings, or options of the command line. An unknown option, and a value of another type,
raise ValueError.

    load_run("sft")                         the run of a recipe or a file
    build_request("sft", {"init": ...})     the same with changes, and how to run it
"""

import os
from collections.abc import Collection, Iterable, Mapping
from contextlib import suppress
from dataclasses import fields, replace
from numbers import Integral, Real
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dolmen.core.config import Words, from_dict, from_words, option_types, unflatten
from dolmen.core.environment import Launch
from dolmen.core.filesystem import is_absent, is_url
from dolmen.core.messages import brief, cut, did_you_mean, unknown_options
from dolmen.families import Family, ModelConfig
from dolmen.families import start as models
from dolmen.families.unknown import TRAINING
from dolmen.files import gate, kinds, storage
from dolmen.recipes import ON_THIS_MACHINE, RECIPES, WITH_INIT
from dolmen.training.config import RunConfig
from dolmen.training.request import LaunchOptions, TrainRequest, read_run
from dolmen.training.spellings import suggestion

if TYPE_CHECKING:
    from dolmen.conversion.source import ModelSource


def load_run(
    name: str, adapt: bool = True, init: str | None = None, is_launched: bool = False
) -> RunConfig:
    """Return the configuration of the run `name`: a recipe, or a YAML file or its URL. `adapt`:
    choose layout and dtype for this machine, for recipes that do so. `init`: the model that will
    replace the recipe's own, for which some recipes have other options; it is not opened.
    `is_launched`: a launcher or --nproc has decided how many processes train. Raises ValueError for
    an unknown name (with suggestions), a folder, or an invalid file.
    """
    if name in RECIPES:
        run = RECIPES[name]()
        if init is not None and name in WITH_INIT:
            run = WITH_INIT[name](run)
        return ON_THIS_MACHINE[name](run, is_launched) if adapt and name in ON_THIS_MACHINE else run
    file = Path(name)
    if is_url(name):
        file = storage.pull_file(name) or file
    is_folder, is_file = (
        os.path.isdir(file),
        os.path.isfile(file),
    )  # unlike Path.is_file, take a name of any length
    if is_folder and (file / "config.yaml").is_file():
        raise ValueError(f"{name} is a folder: dolmen train {file / 'config.yaml'} starts its run")
    if is_folder:
        raise ValueError(
            f"{name} is a folder; to train on its files: dolmen train pretrain --data.path {name}"
        )
    if not is_file:
        # recipes have lower-case names
        hint = did_you_mean(name.lower(), RECIPES, f"recipes are {', '.join(RECIPES)}")
        raise ValueError(f"{cut(name)} is neither a recipe nor a file: {hint}")
    return read_run(file)


def load_run_to_inspect(name: str) -> RunConfig:
    """Return the configuration of a run that is only looked at, as by `plan` and `dryrun`: `name`
    is a recipe (not adapted to this machine), a YAML file, the folder of a run (its config.yaml),
    or a folder with a config.json, whose run has all defaults but the model. Raises ValueError.
    """
    folder = Path(name)
    if name in RECIPES or not os.path.isdir(folder):
        return load_run(name, adapt=False)
    if (folder / "config.json").is_file():
        model = ModelConfig.from_plain(gate.read_json(folder / "config.json", kinds.CONFIG))
        return RunConfig(name=folder.resolve().name, model=model)
    if (folder / "config.yaml").is_file():
        return read_run(folder / "config.yaml")
    raise ValueError(f"{cut(name)} has neither a config.json nor a config.yaml")


def load_run_to_plan(name: str) -> RunConfig:
    """Return the configuration of a run for the planner: `name` is a recipe, a YAML file, the
    folder of a run, or a folder with a config.json. Raises ValueError if there is none, or if it
    has no model.
    """
    run = load_run_to_inspect(name)
    if run.model is None:
        raise ValueError(
            f"{cut(name)} has no model of its own: name a recipe that has one (dolmen recipes), a "
            "folder with a config.json, or a YAML file"
        )
    return run


def clear_length(run: RunConfig, names: Collection[str]) -> RunConfig:
    """Return the run without train.steps, train.tokens and train.epochs if any of the three is
    among the option `names` (as in YAML) that will be set, and without both warm-up lengths if one
    of them is: the recipe's length in one unit must not stay beside the new one in another.
    """
    train, optimizer = run.train, run.optimizer
    if {"train.steps", "train.tokens", "train.epochs"} & set(names):
        train = replace(train, steps=None, tokens=None, epochs=None)
    if {"optimizer.warmup_steps", "optimizer.warmup_tokens"} & set(names):
        optimizer = replace(optimizer, warmup_steps=0, warmup_tokens=None)
    return replace(run, train=train, optimizer=optimizer)


def resolve_init(run: RunConfig, init: str | None) -> tuple[RunConfig, "ModelSource | None"]:
    """Return the run with the model of `init`; without `init`, with its own model, else the model
    of its own option init; and the source of that model, None unless it was opened. That source
    becomes the run's init; another run is pinned to its newest checkpoint, so that later reads find
    the same one. A run with a model is returned unchanged if the folder of its own init no longer
    exists. Raises ValueError, KeyError or OSError.
    """
    source, has_model = init or run.init, run.model is not None and not init
    if source is None or (has_model and is_absent(source)):
        return run, None
    # imports torch, and few runs have an init
    from dolmen.conversion.source import open_source, pin_source

    # that run may write a newer checkpoint meanwhile
    source = pin_source(source)
    if has_model:
        return replace(run, init=source), None
    opened = open_source(source)
    return replace(run, init=source, model=opened.model), opened


MODEL = "model."  # before the fields of a model
MODEL_TYPE = "model.model_type"


def build_request(
    source: str | os.PathLike | RunConfig, changes: Mapping[str, Any]
) -> TrainRequest:
    """Return the request to train a recipe, a YAML file or a RunConfig with `changes` of its
    options: nested mappings or dotted names, with `-` or `_`. Values that are Words of the command
    line are converted to the option's type. The model of init is opened for its config.json, and
    options of launching (out, resume, ...) go to the request itself. Raises ValueError for unknown
    or wrong options, KeyError or OSError.
    """
    # `train={"steps": 1}` and `"train.steps": 1` are one option
    overrides = merge_overrides(flatten(changes))
    if isinstance(source, RunConfig):
        run, name = source, None
    elif isinstance(source, (str, os.PathLike)):
        name = os.fspath(source)
        is_launched = "nproc" in overrides or Launch.read() is not None
        run = load_run(name, init=overrides.get("init"), is_launched=is_launched)
    else:
        raise ValueError(
            f"the run is {brief(source)}: it must be the name of a recipe, a YAML file or a "
            "RunConfig"
        )
    # before the new options are merged over it
    run = clear_length(run, overrides)
    run, opened = resolve_init(
        run, from_dict(RunConfig, {"init": overrides.pop("init", None)}).init
    )
    # first, as it decides which other fields exist
    kind = overrides.pop(MODEL_TYPE, None)
    start = models.start_model(run.model, " ".join(kind) if isinstance(kind, Words) else kind)
    overrides = resolve_aliases(overrides, start.model.family)
    refuse_unknown(overrides, start.model.family)
    model_fields = {name: overrides.pop(name) for name in [*overrides] if name.startswith(MODEL)}
    handling = {f.name: overrides.pop(f.name) for f in fields(LaunchOptions) if f.name in overrides}
    try:
        model = models.apply_options(
            start, {name.removeprefix(MODEL): v for name, v in model_fields.items()}
        )
    except ValueError as error:
        raise ValueError(_name_option(str(error), model_fields)) from None
    changed = replace(from_dict(RunConfig, unflatten(overrides), run), model=model)
    if "train.microbatch_size" not in overrides:
        changed = drop_unfit_microbatch(changed, run)
    request = TrainRequest.from_config(changed, from_dict(LaunchOptions, handling), name)
    return replace(request, opened=opened)


def _name_option(text: str, options: Collection[str]) -> str:
    """Return the message with the option as it is typed in place of the config.json field that it
    starts with, if that is one of the dotted `options`.
    """
    for name in options:
        field = name.removeprefix(MODEL)
        if text.startswith(f"{field} is "):
            return _flag(name) + text.removeprefix(field)
    return text


def drop_unfit_microbatch(changed: RunConfig, run: RunConfig) -> RunConfig:
    """Return the run `changed` without a microbatch size, so that one is chosen later, if its
    layout or global batch differs from that of the original `run` and the microbatch size of `run`
    no longer divides it; else return `changed` as it is.
    """
    size, layout, batch = run.train.microbatch_size, changed.layout, changed.train.global_batch_size
    if size is None or (layout, batch) == (run.layout, run.train.global_batch_size):
        return changed
    # sequences of a data-parallel rank
    rows = batch // (layout.dp or 1)
    # still fits: keep what was chosen
    if rows % size == 0 and rows // size % layout.pp == 0:
        return changed
    return replace(changed, train=replace(changed.train, microbatch_size=None))


def flatten(changes: Mapping[str, Any], section: str = "") -> list[tuple[str, Any]]:
    """Return a list of (dotted name of an option, plain value) for nested mappings of options, with
    `_` for `-` in names. `section`: prefix of the names.
    """
    pairs: list[tuple[str, Any]] = []
    for key, value in changes.items():
        name = f"{section}{key}".replace("-", "_")
        if isinstance(value, Mapping):
            pairs += flatten(value, f"{name}.")
        else:
            pairs.append((name, plain(value)))
    return pairs


def merge_overrides(pairs: Iterable[tuple[str, Any]]) -> dict[str, Any]:
    """Return (name, value) pairs as a dict. Raises ValueError if one name has two values."""
    merged: dict[str, Any] = {}
    for name, value in pairs:
        # the same value twice is no mistake
        if name in merged and merged[name] != value:
            raise ValueError(f"{name} is given twice, as {brief(merged[name])} and {brief(value)}")
        merged[name] = value
    return merged


def plain(value: Any) -> Any:
    """Return a value as YAML can hold it: a path as text, numbers of numpy as Python's, tuples as
    lists, recursively. Anything else, and a number that no float can hold, is returned as it is, to
    be refused later under its option's name.
    """
    match value:
        case bool() | Words():
            return value
        case str():
            return str.__str__(value)  # a subclass, such as an enum, is not written to YAML
        case os.PathLike():
            return os.fspath(value)
        case Integral():
            return int(value)
        case Real():
            with suppress(OverflowError):
                return float(value)
        case list() | tuple():
            return [plain(item) for item in value]
    return value


def resolve_aliases(overrides: Mapping[str, Any], family: Family) -> dict[str, Any]:
    """Return the options (dotted name -> value) with each name that is only another name of a
    model's field replaced by the family's own name, and Words of the command line converted to the
    option's type. Raises ValueError where two names of one option have different values.
    """
    resolved: dict[str, tuple[str, Any]] = {}
    for name, value in overrides.items():
        option = resolve_alias(name, family)
        if isinstance(value, Words):
            option, value = parse_words(option, value, family)
        if option in resolved and resolved[option][1] != value:
            alias, first = resolved[option]
            raise ValueError(
                f"{alias} ({first}) and {name} ({value}) are two names of one option: give one of "
                "them"
            )
        resolved[option] = name, value
    return {option: value for option, (_, value) in resolved.items()}


def parse_words(name: str, words: Words, family: Family) -> tuple[str, Any]:
    """Return (name, value) of an option whose value is Words of the command line, converted to the
    type that the run's options or the model's family have for it. `model.no_bias` without words
    returns ("model.bias", False). Words of an unknown option are returned as they are. Raises
    ValueError for words that do not fit.
    """
    types = option_types(RunConfig)
    if name in types and name not in ("model", "name"):  # these two are Python's alone
        return name, from_words(types[name], words, _flag(name))
    if not name.startswith(MODEL):
        return name, words
    fields_of_model = models.option_fields(family)
    *section, last = name.removeprefix(MODEL).split(".")
    switch = ".".join([*section, last.removeprefix("no_")])
    switch = family.names.get(switch, switch)
    if last.startswith("no_") and not words and switch in fields_of_model:
        return MODEL + switch, False
    field = fields_of_model.get(name.removeprefix(MODEL))
    return name, words if field is None else models.field_from_words(field, words, _flag(name))


def _flag(name: str) -> str:
    """Return a dotted option as it is typed on the command line: --train.batch-size for
    train.batch_size.
    """
    return f"--{name.replace('_', '-')}"


def resolve_alias(name: str, family: Family) -> str:
    """Return the dotted name of the option that `name` stands for: for another family's name of a
    model's field the name that this family has; for a model setting that only matters in training
    the option of training (`model.dropout` is `train.dropout`); else `name` itself.
    """
    if not name.startswith(MODEL):
        return name
    path = name.removeprefix(MODEL)
    if path in family.names:
        return MODEL + family.names[path]
    return TRAINING.get(path, f"--{name}").removeprefix("--").replace("-", "_")


def option_names(family: Family) -> list[str]:
    """Return the dotted names of all options of a run, with the config.json fields that a model of
    this family has, and of the options of launching it.
    """
    model = [MODEL + name for name in models.option_fields(family)]
    run = [name for name in option_types(RunConfig) if name != "model"]
    return [*option_types(LaunchOptions), *run, MODEL_TYPE, *model]


def refuse_unknown(overrides: Mapping[str, Any], family: Family) -> None:
    """Raise ValueError if `overrides` (dotted name -> value) has options that a run with a model of
    this family does not have, with the nearest known name for each, or a whole section, such as
    "train", whose value is not a mapping.
    """
    # all, those of the model's family among them
    names = option_names(family)
    # "train", "layout", ...
    sections = {name.rpartition(".")[0] for name in names} - {""}
    advice: dict[str, str] = {}
    for name, value in overrides.items():
        if name in sections and not isinstance(value, Words):
            raise ValueError(f"{name} is {brief(value)}: it must be a mapping of options")
        if name in names:
            continue
        near = suggestion(name.replace("_", "-"), [n.replace("_", "-") for n in names])
        option = cut(name)
        if isinstance(value, Words):
            option, near = _flag(option), near or "dolmen train --help --all lists them"
        advice[option] = near
    if advice:
        raise ValueError(unknown_options(advice))
