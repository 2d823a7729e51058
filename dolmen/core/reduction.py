"""Sums by a tree, neighbours first:

    ((0 + 1) + (2 + 3)) + ((4 + 5) + 6)        of 7 leaves

The tree over four leaves equals that over two which are sums of two leaves each. So whoever holds
an aligned run of 2^k leaves, or the last ones, may add them beforehand: no bit changes.
"""

import torch
from jaxtyping import Shaped
from torch import Tensor


def tree_sum(parts: Shaped[Tensor, " n *shape"]) -> Shaped[Tensor, "*shape"]:
    """Return parts[0] + parts[1] + ..., neighbours first, then neighbouring sums and so on; the
    last of an odd number waits for the next round. Half precision is added in fp32 and rounded
    once.
    """
    # bf16 sums of 8 ranks would otherwise be rounded three times
    sums = widen(parts)
    while len(sums) > 1:
        even = len(sums) // 2 * 2
        pairs = sums[0:even:2] + sums[1:even:2]
        sums = pairs if even == len(sums) else torch.cat([pairs, sums[even:]])
    return sums[0].to(parts.dtype)


def widen(x: Shaped[Tensor, "*shape"]) -> Shaped[Tensor, "*shape"]:
    """Return x of half precision (bf16, fp16) in fp32, any other x itself."""
    return x.float() if x.dtype in (torch.bfloat16, torch.float16) else x


class Tree:
    """The sum of `leaves` tensors by the tree of `tree_sum`, given one at a time in any order. In
    order, at most log2(leaves) + 1 sums are held at once. Sums of half precision are fp32. A leaf
    of zeros may be given as None.
    """

    def __init__(self, leaves: int):
        """Start a sum of `leaves` tensors."""
        self.leaves = leaves
        self.waiting: dict[tuple[int, int], Tensor | None] = {}
        """Sums whose neighbour has not come, by the number of nodes of their level and their
        index.
        """

    def add(self, index: int, leaf: Tensor | None) -> Tensor | None:
        """Add leaf number `index`, a tensor, which may be overwritten; None: zeros. Return the sum
        of all when this was the last leaf that was missing, else None; None, too, if all are zeros.
        """
        nodes = self.leaves
        while nodes > 1:
            if index ^ 1 < nodes:  # else the last of an odd number: it waits for the next round
                if (nodes, index ^ 1) not in self.waiting:
                    self.waiting[nodes, index] = leaf
                    return None
                leaf = _add(self.waiting.pop((nodes, index ^ 1)), leaf)
            index, nodes = index // 2, -(-nodes // 2)
        return leaf


def _add(a: Tensor | None, b: Tensor | None) -> Tensor | None:
    """Return a + b, None standing for zeros; a, or a copy of half precision's, is overwritten."""
    if a is None or b is None:
        return b if a is None else a
    return widen(a).add_(b)
