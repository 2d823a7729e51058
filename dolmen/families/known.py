"""The registry of families: every `Family` that a module of this package defines."""

import pkgutil
from collections.abc import Mapping
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import Any

from dolmen.core.messages import brief, did_you_mean
from dolmen.families.family import Family

HERE = Path(__file__).parent


@cache
def families() -> dict[str, Family]:
    """Return every family by its name, sorted: all `Family` values of this package's modules."""
    modules = [
        # a new family is a new module here, and no other line
        import_module(f"dolmen.families.{file.name}")
        for file in pkgutil.iter_modules([str(HERE)])
    ]
    known = {v.name: v for module in modules for v in vars(module).values() if type(v) is Family}
    return {name: known[name] for name in sorted(known, key=lambda name: name.replace("-", "_"))}


def find_family(name: Any) -> Family:
    """Return the family of that name. Raises ValueError that lists similar names, or all."""
    if isinstance(name, str) and name in families():
        return families()[name]
    hint = did_you_mean(str(name), families(), f"dolmen knows {', '.join(families())}")
    raise ValueError(f"model_type is {brief(name)}: {hint} (dolmen families lists them)")


def text_config(content: Mapping[str, Any]) -> dict[str, Any] | None:
    """Return the text model's config.json from that of a multimodal model; None if no family is
    part of it. Raises ValueError if the part is missing.
    """
    for family in families().values():
        if family.outer is not None and family.outer.model_type == content.get("model_type"):
            return family.outer.inner(content, family.model_type)
    return None


def family_of(config: Mapping[str, Any]) -> Family:
    """Return the family that reads a config.json: of families that share its model_type the one
    whose `matches` accepts it, else the one without `matches`. Raises ValueError if model_type is
    missing or unknown.
    """
    if config.get("model_type") is None:
        raise ValueError(
            "model_type is missing: set it to the model's family, one of " + ", ".join(families())
        )
    model_type = config["model_type"]
    candidates = [family for family in families().values() if family.model_type == model_type]
    for family in candidates:
        if family.matches is not None and family.matches(config):
            return family
    # at most one family of a model_type has no `matches`
    rest = [family for family in candidates if family.matches is None]
    return rest[0] if rest else find_family(model_type)
