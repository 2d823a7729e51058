"""Training of a module that is not the house's decoder, split by parallel/styles.py: a step as
step.py ends it, with any optimizer of torch, and checkpoints that any layout reads.

    model/NAME       a parameter, or a buffer that the module's state_dict has
    KIND/NAME        what the optimizer keeps of it under the name KIND, as exp_avg; a parameter of
                     one mesh is cut as it is, so another layout reads its own part
    state.json       the step, and what is a number there and no tensor
"""

from collections.abc import Iterable
from os import PathLike
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from jaxtyping import Float
from torch import Tensor, nn

from dolmen.checkpoint.reader import Reader
from dolmen.checkpoint.store import Checkpoints
from dolmen.core import collectives, state
from dolmen.core.mesh import Mesh, process_group
from dolmen.optim.config import OptimizerConfig
from dolmen.optim.optimizer import KINDS, MODEL, AdamW
from dolmen.parallel import data

NUMBERS = "numbers"


class ModuleStepMetrics(NamedTuple):
    """Metrics of a step, the same on every rank."""

    loss: float
    """Loss of the global batch: the sum over ranks of dp."""
    grad_norm: float
    """Norm of all gradients of the module before clipping."""


def adamw(module: nn.Module, config: OptimizerConfig) -> AdamW:
    """Return an AdamW optimizer over the module's trainable parameters with the options of `config`
    (learning rate, betas, eps, weight decay), as a run has it: weight decay for matrices, none for
    vectors. It is dolmen's own class, whose update of sharded parameters takes a tenth of the time
    of torch's.
    """
    trained = [p for p in module.parameters() if p.requires_grad]
    kinds = [
        {
            "params": [p for p in trained if (p.ndim > 1) == matrices],
            "weight_decay": config.weight_decay if matrices else 0.0,
            "kinds": KINDS["adamw"],
        }
        for matrices in (True, False)
    ]
    return AdamW(
        [kind for kind in kinds if kind["params"]],
        lr=config.lr,
        betas=(config.beta1, config.beta2),
        eps=config.eps,
        fused=True,
    )


def step(
    module: nn.Module,
    optimizer: torch.optim.Optimizer,
    loss: Float[Tensor, ""] | Iterable[Float[Tensor, ""]],
    mesh: Mesh,
    *,
    clip: float = 1.0,
) -> ModuleStepMetrics:
    """Update a parallelized module once by any torch optimizer: backward, sum of gradients over dp,
    clipping of their global norm at `clip` (0: off), optimizer step.

    `loss` is that of this rank's rows, divided by the count of the whole batch. The losses of
    several microbatches accumulate; an iterator holds the graph of one of them at a time:

        result = dolmen.step(model, optimizer, (loss_of(rows) for rows in microbatches), mesh)

    Every rank calls it; the result has the loss of the whole batch and the norm before clipping. If
    either is not finite, no parameter changes. Raises ValueError for a `clip` below 0, and without
    a loss.
    """
    if not clip >= 0:
        raise ValueError(f"clip is {clip}: it must be at least 0 (0: no clipping)")
    total = _backward(module, loss, mesh)
    parameters = [p for p in module.parameters() if p.requires_grad]
    norm = data.gradient_norm(parameters, mesh)
    if clip > 0:
        # as torch.nn.utils.clip_grad_norm_, without reading the norm on the host
        data.scale_gradients(parameters, (clip / (norm + 1e-6)).clamp(max=1.0))
    # reduced numbers: every rank decides the same
    numbers = torch.stack([collectives.reduce_scalar(total, mesh.dp), norm])
    if numbers.isfinite().all():
        optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    return ModuleStepMetrics(*numbers.tolist())


def _backward(module: nn.Module, loss: Tensor | Iterable[Tensor], mesh: Mesh) -> Float[Tensor, ""]:
    """Run backward of the loss, or of the loss of each microbatch in turn, and reduce the gradients
    over dp (FSDP). Return the sum of this rank's losses, in fp64. Raises ValueError without a loss.
    """
    if isinstance(loss, Tensor):
        reduction = data.Reduction(module, 0, False)
        reduction.prepare_backward([module], True, True)
        loss.backward()
        return loss.detach().double()
    # which is the last one is known after it: gradients wait, as those of a split backward do
    reduction, total = data.Reduction(module, 0, True), None
    for loss_part in loss:
        loss_part.backward()
        value = loss_part.detach().double()
        total = value if total is None else total + value
    if total is None:
        raise ValueError("step() needs at least one loss")
    reduction.accumulate_weight_gradients(True)
    return total


def save(
    folder: str | PathLike,
    module: nn.Module,
    optimizer: torch.optim.Optimizer,
    mesh: Mesh,
    *,
    step: int,
    keep: int = 0,
) -> None:
    """Save a parallelized module and its optimizer after `step` updates, atomically, in a subfolder
    of `folder`; keep the `keep` newest checkpoints (0: all). Any layout can restore it. Every rank
    calls it. Raises ValueError for an optimizer whose state is not tensors and numbers per
    parameter, and NotSaved if it could not be written.
    """
    tensors, numbers = _checkpoint_state(module, optimizer)
    _store(folder, mesh, keep).save(step, tensors, {"step": step, NUMBERS: numbers}, wait=True)


def restore(
    folder: str | PathLike, module: nn.Module, optimizer: torch.optim.Optimizer, mesh: Mesh
) -> int:
    """Restore module and optimizer, to the bit and in any layout, from the newest checkpoint in
    `folder`; return its step, or 0 without a change if there is none. The optimizer keeps its own
    options, such as the learning rate. Every rank calls it.
    Raises KeyError for another module, ValueError for other shapes and another optimizer, Damaged
    for files that are not what was saved.
    """
    store = _store(folder, mesh)
    newest = store.newest()
    # raises on every rank where the steps differ
    store.together(newest or 0, lambda: None)  # a rank may see another folder than the others
    if newest is None:
        return 0
    stored = set(store.together(newest, lambda: sorted(Reader(store.path(newest)).stored))[0])
    numbers = store.meta(newest).get(NUMBERS, {})
    stored_state = {n for n in stored if not n.startswith(MODEL)} | {*numbers}
    before = dict(optimizer.state)
    try:
        _initialize_state(optimizer)
        tensors, local_numbers = _checkpoint_state(module, optimizer)
        stored_kinds, kinds = (
            {_kind(n) for n in names} for names in (stored_state, {*tensors, *local_numbers})
        )
        if stored_state and stored_kinds != (expected := kinds - {_kind(MODEL)}):
            raise ValueError(
                f"{store.path(newest)} was saved with an optimizer that keeps "
                f"{sorted(stored_kinds)}, and {type(optimizer).__name__} keeps {sorted(expected)}: "
                "use the same one"
            )
        # a parameter that no gradient has reached yet has no state
        store.load(newest, {n: t for n, t in tensors.items() if n in stored or n.startswith(MODEL)})
    except BaseException:
        for p in optimizer.state.keys() - before.keys():  # begun here, and filled with nothing
            del optimizer.state[p]
        raise
    for name, p in _parameter_names(module, optimizer).items():
        restored = optimizer.state[p]
        for kind in [*restored]:
            if f"{kind}/{name}" in numbers:
                restored[kind] = numbers[f"{kind}/{name}"]
            elif f"{kind}/{name}" not in stored:
                del restored[kind]
        if not restored:
            del optimizer.state[p]
    return newest


def _kind(name: str) -> str:
    """Return the part of a checkpoint's tensor name before the slash: "model" for a parameter, or
    the optimizer's name for its state, such as "exp_avg".
    """
    return name.partition("/")[0]


def _store(folder: str | PathLike, mesh: Mesh, keep: int = 0) -> Checkpoints:
    """Return the store of checkpoints in a folder, which keeps the `keep` newest (0: all). All such
    stores of this process communicate over one process group of all ranks, made at the first call
    (collective).
    """
    group = None
    if mesh.grid is not None:
        group = process_group(list(range(dist.get_world_size())), "dolmen checkpoints of modules")
    return Checkpoints(Path(folder), mesh, keep, group)


def _parameter_names(
    module: nn.Module, optimizer: torch.optim.Optimizer
) -> dict[str, nn.Parameter]:
    """Return name in the module -> parameter, for the parameters that the optimizer updates. Raises
    ValueError if one of them does not belong to the module.
    """
    names = {p: name for name, p in module.named_parameters()}
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    if strange := [p for p in parameters if p not in names]:
        raise ValueError(
            f"{len(strange)} of {len(parameters)} parameters of the optimizer do not belong to "
            "the module: create the optimizer after dolmen.parallelize, which replaces parameters"
        )
    return {names[p]: p for p in parameters}


def _checkpoint_state(
    module: nn.Module, optimizer: torch.optim.Optimizer
) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Return (tensors, numbers) that a checkpoint stores of module and optimizer, each by name,
    after resharding parameters that FSDP has gathered. Raises ValueError for an optimizer state
    that another layout could not read.
    """
    for unit in data.units(module):
        unit.reshard()  # after a forward without backward it shows what was gathered
    saved = module.state_dict().keys()
    tensors = {f"{MODEL}{name}": p for name, p in module.named_parameters()}
    tensors |= {f"{MODEL}{name}": b for name, b in module.named_buffers() if name in saved}
    numbers: dict[str, Any] = {}
    for name, p in _parameter_names(module, optimizer).items():
        for kind, value in optimizer.state.get(p, {}).items():
            # sharded as its parameter is, or a scalar (a step count): another layout can read
            # either
            full = isinstance(value, Tensor) and (
                value.ndim == 0
                or state.is_distributed(type(value)) == state.is_distributed(type(p))
            )
            if full:
                tensors[f"{kind}/{name}"] = value
            elif isinstance(value, (int, float)):
                numbers[f"{kind}/{name}"] = value
            elif value is not None:
                raise ValueError(
                    f"{type(optimizer).__name__} keeps a {type(value).__name__} as {kind} of "
                    f"{name}, which must be a number or a tensor sharded like the parameter to be "
                    "readable at other layouts"
                )
    return tensors, numbers


@torch.no_grad()
def _initialize_state(optimizer: torch.optim.Optimizer) -> None:
    """Create the optimizer's state, so that a checkpoint can be loaded into it, by a step with
    gradients and learning rate of 0. Parameters stay as they are; gradients and rates are restored.
    """
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    gradients = [p.grad for p in parameters]
    rates = [group["lr"] for group in optimizer.param_groups]
    # a learning rate of 0 keeps the parameters; weight decay is scaled by it in torch's optimizers
    for group in optimizer.param_groups:
        group["lr"] = torch.zeros_like(group["lr"]) if isinstance(group["lr"], Tensor) else 0.0
    for p in parameters:
        p.grad = torch.zeros_like(p)
    optimizer.step()
    for p, grad in zip(parameters, gradients, strict=True):
        p.grad = grad
    for group, rate in zip(optimizer.param_groups, rates, strict=True):
        group["lr"] = rate
