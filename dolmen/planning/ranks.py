"""Layers and parameters of each pipeline rank, cached by the parts of a layout that decide them, as
a search evaluates a hundred thousand layouts.
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
    """Return the virtual stages that a pipeline rank holds, in order of its chunks."""
    p = choice.pp
    if choice.schedule == "zero-bubble-v":
        # V placement: down the ranks and back up, so rank 0 has both ends
        return [rank, 2 * p - 1 - rank]
    return [rank + p * chunk for chunk in range(choice.virtual_stages)]


@dataclass(frozen=True)
class ParameterCount:
    """Numbers of parameters, dense and of experts."""

    dense: int = 0
    experts: int = 0

    @property
    def number(self) -> int:
        """Number of dense and expert parameters together."""
        return self.dense + self.experts

    @staticmethod
    def count(params: ParamSpecs, sizes: Mapping[str, int]) -> "ParameterCount":
        """Return how many of these parameters a rank holds, dense and of experts. `sizes`: ranks of
        each axis (tp, ep).
        """
        dense = experts = 0
        for param in params.values():
            number = math.prod(param.local_shape(sizes))
            # split over ep too, and sharded over fewer ranks by ZeRO
            if param.stacked:
                experts += number
            else:
                dense += number
        return ParameterCount(dense, experts)

    def __add__(self, other: "ParameterCount") -> "ParameterCount":
        """Return the sum, dense and expert parameters separately."""
        return ParameterCount(self.dense + other.dense, self.experts + other.experts)


class RankParameters(NamedTuple):
    """Parameters of a pipeline rank, on one rank of tp and ep, before sharding by ZeRO."""

    blocks: ParameterCount
    ends: ParameterCount
    """Embedding and head."""
    largest: ParameterCount
    """Parameters of the largest of the blocks."""


@dataclass
class ModelRanks:
    """Layers and parameters of the pipeline ranks of a model; results are cached."""

    spec: ModelSpec
    _layers: dict[int, list[range]] = field(default_factory=dict)
    _extreme_ranks: dict[tuple, list[int]] = field(default_factory=dict)
    _of_blocks: dict[tuple[int, int], list[ParameterCount]] = field(default_factory=dict)
    _parameters: dict[tuple, RankParameters] = field(default_factory=dict)

    def layers_of_stages(self, choice: LayoutChoice) -> list[range]:
        """Return the layers of each virtual stage, balanced over the stages; cached."""
        stages = choice.pp * choice.virtual_stages
        if stages not in self._layers:
            self._layers[stages] = balance(self.spec.layers, stages)
        return self._layers[stages]

    def layers(self, choice: LayoutChoice, rank: int) -> list[int]:
        """Return the layer numbers of a pipeline rank, those of its first virtual stage first."""
        stages = self.layers_of_stages(choice)
        return [layer for stage in stages_of(choice, rank) for layer in stages[stage]]

    def extreme_ranks(self, choice: LayoutChoice) -> list[int]:
        """Return the pipeline ranks that can use the most memory, sorted: the first and the last
        rank of the pipeline (embedding, head), and the first and the last of those between them
        that have equal layers; cached.
        """
        key = (choice.pp, choice.schedule, choice.virtual_stages)
        if key not in self._extreme_ranks:
            classes: dict[object, list[int]] = {}
            for rank in range(choice.pp):
                # in-flight microbatches rise or fall monotonically with the rank
                kinds = tuple(sorted(self.kinds[i] for i in self.layers(choice, rank)))
                # ends have embedding or head, so they are classes of their own
                ends = rank if rank in (0, choice.pp - 1) else None
                classes.setdefault((kinds, ends), []).append(rank)
            self._extreme_ranks[key] = sorted(
                {r for class_ranks in classes.values() for r in (class_ranks[0], class_ranks[-1])}
            )
        return self._extreme_ranks[key]

    def elements(self, choice: LayoutChoice, rank: int) -> int:
        """Return the number of parameters of a pipeline rank, on one rank of tp and ep, before
        sharding by ZeRO.
        """
        elements = self.parameters(choice, rank)
        return (elements.blocks + elements.ends).number

    def parameters(self, choice: LayoutChoice, rank: int) -> RankParameters:
        """Return the parameter counts of a pipeline rank: of its blocks, of embedding and head, and
        of its largest block; cached.
        """
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
                ends += ParameterCount.count(self._head_params, sizes)
            if last and not first and self.spec.head.tied:  # the table has two owners
                ends += ParameterCount.count({"embed.weight": self._first["embed.weight"]}, sizes)
            largest = max(here, key=lambda count: count.number, default=ParameterCount())
            self._parameters[key] = RankParameters(sum(here, ParameterCount()), ends, largest)
        return self._parameters[key]

    def _held_blocks(self, tp: int, ep: int) -> list[ParameterCount]:
        """Return the parameter counts of each kind of layer on one rank of tp and ep; cached."""
        if (tp, ep) not in self._of_blocks:
            params = [select_prefix(self.spec.params, f"layers.{i}") for i in self.examples]
            self._of_blocks[tp, ep] = [
                ParameterCount.count(params_, {"tp": tp, "ep": ep}) for params_ in params
            ]
        return self._of_blocks[tp, ep]

    @cached_property
    def blocks(self) -> list[BlockSpec]:
        """Distinct kinds of layers, in order of their first layer."""
        # a model has one or two kinds, so a few counts serve all layers
        return list(dict.fromkeys(self.spec.blocks))

    @cached_property
    def kinds(self) -> list[int]:
        """For each layer the index of its kind in `blocks`."""
        number = {block: i for i, block in enumerate(self.blocks)}
        return [number[block] for block in self.spec.blocks]

    @cached_property
    def examples(self) -> list[int]:
        """For each kind of layer the number of the first layer that has it."""
        return [self.kinds.index(kind) for kind in range(len(self.blocks))]

    @cached_property
    def _first(self) -> ParamSpecs:
        """Parameters of the embedding, which the first pipeline stage holds."""
        return self.spec.embedding.params(self.spec.hidden_size, self.spec.head.tied)

    @cached_property
    def _head_params(self) -> ParamSpecs:
        """Parameters outside of layers and embedding (final norm, head), held by the last stage."""
        return {
            name: param
            for name, param in self.spec.params.items()
            if not name.startswith("layers.") and name not in self._first
        }
