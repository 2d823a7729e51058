"""A run's model before and after what is said of it: options of the command line, keywords of
Python. What is said is a field of the family and its value; one inside another is
`rope_parameters.factor`.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from dolmen.core.config import Words, from_words
from dolmen.families.family import Family, Field
from dolmen.families.known import find
from dolmen.families.model import Model, changed, explicit, made, moved
from dolmen.files.schema import Either, Flag, Int, List, Null, Real, Schema, Text

DEFAULT_FAMILY = "llama"


@dataclass(frozen=True)
class Start:
    """A model before anything is said of it."""

    model: Model
    bare: bool = False
    """Whether it is a family's name and nothing more."""
    wanted: bool = True
    """Whether a recipe, a file, --init or an option has asked for a model."""


def start(model: Model | None, asked: str | None) -> Start:
    """The model of a run, or else the defaults of a family; of the family that is `asked` for.
    Raises ValueError.
    """
    if model is None:
        bare = Model({"model_type": asked or DEFAULT_FAMILY})
        return Start(bare, bare=True, wanted=asked is not None)
    return Start(model if asked in (None, model.model_type) else _of(model, asked))


def asked(start: Start, said: Mapping[str, Any]) -> Model | None:
    """The model with what is `said`, None where there is none. What it has already is not stated
    once more. Raises ValueError.
    """
    whole = explicit(start.model)
    news = {path: value for path, value in said.items() if value != _value(whole, path)}
    if not news and not start.wanted:
        return None
    if start.bare:
        return made(start.model.model_type, news)
    return changed(start.model, news) if news else start.model


def option_fields(family: Family) -> dict[str, Field]:
    """The fields of a family that are options: `rope_parameters.factor` -> the field."""
    found = {}
    for one in family.fields:
        if one.inside:
            found |= {f"{one.name}.{inner.name}": inner for inner in one.inside if inner.help}
        elif one.help:
            found[one.name] = one
    return found


def option_type(kind: Schema) -> Any:
    """The type of the option of a field."""
    match kind:
        case Either((Null(), Flag())):
            return bool  # null is false
        case Either((Null(), inner)):
            return option_type(inner) | None
        case Flag():
            return bool
        case Int():
            return int
        case Real():
            return float
        case Text(choices):
            return Literal[choices] if choices else str
        case List(item):
            return tuple[option_type(item), ...]
    raise AssertionError(f"no option is of {kind}")


def field_from_words(field: Field, words: Words, option: str) -> Any:
    """The value of a field, as a config.json has it, that words of the command line are. Raises
    ValueError.
    """
    value = from_words(option_type(field.kind), words, option)
    return list(value) if isinstance(value, tuple) else value


def _value(whole: Mapping[str, Any], path: str) -> Any:
    name, _, inner = path.partition(".")
    return (whole[name] or {}).get(inner) if inner else whole[name]


def _of(model: Model, model_type: str) -> Model:
    """The model as one of another family: the same tree, or, where that family cannot express it,
    what both have by name and its defaults for the rest.
    """
    other = find(model_type)
    try:
        return moved(model, model_type)
    except ValueError:
        whole = explicit(model)
        shared = {
            other.names[name]: whole[one.name]
            for one in model.family.fields
            if one.help or one.inside
            for name in (one.name, *one.aliases, *one.common)
            if name in other.names and whole[one.name] is not None
        }
        return made(model_type, shared)
