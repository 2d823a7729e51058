"""Any module of torch, split, trained and kept: `parallelize`, `step`, `save`, `restore`."""

import os
from collections.abc import Iterable, Mapping

import torch
from jaxtyping import Float
from torch import Tensor

from dolmen.core.mesh import Mesh
from dolmen.parallel import styles
from dolmen.training import modules
from dolmen.training.modules import Stepped


def parallelize(
    module: torch.nn.Module,
    plan: Mapping[str, styles.Style],
    mesh: Mesh,
    *,
    zero: int = 0,
) -> torch.nn.Module:
    """Any module of torch, in place, split over the axis tp of `mesh`, and over dp as stage `zero`
    of ZeRO. `plan` names its parts, patterns too, and how each is split: columns or rows of a
    linear layer, a norm by the tokens of a sequence, an embedding or a head by its vocabulary.
    Every rank has the same values before, and the same answers after. Gradients are summed over dp,
    so a loss is divided by the count of the whole batch. Raises ValueError for what cannot be split
    so.

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
) -> Stepped:
    """One update of a module that `parallelize` has split, by any optimizer of torch: backward,
    gradients summed over dp, their norm over the whole module clipped at `clip` (0: not), update.
    `loss` is of this rank's rows, divided by the count of the whole batch; several, of
    microbatches, accumulate, and are best made one by one:

        told = dolmen.step(model, optimizer, (loss_of(rows) for rows in microbatches), mesh)

    Every rank calls it, and is told the loss of the whole batch and the norm before clipping. Where
    either is not finite no parameter changes. Raises ValueError for a `clip` below 0, and for no
    loss.
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
    """A checkpoint of a split module and of its optimizer after `step` updates, in a folder of
    `folder`, whole or not at all; of those there the `keep` newest stay (0: all). Any layout reads
    it. Every rank calls it. Raises ValueError for an optimizer that keeps other things than tensors
    and numbers of each parameter, and NotSaved where it could not be written.
    """
    modules.save(os.fspath(folder), module, optimizer, mesh, step, keep)


def restore(
    folder: str | os.PathLike,
    module: torch.nn.Module,
    optimizer: torch.optim.Optimizer,
    mesh: Mesh,
) -> int:
    """The step of the newest checkpoint in `folder`, with module and optimizer as they were then,
    to the bit, in whatever layout either is; 0, and nothing changed, where there is none. The
    optimizer's options, as its learning rate, are those that it was made with. Every rank calls it.
    Raises KeyError for another module, ValueError for other shapes and another optimizer, Damaged
    for files that are not what was saved.
    """
    return modules.restore(os.fspath(folder), module, optimizer, mesh)
