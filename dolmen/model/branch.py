"""A branch of the residual stream that is one column-row pair of tensor parallelism: x enters by
column-parallel products, and what comes of them leaves by a row-parallel one.

    x -> enter -> columns -> inner -> row -> leave -> y

Branches of one x, or whose results are added, enter and leave together: one collective each way
for all of them, where each by itself would have its own.
"""

from collections.abc import Sequence
from itertools import accumulate

from jaxtyping import Float
from torch import Tensor

from dolmen.core.state import local
from dolmen.model.cached import LayerCache
from dolmen.model.component import Component
from dolmen.model.given import Given
from dolmen.model.layers import Row
from dolmen.parallel import tensor
from dolmen.parallel.tensor import TensorParallel


class Branch(Component):
    """A mixer or an mlp of dense matrices."""

    tp: TensorParallel

    @property
    def columns(self) -> list[tuple[Tensor, Tensor | None]]:
        """Weight [out_i / tp, hidden] and bias of each product of x, as this rank multiplies
        them.
        """
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

    def forward(
        self, x: Float[Tensor, "here hidden"], given: Given, cache: LayerCache | None = None
    ) -> Float[Tensor, "here hidden"]:
        (products,) = enter([self], x)
        return self.row(self.inner(products, given, cache))

    def part(
        self, x: Float[Tensor, "tokens hidden"], given: Given
    ) -> Float[Tensor, "tokens hidden"]:
        """Of x R@tp, which has entered already -> P@tp, to leave with other sums; without the bias
        of the row.
        """
        weights, biases = zip(*self.columns, strict=True)
        y = self.inner(tensor.products(x, weights, biases, self.tp), given)
        return tensor.products(y, [local(self.row.weight)], [None], self.tp)[0]


def enter(
    branches: Sequence[Branch], x: Float[Tensor, "here hidden"]
) -> list[tuple[Float[Tensor, "tokens _"], ...]]:
    """The products of x, I@tp (or S(0)@tp), with the columns of each branch."""
    columns = [branch.columns for branch in branches]
    weights, biases = zip(*(pair for pairs in columns for pair in pairs), strict=True)
    products = tensor.columns(x, weights, biases, branches[0].tp)
    ends = list(accumulate(len(pairs) for pairs in columns))
    return [products[end - len(pairs) : end] for pairs, end in zip(columns, ends, strict=True)]


def leave(
    branches: Sequence[Branch], results: Sequence[Float[Tensor, "tokens _"]]
) -> Float[Tensor, "here hidden"]:
    """The sum of the branches, I@tp (or S(0)@tp), of the result of each one's `inner`."""
    rows = [branch.row for branch in branches]
    y = tensor.rows(results, [local(row.weight) for row in rows], branches[0].tp)
    for row in rows:
        y = y if row.bias is None else y + local(row.bias)
    return y
