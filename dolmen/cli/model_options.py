"""`--model.*`: what the fields that a family declares become on the command line. An option has the
name of the field in a config.json; names that other families or dolmen before have for it are taken
too, and those of what is no part of a model any more lead to where it is now.

Nothing here imports torch or transformers.
"""

from collections.abc import Mapping
from dataclasses import fields, make_dataclass
from itertools import takewhile
from typing import Annotated, Any, Literal

import tyro

from dolmen import families
from dolmen.families import Family, Field, Model
from dolmen.families.unknown import TRAINING
from dolmen.files.schema import Either, Flag, Int, List, Null, Real, Schema, Text

PREFIX = "--model."
MODEL_TYPE = "model.model-type"


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


def resolve_aliases(argv: list[str], family: Family) -> list[str]:
    """Replace aliases of `--model.*` options by the family's names.

    Raises ValueError where two names of one option have different values.
    """
    now = [_renamed(word, family) if word.startswith(PREFIX) else word for word in argv]
    _check_spellings(argv, now)
    return now


def _check_spellings(argv: list[str], now: list[str]) -> None:
    given: dict[str, dict[str, list[str]]] = {}
    for i, (word, renamed) in enumerate(zip(argv, now, strict=True)):
        if word.startswith("--"):
            name, option = (w.partition("=")[0].replace("_", "-") for w in (word, renamed))
            given.setdefault(option, {})[name] = _values(argv[i:])
    for names in given.values():
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
    return f"{TRAINING[path]}{sign}{value}" if path in TRAINING else word


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


def said(before: Any, after: Any) -> dict[str, Any]:
    """Field -> its new value, of those that differ; of a mapping, `mapping.field`."""
    found = {}
    for one in fields(before):
        old, new = vars(before)[one.name], vars(after)[one.name]
        if isinstance(one.type, type):
            inner = said(old, new)
            found |= {f"{one.name}.{name}": value for name, value in inner.items()}
        elif old != new and one.name != "model_type":
            found[one.name] = list(new) if isinstance(new, tuple) else new
    return found
