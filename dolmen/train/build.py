"""From a configuration to a placed model: build on meta -> split over tp -> fully_shard per block,
then root -> allocate -> initialise or load. Every model of the house, for training or for serving,
is built here.
"""

from collections.abc import Callable

import torch
from torch import Tensor, nn

from dolmen.core import state
from dolmen.core.mesh import Mesh
from dolmen.model.config import ModelConfig
from dolmen.model.decoder import Decoder
from dolmen.model.layers import Leaf, Norm
from dolmen.model.layout import Layout
from dolmen.model.moe import Router
from dolmen.model.split import split
from dolmen.ops.kernels import Hardware, Kernels, choose
from dolmen.parallel import data
from dolmen.parallel.actions import Schedule


def build(
    config: ModelConfig,
    mesh: Mesh,
    layout: Layout | None = None,
    schedule: Schedule | None = None,
    *,
    dtype: torch.dtype = torch.float32,
    compute: torch.dtype | None = None,
    compile: bool = False,
    hardware: Hardware | None = None,
) -> Decoder:
    """The decoder on `mesh`, or this rank's stages of it, allocated, its values not yet set.

    `layout` says how it is split over the axes of `mesh`; None builds for inference, split over tp
    alone. `schedule` places the stages; None: there is one. `dtype` is that of parameters at rest,
    `compute` (default: the same) that of the copies a step works with. Kernels are chosen for
    `hardware` (default: the mesh's device): H100 lets a CPU take the road of one. Raises ValueError
    where the layout does not divide the model.
    """
    hardware = hardware or Hardware.of(mesh.device)
    kernels = chosen(config, mesh, compute or dtype, hardware)
    parts = split(mesh, config.num_hidden_layers, layout or Layout(), schedule, kernels)
    with torch.device("meta"):
        model = Decoder(config, parts).to(dtype)
    model.compute = compute
    state.distribute(model, model.plan(), mesh)
    if compile:
        model.compile_parts()
    if layout is not None:
        data.shard(model, model.units(), mesh, layout.zero, compute or dtype, model.partial())
        if layout.zero == 3 and hardware.kind == "cuda":  # a CPU would only hold more
            for blocks in model.ahead():
                data.prefetch(blocks)
    model.to_empty(device=mesh.device)
    for module in model.modules():
        if isinstance(module, Router) and module.bias is not None:
            state.shard(module.bias).zero_()  # no file has one
    if config.tie_word_embeddings:
        assert model.head is None  # tied by construction: to_empty has nothing to untie
    return model


def chosen(config: ModelConfig, mesh: Mesh, compute: torch.dtype, hardware: Hardware) -> Kernels:
    """The kernels of a rank of `mesh`, whose step computes in `compute`."""
    widths = (config.hidden_size, config.expert_size // mesh.tp.size)
    return choose(hardware, compute, config.head_dim, widths if config.num_experts else ())


def initialize(model: Decoder, seed: int) -> None:
    """Initial values from the seed alone: normal weights, norms 1, biases 0; a layout never changes
    a value.
    """
    with torch.no_grad():
        for prefix, leaf in model.named_modules():
            if not isinstance(leaf, Leaf):
                continue
            for name, p in leaf.named_parameters(recurse=False):
                if name == "bias":
                    state.shard(p).zero_()
                elif isinstance(leaf, Norm):
                    state.shard(p).fill_(1.0)
                else:
                    state.initialize(
                        p, f"{prefix}.{name}", seed, model.config.initializer_range * leaf.std_scale
                    )


def load(model: nn.Module, stream: Callable[[Callable[[str, Tensor], None]], None]) -> None:
    """Fill the model from `stream`, which calls write(name, full tensor) for every parameter, one
    tensor at a time.
    """
    parameters = dict(model.named_parameters())
    with torch.no_grad():
        stream(lambda name, value: state.write(parameters[name], value))
