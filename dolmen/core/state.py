"""State at rest is DTensor, compute is local tensors: this file is the bridge, and the only one
that says DTensor.

distribute(module, placements, mesh)     meta parameters -> DTensors split over tp, or ep and tp
                                         (parallel/data.py: over dp)
gather_as_plain(record), local(p)        the bridge into compute: FSDP gathers a plain tensor
region(p), write_region(p, x)            this rank's part of the logical tensor: initial values,
                                         loading
gather_full(p)                           all of the logical tensor: export
"""

import logging
import math
from collections.abc import Callable, Mapping

import torch
from jaxtyping import Float, Shaped
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard  # noqa: F401

from dolmen.core import collectives
from dolmen.core.determinism import seed_of
from dolmen.core.mesh import Axis, Mesh
from dolmen.core.torch_private import sharding, strings

BLOCK = 1 << 16  # elements of the logical tensor drawn from one seed


Places = Placement | tuple[Placement, Placement]
"""Placement of a parameter on tp; for an expert, on ep and on tp."""


def distribute(module: nn.Module, placements: Mapping[str, Places], mesh: Mesh) -> None:
    """Replace every parameter of `module` (on meta, in full shape) by a DTensor that is sharded as
    `placements` says, by parameter name: over mesh axis tp, or over ep and tp for a pair. In place;
    tied parameters stay one parameter. Does nothing for a mesh without process groups. Raises
    KeyError if a parameter has no placement.
    """
    if mesh.grid is None or mesh.expert_grid is None:
        return
    # once: to slice a device mesh takes milliseconds
    dense, expert = mesh.grid["tp"], mesh.expert_grid["ep", "tp"]
    replaced: dict[Tensor, nn.Parameter] = {}
    for prefix, owner in module.named_modules():
        for name, p in list(owner.named_parameters(recurse=False)):
            # a tied parameter is met twice, and must become one DTensor
            if p not in replaced:
                places = placements[f"{prefix}.{name}" if prefix else name]
                grid = expert if isinstance(places, tuple) else dense
                places = places if isinstance(places, tuple) else (places,)
                shape, _ = sharding.local_shape_and_offset(p.shape, grid, places)
                shard = torch.empty(shape, dtype=p.dtype, device=p.device)
                replaced[p] = nn.Parameter(
                    DTensor.from_local(
                        shard, grid, places, run_check=False, shape=p.shape, stride=p.stride()
                    ),
                    requires_grad=p.requires_grad,
                )
            setattr(owner, name, replaced[p])


def gather_as_plain(record: sharding.Record, partial: Axis | None) -> None:
    """Make FSDP gather a parameter, which rests on tp as a DTensor, as a plain tensor, and take a
    plain gradient for it: the bridge between DTensor state and local compute, crossed once per
    gathering. `record` is FSDP's record of the parameter, changed in place; call before the first
    forward. `partial`: the axis over which its gradient is a partial sum (a weight stored whole but
    used on this rank's part of the activations), and is summed when FSDP reduces it; None: it is no
    partial sum.

    Otherwise every use of a weight is an autograd node, a view and a DTensor made of its gradient,
    which is then added by dispatch: 1 ms of a layer's 3 ms of host time per microbatch.
    """
    sharding.gather_plain(
        record, None if partial is None else lambda grad: collectives.sum_(grad, partial)
    )


def local(p: Shaped[Tensor, "*whole"]) -> Shaped[Tensor, "*here"]:
    """Return this rank's shard of a parameter as a plain tensor for compute, with autograd where
    gradients are enabled; a plain tensor is returned as it is. Its gradient is what this rank
    computes; FSDP sums partial ones (`gather_as_plain`). A model built for inference has no FSDP:
    whoever takes its gradients makes the sums (parallel/data.sum_partial).

    Without gradients autograd is bypassed: for the hundreds of parameters of an update that takes
    longer than its launches.
    """
    if not isinstance(p, DTensor):
        return p
    return p.to_local() if torch.is_grad_enabled() and p.requires_grad else sharding.local_tensor(p)


def is_distributed(cls: type) -> bool:
    """Return True for DTensor and its subclasses, whose tensors are sharded over ranks."""
    return issubclass(cls, DTensor)


def region(p: Shaped[Tensor, "*whole"]) -> tuple[slice, ...]:
    """Return the part of the full tensor that this rank holds, one slice per dimension; all of it
    for a plain tensor.
    """
    if not isinstance(p, DTensor):
        return tuple(slice(0, n) for n in p.shape)
    shape, offset = sharding.local_shape_and_offset(p.shape, p.device_mesh, p.placements)
    return tuple(slice(o, o + n) for o, n in zip(offset, shape, strict=True))


def sharded_dims(p: Shaped[Tensor, "*whole"]) -> dict[str, int | None]:
    """Return, per mesh axis that p is distributed over, the dim that it shards, or None where it
    replicates; the innermost cut (made last) first. Empty for a plain tensor.
    """
    if not isinstance(p, DTensor):
        return {}
    names = p.device_mesh.mesh_dim_names
    assert names is not None
    return {
        name: None if place.is_replicate() else place.dim  # pyright: ignore[reportAttributeAccessIssue]  # of every shard
        for name, place in zip(names, p.placements, strict=True)
    }


def local_view(p: Shaped[Tensor, "*whole"]) -> Shaped[Tensor, "*here"]:
    """Return this rank's shard (of a plain tensor all of it) as a plain tensor without autograd, on
    the same memory: writing to it changes the parameter.
    """
    return sharding.local_tensor(p) if isinstance(p, DTensor) else p.detach()


def tensor_like(
    p: Shaped[Tensor, "*whole"], values: Shaped[Tensor, "*here"]
) -> Shaped[Tensor, "*whole"]:
    """Return a tensor sharded like p whose local values are `values`; for a plain p `values`
    itself.
    """
    return sharding.dtensor_like(p, values) if isinstance(p, DTensor) else values


def write_region(p: Shaped[Tensor, "*whole"], value: Shaped[Tensor, "..."]) -> None:
    """Copy this rank's region of the full tensor `value` into p. Raises ValueError if the shapes
    differ, and if p has no memory: there the copy would be lost.
    """
    here = local_view(p)
    if here.is_meta:
        raise ValueError(
            f"a parameter of shape {tuple(p.shape)} has no storage: its weight was freed"
        )
    if p.shape != value.shape:
        raise ValueError(
            f"a value of shape {tuple(value.shape)} for a parameter of shape {tuple(p.shape)}"
        )
    # also casts and moves to the device
    here.copy_(value[region(p)])


def gather_full(p: Shaped[Tensor, "*whole"]) -> Shaped[Tensor, "*whole"]:
    """Return the full tensor of a sharded one, plain and detached, on every rank; of a plain tensor
    itself, detached. Collective: all ranks of the parameter's mesh call it.
    """
    if not isinstance(p, DTensor):
        return p.detach()
    # axes are gathered one after another, each along a dim: nothing is added, so no order matters,
    # and there is nothing to warn of
    logger = logging.getLogger(strings.REDISTRIBUTE)
    # setting its level would empty the caches of all loggers: 0.7 ms
    before, logger.disabled = logger.disabled, True
    try:
        return p.full_tensor().detach()
    finally:
        logger.disabled = before


def replication_weight(p: Shaped[Tensor, "*whole"]) -> float:
    """Return 1 / (number of ranks that hold this rank's elements of p), 1 for a plain tensor: the
    weight of a local sum in a sum over the world that counts each element once.
    """
    if not isinstance(p, DTensor):
        return 1.0
    return 1.0 / math.prod(
        p.device_mesh.size(i) for i, place in enumerate(p.placements) if place.is_replicate()
    )


def dtype_of(module: nn.Module) -> torch.dtype:
    """Return the dtype of a module's first floating-point parameter, in which its parameters are
    stored but for 8-bit integer ones.
    """
    return next(p.dtype for p in module.parameters() if p.is_floating_point())


def local_elements(p: Shaped[Tensor, "*whole"]) -> int:
    """Return the number of elements of p that this rank holds."""
    return math.prod(s.stop - s.start for s in region(p))


def fill_normal(p: Float[Tensor, "*whole"], name: str, seed: int, std: float) -> None:
    """Fill this rank's part of p with normal values of mean 0 and standard deviation `std`, which
    depend only on (seed, name, position in the full tensor), so on no layout.
    """
    _fill(p, name, seed, lambda block, generator: block.normal_(0.0, std, generator=generator))


def fill_uniform(p: Float[Tensor, "*whole"], name: str, seed: int, bound: float) -> None:
    """Fill this rank's part of p with values uniform in [-bound, bound], which depend only on
    (seed, name, position in the full tensor), so on no layout.
    """
    _fill(
        p, name, seed, lambda block, generator: block.uniform_(-bound, bound, generator=generator)
    )


FillBlock = Callable[[Tensor, torch.Generator], Tensor]
"""(block, generator) -> the block, filled in place."""


def _fill(p: Tensor, name: str, seed: int, draw: FillBlock) -> None:
    """Fill p by `draw`, a block at a time, so that values depend only on (seed, name, position in
    the full tensor).

    The full tensor is cut along dim 0 into blocks of BLOCK elements, each sampled from its own
    seed; a rank samples the blocks that its region meets and keeps its part. No rank ever holds a
    full tensor. Of stacked matrices each has its own name.
    """
    # Blocks are cut of the logical tensor, not of what a rank holds, or values would follow the
    # layout. Where a rank's region ends inside a block, it draws all of it and keeps a part.
    out, where = local_view(p), region(p)
    if out.numel() == 0:
        return
    if p.ndim < 3:
        _fill_blocks(out, p.shape, where, name, seed, draw)
    else:
        for i in range(where[0].start, where[0].stop):
            _fill_blocks(out[i - where[0].start], p.shape[1:], where[1:], f"{name}.{i}", seed, draw)


def _fill_blocks(
    out: Tensor, full: torch.Size, where: tuple[slice, ...], name: str, seed: int, draw: FillBlock
) -> None:
    """Fill `out`, the part `where` of a matrix or vector of shape `full`, block by block of rows:
    `draw` fills a block from a generator with the block's own seed, so values do not depend on the
    sharding.
    """
    rows = max(1, BLOCK // math.prod(full[1:]))
    first, last = where[0].start // rows, (where[0].stop - 1) // rows
    for block in range(first, last + 1):
        top, bottom = block * rows, min((block + 1) * rows, full[0])
        values = torch.empty((bottom - top, *full[1:]))
        draw(values, torch.Generator().manual_seed(seed_of(seed, name, block)))
        lo, hi = max(top, where[0].start), min(bottom, where[0].stop)
        out[lo - where[0].start : hi - where[0].start].copy_(
            values[(slice(lo - top, hi - top), *where[1:])]
        )
