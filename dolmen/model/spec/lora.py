"""What is trained beside weights that are frozen: low-rank adapters (LoRA; Hu et al., 2106.09685).

    y = W x + (alpha / rank) B A x        W [out, in] frozen, A [rank, in], B [out, rank]

B begins at zero, so that the model begins as it was; A as PEFT begins it. Of stacked experts each
has its own A and B. How they lie on axes follows from W: what cuts its outputs cuts B, what cuts
its inputs cuts A, and the other of the two sees a part of the heads or columns, so its gradient is
a partial sum over tp (dolmen/parallel/tensor.py).

DoRA (Liu et al., 2402.09353) trains the length of each output's row by itself, beside the direction
that B A turns it to; the length of what is turned is a constant in the gradient (section 4.3):

    y = m (W x + scale B A x) / |W + scale B A|        m [out], begins as the lengths of W's rows

What is frozen may be held in eight bits (ops/int8.py): matrices of layers and of experts, those
without an adapter too. A weight [out, in] has a scale [out] then, which lies as its outputs do.
"""

import math
from dataclasses import dataclass, replace
from typing import Literal

from dolmen.model.spec.param import Leaf, Leaves

ADAPTED = ("matrix", "expert")
"""Roles of the weights that can have an adapter, and be held in eight bits."""


@dataclass(frozen=True)
class Adapter:
    """An adapter on each weight of `targets`, by full names. Nothing else is trained, except what
    every run has to begin anew, as no stored model has it (`Leaf.with_adapters`: a scalar head).
    """

    rank: int
    alpha: float
    targets: frozenset[str]
    frozen: Literal["whole", "int8"] = "whole"
    """How what is frozen is held."""
    scaling: Literal["rank", "root"] = "rank"
    """What alpha is divided by: the rank, or its square root (rsLoRA, 2312.03732)."""
    kind: Literal["lora", "dora"] = "lora"

    @property
    def scale(self) -> float:
        """What B A x is multiplied by."""
        return self.alpha / (self.rank if self.scaling == "rank" else math.sqrt(self.rank))

    def beside(self, leaves: Leaves) -> Leaves:
        """The parameters of a model, frozen, and those of the adapters, each after its weight.
        Raises KeyError for a target that is none of them.
        """
        if left := sorted(self.targets - leaves.keys()):
            raise KeyError(f"{len(left)} targets of adapters are no parameters, e.g. {left[:3]}")
        found: Leaves = {}
        for name, leaf in leaves.items():
            found[name] = replace(leaf, trained=leaf.with_adapters)
            if self.frozen == "int8" and leaf.role in ADAPTED:
                found[name] = replace(found[name], int8=True)
                found[scale_of(name)] = self.scales(leaf)
            if name in self.targets:
                down, up = self.pair(name)
                found |= {down: self.down(leaf), up: self.up(leaf)}
                if self.kind == "dora":
                    found[magnitude_of(name)] = self.magnitude(leaf)
        return found

    @staticmethod
    def pair(weight: str) -> tuple[str, str]:
        """The names of A and B of a weight."""
        module = weight.removesuffix("weight")
        return f"{module}lora_A", f"{module}lora_B"

    def magnitude(self, weight: Leaf) -> Leaf:
        """Of DoRA, the lengths of the rows of a weight: a gain, which as that of a norm does not
        decay.
        """
        inputs = len(weight.shape) - 1
        return Leaf(
            weight.shape[:-1],
            "norm",
            tuple(cut for cut in weight.cuts if cut.dim != inputs),
            gradient="branch" if _cuts(weight, inputs) else weight.gradient,
            initial="beside",
        )

    def scales(self, weight: Leaf) -> Leaf:
        """The scale of a weight [out, in], or of stacked ones [experts, out, in]."""
        return Leaf(
            weight.shape[:-1],
            "scale",
            tuple(cut for cut in weight.cuts if cut.dim != len(weight.shape) - 1),
            initial="beside",
            trained=False,
            precise=True,
        )

    def down(self, weight: Leaf) -> Leaf:
        """A of a weight [out, in], or of stacked ones [experts, out, in]."""
        *experts, out, inp = weight.shape
        return Leaf(
            (*experts, self.rank, inp),
            "adapter",
            tuple(cut for cut in weight.cuts if cut.dim != len(experts)),
            gradient="branch" if _cuts(weight, len(experts)) else weight.gradient,
            initial="uniform",
            products=weight.products // out * self.rank,
        )

    def up(self, weight: Leaf) -> Leaf:
        """B of the same."""
        *experts, out, inp = weight.shape
        return Leaf(
            (*experts, out, self.rank),
            "adapter",
            tuple(cut for cut in weight.cuts if cut.dim != len(experts) + 1),
            gradient="branch" if _cuts(weight, len(experts) + 1) else weight.gradient,
            initial="zeros",
            products=weight.products // inp * self.rank,
            scale=self.scale,
        )


def magnitude_of(weight: str) -> str:
    """The name of DoRA's lengths of the rows of a weight."""
    return f"{weight.removesuffix('weight')}lora_magnitude"


def scale_of(weight: str) -> str:
    """The name of the scale of a weight in eight bits."""
    return f"{weight}_scale"


def _cuts(weight: Leaf, dim: int) -> bool:
    return any(cut.dim == dim for cut in weight.cuts)
