"""A run's model before and after options are applied (of the command line, or keywords in Python).
An option is a field of the family and its value; a field inside another one is named
`rope_parameters.factor`.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, get_args, get_origin

from dolmen.core.config import Words, from_words, is_optional, plain_type
from dolmen.families.family import Family, Field, find_family
from dolmen.families.model import (
    ModelConfig,
    convert_family,
    explicit_fields,
    model_from_fields,
    replace_fields,
)

DEFAULT_FAMILY = "llama"


@dataclass(frozen=True)
class StartModel:
    """The model of a run before options are applied."""

    model: ModelConfig
    bare: bool = False
    """No model was specified, at most a family's name."""
    wanted: bool = True
    """A recipe, a file, --init or an option specifies a model."""


def start_model(model: ModelConfig | None, model_type: str | None) -> StartModel:
    """Return the model that options are applied to: `model`, converted to the family `model_type`
    if that is another one; or, without a model, the defaults of that family (default: llama).
    Raises ValueError for an unknown family.
    """
    if model is None:
        bare = ModelConfig({"model_type": model_type or DEFAULT_FAMILY})
        return StartModel(bare, bare=True, wanted=model_type is not None)
    return StartModel(
        model if model_type in (None, model.model_type) else _convert_family(model, model_type)
    )


def apply_options(start: StartModel, options: Mapping[str, Any]) -> ModelConfig | None:
    """Return the model with the options applied (`options`: field path -> value); options equal to
    what it has change nothing. None if neither an option nor anything else specifies a model.
    Raises ValueError for an impossible model.
    """
    full = explicit_fields(start.model)
    # unchanged values would only rewrite the config.json's spelling
    news = {path: value for path, value in options.items() if value != _value(full, path)}
    if not news and not start.wanted:
        return None
    if start.bare:
        return model_from_fields(start.model.model_type, news)
    return replace_fields(start.model, news) if news else start.model


def option_fields(family: Family) -> dict[str, Field]:
    """Return the fields of a family that are command-line options, by path:
    `rope_parameters.factor` for one inside another.
    """
    options = {}
    for field in family.fields:
        if field.nested:
            options |= {f"{field.name}.{inner.name}": inner for inner in field.nested if inner.help}
        elif field.help:
            options[field.name] = field
    return options


def option_type(hint: Any) -> Any:
    """Return the type that a field's command-line option is parsed as, from the field's type hint:
    lists become tuples, and null is allowed where the hint allows it, but not for flags.
    """
    kind = plain_type(hint)
    if get_origin(kind) is list:
        kind = tuple[plain_type(get_args(kind)[0]), ...]
    # null is false for a flag
    return kind | None if is_optional(hint) and kind is not bool else kind


def field_from_words(field: Field, words: Words, option: str) -> Any:
    """Return a field's value, as a config.json states it, parsed from the words given to its
    command-line option. Raises ValueError, naming `option`, for words that do not parse.
    """
    value = from_words(option_type(field.kind), words, option)
    return list(value) if isinstance(value, tuple) else value


def _value(full: Mapping[str, Any], path: str) -> Any:
    """Return the value at a path, `name` or `name.inner`, of explicit fields; None where `name` has
    no `inner`. Raises KeyError for a missing `name`.
    """
    name, _, inner = path.partition(".")
    return (full[name] or {}).get(inner) if inner else full[name]


def _convert_family(model: ModelConfig, model_type: str) -> ModelConfig:
    """Return the model converted to another family: with the same spec, or, if the family cannot
    express it, with the fields that both have by name and the new family's defaults for the rest.
    """
    other = find_family(model_type)
    try:
        return convert_family(model, model_type)
    except ValueError:
        full = explicit_fields(model)
        # by any name a field of the old family has in the new one
        shared = {
            other.names[name]: full[field.name]
            for field in model.family.fields
            if field.help or field.nested
            for name in (field.name, *field.aliases, *field.common)
            if name in other.names and full[field.name] is not None
        }
        try:
            return model_from_fields(model_type, shared)
        except ValueError:
            # BERT's families have only tied heads
            shared.pop("tie_word_embeddings", None)
            return model_from_fields(model_type, shared)
