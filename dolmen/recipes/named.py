"""The run that a name stands for, a recipe's or a YAML file's, with the model that it starts
from.
"""

import os
from collections.abc import Collection
from dataclasses import replace
from pathlib import Path

from dolmen.core.filesystem import is_absent
from dolmen.core.messages import cut, did_you_mean
from dolmen.families import Model
from dolmen.files import gate, kinds
from dolmen.recipes import BEGUN, HERE, RECIPES
from dolmen.training.config import RunConfig
from dolmen.training.request import read_run


def named(name: str, here: bool = True, init: str | None = None) -> RunConfig:
    """The run of a recipe, as it is `here` or on any machine, and where `init` is to say the model,
    or of a YAML file. Raises ValueError.
    """
    if name in RECIPES:
        made = RECIPES[name]()
        if init is not None and name in BEGUN:
            made = BEGUN[name](made)
        return HERE[name](made) if here and name in HERE else made
    file = Path(name)
    is_folder, is_file = os.path.isdir(file), os.path.isfile(file)  # of any name, however long
    if is_folder and (file / "config.yaml").is_file():
        raise ValueError(f"{name} is a folder: dolmen train {file / 'config.yaml'} takes its run")
    if is_folder:
        raise ValueError(
            f"{name} is a folder; if it is one of data: dolmen train pretrain --data.path {name}"
        )
    if not is_file:
        hint = did_you_mean(name.lower(), RECIPES, f"recipes are {', '.join(RECIPES)}")
        raise ValueError(f"{cut(name)} is neither a recipe nor a file: {hint}")
    return read_run(file)


def described(name: str) -> RunConfig:
    """The run that is looked at and not done: a recipe's as on any machine, a YAML file's, that of
    a run's folder, or, of a folder with a config.json, all defaults but the model. Raises
    ValueError.
    """
    folder = Path(name)
    if name in RECIPES or not os.path.isdir(folder):
        return named(name, here=False)
    if (folder / "config.json").is_file():
        model = Model.from_plain(gate.read_json(folder / "config.json", kinds.CONFIG))
        return RunConfig(name=folder.resolve().name, model=model)
    if (folder / "config.yaml").is_file():
        return read_run(folder / "config.yaml")
    raise ValueError(f"{cut(name)} has neither a config.json nor a config.yaml")


def planned(name: str) -> RunConfig:
    """The run of a model that is to be planned, as `described` has it. Raises ValueError."""
    run = described(name)
    if run.model is None:
        raise ValueError(
            f"{cut(name)} has no model of its own: name a recipe that has one (dolmen recipes), a "
            "folder with a config.json, or a YAML file"
        )
    return run


def otherwise_long(run: RunConfig, said: Collection[str]) -> RunConfig:
    """The run without a length of its own, or a warm-up, where the options `said`, as YAML has
    their names, say one: in steps, tokens or epochs, whatever its own is in.
    """
    train, optimizer = run.train, run.optimizer
    if {"train.steps", "train.tokens", "train.epochs"} & set(said):
        train = replace(train, steps=None, tokens=None, epochs=None)
    if {"optimizer.warmup_steps", "optimizer.warmup_tokens"} & set(said):
        optimizer = replace(optimizer, warmup_steps=0, warmup_tokens=None)
    return replace(run, train=train, optimizer=optimizer)


def begun(run: RunConfig, init: str | None) -> RunConfig:
    """The run with the model that it starts from: that of `init`, or else its own, or else that of
    its own init. Of another run `init` is the checkpoint it has now, however often it is read from
    here on. Its own may be absent, of one that goes on without it. Raises ValueError, KeyError or
    OSError.
    """
    source, own = init or run.init, run.model is not None and not init
    if source is None or (own and is_absent(source)):
        return run
    # torch, and few runs are of --init
    from dolmen.conversion.source import open_source, pin_source

    source = pin_source(source)
    return replace(run, init=source, model=run.model if own else open_source(source).model)
