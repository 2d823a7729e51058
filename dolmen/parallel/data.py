"""Data parallelism and ZeRO (1910.02054) through `fully_shard`, and everything that happens to gradients after backward.

With P the bytes of parameters on this rank of tp, of them B a block's and R the rest's (embedding, final norm, head), all
in the dtype they rest in (tests/parallel/test_zero.py measures these forms at every operation, fp32 and bfloat16):

    zero   parameters, and   gradients between   compute copies live        parameters and copies
           each moment       microbatches        until the end of           after forward, fp32
    0      P                 P                   the last backward          2 P
    1      P / dp            P                   the last backward          (1 + 1/dp) P
    2      P / dp            P / dp              each backward              (1 + 1/dp) P
    3      P / dp            P / dp              their block, R their pass  P / dp, at most P / dp + R + B in it

With dp = 1, stages 1 and 2 hold what 0 does. Gradients come a block at a time, B whole, while copies go: with one
microbatch the most at once is (1 + 1/dp) P + B + H for 1 and 2, 2 P + B + H for 0 (H: head and final norm, which wait).

The loss is divided by the global count of real tokens before backward, so gradients are summed, never averaged.
"""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from torch.distributed._composable.replicate_with_fsdp import replicate
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard

from dolmen.core import collectives, state
from dolmen.core.mesh import Mesh

PIECE = 1 << 14                                            # gradient elements whose squares are added in fp32


def shard(model: nn.Module, blocks: Iterable[nn.Module], mesh: Mesh, zero: int, compute: torch.dtype) -> None:
    """Split model over dp as ZeRO stage `zero`, each block a unit of communication, the rest one more; in place.

    Parameters stay in their own dtype (fp32 masters); blocks compute in `compute`; gradients are reduced in fp32 (or
    wider). No-op on a mesh of no grid.
    """
    if mesh.grid is None: return
    rest = next(model.parameters()).dtype
    # inputs are not cast: rope tables must stay fp32, and activations take the weights' dtype at the embedding
    policy = MixedPrecisionPolicy(param_dtype=compute, reduce_dtype=rest, cast_forward_inputs=False)
    for module in (*blocks, model):
        if zero == 0: replicate(module, mesh=mesh.grid["dp"], mp_policy=policy)
        else: fully_shard(module, mesh=mesh.grid["dp"], reshard_after_forward=zero == 3, mp_policy=policy)
    for unit in units(model) if mesh.dp.size > 1 else ():  # neither call is recursive; dp 1 would be a pass that divides by 1
        unit.set_gradient_divide_factor(1.0)
        if mesh.device.type == "cpu": unit.set_force_sum_reduction_for_comms(True)


def units(model: nn.Module) -> list[FSDPModule]:
    """The modules that `shard` made units of communication."""
    return [m for m in model.modules() if isinstance(m, FSDPModule)]


@contextmanager
def inference(model: nn.Module) -> Iterator[None]:
    """Evaluation mode without gradients; afterwards the mode is as before and sharded parameters are at rest again.

    Not torch.inference_mode: ZeRO keeps its gathered parameters for the next step, which must be able to train on them.
    """
    training = model.training
    model.eval()
    try:
        with torch.no_grad(): yield
    finally:
        model.train(training)
        for unit in units(model): unit.reshard()


def backward(loss: Tensor, model: nn.Module, last: bool, zero: int) -> None:
    """One microbatch's backward. Gradients cross dp with the last microbatch, and with each under ZeRO 2 and 3."""
    if isinstance(model, FSDPModule):
        now = last or zero >= 2
        model.set_is_last_backward(last)
        model.set_requires_gradient_sync(now)
        model.set_reshard_after_backward(now)
    loss.backward()


def gradient_norm(parameters: Iterable[nn.Parameter], mesh: Mesh) -> Tensor:
    """Euclidean norm of the logical gradient, fp32 scalar, the same on every rank: each element is counted once.

    On CPU, torch adds squares one by one in fp32 (30 M elements: 1.7e-3 off), so pieces are added in fp64.
    """
    total = torch.zeros((), dtype=torch.float64, device=mesh.device)
    for p in parameters:
        if p.grad is None: continue
        flat = state.shard(p.grad).flatten()
        norms = torch._foreach_norm(flat.split(PIECE) if flat.is_cpu else [flat])
        total += torch.stack(norms).double().square().sum() * state.owned(p.grad)
    total = collectives.reduce_scalar(collectives.reduce_scalar(total, mesh.tp), mesh.dp)
    return total.sqrt().float()


def scale_gradients(parameters: Iterable[nn.Parameter], factor: Tensor) -> None:
    """Multiply all gradients by a scalar tensor, in place: clipping, and undoing a loss scale."""
    torch._foreach_mul_([state.shard(p.grad) for p in parameters if p.grad is not None], factor)
