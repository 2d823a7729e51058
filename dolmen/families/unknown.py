"""What a config.json has that its family does not know: mistyped, of another family, or training's.
It is kept for an export, and told by whoever reads a model.
"""

import warnings
from difflib import get_close_matches

from dolmen.families.family import HARMLESS, ONLY
from dolmen.families.model import RESERVED, Model

# What a model had before it was a config.json, and a run says of training now -> the option.
TRAINING = {
    "dropout": "--train.dropout",
    "router_balance": "--train.router.balance",
    "router_aux_loss_coef": "--train.router.aux-loss-coef",
    "router_z_loss_coef": "--train.router.z-loss-coef",
    "router_bias_rate": "--train.router.bias-rate",
}


def unknown_fields(model: Model) -> list[str]:
    """Fields of its config.json that dolmen has never heard of: kept for the way back, without
    effect on the model. For a warning at the place that reads.
    """
    family, config = model.family, model.config
    names = {*HARMLESS, *ONLY, *family.only, *family.harmless, *family.beside, *family.aliases}
    names |= {RESERVED, *(field.name for field in family.fields)}
    inner = [
        f"{field.name}.{name}"
        for field in family.fields
        if field.inside
        for name in config.get(field.name) or {}
        if name not in {one.name for one in field.inside}
    ]
    return sorted(n for n in config if n not in names and not n.startswith("_")) + inner


def without_effect(model: Model) -> str | None:
    """What to warn of where the model's config.json has fields that its family does not know."""
    told = []
    for name in unknown_fields(model):
        plain = name.replace("-", "_")
        near = get_close_matches(plain, [field.name for field in model.family.fields], n=1)
        meant = TRAINING.get(plain) or model.family.names.get(plain) or "".join(near)
        told.append(f"{name} (did you mean {meant}?)" if meant else name)
    if not told:
        return None
    return (
        f"the model's config.json has {', '.join(told)}, of which {model.model_type} knows "
        "nothing: kept for an export, without effect on the model"
    )


def warn(model: Model) -> None:
    """Warn of `without_effect`, if there is anything; of the same, Python tells once."""
    if line := without_effect(model):
        warnings.warn(line, stacklevel=3)
