"""Muon (Jordan et al., 2024, kellerjordan.github.io/posts/muon), and the Newton-Schulz iteration
that orthogonalises its updates: it brings all singular values of a matrix near 1.

    X0 = G / |G|         |G| Frobenius: no singular value is over 1
    A  = X X^T           [m, m], m the shorter side
    X  = a X + (b A + c A A) X

takes every singular value s to a s + b s^3 + c s^5. The coefficients are not those that converge:
their slope at 0 is as steep as can be, and after five steps what began between 0.01 and 1 lies
between 0.7 and 1.2.

Muon (Jordan et al., 2024): the momentum of a hidden matrix, orthogonalised. With the decay and
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
from contextlib import nullcontext

import torch
from jaxtyping import Float
from torch import Tensor, nn

from dolmen.core import state
from dolmen.core.mesh import Mesh
from dolmen.core.torch_private.compute import foreach_add, foreach_add_, foreach_mul_
from dolmen.ops import invariant
from dolmen.optim.config import OptimizerConfig
from dolmen.parallel.assembly import Assembly

A, B, C = 3.4445, -4.7750, 2.0315
STEPS = 5
EPS = 1e-7  # of the norm: a matrix of zeros stays one


def orthogonalize(
    g: Float[Tensor, "rows columns"], dtype: torch.dtype
) -> Float[Tensor, "rows columns"]:
    """Return g with its singular values brought near 1 (0.7 to 1.2) by STEPS Newton-Schulz
    iterations in `dtype`, which the result has. The norm is summed in fp64, as torch adds squares
    one by one on a CPU.
    """
    norm = torch.linalg.vector_norm(g, dtype=torch.float64) + EPS
    x = (g / norm.to(g.dtype)).to(dtype)
    tall = g.shape[0] > g.shape[1]
    if tall:
        x = x.t()
    for _ in range(STEPS):
        a = x @ x.t()
        x = A * x + (B * a + C * (a @ a)) @ x
    return x.t() if tall else x


def flops(rows: int, columns: int) -> int:
    """Return the number of floating-point operations of `orthogonalize` for one [rows, columns]
    matrix.
    """
    short, long = sorted((rows, columns))
    return STEPS * (4 * short * short * long + 2 * short**3)


KINDS = ("momentum",)  # of state
RATIO = 0.2  # root mean square of an update's elements, over lr


class Muon(torch.optim.Optimizer):
    """Muon over parameters [rows, columns], or stacks of such, however they are sharded. All ranks
    that hold parts of them make each step together.
    """

    def __init__(
        self,
        parameters: Iterable[nn.Parameter],
        config: OptimizerConfig,
        mesh: Mesh,
        exact: bool = False,
    ):
        """Take the hyperparameters from `config`, and assign each matrix an owner rank. `exact`:
        orthogonalize on one thread, as the number of threads changes bits.
        """
        muon = config.muon
        group = {
            "params": list(parameters),
            "lr": config.lr,
            "weight_decay": config.weight_decay,
            "momentum": muon.momentum,
            "kinds": KINDS,
        }
        super().__init__([group], {})
        self.half, self.exact = muon.dtype == "bfloat16", exact
        self.assembly = Assembly(group["params"], mesh, flops)

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Make one update of every parameter, its momentum and its step count, in place; each must
        have a gradient. `closure` is torch's and unused. Collective: all ranks that hold parts of
        the matrices.
        """
        (group,) = self.param_groups
        parameters = group["params"]
        gradients = [_view(p.grad) for p in parameters]
        states = [self.state[p] for p in parameters]
        momenta = [_view(s["momentum"]) for s in states]
        foreach_add_([s["step"] for s in states], 1)
        foreach_mul_(momenta, group["momentum"])
        foreach_add_(momenta, gradients)
        ahead = foreach_add(gradients, momenta, alpha=group["momentum"])
        values = [_view(p) for p in parameters]
        foreach_mul_(values, 1 - group["lr"] * group["weight_decay"])
        updates = self.assembly.apply(self._direction, matrices(ahead))
        for value, update in zip(matrices(values), updates, strict=True):
            value.add_(update, alpha=-group["lr"])

    def _direction(self, full: Tensor) -> Tensor:
        """Return what the learning rate multiplies, and is then subtracted from the weight: the
        orthogonalised matrix `full`, times its scale. Computed on one thread with exact numerics.
        """
        dtype = torch.bfloat16 if self.half else full.dtype
        scale = RATIO * math.sqrt(max(full.shape))
        with invariant.one_thread() if self.exact else nullcontext():
            return scale * orthogonalize(full, dtype).to(full.dtype)


def matrices(tensors: Iterable[Tensor]) -> list[Tensor]:
    """Return views of all matrices of the tensors: a 2D tensor is one, a 3D tensor a stack of
    them.
    """
    return [m for t in tensors for m in (t.unbind() if t.ndim == 3 else [t])]


def _view(p: Tensor | None) -> Tensor:
    """Return this rank's shard of a parameter, gradient or state as a plain tensor on the same
    memory; asserts that it is not None.
    """
    assert p is not None, "a trained matrix has no gradient"
    return state.local_view(p)
