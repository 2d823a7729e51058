"""Declared families: a config.json is a model, and every stored tensor has a rule. Without torch.

Model(config.json).tree -> what is computed (dolmen/model/spec)
weight_map(model) -> which of our parameters each stored tensor holds
"""

from dolmen.families.family import Family, Field
from dolmen.families.known import families, find
from dolmen.families.model import (
    Model,
    changed,
    compared,
    completed,
    edit,
    explicit,
    made,
    moved,
    new,
    scored,
    stated,
    tuned,
    unscored,
)
from dolmen.families.unknown import unknown_fields
from dolmen.families.weights import WeightMap, weight_map

__all__ = [
    "Family",
    "Field",
    "Model",
    "WeightMap",
    "changed",
    "compared",
    "completed",
    "edit",
    "explicit",
    "families",
    "find",
    "made",
    "moved",
    "new",
    "scored",
    "stated",
    "tuned",
    "unknown_fields",
    "unscored",
    "weight_map",
]
