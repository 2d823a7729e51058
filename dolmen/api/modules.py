"""Any torch.nn.Module: `parallelize` it, train it with `step`, and `save` and `restore` it."""

import os
from collections.abc import Iterable, Mapping

import torch
from jaxtyping import Float
from torch import Tensor

from dolmen.core.mesh import Mesh
from dolmen.parallel import styles
from dolmen.training import modules
from dolmen.training.modules import ModuleStepMetrics


def parallelize(
    module: torch.nn.Module,
    plan: Mapping[str, styles.Style],
    mesh: Mesh,
    *,
    zero: int = 0,
) -> torch.nn.Module:
    """Shard a module in place over the mesh axis tp, and over dp by ZeRO stage `zero`; return it.

    `plan` maps names of submodules (patterns too) to how each is split: columns or rows of a linear
    layer, a norm by the tokens of a sequence, an embedding or a head by its vocabulary. Every rank
    must have the same values before, and has the same outputs after. Gradients are summed over dp,
    so divide the loss by the count of the whole batch. Raises ValueError for a module that cannot
    be split so.

        mesh = Layout(tp=2).mesh(torch.device("cpu"))
        model = dolmen.parallelize(ToyModel(), {"net1": "columns", "net2": "rows"}, mesh)
        optimizer = torch.optim.AdamW(model.parameters())

    See examples/toymodel.py and docs/how-to/parallelize.md.
    """
    return styles.parallelize(module, plan, mesh, zero)


def step(
    module: torch.nn.Module,
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
    return modules.step(module, optimizer, loss, mesh, clip)


def save(
    folder: str | os.PathLike,
    module: torch.nn.Module,
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
    modules.save(os.fspath(folder), module, optimizer, mesh, step, keep)


def restore(
    folder: str | os.PathLike,
    module: torch.nn.Module,
    optimizer: torch.optim.Optimizer,
    mesh: Mesh,
) -> int:
    """Restore module and optimizer, to the bit and in any layout, from the newest checkpoint in
    `folder`; return its step, or 0 without a change if there is none. The optimizer keeps its own
    options, such as the learning rate. Every rank calls it.
    Raises KeyError for another module, ValueError for other shapes and another optimizer, Damaged
    for files that are not what was saved.
    """
    return modules.restore(os.fspath(folder), module, optimizer, mesh)
