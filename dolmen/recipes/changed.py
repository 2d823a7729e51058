"""A run of a recipe, a YAML file or a RunConfig, and changes of its options: keywords of Python,
those of a section in a mapping, or options of the command line. An unknown option, and a value of
another type, raise ValueError.
"""

import os
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import fields, replace
from numbers import Integral, Real
from typing import Any

from dolmen.core.config import Words, from_dict, from_words, option_types, unflatten
from dolmen.core.messages import brief, cut
from dolmen.families import Family
from dolmen.families import start as models
from dolmen.families.unknown import TRAINING
from dolmen.recipes.named import begun, named, otherwise_long
from dolmen.training.config import RunConfig
from dolmen.training.request import Handling, Request
from dolmen.training.spellings import suggestion

MODEL = "model."  # before the fields of a model
MODEL_TYPE = "model.model_type"


def request(source: str | os.PathLike | RunConfig, changes: Mapping[str, Any]) -> Request:
    """The run of `source` with the `changes`, whose names may have `-` for `_`, and `.` for a
    mapping. Fields of a model may be Words. Raises ValueError, KeyError or OSError.
    """
    said = once(flattened(changes))
    if isinstance(source, RunConfig):
        run, name = source, None
    elif isinstance(source, (str, os.PathLike)):
        name = os.fspath(source)
        run = named(name, init=said.get("init"))
    else:
        raise ValueError(
            f"the run is {brief(source)}: it must be the name of a recipe, a YAML file or a "
            "RunConfig"
        )
    run = otherwise_long(run, said)
    run = begun(run, from_dict(RunConfig, {"init": said.pop("init", None)}).init)
    kind = said.pop(MODEL_TYPE, None)
    start = models.start_model(run.model, " ".join(kind) if isinstance(kind, Words) else kind)
    said = resolve_aliases(said, start.model.family)
    refuse_unknown(said, start.model.family)
    of_model = {name: said.pop(name) for name in [*said] if name.startswith(MODEL)}
    handled = {one.name: said.pop(one.name) for one in fields(Handling) if one.name in said}
    model = models.apply_options(
        start, {name.removeprefix(MODEL): v for name, v in of_model.items()}
    )
    changed = replace(from_dict(RunConfig, unflatten(said), run), model=model)
    if "train.microbatch_size" not in said:
        changed = drop_unfit_microbatch(changed, run)
    return Request.of(changed, from_dict(Handling, handled), name)


def drop_unfit_microbatch(changed: RunConfig, run: RunConfig) -> RunConfig:
    """Return the `changed` run without the microbatch size of `run`, so that one is chosen, where
    it fits no more: where the changes give another layout or global batch that it does not divide.
    A config.yaml has the size that was chosen for its layout, which nobody gave.
    """
    size, layout, batch = run.train.microbatch_size, changed.layout, changed.train.global_batch_size
    if size is None or (layout, batch) == (run.layout, run.train.global_batch_size):
        return changed
    rows = batch // (layout.dp or 1)
    if rows % size == 0 and rows // size % layout.pp == 0:
        return changed
    return replace(changed, train=replace(changed.train, microbatch_size=None))


def flattened(changes: Mapping[str, Any], section: str = "") -> list[tuple[str, Any]]:
    """(`section.option`, plain value) of all that is said."""
    found: list[tuple[str, Any]] = []
    for key, value in changes.items():
        name = f"{section}{key}".replace("-", "_")
        if isinstance(value, Mapping):
            found += flattened(value, f"{name}.")
        else:
            found.append((name, plain(value)))
    return found


def once(pairs: Iterable[tuple[str, Any]]) -> dict[str, Any]:
    """Raises ValueError where one name has two values, of which one would be lost."""
    said: dict[str, Any] = {}
    for name, value in pairs:
        # what a NaN or an array says of itself is not asked
        if name in said and said[name] != value:
            raise ValueError(f"{name} is given twice, as {brief(said[name])} and {brief(value)}")
        said[name] = value
    return said


def plain(value: Any) -> Any:
    """A path as text, text and a number of numpy as Python's; a list for a tuple, as files have it.
    What no float holds stays, to be refused by name.
    """
    match value:
        case bool() | Words():
            return value
        case str():
            return str.__str__(value)  # of a subclass YAML has no word
        case os.PathLike():
            return os.fspath(value)
        case Integral():
            return int(value)
        case Real():
            with suppress(OverflowError):
                return float(value)
        case list() | tuple():
            return [plain(one) for one in value]
    return value


def resolve_aliases(said: Mapping[str, Any], family: Family) -> dict[str, Any]:
    """Replace aliases of `model.*` options by the family's names.

    Raises ValueError where two names of one option have different values.
    """
    found: dict[str, tuple[str, Any]] = {}
    for name, value in said.items():
        now = resolve_alias(name, family)
        if isinstance(value, Words):
            now, value = typed(now, value, family)
        if now in found and found[now][1] != value:
            raise ValueError(
                f"{found[now][0]} ({found[now][1]}) and {name} ({value}) are two names of one "
                "option: give one of them"
            )
        found[now] = name, value
    return {now: value for now, (_, value) in found.items()}


def typed(name: str, words: Words, family: Family) -> tuple[str, Any]:
    """The option that words of the command line are for, `model.no_bias` being `model.bias`, and
    their value; those of an unknown option stay. Raises ValueError.
    """
    own = option_types(RunConfig)
    if name in own and name not in ("model", "name"):  # these two are Python's alone
        return name, from_words(own[name], words, _worded(name))
    if not name.startswith(MODEL):
        return name, words
    fields_of_model = models.option_fields(family)
    *section, last = name.removeprefix(MODEL).split(".")
    on = ".".join([*section, last.removeprefix("no_")])
    on = family.names.get(on, on)
    if last.startswith("no_") and not words and on in fields_of_model:
        return MODEL + on, False
    field = fields_of_model.get(name.removeprefix(MODEL))
    return name, words if field is None else models.field_from_words(field, words, _worded(name))


def _worded(name: str) -> str:
    """An option as the command line has it."""
    return f"--{name.replace('_', '-')}"


def resolve_alias(name: str, family: Family) -> str:
    if not name.startswith(MODEL):
        return name
    path = name.removeprefix(MODEL)
    if path in family.names:
        return MODEL + family.names[path]
    return TRAINING.get(path, f"--{name}").removeprefix("--").replace("-", "_")


def known(family: Family) -> list[str]:
    """All that may be said of a run whose model is of the family."""
    model = [MODEL + name for name in models.option_fields(family)]
    run = [name for name in option_types(RunConfig) if name != "model"]
    return [*option_types(Handling), *run, MODEL_TYPE, *model]


def refuse_unknown(said: Mapping[str, Any], family: Family) -> None:
    """Raises ValueError with the option that may be meant, and for a section that is no mapping."""
    names = known(family)
    sections = {name.rpartition(".")[0] for name in names} - {""}
    for name, value in said.items():
        if name in sections and not isinstance(value, Words):
            raise ValueError(f"{name} is {brief(value)}: it must be a mapping of options")
        if name in names:
            continue
        near = suggestion(name.replace("_", "-"), [n.replace("_", "-") for n in names])
        option = cut(name)
        if isinstance(value, Words):
            option, near = _worded(option), near or "dolmen train --help --all lists them"
        raise ValueError(f"unknown option {option}" + (f": {near}" if near else ""))
