"""Weights laid out for products that nothing is trained by: made once, where an engine begins.

    OneDnn    fp32, as oneDNN's kernels of a CPU read it. F.linear of a few rows asks another
              library, which reads 4 to 10 GB/s of one core (an EPYC), this 14 to 19. One row
              reads what is wide best turned, row by row of W^T: 20 GB/s where F.linear has 10.
    Int8      each row of W [out, in] an int8 times a scale of its own (ops/int8.py), x in bf16. Of
              a row-parallel W each rank rounds its part of the row, by a scale of its own.

Both are of the weight with the adapter that lies beside it.
"""

from typing import Literal, Protocol

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor

from dolmen.core.torch_private import compute
from dolmen.ops import int8

Weights = Literal["stated", "int8"]
"""How weights are held: in the dtype that is asked for, or as int8."""

ROWS = 64  # what a weight is laid out for; as fast with 4 rows and with 256
LEAST = 4  # rows: of fewer oneDNN takes another kernel, with which even one row takes longer
PIECE = 32  # inputs; of rows of 72 or 200 the int8 product of torch 2.13 was wrong, or crashed
WORTH = 1 << 14  # elements; of fewer what a product costs is its call


class LaidOut(Protocol):
    """What multiplies by a weight."""

    def __call__(
        self, x: Float[Tensor, "tokens in"], bias: Float[Tensor, " out"] | None
    ) -> Float[Tensor, "tokens out"]:
        """x W^T + b, without autograd."""
        ...


class OneDnn:
    """See above."""

    def __init__(self, weight: Float[Tensor, "out in"]):
        own, wide = weight.detach(), weight.shape[0] > weight.shape[1]
        self.weight = compute.laid_out(own, ROWS)
        self.one = own.t().contiguous() if wide else own.t()

    def __call__(
        self, x: Float[Tensor, "tokens in"], bias: Float[Tensor, " out"] | None
    ) -> Float[Tensor, "tokens out"]:
        rows = len(x)
        if rows == 1:
            return x @ self.one if bias is None else torch.addmm(bias, x, self.one)
        # the same rows again, in one operator of 2 us, where padding takes 7
        x = x if rows >= LEAST else torch.cat([x] * -(-LEAST // rows))
        return compute.laid_out_product(x, self.weight, bias)[:rows]


class Int8Rows:
    """See above."""

    def __init__(self, weight: Float[Tensor, "out in"]):
        payload, self.scale = int8.quantise(weight)
        # torch's operator reads whole pieces of a row, behind the end of one that is shorter
        self.beside = -weight.shape[1] % PIECE
        self.weight = F.pad(payload, (0, self.beside))
        # scales are applied in fp32: as bf16 each would be up to 0.4 % off
        self.ones = torch.ones_like(self.scale, dtype=torch.bfloat16)

    def __call__(
        self, x: Float[Tensor, "tokens in"], bias: Float[Tensor, " out"] | None
    ) -> Float[Tensor, "tokens out"]:
        x_whole = F.pad(x.bfloat16(), (0, self.beside)) if self.beside else x.bfloat16()
        y = compute.int8_product(x_whole, self.weight, self.ones).float() * self.scale
        return (y if bias is None else y + bias).to(x.dtype)


def product_of(weight: Tensor, kind: Weights) -> LaidOut | None:
    """What multiplies by a weight on a CPU faster than torch does by itself; None: nothing does."""
    if weight.ndim != 2:
        return None
    if kind == "int8":
        return Int8Rows(weight)
    large = weight.numel() >= WORTH and min(weight.shape) >= ROWS
    gains = large and weight.dtype == torch.float32 and compute.lays_out()
    return OneDnn(weight) if gains else None
