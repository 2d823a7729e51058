"""Routing replay: record the experts that tokens were routed to, and route them there again, so
that policy and old log-probabilities are of one network though the router has moved (2507.18071,
section 5.3; recorded in the pass of the old log-probabilities, as Qwen's R2). The experts' weights
are today's router's, and so is its gradient.

The choices of all MoE layers of a token are one row, [sequences, length, choices]: the k of the
first MoE layer, then those of the next.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import torch
from jaxtyping import Int64
from torch import Tensor

from dolmen.core import collectives
from dolmen.core.mesh import Mesh
from dolmen.model.spec import ModelSpec, MoESpec
from dolmen.model.split import ModelSplit


@dataclass(frozen=True, eq=False)
class Routes:
    """Routing replay of one microbatch: experts to force, and a callback that records them, both by
    layer number.
    """

    forced_experts: Mapping[int, Int64[Tensor, "n k"]] = field(default_factory=dict)
    """Layer -> experts forced on this cp rank's tokens; a layer that is absent uses its router's
    choice.
    """
    on_routing: Callable[[int, Tensor], None] | None = None
    """(layer, experts [n, k]) -> nothing; called where a layer has routed."""

    def listener(self, layer: int) -> Callable[[Tensor], None] | None:
        """Return a callback for layer `layer` that passes its experts [n, k] to `on_routing`; None
        if nobody listens.
        """
        on_routing = self.on_routing
        return None if on_routing is None else lambda experts: on_routing(layer, experts)


def choice_slices(spec: ModelSpec) -> dict[int, slice]:
    """Return layer number -> slice of its experts among a token's recorded choices, which are the k
    experts of each MoE layer, layer after layer. Empty for a dense model.
    """
    slices, first = {}, 0
    for number, block in enumerate(spec.blocks):
        if isinstance(block.mlp, MoESpec):
            slices[number] = slice(first, first + block.mlp.per_token)
            first += block.mlp.per_token
    return slices


def replay_routes(
    spec: ModelSpec, split: ModelSplit, experts: Int64[Tensor, "sequences length choices"]
) -> Routes:
    """Return Routes that force this cp rank's tokens of a microbatch to recorded experts.
    `experts`: the choices of all tokens of every cp rank, those of all MoE layers side by side.
    """
    # this cp rank's tokens (zigzag), as the decoder splits them
    here = split.cp.split(experts, 1)
    return Routes(
        {
            i: here[..., columns].flatten(0, 1).contiguous()
            for i, columns in choice_slices(spec).items()
        }
    )


def gather_routes(
    choices_of: Mapping[tuple[int, int], Int64[Tensor, "n k"]],
    spec: ModelSpec,
    split: ModelSplit,
    mesh: Mesh,
    shape: tuple[int, int],
    micros: int,
) -> Int64[Tensor, "sequences length choices"]:
    """Return the recorded expert choices of all tokens of a batch of `shape` [sequences, length] in
    `micros` microbatches, the same on every rank of cp and pp, over which it is collective.
    `choices_of`: this rank's records, (microbatch, layer) -> experts of its tokens.
    """
    slices, rows = choice_slices(spec), shape[0] // micros
    choices = max(columns.stop for columns in slices.values())
    # zeros where another rank has the token or the layer, so that sums put the pieces together
    full = torch.zeros((*shape, choices), dtype=torch.int64, device=mesh.device)
    index = split.cp.indices(shape[1], mesh.device)
    for (micro, layer), experts in choices_of.items():
        here = experts.view(rows, -1, experts.shape[-1])
        full[micro * rows : (micro + 1) * rows, index, slices[layer]] = here
    # every token is on one rank of cp, and every layer on one of pp
    return collectives.reduce_scalar(collectives.reduce_scalar(full, mesh.cp), mesh.pp)
