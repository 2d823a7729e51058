"""ALiBi (Press et al., 2108.12409): slopes; and Falcon's form of it, which keys carry."""

import torch
import torch.nn.functional as F
from jaxtyping import BFloat16, Float, Int64
from torch import Tensor

from dolmen.core import device


def slopes(heads: int) -> tuple[float, ...]:
    """Of each head, as the paper's code, BLOOM and Falcon have them: 2^(-8/n), 2^(-16/n), ..., 2^-8
    where n = heads is a power of two. Else those of the next lower n, and after them the first,
    third, fifth, ... of 2 n, between which n's own lie.
    """
    n = 1 << (heads.bit_length() - 1)
    return (
        *(2 ** (-8 * i / n) for i in range(1, n + 1)),
        *(2 ** (-4 * i / n) for i in range(1, 2 * (heads - n), 2)),
    )


def steps(heads: int, positions: Int64[Tensor, "b s"]) -> BFloat16[Tensor, "b s {heads}"]:
    """What the products of the key at each of `positions` grow by, of each head; `b` may be 1.
    Slopes, positions and their products are rounded, as in the build_alibi_tensor of Falcon in
    transformers.
    """
    each = torch.tensor(slopes(heads), dtype=torch.bfloat16)
    return device.send(each, positions.device) * positions[..., None].bfloat16()


def carried(
    q: Float[Tensor, "b s heads size"],
    k: Float[Tensor, "b s heads size"],
    steps: Float[Tensor, "#b s heads"],
    more: int,
) -> tuple[Float[Tensor, "b s heads wide"], Float[Tensor, "b s heads wide"]]:
    """Both `more` numbers wider, so that each product is the sum of what it was and of the key's
    step: a 1 in every query, the step in the key, then zeros.
    """
    step, zeros = steps.to(k.dtype).expand(k.shape[:3])[..., None], (0, more - 1)
    return F.pad(F.pad(q, (0, 1), value=1.0), zeros), F.pad(torch.cat((k, step), -1), zeros)
