"""What is trained beside weights that are frozen: low-rank adapters (LoRA; Hu et al., 2106.09685).

    y = W x + (alpha / rank) B A x        W [out, in] frozen, A [rank, in], B [out, rank]

B begins at zero, so that the model begins as it was; A as PEFT begins it. Of stacked experts each
has its own A and B. How they lie on axes follows from W: what cuts its outputs cuts B, what cuts
its inputs cuts A, and the other of the two sees a part of the heads or columns, so its gradient is
a partial sum over tp (dolmen/parallel/tensor.py).
"""

from dataclasses import dataclass, replace

from dolmen.model.tree.leaf import Leaf, Leaves


@dataclass(frozen=True)
class Adapter:
    """An adapter on each weight of `targets`, by full names. Nothing else is trained, except what
    every run has to begin anew, as no stored model has it (`Leaf.with_adapters`: a scalar head).
    """

    rank: int
    alpha: float
    targets: frozenset[str]

    @property
    def scale(self) -> float:
        """What B A x is multiplied by."""
        return self.alpha / self.rank

    def beside(self, leaves: Leaves) -> Leaves:
        """The parameters of a model, frozen, and those of the adapters, each after its weight.
        Raises KeyError for a target that is none of them.
        """
        if left := sorted(self.targets - leaves.keys()):
            raise KeyError(f"{len(left)} targets of adapters are no parameters, e.g. {left[:3]}")
        found: Leaves = {}
        for name, leaf in leaves.items():
            found[name] = replace(leaf, trained=leaf.with_adapters)
            if name in self.targets:
                down, up = self.pair(name)
                found |= {down: self.down(leaf), up: self.up(leaf)}
        return found

    @staticmethod
    def pair(weight: str) -> tuple[str, str]:
        """The names of A and B of a weight."""
        module = weight.removesuffix("weight")
        return f"{module}lora_A", f"{module}lora_B"

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


def _cuts(weight: Leaf, dim: int) -> bool:
    return any(cut.dim == dim for cut in weight.cuts)
