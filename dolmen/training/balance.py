"""Load of experts: router metrics, and load balancing without an auxiliary loss (2408.15664): after
each update a routing bias rises for every expert with fewer tokens than the mean, and falls for
every one with more.

Tokens per expert are counted in backward, as gradients of a zero "tally" per layer: activation
recomputation runs a forward twice, and backward once, so each token counts once.
"""

from collections.abc import Mapping

import torch
from jaxtyping import Float, Float64
from torch import Tensor

from dolmen.core import device, state
from dolmen.model.component import RouterLosses
from dolmen.model.decoder import Decoder
from dolmen.model.spec import ModelSpec

NAMES = ("router/max_load", "router/aux_loss", "router/z_loss")


def open_tallies(model: Decoder, scale: Float64[Tensor, ""]) -> dict[int, RouterLosses]:
    """Return layer number -> RouterLosses for each layer with experts on this rank, an object that
    the layer's forward takes: a tensor of zeros, whose gradient will count tokens per expert and
    sum the auxiliary losses in backward, and `scale`, which multiplies the gradients of these
    losses (loss scale / sequences of the global batch).
    """
    # tokens per expert, then the sums of the balance loss and of the z-loss
    number = model.spec.experts + 2
    return {
        i: RouterLosses(
            scale,
            torch.zeros(number, dtype=torch.float64, device=scale.device, requires_grad=True),
        )
        for i in model.split.layers
        if model.spec.blocks[i].mlp.experts
    }


def local_tallies(
    model: Decoder, opened: Mapping[int, RouterLosses]
) -> Float64[Tensor, "layers experts_and_2"]:
    """Return what the backward passes of this rank counted in a step, by layer: tokens per expert,
    then the sums of balance loss and z-loss. 0 for layers of other pipeline stages and without
    experts; no rows for a dense model. `opened`: as `open_tallies` returned. A sum over the world
    counts each token tp times.
    """
    spec = model.spec
    rows = spec.layers if spec.experts else 0
    tallies = torch.zeros(
        rows, spec.experts + 2, dtype=torch.float64, device=next(model.parameters()).device
    )
    for i, layer in opened.items():
        if layer.tally.grad is not None:
            tallies[i] = layer.tally.grad
    return tallies


def router_metrics(
    spec: ModelSpec, tallies: Float[Tensor, "layers experts_and_2"], sequences: int
) -> Float[Tensor, " names"]:
    """Return three metrics of a step's routing from the tallies of the world, in the order of
    NAMES; an empty tensor for a dense model:

    router/max_load     the busiest expert's tokens over the mean of its layer, in the worst layer:
                        1 to the number of experts
    router/aux_loss     the balance loss, mean over `sequences` (those of the global batch) and
                        layers: 1 is balanced
    router/z_loss       the same of the z-loss
    """
    if not spec.experts:
        return tallies.new_zeros(0)
    rows = torch.stack([tallies[i] for i in _sparse(spec)])
    loads, losses = rows.split([spec.experts, 2], 1)
    mean = loads.mean(1).clamp(min=1e-9)  # 0 only if no backward was run
    return torch.cat([(loads.amax(1) / mean).amax(0, keepdim=True), losses.mean(0) / sequences])


def _sparse(spec: ModelSpec) -> list[int]:
    """Return the numbers of the model's layers that have experts."""
    return [i for i, block in enumerate(spec.blocks) if block.mlp.experts]


def expert_loads(
    spec: ModelSpec, tallies: Float[Tensor, "layers experts_and_2"]
) -> dict[str, list[float]]:
    """Return layer number (as text) -> each expert's tokens in a step relative to the mean of the
    layer, rounded; {} for a dense model. `tallies`: of the world. The host waits for the device.
    """
    layers = _sparse(spec) if spec.experts else []
    if not layers:
        return {}
    counted = torch.stack([tallies[i] for i in layers])[:, : spec.experts]
    share = counted / counted.mean(1, keepdim=True).clamp(min=1e-9)
    rows = device.read_back(share)
    return {str(i): [round(x, 3) for x in row] for i, row in zip(layers, rows, strict=True)}


def update_router_bias(
    model: Decoder, tallies: Float[Tensor, "layers experts_and_2"], update: bool
) -> None:
    """Raise the routing bias of each expert with fewer tokens than its layer's mean, and lower that
    of each with more, by --train.router.bias-rate, in place, for this rank's layers; by the tallies
    of the world. Nothing for a skipped step (`update` False) and unless --train.router.balance is
    bias.
    """
    if not update or model.router.balance != "bias":
        return
    for block in (b for part in range(len(model.split.parts)) for b in model.blocks(part)):
        # no gradient and no optimizer moves it, this rule does
        bias = block.mlp.balance_bias
        if bias is not None:
            load = tallies[block.layer, : model.spec.experts]
            _move(bias, load, model.router.bias_rate)


def _move(bias: Tensor, load: Tensor, rate: float) -> None:
    """Add rate * sign(mean load - load) to the bias [experts], in place, for this rank's part;
    `load` [experts].
    """
    with torch.no_grad():
        state.local_view(bias).add_((load.mean() - load).sign()[state.region(bias)], alpha=rate)
