"""What a rank sends in a step, counted as it is sent."""

from collections import Counter

import torch
from torch.utils._python_dispatch import TorchDispatchMode


class Sent(TorchDispatchMode):
    """Bytes that this rank gives to others in collectives (a ring's (n - 1) / n, twice for a sum)
    and in sends.
    """

    def __init__(self):
        super().__init__()
        self.bytes = Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        name = func.__name__.split(".")[0].strip("_")
        if func.namespace in ("c10d", "_c10d_functional"):
            tensors = [
                t
                for a in args[:2]
                for t in torch.utils._pytree.tree_leaves(a)
                if isinstance(t, torch.Tensor)
            ]
            largest = max(
                (t.nbytes for t in [*tensors, *([out] if isinstance(out, torch.Tensor) else [])]),
                default=0,
            )
            if "all_reduce" in name or "allreduce" in name:
                self.bytes["sums"] += largest
            elif "gather" in name:
                self.bytes["gathers"] += largest // 2
            elif "reduce_scatter" in name or "all_to_all" in name:
                self.bytes["scatters"] += largest // 2
            elif name in ("send", "isend"):
                self.bytes["sends"] += largest
        return out
