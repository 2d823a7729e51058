"""A branch of the residual stream that is one column-row pair of tensor parallelism: x enters by
column-parallel products, and what comes of them leaves by a row-parallel one.

    x -> enter -> columns -> inner -> row -> leave -> y

Branches of one x, or whose results are added, enter and leave together: one collective each way
for all of them, where each by itself would have its own.
"""

from collections.abc import Sequence
from itertools import accumulate
from typing import Any

from jaxtyping import Float
from torch import Tensor, nn

from dolmen.model.component import Component, Given, LayerCache
from dolmen.model.layers import Row
from dolmen.parallel import tensor
from dolmen.parallel.tensor import Linear, TensorParallel


class Passing(nn.Module):
    """Hands on what it is given: a place for hooks, where what passes is no module's result."""

    def forward(self, x: Any) -> Any:
        return x


class Branch(Component):
    """A mixer or an mlp of dense matrices. Hooks of `products` and `result` see what `inner` is
    given and what it makes, however the branch is arranged.
    """

    tp: TensorParallel

    def __init__(self):
        super().__init__()
        self.products, self.result = Passing(), Passing()

    @property
    def columns(self) -> list[Linear]:
        """What each product of x multiplies by, weight [out_i / tp, hidden]."""
        raise NotImplementedError

    @property
    def row(self) -> Row:
        """What multiplies the result of `inner`, S(1)@tp, and sums it over tp."""
        raise NotImplementedError

    def inner(
        self,
        products: Sequence[Float[Tensor, "tokens _"]],
        given: Given,
        cache: LayerCache | None = None,
    ) -> Float[Tensor, "tokens _"]:
        """The products of x with the columns, each [tokens, out_i / tp] S(1)@tp -> [tokens, inputs
        of the row / tp] S(1)@tp.
        """
        raise NotImplementedError

    def between(
        self,
        products: Sequence[Float[Tensor, "tokens _"]],
        given: Given,
        cache: LayerCache | None = None,
    ) -> Float[Tensor, "tokens _"]:
        """`inner`, seen by hooks."""
        return self.result(self.inner(self.products(products), given, cache))

    def forward(
        self, x: Float[Tensor, "here hidden"], given: Given, cache: LayerCache | None = None
    ) -> Float[Tensor, "here hidden"]:
        (products,) = enter([self], x)
        return self.row(self.between(products, given, cache))

    def part(
        self, x: Float[Tensor, "tokens hidden"], given: Given
    ) -> Float[Tensor, "tokens hidden"]:
        """Of x R@tp, which has entered already -> P@tp, to leave with other sums; without the bias
        of the row.
        """
        y = self.between(tensor.products(x, self.columns, self.tp), given)
        return tensor.part_of_rows(y, self.row.linear(), self.tp)


def enter(
    branches: Sequence[Branch], x: Float[Tensor, "here hidden"]
) -> list[tuple[Float[Tensor, "tokens _"], ...]]:
    """The products of x, I@tp (or S(0)@tp), with the columns of each branch."""
    columns = [branch.columns for branch in branches]
    products = tensor.columns(x, [one for ones in columns for one in ones], branches[0].tp)
    ends = list(accumulate(map(len, columns)))
    return [products[end - len(ones) : end] for ones, end in zip(columns, ends, strict=True)]


def leave(
    branches: Sequence[Branch], results: Sequence[Float[Tensor, "tokens _"]]
) -> Float[Tensor, "here hidden"]:
    """The sum of the branches, I@tp (or S(0)@tp), of the result of each one's `inner`."""
    return tensor.rows(results, [branch.row.linear() for branch in branches], branches[0].tp)
