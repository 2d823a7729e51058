"""The families that there are: every file of this folder that declares a FAMILY."""

import pkgutil
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import Any

from dolmen.core.words import shown
from dolmen.families.family import Family

HERE = Path(__file__).parent


@cache
def families() -> dict[str, Family]:
    """model_type -> family."""
    files = [
        import_module(f"dolmen.families.{file.name}") for file in pkgutil.iter_modules([str(HERE)])
    ]
    found = [vars(file)["FAMILY"] for file in files if "FAMILY" in vars(file)]
    return {family.model_type: family for family in found}


def find(model_type: Any) -> Family:
    """The family of that name. Raises ValueError listing the known ones."""
    if not isinstance(model_type, str) or model_type not in families():
        raise ValueError(f"model_type is {shown(model_type)}: dolmen knows {', '.join(families())}")
    return families()[model_type]
