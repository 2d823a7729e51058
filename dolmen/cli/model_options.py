"""`--model.*`: what the fields that a family declares become on the command line. An option has the
name of the field in a config.json; names that other families or dolmen before have for it are taken
too, and those of what is no part of a model any more lead to where it is now.

Nothing here imports torch or transformers.
"""

from collections.abc import Mapping
from dataclasses import dataclass, fields, make_dataclass
from itertools import takewhile
from typing import Annotated, Any, Literal

import tyro

from dolmen import families
from dolmen.families import Family, Field, Model
from dolmen.families.unknown import TRAINING
from dolmen.files.schema import Either, Flag, Int, List, Null, Real, Schema, Text

DEFAULT_FAMILY = "llama"
PREFIX = "--model."
MODEL_TYPE = ("model.model-type", "model.family")  # the option, and what it was
# Options that were the model's, where the family has no such field.
MOVED = {"family": "--model.model-type", **TRAINING}


@dataclass(frozen=True)
class Start:
    """A model before options change it."""

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


def options(family: Family) -> type:
    """The dataclass of the options of a family."""
    known = Literal[tuple(families.families())]
    told = "Family of the model: which config.json it is. Options are the fields of its family."
    return make_dataclass(
        "ModelOptions",
        [
            ("model_type", Annotated[known, tyro.conf.arg(help=told)]),
            *(_option(one) for one in family.fields if one.help or one.inside),
        ],
        namespace={"__doc__": "Fields of the model's config.json, as its family has them."},
        frozen=True,
    )


def default(cls: type, model: Model) -> Any:
    """The `cls` that says `model`."""
    return _instance(cls, {"model_type": model.model_type, **families.explicit(model)})


def asked(start: Start, before: Any, after: Any) -> Model | None:
    """The model that the options `after` ask for, where they were `before`; None where there is
    none. Raises ValueError.
    """
    said = _differences(before, after)
    if not said and not start.wanted:
        return None
    if start.bare:
        return families.made(start.model.model_type, said)
    return families.changed(start.model, said) if said else start.model


def in_todays_names(argv: list[str], family: Family) -> list[str]:
    """`argv` with every `--model.*` under the name it has now. Raises ValueError where two names of
    one option say different values.
    """
    now = [_renamed(word, family) if word.startswith(PREFIX) else word for word in argv]
    _check_spellings(argv, now)
    return now


def _check_spellings(argv: list[str], now: list[str]) -> None:
    said: dict[str, dict[str, list[str]]] = {}
    for i, (word, renamed) in enumerate(zip(argv, now, strict=True)):
        if word.startswith("--"):
            name, option = (w.partition("=")[0].replace("_", "-") for w in (word, renamed))
            said.setdefault(option, {})[name] = _values(argv[i:])
    for names in said.values():
        (first, values), *others = names.items()
        for name, more in others:
            if [_number(v) for v in more] != [_number(v) for v in values]:
                one, other = (" ".join(words) for words in ([first, *values], [name, *more]))
                raise ValueError(f"{one} and {other} are two names of one option: give one of them")


def _values(words: list[str]) -> list[str]:
    """What the option that the words begin with is given: after its sign, or up to the next."""
    _, sign, value = words[0].partition("=")
    return [value] if sign else list(takewhile(lambda w: not w.startswith("--"), words[1:]))


def _number(word: str) -> float | str:
    """1e-5 and 0.00001 are one value."""
    try:
        return float(word)
    except ValueError:
        return word


def _renamed(word: str, family: Family) -> str:
    name, sign, value = word.partition("=")
    path = name.removeprefix(PREFIX).replace("-", "_")
    off = path.startswith("no_")
    path = path.removeprefix("no_")
    if path in family.names:
        now = ("no_" if off else "") + family.names[path]
        return f"{PREFIX}{now.replace('_', '-')}{sign}{value}"
    return f"{MOVED[path]}{sign}{value}" if path in MOVED else word


def _of(model: Model, model_type: str) -> Model:
    """The model as one of another family: the same tree, or, where that family cannot express it,
    what both have by name and its defaults for the rest.
    """
    other = families.find(model_type)
    try:
        return families.moved(model, model_type)
    except ValueError:
        whole = families.explicit(model)
        shared = {
            other.names[name]: whole[one.name]
            for one in model.family.fields
            if one.help or one.inside
            for name in (one.name, *one.aliases, *one.common)
            if name in other.names and whole[one.name] is not None
        }
        return families.made(model_type, shared)


def _option(one: Field) -> tuple[str, Any]:
    others = [name for name in (*one.aliases, *one.common) if "." not in name]
    also = f" Also {', '.join(f'{PREFIX}{n}'.replace('_', '-') for n in others)}." if others else ""
    if one.inside:
        inner = [_option(inside) for inside in one.inside if inside.help]
        told = {"__doc__": f"Fields of {one.name}."}
        return one.name, make_dataclass(one.name, inner, namespace=told, frozen=True)
    return one.name, Annotated[_type(one.kind), tyro.conf.arg(help=one.help + also)]


def _type(kind: Schema) -> Any:
    match kind:
        case Either((Null(), Flag())):
            return bool  # null is false
        case Either((Null(), inner)):
            return _type(inner) | None
        case Flag():
            return bool
        case Int():
            return int
        case Real():
            return float
        case Text(choices):
            return Literal[choices] if choices else str
        case List(item):
            return tuple[_type(item), ...]
    raise AssertionError(f"no option is of {kind}")


def _instance(cls: type, values: Mapping[str, Any]) -> Any:
    made = {}
    for one in fields(cls):
        value = values.get(one.name)
        if isinstance(one.type, type):
            made[one.name] = _instance(one.type, value or {})
        elif isinstance(value, list):
            made[one.name] = tuple(value)
        else:
            made[one.name] = value
    return cls(**made)


def _differences(before: Any, after: Any) -> dict[str, Any]:
    """Field -> its new value, of those that differ; of a mapping, `mapping.field`."""
    said = {}
    for one in fields(before):
        old, new = vars(before)[one.name], vars(after)[one.name]
        if isinstance(one.type, type):
            inner = _differences(old, new)
            said |= {f"{one.name}.{name}": value for name, value in inner.items()}
        elif old != new and one.name != "model_type":
            said[one.name] = list(new) if isinstance(new, tuple) else new
    return said
