"""The map from stored tensors to parameters, for import and export."""

import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from dolmen.families.family import BARE, RESERVED, nest_own_fields
from dolmen.families.model import ModelConfig, explicit_fields, replace_fields, with_scalar_head
from dolmen.families.rules import Rename, Shape, StoredTensor, ending, entries
from dolmen.model.spec import ScalarHeadSpec

SCORE = (Rename("score", "score"),)  # in every family that has one


@dataclass(frozen=True)
class WeightMap:
    """Every tensor that a checkpoint of `model` stores, and which parameters it holds."""

    model: ModelConfig
    entries: dict[str, StoredTensor]
    """Stored name -> entry, in the order an export writes them."""
    embedding: str
    """Stored name of the embedding."""
    head: str
    """Stored name of the head; a tied model's files may store it too, and it must then equal the
    embedding.
    """

    @property
    def exported_entries(self) -> dict[str, StoredTensor]:
        """Tensors that an export writes: `entries` under the names of the model's files, and the
        tied head if the family's files store it.
        """
        exported, family = dict(self.entries), self.model.family
        if family.stores_tied_head and self.model.spec.head.tied:
            # the same parameter, stored a second time
            exported[self.head] = replace(exported[self.embedding], hf=self.head)
        if not self.model.config.get(RESERVED, {}).get(BARE.name):
            return exported
        bare = [
            replace(weight, hf=weight.hf.removeprefix(family.prefix))
            for weight in exported.values()
        ]
        return {entry.hf: entry for entry in bare}

    def canonical(self, name: str) -> str:
        """Return the current full name of a tensor that a file stores under `name`: without the
        multimodal model's prefix, with today's suffix, and with the family's prefix if the file
        leaves it out.
        """
        larger = self.model.family.outer
        name = name if larger is None else larger.name(name)
        for before, now in self.model.family.legacy_suffixes.items():
            name = name.removesuffix(before) + now if name.endswith(before) else name
        full = self.model.family.prefix + name
        return (
            full
            if name not in self.entries and (full in self.entries or self.ignores(full))
            else name
        )

    def ignores(self, name: str) -> bool:
        """Return whether a canonical name is of a tensor to skip: a buffer that is recomputed, or a
        module that this model lacks, by the family's patterns.
        """
        return name not in self.entries and any(
            re.fullmatch(pattern, name) for pattern in self.model.family.ignored
        )

    def is_other_part(self, name: str) -> bool:
        """Return whether a canonical name is of another part of a multimodal model, such as its
        vision tower.
        """
        larger = self.model.family.outer
        return larger is not None and name.startswith(larger.other_prefixes)

    def is_dropped_layer(self, name: str) -> bool:
        """Return whether a canonical name is of a stored layer after the model's last (multi-token
        prediction), which the family drops.
        """
        return name.startswith(self._dropped_prefixes)

    @cached_property
    def _dropped_prefixes(self) -> tuple[str, ...]:
        """Prefixes of the stored names of dropped layers, such as "model.layers.61."; empty if the
        family drops none.
        """
        family, layers = self.model.family, self.model.spec.layers
        if family.dropped_layers_field is None:
            return ()
        # any rule of the layers, for the prefix before the number
        stored = next(entry.rule.hf for entry in self.entries.values() if "{}" in entry.rule.hf)
        start, more = (
            stored.split("{}")[0],
            explicit_fields(self.model)[family.dropped_layers_field],
        )
        return tuple(f"{start}{layers + i}." for i in range(more))

    def is_tied_head(self, name: str) -> bool:
        """Return whether a canonical name is of a stored copy of a tied head."""
        return self.model.spec.head.tied and name == self.head and name not in self.entries

    def expected_shape(self, name: str) -> Shape | None:
        """Return the shape that a stored tensor must have; None if no rule maps it."""
        entry = self.entries.get(self.embedding if self.is_tied_head(name) else name)
        return entry.shape if entry else None

    def disagreeing_fields(self, name: str, shape: Shape) -> list[str]:
        """Return the config fields that could explain a stored `shape` other than the expected one:
        those whose change changes a mismatching dim. Empty if the number of dims differs.
        """
        stored = self.embedding if self.is_tied_head(name) else name
        expected = self.entries[stored].shape
        if len(expected) != len(shape):
            return []
        return [
            field
            for field, other in _shapes_by_field(self.model, stored)
            # a field explains a mismatch if changing it changes that very dim
            if any(e != s and e != o for e, s, o in zip(expected, shape, other, strict=True))
        ]


def weight_map(model: ModelConfig) -> WeightMap:
    """Return the weight map of a model by its family's rules. Raises KeyError, naming three
    parameters, if no rule makes some of them.
    """
    # a scalar head is stored as "score" in every family
    rules = [*model.family.rules(model.spec), *SCORE * isinstance(model.spec.head, ScalarHeadSpec)]
    embedding, head = (
        next(rule.hf + ending(rule, "weight") for rule in rules if rule.names == (ours,))
        for ours in ("embed", "head")
    )
    stored = entries(rules, model.spec.shapes, model.spec.layers)
    return WeightMap(model, stored, embedding, head)


def _shapes_by_field(model: ModelConfig, stored: str) -> Iterator[tuple[str, Shape]]:
    """Yield (field, shape that the stored tensor named `stored` would have with another value of
    the field) for every integer field of the model: doubled, halved or 1, whichever first gives a
    possible model.
    """
    full = explicit_fields(model)
    # all fields explicit, so that changing one leaves the others as they are
    plain = ModelConfig(nest_own_fields(model.family, {**full, "model_type": model.model_type}))
    plain = with_scalar_head(plain) if isinstance(model.spec.head, ScalarHeadSpec) else plain
    for name, value in full.items():
        if isinstance(value, int) and not isinstance(value, bool):
            # a field may be bound to others (heads divide the width): the first value that gives a
            # model
            for other in (2 * value, value // 2, 1):
                if (shape := _shape_with(plain, {name: other}, stored)) is not None:
                    yield name, shape
                    break


def _shape_with(model: ModelConfig, fields: dict[str, Any], stored: str) -> Shape | None:
    """Return the shape of the stored tensor named `stored` if the model had these values of
    `fields`; None if such a model is impossible or has no such tensor.
    """
    try:
        entry = weight_map(replace_fields(model, fields)).entries.get(stored)
    except (ValueError, KeyError):
        return None  # this field is tied to another one, or none of the structure
    return None if entry is None else entry.shape
