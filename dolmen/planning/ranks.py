"""Layers and parameters of each rank of a pipeline, for layouts by the hundred thousand: results
are cached.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import NamedTuple

from dolmen.model.layout import balance
from dolmen.model.spec import BlockSpec, ModelSpec, ParamSpecs, select_prefix
from dolmen.planning.space import LayoutChoice


def stages_of(choice: LayoutChoice, rank: int) -> list[int]:
    """The stages of a pipeline rank: its first, and one for each further chunk."""
    p = choice.pp
    if choice.schedule == "zero-bubble-v":
        return [rank, 2 * p - 1 - rank]
    return [rank + p * chunk for chunk in range(choice.virtual_stages)]


@dataclass(frozen=True)
class ParameterCount:
    """Numbers of parameters that a rank has of one part, those of experts by themselves."""

    dense: int = 0
    experts: int = 0

    @property
    def number(self) -> int:
        """Dense and expert parameters together."""
        return self.dense + self.experts

    @staticmethod
    def count(leaves: ParamSpecs, sizes: Mapping[str, int]) -> "ParameterCount":
        """Count these leaves, where each axis has so many ranks."""
        dense = experts = 0
        for leaf in leaves.values():
            number = math.prod(leaf.held(sizes))
            if leaf.stacked:
                experts += number
            else:
                dense += number
        return ParameterCount(dense, experts)

    def __add__(self, other: "ParameterCount") -> "ParameterCount":
        return ParameterCount(self.dense + other.dense, self.experts + other.experts)


class RankParameters(NamedTuple):
    """Parameters of a pipeline rank, on one rank of tp."""

    blocks: ParameterCount
    ends: ParameterCount
    """Embedding and head."""
    largest: ParameterCount
    """Parameters of the largest of the blocks."""


@dataclass
class ModelRanks:
    """Layers and parameters of the ranks of a model."""

    tree: ModelSpec
    _layers: dict[int, list[range]] = field(default_factory=dict)
    _telling: dict[tuple, list[int]] = field(default_factory=dict)
    _of_blocks: dict[tuple[int, int], list[ParameterCount]] = field(default_factory=dict)
    _parameters: dict[tuple, RankParameters] = field(default_factory=dict)

    def layers_of_stages(self, choice: LayoutChoice) -> list[range]:
        """The layers of each virtual stage."""
        stages = choice.pp * choice.virtual_stages
        if stages not in self._layers:
            self._layers[stages] = balance(self.tree.layers, stages)
        return self._layers[stages]

    def layers(self, choice: LayoutChoice, rank: int) -> list[int]:
        """The layers of a pipeline rank, its first stage's first."""
        stages = self.layers_of_stages(choice)
        return [layer for stage in stages_of(choice, rank) for layer in stages[stage]]

    def telling(self, choice: LayoutChoice) -> list[int]:
        """Return the first and the last of pipeline ranks with equal layers: one of them is
        fullest.
        """
        key = (choice.pp, choice.schedule, choice.virtual_stages)
        if key not in self._telling:
            classes: dict[object, list[int]] = {}
            for rank in range(choice.pp):
                kinds = tuple(sorted(self.kinds[i] for i in self.layers(choice, rank)))
                ends = rank if rank in (0, choice.pp - 1) else None
                classes.setdefault((kinds, ends), []).append(rank)
            self._telling[key] = sorted({r for one in classes.values() for r in (one[0], one[-1])})
        return self._telling[key]

    def elements(self, choice: LayoutChoice, rank: int) -> int:
        """Parameters of a pipeline rank, on one rank of tp."""
        found = self.parameters(choice, rank)
        return (found.blocks + found.ends).number

    def parameters(self, choice: LayoutChoice, rank: int) -> RankParameters:
        """The same, by where they are."""
        key = (*choice[:5], choice.schedule, choice.virtual_stages, rank)
        if key not in self._parameters:
            sizes = {"tp": choice.tp, "ep": choice.ep}
            kinds = self._held_blocks(choice.tp, choice.ep)
            here = [kinds[self.kinds[i]] for i in self.layers(choice, rank)]
            ends, owned = ParameterCount(), stages_of(choice, rank)
            first, last = 0 in owned, choice.pp * choice.virtual_stages - 1 in owned
            if first:
                ends += ParameterCount.count(self._first, sizes)
            if last:
                ends += ParameterCount.count(self._last, sizes)
            if last and not first and self.tree.head.tied:  # the table has two owners
                ends += ParameterCount.count({"embed.weight": self._first["embed.weight"]}, sizes)
            largest = max(here, key=lambda one: one.number, default=ParameterCount())
            self._parameters[key] = RankParameters(sum(here, ParameterCount()), ends, largest)
        return self._parameters[key]

    def _held_blocks(self, tp: int, ep: int) -> list[ParameterCount]:
        if (tp, ep) not in self._of_blocks:
            leaves = [select_prefix(self.tree.leaves, f"layers.{i}") for i in self.examples]
            self._of_blocks[tp, ep] = [
                ParameterCount.count(one, {"tp": tp, "ep": ep}) for one in leaves
            ]
        return self._of_blocks[tp, ep]

    @cached_property
    def blocks(self) -> list[BlockSpec]:
        """The kinds of layers."""
        return list(dict.fromkeys(self.tree.blocks))

    @cached_property
    def kinds(self) -> list[int]:
        """Number of the kind of each layer."""
        number = {block: i for i, block in enumerate(self.blocks)}
        return [number[block] for block in self.tree.blocks]

    @cached_property
    def examples(self) -> list[int]:
        """First layer of each kind."""
        return [self.kinds.index(kind) for kind in range(len(self.blocks))]

    @cached_property
    def _first(self) -> ParamSpecs:
        return self.tree.embedding.leaves(self.tree.hidden_size, self.tree.head.tied)

    @cached_property
    def _last(self) -> ParamSpecs:
        return {
            name: leaf
            for name, leaf in self.tree.leaves.items()
            if not name.startswith("layers.") and name not in self._first
        }
