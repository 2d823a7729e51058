"""How a config.json states the fields of its family: under which of a field's names, with what left
out, and in a run's YAML with numbers as text.
"""

from collections.abc import Mapping
from typing import Any

from dolmen.families.family import RESERVED, Family, Field
from dolmen.files.schema import Either, Object, Real, Schema


def own_names(family: Family, config: Mapping[str, Any]) -> dict[str, Any]:
    """`config` under the family's own names of fields."""
    return {family.aliases.get(name, name): value for name, value in config.items()}


def with_defaults(family: Family, config: Mapping[str, Any]) -> dict[str, Any]:
    """`config` with every absent field filled in, and those of our own beside the others."""
    ours = {RESERVED, *(field.name for field in family.fields if field.ours)}
    others = {n: v for n, v in own_names(family, config).items() if n not in ours}
    return {**{f.name: f.default for f in family.fields}, **others, **config.get(RESERVED, {})}


def nested(family: Family, fields: Mapping[str, Any]) -> dict[str, Any]:
    """`fields` as a config.json has them: those of our own under RESERVED."""
    ours = {field.name for field in family.fields if field.ours} & fields.keys()
    apart = {name: fields[name] for name in fields if name in ours}
    rest = {name: value for name, value in fields.items() if name not in ours}
    return {**rest, RESERVED: {**rest.get(RESERVED, {}), **apart}} if apart else rest


def _spellings(field: Field, config: Mapping[str, Any]) -> list[str]:
    """The names by which `config` states a field."""
    return [name for name in (field.name, *field.aliases) if name in config]


def refuse_two(field: Field, config: Mapping[str, Any]) -> None:
    """Raises ValueError where `config` states the field by two names, and by each another value."""
    stated = [(name, config[name]) for name in _spellings(field, config)]
    for name, value in stated[1:]:
        first, before = stated[0]
        if value != before:
            raise ValueError(
                f"{first} is {before!r} and {name} is {value!r}: they are two names of one field, "
                "state one of them"
            )


def spelled(field: Field, config: Mapping[str, Any], value: Any) -> dict[str, Any]:
    """`field` as `config` spells it."""
    if field.spell is not None:
        return field.spell(config, value)
    if field.ours:
        return {RESERVED: {**config.get(RESERVED, {}), field.name: value}}
    return dict.fromkeys(_spellings(field, config) or [field.name], value)


def with_numbers(value: Any, kind: Schema) -> Any:
    """`value`, with 1e-05 a number where `kind` has one: JSON reads it as one, YAML as text."""
    match kind:
        case Real() if isinstance(value, str):
            try:
                return float(value)
            except ValueError:
                return value
        case Either(several):
            for one in several:
                value = with_numbers(value, one)
        case Object(_, fields) if isinstance(value, dict):
            inside = {n: with_numbers(value[n], one) for n, one in fields.items() if n in value}
            return {**value, **inside}
    return value
