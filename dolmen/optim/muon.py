"""Muon (Jordan et al., 2024): the momentum of a hidden matrix, orthogonalised. With the decay and
the scale of Moonlight (Liu et al., 2502.16982):

    M = momentum * M + G
    O = orthogonalize(G + momentum * M)                 Nesterov's
    W = W - lr * (0.2 sqrt(max(rows, columns)) O + decay * W)

An orthogonal [rows, columns] matrix has elements of root mean square 1 / sqrt(max(rows, columns)).
Times the scale that is 0.2, about what AdamW's updates have, so learning rate and decay are those
of AdamW, and one of each will do for all parameters. (Jordan's sqrt(max(1, rows / columns)) asks
for a rate of its own for matrices.)

Momentum lies as its parameter does and is this rank's; of the sum that is orthogonalised the whole
logical matrix comes together on one rank (parallel/assembly.py).
"""

import math
from collections.abc import Iterable

import torch
from torch import Tensor, nn

from dolmen.core import state
from dolmen.core.mesh import Mesh
from dolmen.core.torch_private.compute import foreach_add, foreach_add_, foreach_mul_
from dolmen.ops import newton_schulz
from dolmen.optim.config import OptimizerConfig
from dolmen.parallel.assembly import Assembly

KINDS = ("momentum",)  # of state
RATIO = 0.2  # root mean square of an update's elements, over lr


class Muon(torch.optim.Optimizer):
    """Parameters are [rows, columns], or stacks of such, and lie anyhow. All ranks that hold parts
    of them make each step together.
    """

    def __init__(self, parameters: Iterable[nn.Parameter], config: OptimizerConfig, mesh: Mesh):
        own = config.muon
        group = {
            "params": list(parameters),
            "lr": config.lr,
            "weight_decay": config.weight_decay,
            "momentum": own.momentum,
            "kinds": KINDS,
        }
        super().__init__([group], {})
        self.half = own.dtype == "bfloat16"
        self.assembly = Assembly(group["params"], mesh, newton_schulz.flops)

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        """One update of every parameter, each of which has a gradient."""
        (group,) = self.param_groups
        parameters = group["params"]
        gradients = [_view(p.grad) for p in parameters]
        kept = [self.state[p] for p in parameters]
        momenta = [_view(s["momentum"]) for s in kept]
        foreach_add_([s["step"] for s in kept], 1)
        foreach_mul_(momenta, group["momentum"])
        foreach_add_(momenta, gradients)
        ahead = foreach_add(gradients, momenta, alpha=group["momentum"])
        values = [_view(p) for p in parameters]
        foreach_mul_(values, 1 - group["lr"] * group["weight_decay"])
        updates = self.assembly.apply(self._direction, matrices(ahead))
        for value, update in zip(matrices(values), updates, strict=True):
            value.add_(update, alpha=-group["lr"])

    def _direction(self, whole: Tensor) -> Tensor:
        """What a matrix moves by, over -lr."""
        dtype = torch.bfloat16 if self.half else whole.dtype
        scale = RATIO * math.sqrt(max(whole.shape))
        return scale * newton_schulz.orthogonalize(whole, dtype).to(whole.dtype)


def matrices(tensors: Iterable[Tensor]) -> list[Tensor]:
    """Those of which some are stacks, each by itself: views."""
    return [m for t in tensors for m in (t.unbind() if t.ndim == 3 else [t])]


def _view(p: Tensor | None) -> Tensor:
    assert p is not None, "a trained matrix has no gradient"
    return state.local_view(p)
