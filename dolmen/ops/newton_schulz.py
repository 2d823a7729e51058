"""A matrix with all its singular values brought near 1, by Newton-Schulz (Jordan et al., 2024,
kellerjordan.github.io/posts/muon).

    X0 = G / |G|         |G| Frobenius: no singular value is over 1
    A  = X X^T           [m, m], m the shorter side
    X  = a X + (b A + c A A) X

takes every singular value s to a s + b s^3 + c s^5. The coefficients are not those that converge:
their slope at 0 is as steep as can be, and after five steps what began between 0.01 and 1 lies
between 0.7 and 1.2.
"""

import torch
from jaxtyping import Float
from torch import Tensor

A, B, C = 3.4445, -4.7750, 2.0315
STEPS = 5
EPS = 1e-7  # of the norm: a matrix of zeros stays one


def orthogonalize(
    g: Float[Tensor, "rows columns"], dtype: torch.dtype
) -> Float[Tensor, "rows columns"]:
    """In `dtype`; the norm is added in fp64, for on a CPU torch adds squares one by one."""
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
    """Floating-point operations of the products of `orthogonalize`."""
    short, long = sorted((rows, columns))
    return STEPS * (4 * short * short * long + 2 * short**3)
