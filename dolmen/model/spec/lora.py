"""LoRA: low-rank adapters, trained beside frozen weights (Hu et al., 2106.09685).

    y = W x + (alpha / rank) B A x        W [out, in] frozen, A [rank, in], B [out, rank]

B starts at zero, so that the model starts unchanged; A starts as in PEFT. Stacked experts have an A
and B each. Sharding follows from W: what shards its outputs shards B, what shards its inputs shards
A, and the other of the two sees a part of the heads or columns, so its gradient is a partial sum
over tp (dolmen/parallel/tensor.py).

DoRA (Liu et al., 2402.09353) trains the length of each output's row separately from its direction;
the norm in the denominator is a constant in the gradient (section 4.3):

    y = m (W x + scale B A x) / |W + scale B A|        m [out], starts as the lengths of W's rows

Frozen weights may be int8 (ops/int8.py): matrices of layers and of experts, those without an
adapter too. A weight [out, in] then has a scale [out], sharded as its outputs are.
"""

import math
from dataclasses import dataclass, replace
from typing import Literal

from dolmen.model.spec.param import ParamSpec, ParamSpecs

ADAPTED = ("matrix", "expert")
"""Roles of the weights that can have an adapter and be stored as int8."""


@dataclass(frozen=True)
class LoraSpec:
    """LoRA adapters on the weights named in `targets`. Nothing else is trained, except parameters
    with `train_with_adapters` (a scalar head), which no stored model has.
    """

    rank: int
    alpha: float
    targets: frozenset[str]
    frozen: Literal["whole", "int8"] = "whole"
    """Storage of frozen weights: as they are, or as int8 with a scale per output row."""
    scaling: Literal["rank", "root"] = "rank"
    """Divisor of alpha: the rank, or its square root (rsLoRA, 2312.03732)."""
    kind: Literal["lora", "dora"] = "lora"

    @property
    def scale(self) -> float:
        """Factor of B A x: alpha / rank, or alpha / sqrt(rank) with `scaling` "root"."""
        return self.alpha / (self.rank if self.scaling == "rank" else math.sqrt(self.rank))

    def add_params(self, params: ParamSpecs) -> ParamSpecs:
        """Return the specs of a model's parameters, frozen (but for a new scalar head), with those
        of A and B, DoRA magnitude and int8 scale after each weight that has them. Raises KeyError
        for a target that is no parameter.
        """
        if left := sorted(self.targets - params.keys()):
            raise KeyError(f"{len(left)} targets of adapters are not parameters, e.g. {left[:3]}")
        adapted: ParamSpecs = {}
        for name, param in params.items():
            # everything is frozen but a new scalar head
            adapted[name] = replace(param, trained=param.train_with_adapters)
            if self.frozen == "int8" and param.role in ADAPTED:
                adapted[name] = replace(adapted[name], int8=True)
                adapted[scale_name(name)] = self.scales(param)
            if name in self.targets:
                down, up = self.pair(name)
                adapted |= {down: self.down(param), up: self.up(param)}
                if self.kind == "dora":
                    adapted[magnitude_name(name)] = self.magnitude(param)
        return adapted

    @staticmethod
    def pair(weight: str) -> tuple[str, str]:
        """Return the parameter names of A and B of a weight."""
        module = weight.removesuffix("weight")
        return f"{module}lora_A", f"{module}lora_B"

    def magnitude(self, weight: ParamSpec) -> ParamSpec:
        """Return the spec of DoRA's magnitude [out], the row norms of a weight. Like a norm's gain
        it is not decayed.
        """
        # row-parallel W: m multiplies a partial sum, so its gradient is partial
        inputs = len(weight.shape) - 1
        return ParamSpec(
            weight.shape[:-1],
            "norm",
            tuple(cut for cut in weight.shards if cut.dim != inputs),
            gradient="branch" if _shards_dim(weight, inputs) else weight.gradient,
            initial="beside",
        )

    def scales(self, weight: ParamSpec) -> ParamSpec:
        """Return the spec of the int8 scales of a weight: [out], or [experts, out] for stacked
        ones; not trained, fp32.
        """
        return ParamSpec(
            weight.shape[:-1],
            "scale",
            tuple(cut for cut in weight.shards if cut.dim != len(weight.shape) - 1),
            initial="beside",
            trained=False,
            precise=True,
        )

    def down(self, weight: ParamSpec) -> ParamSpec:
        """Return the spec of A [rank, in] of a weight [out, in], or [experts, rank, in] of stacked
        ones.
        """
        *experts, out, inp = weight.shape
        return ParamSpec(
            (*experts, self.rank, inp),
            "adapter",
            # A: sharded with W's inputs
            tuple(cut for cut in weight.shards if cut.dim != len(experts)),
            gradient="branch" if _shards_dim(weight, len(experts)) else weight.gradient,
            initial="uniform",
            # rank * in multiply-adds; k / E of them for experts, as `products` of W has it
            products=weight.products // out * self.rank,
        )

    def up(self, weight: ParamSpec) -> ParamSpec:
        """Return the spec of B [out, rank] of a weight [out, in], or [experts, out, rank] of
        stacked ones.
        """
        *experts, out, inp = weight.shape
        return ParamSpec(
            (*experts, out, self.rank),
            "adapter",
            # B: sharded with W's outputs
            tuple(cut for cut in weight.shards if cut.dim != len(experts) + 1),
            gradient="branch" if _shards_dim(weight, len(experts) + 1) else weight.gradient,
            initial="zeros",
            products=weight.products // inp * self.rank,
            scale=self.scale,
        )


def magnitude_name(weight: str) -> str:
    """Return the parameter name of the DoRA magnitude of a weight."""
    return f"{weight.removesuffix('weight')}lora_magnitude"


def scale_name(weight: str) -> str:
    """Return the parameter name of the scales of an int8 weight."""
    return f"{weight}_scale"


def _shards_dim(weight: ParamSpec, dim: int) -> bool:
    """Return whether some mesh axis splits `dim` of the weight."""
    return any(cut.dim == dim for cut in weight.shards)
