"""Data parallelism and ZeRO (1910.02054) through `fully_shard`, and everything that happens to
gradients after backward.

With P the bytes of parameters on this rank of tp, of them B a block's and R the rest's (embedding,
final norm, head), all in the dtype they rest in (tests/parallel/test_zero.py measures these forms
at every operation, fp32 and bfloat16):

    zero   parameters, and   gradients between   compute copies live        parameters and copies
           each moment       microbatches        until the end of           after forward, fp32
    0      P                 P                   the last backward          2 P
    1      P / dp            P                   the last backward          (1 + 1/dp) P
    2      P / dp            P / dp              each backward              (1 + 1/dp) P
    3      P / dp            P / dp              their block; R: the pass   P / dp; at most
                                                                            P / dp + R + B during it

With dp = 1, stages 1 and 2 hold what 0 does. Gradients come one block at a time, B whole, while
copies go: with one microbatch the most at once is (1 + 1/dp) P + B + H for 1 and 2, 2 P + B + H for
0 (H: head and final norm, which wait).

The loss is divided by the global count of real tokens before backward, so gradients are summed,
never averaged.
"""

from collections.abc import Callable, Container, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise
from typing import Literal

import torch
import torch.distributed as dist
from jaxtyping import Float, Float64
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard

from dolmen.core import collectives, state, transfers
from dolmen.core.mesh import Axis, Mesh
from dolmen.core.torch_private import sharding
from dolmen.core.torch_private.compute import foreach_mul_, foreach_norm
from dolmen.ops.kernels import Kernels

PIECE = 1 << 14  # gradient elements whose squares are added in fp32


@dataclass(frozen=True)
class Unit:
    """A module whose parameters are gathered and reduced together. `experts`: sharded over edp, not
    fsdp. `precise`: computes in the dtypes its parameters are stored in, not in the model's compute
    dtype.
    """

    module: nn.Module
    experts: bool = False
    precise: bool = False


def shard_model(
    model: nn.Module,
    parts: Iterable[Unit],
    mesh: Mesh,
    zero: int,
    compute: torch.dtype,
    partial: Container[str] = (),
    wide_gradients: bool = False,
) -> None:
    """Split the parameters of `model` over fsdp (dp x cp) as ZeRO stage `zero`, in place, by FSDP's
    hooks: each of `parts` (inner ones first) is a unit of communication, the rest one more.
    `partial` names the parameters whose gradient on tp is a partial sum, to be summed over tp too.

    Parameters stay in their own dtype (fp32 masters); units compute in `compute`, on plain tensors;
    gradients are reduced in fp32 (or wider). `wide_gradients`: gathered copies take gradients in
    that dtype too, where functions give them so. Does nothing for a mesh without process groups.
    """
    if mesh.grid is None or mesh.expert_grid is None:
        return
    rest = state.dtype_of(model)
    # fully_shard gives a unit all parameters below it that no unit has yet: so blocks before their
    # model, and experts and routers before their block
    for unit in (*parts, Unit(model)):
        axis, grid = (mesh.edp, mesh.expert_grid) if unit.experts else (mesh.fsdp, mesh.grid)
        # inputs are not cast: rope tables must stay fp32, and activations take the weights' dtype
        # at the embedding
        policy = MixedPrecisionPolicy(
            param_dtype=None if unit.precise else compute,
            reduce_dtype=rest,
            cast_forward_inputs=False,
        )
        if zero == 0:
            sharding.replicate(unit.module, mesh=grid[axis.name], mp_policy=policy)
        else:
            fully_shard(
                unit.module,
                mesh=grid[axis.name],
                reshard_after_forward=zero == 3,
                mp_policy=policy,
                # with exact numerics a rank has whole rows, which are leaves of the norm
                shard_placement_fn=(
                    _even_placement(axis, keeps_rows=wide_gradients) if unit.experts else None
                ),
            )
        assert isinstance(unit.module, FSDPModule)
        if axis.size == 1:  # a factor would be a pass that divides by 1
            if zero > 0:
                unit.module.set_custom_reduce_scatter(_Alone())
            continue
        unit.module.set_gradient_divide_factor(sharding.One(1.0))  # neither call is recursive
        # else NCCL multiplies every element by 1 on its way, and gloo refuses to
        unit.module.set_force_sum_reduction_for_comms(True)
        if axis.reduction == "fixed":
            assert zero > 0, "Layout.check has refused it"
            unit.module.set_custom_reduce_scatter(_InOrder(axis))
    names = {p: name for name, p in model.named_parameters()}
    for record in (r for unit in units(model) for r in sharding.records(unit)):
        state.gather_as_plain(record, mesh.tp if names[record.sharded_param] in partial else None)
        if wide_gradients:
            sharding.widen_gradient(record)


class _InOrder(sharding.ReduceScatter):
    """FSDP's reduce-scatter through core/transfers.py, which adds up ranks in the axis's fixed
    order.
    """

    def __init__(self, axis: Axis):
        """Reduce over `axis`."""
        self.axis = axis

    def allocate(
        self, size: Sequence[int | torch.SymInt], *, dtype: torch.dtype, device: torch.device
    ) -> Tensor:
        """Return an uninitialised communication buffer for FSDP."""
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(
        self,
        output_tensor: Tensor,
        input_tensor: Tensor,
        group: dist.ProcessGroup,
        op: object,
        async_op: bool = False,
    ) -> None:
        """Reduce-scatter `input_tensor` into `output_tensor`, synchronously; FSDP's `group` and
        `op` are those of the axis.
        """
        arriving = transfers.start_reduce_scatter(input_tensor, self.axis)
        output_tensor.copy_(transfers.finish_reduce_scatter(arriving, self.axis))


class _Alone(sharding.ReduceScatter):
    """The reduce-scatter of one rank, whose gradients are already the sum. FSDP allocates a buffer
    that gradients are copied into, and right after it one that it copies their sum into from there.
    Both are one here, and torch skips a copy onto itself (of 33 M gradients 45 ms on a
    CPU).
    """

    def __init__(self) -> None:
        """Start without a buffer."""
        self.filled: Tensor | None = None

    def allocate(
        self, size: Sequence[int | torch.SymInt], *, dtype: torch.dtype, device: torch.device
    ) -> Tensor:
        """Return a new uninitialised buffer on odd calls and the same one again on even calls: FSDP
        asks for an input and then for an output.
        """
        if self.filled is not None:
            out, self.filled = self.filled, None
            return out
        self.filled = torch.empty(*size, dtype=dtype, device=device)
        return self.filled

    def __call__(
        self,
        output_tensor: Tensor,
        input_tensor: Tensor,
        group: dist.ProcessGroup,
        op: object,
        async_op: bool = False,
    ) -> None:
        """Never called, as FSDP skips the reduce-scatter on one rank: raises AssertionError."""
        raise AssertionError


def _even_placement(axis: Axis, keeps_rows: bool) -> Callable[[nn.Parameter], state.Shard]:
    """Return a function that chooses the placement of stacked matrices (of experts) on `axis`: it
    shards the first dim of this rank's part that the axis divides, as experts may be fewer than
    ranks; else dim 0, of which some ranks then hold less than others. `keeps_rows`: the last dim is
    never sharded.
    """

    def place(p: nn.Parameter) -> state.Shard:
        """Return the placement that shards one parameter."""
        return state.Shard(
            next(
                (
                    dim
                    for dim, size in enumerate(
                        state.local_view(p).shape[: -1 if keeps_rows else None]
                    )
                    if size % axis.size == 0
                ),
                0,
            )
        )

    return place


def prefetch(blocks: Sequence[Sequence[nn.Module]]) -> None:
    """Make FSDP gather the parameters of all units of the next of `blocks` (lists of modules, in
    the order of forward) before anything of this one is computed, in forward and, in reverse order,
    in backward.

    By itself a unit is gathered when the host reaches it, which is early where the host runs ahead.
    In a block of experts it stops to read the device, and the gathering of experts would begin when
    the router is done.
    """
    gathered: list[list[FSDPModule]] = [
        [m for m in block if isinstance(m, FSDPModule)] for block in blocks
    ]
    for here, there in pairwise(gathered):
        if here and there:
            here[0].set_modules_to_forward_prefetch(there)
            there[0].set_modules_to_backward_prefetch(here)


def units(model: nn.Module) -> list[FSDPModule]:
    """Return the modules that `shard_model` made units of communication."""
    return [m for m in model.modules() if isinstance(m, FSDPModule)]


@contextmanager
def inference(model: nn.Module) -> Iterator[None]:
    """Context manager: the model is in evaluation mode and gradients are disabled inside;
    afterwards its mode is as before and sharded parameters are at rest again.

    Not torch.inference_mode: ZeRO keeps its gathered parameters for the next step, which must be
    able to train on them.
    """
    training = model.training
    model.eval()
    try:
        with torch.no_grad():
            yield
    finally:
        model.train(training)
        for unit in units(model):
            unit.reshard()


class Reduction:
    """When the gradients of one step cross fsdp, and what was gathered for it is let go:

    zero 2, 3          with each backward
    zero 0, 1          with the last backward of the chunk that they belong to; those of the root
                       (what no block owns) with the last of all
    split backward     all of them after the last weight gradients, whatever the stage

    Two switches of each unit say so to FSDP, and `set_is_last_backward` of the root, that the
    streams of the step are to be joined.
    """

    def __init__(self, model: nn.Module, zero: int, split_backward: bool):
        """Set FSDP's switches for a new step of `model` under ZeRO stage `zero`. `split_backward`:
        the schedule computes weight gradients by themselves. Does nothing for a model without FSDP.
        """
        # FSDP acts from hooks of backward. Two switches of each unit say what its hook does when
        # the gradients of the unit are there: send them, or keep them whole and add the next; free
        # what was gathered, or keep it for the next microbatch. The stages of ZeRO differ in when
        # they are on, 1 and 2 in nothing else: on for every backward, 2 sends m times as many
        # gradients in a step of m microbatches, and holds P / dp of them in between, not P.
        self.root = model if isinstance(model, FSDPModule) else None
        if self.root is None:
            return
        self._cross(units(model), zero >= 2 and not split_backward)
        self.root.set_is_last_backward(False)

    def _cross(self, modules: Iterable[FSDPModule], now: bool) -> None:
        """Set whether each of `modules`, not its submodules, reduces its gradients and frees its
        gathered parameters at the end of its backward.
        """
        for unit in modules:
            unit.set_requires_gradient_sync(now, recurse=False)
            unit.set_reshard_after_backward(now, recurse=False)

    def prepare_backward(self, chunk: Iterable[nn.Module], last_of_chunk: bool, last: bool) -> None:
        """Set which FSDP units reduce their gradients in the coming backward; call before each
        backward that computes weight gradients. `chunk`: the modules it goes through.
        `last_of_chunk`: no later backward of this step goes through them; `last`: none follows in
        this step at all.
        """
        if self.root is None:
            return
        # A pipeline's rank may hold several chunks, each done with at another time. The root's own
        # parameters (embedding, head) are in the first chunk's backward or in the last's, or both:
        # they wait until all are done.
        if last_of_chunk:
            self._cross([unit for module in chunk for unit in units(module)], True)
        if last:
            self._cross([self.root], True)
        self.root.set_is_last_backward(last)

    def end_backward(self, micro: int, last: bool) -> None:
        """Called after each action that computes gradients, of microbatch `micro`; `last` of the
        step. Does nothing: autograd and FSDP have accumulated them. For ExactReduction to override.
        """

    def accumulate_weight_gradients(self, last: bool) -> None:
        """Take over the weight gradients that a split backward computed after FSDP's hooks had run:
        FSDP's end-of-backward callback, run by hand, adds them to its unsharded fp32 gradients.
        With `last`, also reduce all gradients over fsdp. Does nothing without FSDP.
        """
        if self.root is None:
            return
        # A split backward has run FSDP's hooks when there were no dW yet: they found nothing to
        # send. W has added to the plain copies since; the hook that ends a backward looks at each
        # unit once more, and takes what has come.
        if last:
            # Those that I has made itself (norms, biases) wait in fp32 by now, those of W in the
            # dtype of compute; of one microbatch no sum has made them alike, as FSDP sends them.
            sharding.run_final_callback(self.root)
            self._cross(units(self.root), True)
        self.root.set_is_last_backward(last)
        sharding.run_final_callback(self.root)


def sum_over(p: nn.Parameter, axis: Axis) -> None:
    """Sum p's gradient over the ranks of `axis`, in place; collective. For a parameter stored on
    several of them (tied embedding and head, partial sums on tp): all hold the same shard of it.
    Asserts that there is a gradient.
    """
    assert p.grad is not None
    collectives.sum_(state.local_view(p.grad), axis)


def sum_partial(model: nn.Module, partial: Container[str], mesh: Mesh) -> None:
    """Sum the gradients of the parameters named in `partial` over tp, in place, after a backward.
    For a model without FSDP (`shard_model` not called), whose gradients nothing else reduces.
    """
    for name, p in model.named_parameters():
        if name in partial:
            sum_over(p, mesh.tp)


def gradient_norm(
    parameters: Iterable[nn.Parameter],
    mesh: Mesh,
    twice: nn.Parameter | None = None,
    squares: Literal["pieces", "whole"] = Kernels().squares,
) -> Float64[Tensor, ""]:
    """Return the Euclidean norm of the model's global gradient, fp64, the same on every rank: each
    element is counted once, however often it is replicated. `twice`: a parameter that two stages
    own (tied embedding), counted half on each. `squares`: how they are added, see ops/kernels.py.
    Collective over the world.

    On CPU, torch adds squares one by one in fp32 (30 M elements: 1.7e-3 off), so pieces are added
    in fp64. On a GPU its norm is a tree, and one call is a kernel for many tensors: the number of
    launches does not grow with that of parameters.
    """
    shards = [
        (state.replication_weight(p.grad) / (2 if p is twice else 1), state.local_view(p.grad))
        for p in parameters
        if p.grad is not None
    ]
    total = torch.zeros((), dtype=torch.float64, device=mesh.device)
    for weight in dict.fromkeys(weight for weight, _ in shards):
        mine = [s for w, s in shards if w == weight]
        norms = (
            torch.stack(foreach_norm(mine))
            if squares == "whole"
            else torch.cat([_piece_norms(s) for s in mine])
        )
        total += norms.double().square().sum() * weight
    return collectives.reduce_scalar(total, mesh.world).sqrt()


def _piece_norms(gradient: Tensor) -> Float[Tensor, " pieces"]:
    """Return the fp32 norm of each PIECE consecutive elements of a gradient, and of those that are
    left. All full pieces are rows of one matrix, so one call has all of them on all threads (33 M
    elements 13.6 ms, on two threads 6.6; a call each 18.5).
    """
    flat = gradient.flatten()
    full = len(flat) // PIECE * PIECE
    rows = torch.linalg.vector_norm(flat[:full].view(-1, PIECE), dim=1)
    return torch.cat((rows, torch.linalg.vector_norm(flat[full:]).view(1)))


def scale_gradients(parameters: Iterable[nn.Parameter], factor: Float[Tensor, ""]) -> None:
    """Multiply all gradients by `factor`, in place: for clipping, and undoing a loss scale."""
    parts = [state.local_view(p.grad) for p in parameters if p.grad is not None]
    if not parts:  # of a stage where all is frozen
        return
    by = factor.to(parts[0].dtype)
    foreach_mul_(parts, by)
