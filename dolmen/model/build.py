"""Builds a placed model from a spec: on meta -> split over tp -> fully_shard per block, then root
-> allocate -> initialise or load. Every model, for training or for serving, is built here.

On meta first, because a model that needs a cluster does not fit in one process, and because checks
of divisibility should cost nothing. Values are set last: initial values depend on a parameter's
name and the seed only, so a layout never changes them, and `load` streams full tensors of which
each rank keeps its part.

A model that only generates can keep its matrices in packed form alone (`load_inference_weights`):
each is packed as soon as its values have arrived, so that the peak is the packed model and one
matrix.
"""

import math
from collections.abc import Callable, Collection, Sequence
from dataclasses import replace

import torch
from torch import Tensor, nn

from dolmen.core import state
from dolmen.core.mesh import Mesh
from dolmen.model import block
from dolmen.model.decoder import Decoder
from dolmen.model.layers import ParameterModule
from dolmen.model.layout import Layout
from dolmen.model.spec import ModelSpec
from dolmen.model.spec.lora import magnitude_name, scale_name
from dolmen.model.split import split_model
from dolmen.model.training import Training
from dolmen.ops import int8
from dolmen.ops.attention.operators import activate_attention
from dolmen.ops.attention_support import AttentionChoice
from dolmen.ops.kernels import Hardware, Kernels, choose
from dolmen.parallel import data, quantized_product
from dolmen.parallel.inference_linear import Weights
from dolmen.parallel.schedule import Schedule


def build(
    spec: ModelSpec,
    mesh: Mesh,
    layout: Layout | None = None,
    schedule: Schedule | None = None,
    *,
    training: Training = Training(),
    dtype: torch.dtype = torch.float32,
    compute: torch.dtype | None = None,
    compile: bool = False,
    hardware: Hardware | None = None,
) -> Decoder:
    """Build the decoder, or this rank's stages of it, sharded over `mesh`, with memory allocated
    and values not yet set.

    `layout`: how the model is split over the axes of `mesh`; None builds for inference, without
    FSDP. `schedule` assigns pipeline stages to ranks; None: one stage. `training`: dropout, router,
    adapter and fp8 options. `dtype`: of stored parameters; `compute`: of the copies a step computes
    with. `compile`: use torch.compile. `hardware`: chooses kernels. Raises ValueError where the
    layout does not divide the model.
    """
    placed = place(
        spec,
        mesh,
        layout,
        schedule,
        training=training,
        dtype=dtype,
        compute=compute,
        compile=compile,
        hardware=hardware,
    )
    return allocate(placed, mesh.device)


def allocate(model: Decoder, device: torch.device) -> Decoder:
    """Allocate uninitialised memory on `device` for a sharded model on meta, and set up fp8 scaling
    state and fp8 all-gather. Returns the same model.
    """
    # the first memory of the model, this rank's part alone
    model.to_empty(device=device)
    for delayed in model.delayed_scaling().values():
        delayed.allocate(device)
    recipes = {
        name: param.fp8 for name, param in model.local_specs().items() if param.fp8 is not None
    }
    # FSDP then gathers fp8 bytes instead of bf16
    quantized_product.gather_payloads(model, recipes)
    return model


def place(
    spec: ModelSpec,
    mesh: Mesh,
    layout: Layout | None = None,
    schedule: Schedule | None = None,
    *,
    training: Training = Training(),
    dtype: torch.dtype = torch.float32,
    compute: torch.dtype | None = None,
    compile: bool = False,
    hardware: Hardware | None = None,
    stages: Sequence[range] | None = None,
) -> Decoder:
    """Build the decoder on meta and shard it over `mesh`: cast, split over tp and ep, optionally
    compile, then FSDP. No memory is allocated.

    `layout`: how the model is split over the axes of `mesh`; None builds for inference, split
    over tp only, without FSDP. `schedule` assigns pipeline stages to ranks; None: one stage.
    `stages`: the layers of each stage (default: balanced). `training`: dropout, router, adapter and
    fp8 options. `dtype`: of stored parameters; `compute` (default: the same): of the copies a step
    computes with. `compile`: use torch.compile. Kernels are chosen for `hardware` (default: the
    mesh's device); with that of an H100 a CPU takes the code path of one. Raises ValueError where
    the layout does not divide the model.
    """
    is_local = hardware is None  # else the kernels are those of another machine (a dry run)
    hardware = hardware or Hardware.from_device(mesh.device)
    trained = training.apply_to(spec)
    kernels = choose_kernels(trained, mesh, compute or dtype, hardware, training.attention)
    kernels = replace(kernels, exact=training.exact)
    if is_local:
        activate_attention(kernels.attention)
    parts = split_model(mesh, spec.layers, layout or Layout(), schedule, kernels, stages)
    # a 70B model costs no memory here, and its checks cost seconds
    with torch.device("meta"):
        model = Decoder(spec, parts, training).to(dtype)
    for name, param in model.local_specs().items():
        if param.precise:
            p = model.get_parameter(name)
            # router bias and int8 scales: bf16 would lose their small steps
            p.data = p.data.to(torch.promote_types(dtype, torch.float32))
    # None: compute in the dtype of the parameters
    model.compute = compute
    # tp and ep: parameters become DTensors on meta, a rank's part each
    state.distribute(model, model.plan(), mesh)
    if compile:
        # before FSDP: see `compile_parts`
        model.compile_parts()
    if layout is not None:
        # dp: parameters are sharded once more over dp x cp (ZeRO)
        # with exact numerics partial sums are added for each microbatch (parallel/exact.py)
        partial = model.partial() if kernels.exact is None else ()
        data.shard_model(
            model,
            model.units(),
            mesh,
            layout.zero,
            compute or dtype,
            partial,
            wide_gradients=kernels.exact is not None,
        )
        if layout.zero == 3 and hardware.kind == "cuda":  # a CPU would only hold more
            for blocks in model.prefetch_order():
                data.prefetch(blocks)
    return model


def choose_kernels(
    spec: ModelSpec,
    mesh: Mesh,
    compute: torch.dtype,
    hardware: Hardware,
    attention: AttentionChoice = AttentionChoice(),
) -> Kernels:
    """Return the kernels that a rank of `mesh` uses on `hardware`, for products in dtype `compute`:
    chosen by head sizes, expert widths, attention kinds, fp8 and torch's deterministic mode.
    `attention`: the attention backend, or auto. Raises ValueError for one that does not fit.
    """
    # a set: equal layers have equal specs
    experts = {param for param in spec.params.values() if param.stacked}
    widths = {width for param in experts for width in param.local_shape({"tp": mesh.tp.size})[1:]}
    # rounded experts are multiplied one after the other: grouped_mm takes bf16 alone
    one_by_one = spec.fp8 is not None or any(param.int8 for param in experts)
    return choose(
        hardware,
        compute,
        longest_head(spec),
        sorted(widths),
        block.attention_kinds(spec),
        spec.fp8,
        one_by_one,
        attention,
        torch.are_deterministic_algorithms_enabled(),
    )


def longest_head(spec: ModelSpec) -> int:
    """Return the largest size of a head, of which attention kernels have a bound."""
    return max(size for b in spec.blocks for size in b.mixer.head_sizes)


def initialize(model: Decoder, seed: int, loaded: Collection[str] = ()) -> None:
    """Set initial values of all parameters but those named in `loaded`. Each value depends on the
    seed, the parameter's name and its spec only, never on the layout.
    """
    with torch.no_grad():
        for name, p in model.named_parameters():
            if name in loaded:
                continue
            param = model.spec.params[name]
            if param.int8 or magnitude_name(name) in model.spec.params:
                # the whole weight: its scale, or DoRA's row norms, follow from full rows
                full = torch.empty(param.shape, device=p.device)
                _initialize_param(full, name, seed, model.spec)
                _write(model, name, full)
            else:
                _initialize_param(p, name, seed, model.spec)


def _initialize_param(p: Tensor, name: str, seed: int, spec: ModelSpec) -> None:
    """Fill p, or this rank's part of it, with the initial values of the spec's `initial`: normal,
    uniform within 1 / sqrt(inputs), ones or zeros. "beside" leaves it as it is: it is derived when
    another parameter is written.
    """
    param = spec.params[name]
    match param.initial:
        case "normal":
            state.fill_normal(p, name, seed, spec.initializer_range * param.std_scale)
        case "uniform":
            state.fill_uniform(p, name, seed, 1 / math.sqrt(param.shape[-1]))
        case "ones":
            state.local_view(p).fill_(1.0)
        case "zeros":
            state.local_view(p).zero_()
        case "beside":
            pass


def load(model: nn.Module, stream: Callable[[Callable[[str, Tensor], None]], None]) -> None:
    """Fill the model from `stream`, which calls write(name, full tensor) once per parameter. An
    int8 weight may be given in floating point, and is then quantised with its scale, or as int8
    values and scale. DoRA magnitudes are set to the row norms of each floating-point weight, unless
    they are written later themselves. A parameter that is never written keeps its old values.
    """
    with torch.no_grad():
        stream(lambda name, value: _write(model, name, value))


def _write(model: nn.Module, name: str, value: Tensor) -> None:
    """Write this rank's part of a full tensor into parameter `name`, quantising to int8 and
    deriving DoRA's magnitude where the model has them.
    """
    p = model.get_parameter(name)
    lengths = value
    if p.dtype == torch.int8 and value.is_floating_point():
        # per output row, from the full tensor: the same on every layout
        value, scale = int8.quantise(value)
        state.write_region(model.get_parameter(scale_name(name)), scale)
        lengths = int8.dequantise(value, scale)
    state.write_region(p, value)
    if isinstance(model, Decoder) and magnitude_name(name) in model.spec.params:
        if lengths.is_floating_point():  # else they come as they are
            magnitude = model.get_parameter(magnitude_name(name))
            # norms in fp32 or wider
            wide = torch.promote_types(lengths.dtype, torch.promote_types(p.dtype, torch.float32))
            state.write_region(magnitude, lengths.to(wide).norm(dim=-1))


def load_inference_weights(
    model: Decoder,
    mesh: Mesh,
    weights: Weights,
    stream: Callable[[Callable[[str, Tensor], None]], None],
) -> Decoder:
    """Fill a sharded model on meta by `stream`, which calls write(name, full tensor) once per
    parameter, keeping the matrices of linears only in the packed format `weights` and freeing their
    plain form. Embeddings and norms stay plain. Returns the same model. CPU only.
    """
    model.packed_only = weights
    packed = {
        name: part
        for name, part in model.named_modules()
        if isinstance(part, ParameterModule) and part.only_multiplies
    }
    for name, part in model.named_modules():
        if name not in packed:
            part.to_empty(device=mesh.device, recurse=False)
    for delayed in model.delayed_scaling().values():
        delayed.allocate(mesh.device)
    # tensors that each packed module still waits for
    coming = {
        part: {param_name for param_name, _ in part.named_parameters(recurse=False)}
        for part in packed.values()
    }
    # modules whose plain memory is allocated
    allocated: set[str] = set()

    def through(write: Callable[[str, Tensor], None], name: str, value: Tensor) -> None:
        """Write one tensor; allocate its module at the module's first tensor, and pack and free it
        after its last.
        """
        owner, _, param_name = name.rpartition(".")
        if owner not in packed:
            return write(name, value)
        if owner not in allocated:
            allocated.add(owner)
            packed[owner].to_empty(device=mesh.device, recurse=False)
        write(name, value)
        coming[packed[owner]].remove(param_name)
        if not any(coming[part] for part in packed[owner].fused):
            # the last tensor has come: pack, and give the plain memory back
            packed[owner].free_weights(weights)

    load(model, lambda write: stream(lambda name, value: through(write, name, value)))
    return model
