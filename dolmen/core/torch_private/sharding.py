"""Private names of DTensor and of FSDP, and what we take its records for."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed._composable.replicate_with_fsdp import replicate as _replicate
from torch.distributed.fsdp import FSDPModule
from torch.distributed.fsdp._fully_shard import _fsdp_api, _fsdp_common
from torch.distributed.fsdp._fully_shard._fsdp_param import FSDPParam
from torch.distributed.tensor import _utils

replicate = _replicate
"""`fully_shard` that shards nothing, with its hooks, buckets and switches: ZeRO 0. The public
`torch.distributed._composable.replicate` is DDP's, which has other hooks. 2.11 to 2.13."""

Record = FSDPParam
"""FSDP's record of a parameter: the shard (`sharded_param`), the copy gathered from it, and the
gradients of both. 2.11 to 2.13."""

local_shape_and_offset = _utils.compute_local_shape_and_global_offset
"""(shape, mesh, placements) -> shape and offset of this rank's part, of any placements, uneven ones
too, from arithmetic alone. 2.11 to 2.13."""


ReduceScatter = _fsdp_api.ReduceScatter
"""Interface that FSDP calls to reduce gradients where it is configured to
(`set_custom_reduce_scatter`, public; its class is not): `allocate(size, dtype, device)`, and a call
with tensors of output and input, group and operation. 2.13; tried in no other.
"""


def local_tensor(p: Any) -> Tensor:
    """Return the plain tensor in which a DTensor stores this rank's values, without autograd.
    `to_local()` is public, and of a parameter a view with a node of autograd, which takes longer
    than the launches of an update. 2.11 to 2.13.
    """
    return p._local_tensor


def dtensor_like(p: Any, values: Tensor) -> Tensor:
    """Return a DTensor sharded like the DTensor p with local `values`. The public `from_local`
    computes p's shape and strides again. 2.11 to 2.13.
    """
    return type(p)(values, p._spec, requires_grad=False)


def records(unit: FSDPModule) -> list[Record]:
    """Return FSDP's records of the parameters of a unit (its module), nested units left out. 2.11
    to 2.13.
    """
    state = vars(unit._get_fsdp_state())
    # 2.11 has one group per unit
    groups = (
        state["_fsdp_param_groups"]
        if "_fsdp_param_groups" in state
        else [state["_fsdp_param_group"]]
    )
    return [record for group in groups if group is not None for record in group.fsdp_params]


def gather_plain(record: Record, sum_gradient: Callable[[Tensor], Tensor] | None) -> None:
    """Make FSDP gather a parameter, which tp has split as a DTensor, as a plain tensor, and take a
    plain gradient for it, to which `sum_gradient` (if any) is applied before it is reduced.
    `record` is changed in place; call before the first forward. Does nothing for a parameter that
    is not on tp. 2.11 to 2.13: what is gathered becomes a DTensor where `is_dtensor` is set, and in
    2.13 where there is a spec.
    """
    if not record.is_dtensor:
        return
    record.is_dtensor = False
    # 2.11 has no such field, and reads the flag alone
    record._unsharded_dtensor_spec = None  # pyright: ignore[reportAttributeAccessIssue]
    if sum_gradient is not None:
        # called by position
        record._get_grad_inner_tensor = sum_gradient  # pyright: ignore[reportAttributeAccessIssue]


def widen_gradient(record: Record) -> None:
    """Make autograd leave gradients on the copy that FSDP gathers of a parameter in the dtype in
    which FSDP reduces them (fp32), where functions give them so; else it rounds them to the copy's
    dtype (bf16). `record` is changed in place; call before the first forward. 2.11 to 2.13:
    `grad_dtype` is public, and the copy is made here.
    """
    gather = record.init_unsharded_param

    def gather_wide() -> None:
        """Make or refill the gathered copy, and set the dtype of its gradient."""
        gather()
        record._unsharded_param.grad_dtype = record.reduce_dtype or record.orig_dtype

    record.init_unsharded_param = gather_wide


def gathered_copy(record: Record) -> Tensor | None:
    """Return the plain tensor into which FSDP gathers a parameter, and on which autograd leaves its
    gradient, whether its memory is freed or not; None before the first gathering. 2.11 to 2.13.
    """
    return getattr(record, "_unsharded_param", None)


def run_final_callback(root: FSDPModule) -> None:
    """Run FSDP's end-of-backward callback by hand: it looks at each unit once more, accumulates the
    gradients that have come since, and reduces them if that is switched on. 2.11 to 2.13.
    """
    root._get_fsdp_state()._root_post_backward_final_callback()


class One(float):
    """A divisor of 1 that divides nothing. `replicate` divides by its factor, 1 too, which would be
    a pass over all gradients and a copy of them. 2.11 to 2.13 divide by `/` alone.
    """

    @classmethod
    def __torch_function__(cls, function, types, args=(), kwargs=None):
        """Return x for x / self, without computing."""
        return args[0]  # x / 1


def ranks(record: Record) -> int:
    """Return over how many ranks FSDP shards a parameter; 1 for `replicate`. 2.11 to 2.13."""
    info = record.mesh_info
    return info.shard_mesh_size if isinstance(info, _fsdp_common.FSDPMeshInfo) else 1


def gathered_shape(record: Record) -> torch.Size:
    """Return the shape of the plain tensor into which FSDP gathers a parameter. 2.11 to 2.13."""
    return record._orig_size


def gather_as(
    record: Record,
    sent: Callable[[Tensor, nn.Module], tuple[Tensor, ...]],
    received: Callable[[Sequence[Tensor]], Tensor],
) -> None:
    """Make FSDP all-gather the tensors of `sent(shard, module)` in place of a rank's shard of a
    parameter, and use `received(gathered tensors)`, in the same order, as the gathered copy. Each
    tensor has the shard's dim 0 first. Their number may change from one gathering to the next, if
    all ranks agree. Call once the shard has memory.

    The extension is public: two methods of the shard, which FSDP looks for; documented for a class
    of tensors, and here set on this one tensor, so that parameters at rest are as all others.
    Private is that FSDP registers them, and the list of what it gathers into. 2.11 to 2.13.
    """
    shard = local_tensor(record.sharded_param)
    shapes: list[torch.Size] = []

    def pre_all_gather(mesh, size, stride, module, policy) -> tuple[tuple[Tensor, ...], None]:
        """Return the tensors that this rank sends, and no metadata."""
        parts = sent(shard, module)
        shapes[:] = [part.shape for part in parts]
        if len(parts) != len(record.all_gather_outputs):
            record.all_gather_outputs = []  # made anew
        return parts, None

    def post_all_gather(outputs, metadata, dtype, *, out: Tensor | None = None):
        """Return the copy made of the gathered tensors, or write it to `out` and return None; frees
        the buffers that they were gathered into.
        """
        copy = received([o.view(-1, *shape[1:]) for o, shape in zip(outputs, shapes, strict=True)])
        if out is not None:
            # FSDP has kept the copy's place; backward may hold it, as the same values
            out.data.copy_(copy)
        for output in record.all_gather_outputs:
            output.untyped_storage().resize_(0)
        return None if out is not None else (copy, (copy,))

    shard.fsdp_pre_all_gather = pre_all_gather  # pyright: ignore[reportAttributeAccessIssue]
    shard.fsdp_post_all_gather = post_all_gather  # pyright: ignore[reportAttributeAccessIssue]
    record._init_extensions()
