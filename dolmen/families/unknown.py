"""Fields of a config.json that its family does not know: mistyped, of another family, or of
training. They are kept for an export; whoever reads a model warns of them.
"""

import json
import warnings
from difflib import get_close_matches
from typing import Any

from dolmen.core.messages import cut
from dolmen.families.family import HARMLESS, ONLY, RESERVED, flag
from dolmen.families.model import ModelConfig, assumed_fields

MOST = 8  # fields that are listed by name
# Names of a training setting where a model's field is expected -> the option.
TRAINING = {
    "dropout": "--train.dropout",
    "router_balance": "--train.router.balance",
    "router_aux_loss_coef": "--train.router.aux-loss-coef",
    "router_z_loss_coef": "--train.router.z-loss-coef",
    "router_bias_rate": "--train.router.bias-rate",
}


def unknown_fields(model: ModelConfig) -> list[str]:
    """Return the names of the config.json's fields that dolmen does not know (inside a mapping:
    `rope_parameters.x`). They are kept for export and do not affect the model; whoever reads a
    model should warn.
    """
    family, config = model.family, model.config
    names = {
        *HARMLESS,
        *ONLY,
        *family.only,
        *family.harmless.split(),
        *family.extra_fields,
        *family.aliases,
    }
    names |= {RESERVED, *(field.name for field in family.fields if not field.ours)}
    inner = [
        f"{field.name}.{name}"
        for field in family.fields
        if field.nested
        for name in config.get(field.name) or {}
        if name not in {nested.name for nested in field.nested} | HARMLESS | ONLY.keys()
        and not name.startswith("_")
    ]
    return sorted(n for n in config if n not in names and not n.startswith("_")) + inner


def unknown_fields_warning(model: ModelConfig) -> str | None:
    """Return a warning that lists the config.json's fields unknown to the family, 8 at most by
    name; None if there are none.
    """
    names = unknown_fields(model)
    if not names:
        return None
    hints = [_add_hint(model, name) for name in names[:MOST]]
    if len(names) > MOST:
        hints.append(f"and {len(names) - MOST:,} more")
    return (
        f"the model's config.json has {', '.join(hints)}, unknown to {model.model_type}: kept for "
        "export, without effect on the model"
    )


def assumption_warning(model: ModelConfig) -> str | None:
    """Return a warning that names the values assumed for fields that the config.json leaves open,
    and how to state them; None if there are none.
    """
    assumed = assumed_fields(model)
    if not assumed:
        return None
    text = ", ".join(f"{name} {value}" for name, value in assumed.items())
    knobs = " and ".join(flag(name) for name in assumed)
    return (
        f"the model's config.json does not tell which variant of {model.model_type} it is: "
        f"assuming one with {text}; otherwise set {knobs}, or add it under {RESERVED!r} in the "
        f'config.json, {{"{RESERVED}": {json.dumps(assumed)}}}'
    )


def lost_on_export(model: ModelConfig) -> dict[str, Any]:
    """Return name -> value of the dolmen fields that an export drops and without which its
    config.json would be read as another model; {} if there are none.
    """
    assumed, reserved = (
        assumed_fields(ModelConfig(model.export_config())),
        model.config.get(RESERVED, {}),
    )
    return {
        name: reserved[name]
        for name in assumed
        if name in reserved and reserved[name] != assumed[name]
    }


def export_warning(model: ModelConfig) -> str | None:
    """Return a warning that names the fields an export loses, without which it is read as another
    model; None if there are none.
    """
    lost = lost_on_export(model)
    if not lost:
        return None
    text = " and ".join(f"{name} {value}" for name, value in lost.items())
    knobs = " and ".join(f"{flag(name)} {value}" for name, value in lost.items())
    return (
        f"the model has {text}, which a config.json of {model.model_type} cannot express: readers "
        f"of the export, dolmen included, assume another variant unless they set {knobs}"
    )


def model_warnings(model: ModelConfig) -> list[str]:
    """Return the warnings about a model that was read: unknown fields and assumed values."""
    return [line for line in (unknown_fields_warning(model), assumption_warning(model)) if line]


def _add_hint(model: ModelConfig, name: str) -> str:
    """Return the field's name, shortened, with "(did you mean ...?)" if a similar field or a
    training option can be guessed.
    """
    plain, family = name.replace("-", "_"), model.family
    outer, _, inner = plain.partition(".")
    fields = [field for field in family.fields if field.name == outer] if inner else []
    known = [nested.name for field in fields for nested in field.nested] or list(
        family.names.values()
    )
    near = get_close_matches(inner or plain, known, n=1)
    meant = TRAINING.get(plain) or family.names.get(plain) or "".join(near)
    return f"{cut(name)} (did you mean {meant}?)" if meant else cut(name)


def warn(model: ModelConfig) -> None:
    """Issue the lines of `model_warnings` as Python warnings, which are shown once each."""
    for line in model_warnings(model):
        warnings.warn(line, stacklevel=3)
