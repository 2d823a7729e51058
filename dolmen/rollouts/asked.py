"""What a model makes of rows that every rank has: each copy of it asks its share."""

from collections.abc import Callable

import torch
from jaxtyping import Float
from torch import Tensor

from dolmen.core import collectives
from dolmen.core.mesh import Mesh
from dolmen.data.batch import Batch


def of_rows(
    batch: Callable[[slice], Batch],
    ask: Callable[[Batch], Tensor],
    rows: int,
    size: int,
    mesh: Mesh,
) -> Float[Tensor, "rows length *numbers"]:
    """`ask(batch(...))` of so many rows, `size` (which divides them) at once over all of dp: on
    every rank, on the CPU, in fp32. Every rank of `mesh` calls it.
    """
    mine, found = size // mesh.dp.size, []
    for first in range(0, rows, size):
        own = slice(first + mesh.dp.rank * mine, first + (mesh.dp.rank + 1) * mine)
        here = ask(batch(own))
        whole = torch.zeros((size, *here.shape[1:]), dtype=here.dtype, device=here.device)
        whole[own.start - first : own.stop - first] = here
        # of each row one rank of dp has the numbers, and the others 0
        found.append(collectives.reduce_scalar(whole, mesh.dp).float().cpu())
    return torch.cat(found)
