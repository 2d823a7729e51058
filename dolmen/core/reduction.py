"""In which order partial sums of several ranks are added: the one place that says so.

    fast     the backend adds, on the way: in the order of its rings and trees, which follow the
             number of nodes, the size of what is sent and the version of NCCL or gloo
    fixed    ranks exchange parts, and each adds up its own, neighbours first:

                 ((0 + 1) + (2 + 3)) + ((4 + 5) + 6)        of 7 ranks

The tree of four ranks that hold one part each is that of two that have each added two parts before.
Over n ranks a fixed sum sends as many bytes per rank as a ring would, 2 (n - 1) / n of what is
summed, and (n - 1) / n to scatter it; but straight to the rank that adds, so that of a node with g
ranks up to g times as many leave.
"""

from typing import Literal

import torch
from jaxtyping import Shaped
from torch import Tensor

Order = Literal["fast", "fixed"]


def tree(parts: Shaped[Tensor, " n *shape"]) -> Shaped[Tensor, "*shape"]:
    """The sum of parts[0], parts[1] and so on, neighbours first; of an odd number the last waits
    for the next round. Half precision is added in fp32, and rounded once.
    """
    sums = parts.to(torch.promote_types(parts.dtype, torch.float32)) if _half(parts) else parts
    while len(sums) > 1:
        even = len(sums) // 2 * 2
        sums = torch.cat([sums[0:even:2] + sums[1:even:2], sums[even:]])
    return sums[0].to(parts.dtype)


def _half(x: Tensor) -> bool:
    return x.dtype in (torch.bfloat16, torch.float16)
