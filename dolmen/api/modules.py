"""Any module of torch, split: `parallelize`."""

from collections.abc import Mapping

import torch

from dolmen.core.mesh import Mesh
from dolmen.parallel import styles


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

    See examples/toymodel.py and docs/parallelize.md.
    """
    return styles.parallelize(module, plan, mesh, zero)
