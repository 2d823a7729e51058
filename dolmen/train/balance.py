"""How busy experts were in a step: the router's numbers in the metrics, and balancing without an
auxiliary loss (2408.15664), where after each update a bias rises for every expert that had fewer
tokens than the mean, and falls for every one that had more.
"""

import torch
from torch import Tensor

from dolmen.core import collectives, state
from dolmen.core.mesh import Mesh
from dolmen.model.decoder import Decoder
from dolmen.model.moe import MoE


def settle(model: Decoder, mesh: Mesh, sequences: int, update: bool) -> dict[str, float]:
    """Take the tallies of the step's sparse layers, move their biases if `update`, and tell, the
    same on every rank and of any layout:

    router/max_load     the busiest expert's tokens over the mean of its layer, in the worst layer:
                        1 to num_experts
    router/aux_loss     the balance loss, mean over `sequences` (those of the global batch) and
                        layers: 1 is balanced
    router/z_loss       the same of the z-loss

    One collective of (num_experts + 2) numbers per layer; of a dense model nothing, and {}. A
    collective: every rank calls it.
    """
    c = model.config
    if not any(c.sparse(i) for i in range(c.num_hidden_layers)):
        return {}
    layers = {
        block.layer: block.mlp for block in model.layers.values() if isinstance(block.mlp, MoE)
    }
    tallies = torch.zeros(
        c.num_hidden_layers, c.num_experts + 2, dtype=torch.float64, device=mesh.device
    )
    for i, moe in layers.items():
        if moe.tally is not None:
            tallies[i] = moe.tally
        moe.tally = None
    # every rank of tp counted the same tokens
    tallies = collectives.reduce_scalar(tallies, mesh.world) / mesh.tp.size
    loads = tallies[:, : c.num_experts]
    if update and c.router_balance == "bias":
        for i, moe in layers.items():
            _move(moe.router.bias, loads[i], c.router_bias_rate)
    sparse = [i for i in range(c.num_hidden_layers) if c.sparse(i)]
    balance, z = (tallies[sparse, c.num_experts :].mean(0) / sequences).tolist()
    mean = loads[sparse].mean(1).clamp(min=1e-9)  # 0 only if no backward was run
    return {
        "router/max_load": float((loads[sparse].amax(1) / mean).max()),
        "router/aux_loss": balance,
        "router/z_loss": z,
    }


def _move(bias: Tensor, load: Tensor, rate: float) -> None:
    """bias += rate * sign(mean load - load), of this rank's part; both [E]."""
    with torch.no_grad():
        state.shard(bias).add_((load.mean() - load).sign()[state.region(bias)], alpha=rate)
