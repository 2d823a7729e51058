"""`--model.*`: the fields that a family declares, as options. An option has the name of the field
in a config.json; names that other families or dolmen before have for it are taken too.

Nothing here imports torch or transformers.
"""

from typing import Any, Literal

from dolmen import families
from dolmen.cli.parse import Group, Option
from dolmen.families import Field, Model
from dolmen.families.start import option_type

PREFIX = "model."


def groups(model: Model) -> list[Group]:
    """The options of the family of a model, with the values that the model has."""
    family, values = model.family, families.explicit_fields(model)
    known = Literal[tuple(families.families())]
    text = "Family of the model: which config.json it is. Options are the fields of its family."
    kind = Option(f"{PREFIX}model-type", known, text, model.model_type)
    own = [_option(PREFIX, one, values) for one in family.fields if one.help and not one.nested]
    about = "Fields of the model's config.json, as its family has them."
    return [
        Group("model", about, (kind, *own)),
        *(_group(one, values.get(one.name) or {}) for one in family.fields if one.nested),
    ]


def _group(one: Field, values: dict[str, Any]) -> Group:
    prefix = f"{PREFIX}{one.name.replace('_', '-')}."
    inner = tuple(_option(prefix, inside, values) for inside in one.nested if inside.help)
    return Group(prefix.rstrip("."), f"Fields of {one.name}.", inner)


def _option(prefix: str, one: Field, values: dict[str, Any]) -> Option:
    others = [name for name in (*one.aliases, *one.common) if "." not in name]
    also = (
        f" Also {', '.join(f'--{PREFIX}{n}'.replace('_', '-') for n in others)}." if others else ""
    )
    name = f"{prefix}{one.name.replace('_', '-')}"
    return Option(name, option_type(one.kind), one.help + also, values.get(one.name))
