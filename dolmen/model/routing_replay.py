"""Which experts tokens go to, remembered and replayed: so that the ratio of what a policy says now
to what it said is of one network, though the router has moved meanwhile (2507.18071, section 5.3:
Routing Replay; from the pass that old log-probabilities are of, Qwen's R2). The weights of these
experts are the router's of now, and so is its gradient.

All sparse layers' choices of a token stand in one row, [sequences, length, choices]: those of the
first layer, k of them, then those of the next.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import torch
from jaxtyping import Int64
from torch import Tensor

from dolmen.core import collectives
from dolmen.core.mesh import Mesh
from dolmen.model.spec import Experts, Tree
from dolmen.model.split import Split


@dataclass(frozen=True, eq=False)
class Routes:
    """Of a microbatch, by the number of a layer."""

    chosen: Mapping[int, Int64[Tensor, "n k"]] = field(default_factory=dict)
    """Of this rank of cp's tokens; of a layer that is not there its router chooses."""
    told: Callable[[int, Tensor], None] | None = None
    """(layer, experts [n, k]) -> nothing; called where a layer has routed."""

    def listener(self, layer: int) -> Callable[[Tensor], None] | None:
        told = self.told
        return None if told is None else lambda experts: told(layer, experts)


def places(tree: Tree) -> dict[int, slice]:
    """Of each sparse layer, where its choices stand among all; empty for a dense model."""
    found, first = {}, 0
    for number, block in enumerate(tree.blocks):
        if isinstance(block.mlp, Experts):
            found[number] = slice(first, first + block.mlp.per_token)
            first += block.mlp.per_token
    return found


def replayed(
    tree: Tree, split: Split, experts: Int64[Tensor, "sequences length choices"]
) -> Routes:
    """What a microbatch is routed by, whose choices are known for all tokens."""
    here = split.cp.split(experts, 1)
    return Routes({i: here[..., own].flatten(0, 1).contiguous() for i, own in places(tree).items()})


def gathered(
    kept: Mapping[tuple[int, int], Int64[Tensor, "n k"]],
    tree: Tree,
    split: Split,
    mesh: Mesh,
    shape: tuple[int, int],
    micros: int,
) -> Int64[Tensor, "sequences length choices"]:
    """The choices of all tokens of a batch of that `shape` [sequences, length], on every rank of
    tp, cp and pp, from those that this rank has been told by (microbatch, layer).
    """
    own, rows = places(tree), shape[0] // micros
    choices = max(one.stop for one in own.values())
    whole = torch.zeros((*shape, choices), dtype=torch.int64, device=mesh.device)
    index = split.cp.indices(shape[1], mesh.device)
    for (micro, layer), experts in kept.items():
        here = experts.view(rows, -1, experts.shape[-1])
        whole[micro * rows : (micro + 1) * rows, index, own[layer]] = here
    # every token is on one rank of cp, and every layer on one of pp
    return collectives.reduce_scalar(collectives.reduce_scalar(whole, mesh.cp), mesh.pp)
