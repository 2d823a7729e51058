"""Operators of exact numerics (ops/numerics.py): each gives the same bits to a row, a column or an
element whatever else is computed with it.

What is known of torch 2.13 on a CPU (MKL 2024.2, oneDNN 3.12, AVX-512), in fp32:

    product over K whole    invariant from 16 rows and columns on, with one or two threads; below,
                            or with more threads below 256, MKL takes another kernel
                            -> padded to 16; the self-test refuses thread counts that do not hold
    exp, log, sqrt, rsqrt, tanh, erf, sums and maxima of contiguous rows, softmax, logsumexp, the
    largest of a row, embedding: invariant
    layer_norm              its gradient of the weight follows the number of rows
                            -> made of means over rows (ops/norm.py)
    silu, sigmoid, gelu     differ in the remainder of a vector loop
                            -> made of exp, tanh, erf, quotients and products
    sum over rows           follows the number of columns -> a tree of additions
    AdamW fused             differs in shards that are no multiple of 8
                            -> torch's foreach form (optim/optimizer.py)

in bf16, whose products are rounded and then added in fp32:

    product over K whole    invariant; over more than 1,024 terms of a transposed first factor, it
                            depends on shapes and threads -> made contiguous
    silu                    invariant
    gelu                    differs -> the form above, in fp32

Another library may break what holds here, so a run tries its own shapes before its first step
(training/self_test.py).
"""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int64
from torch import Tensor

from dolmen.core.autograd import Context, TypedFunction
from dolmen.core.reduction import Tree, widen

LEAST = 16
"""Rows and columns from which MKL's products keep their bits."""
TRANSPOSED = 1024
"""Terms up to which oneDNN's bf16 products of a transposed first factor keep their bits."""


@contextmanager
def one_thread() -> Iterator[None]:
    """Context manager: torch computes on one thread inside; the number of threads is restored at
    the end.
    """
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def product(a: Float[Tensor, "m k"], b: Float[Tensor, "k n"]) -> Float[Tensor, "m n"]:
    """Return a @ b, each element with bits that are a function of one row of a and one column of b,
    whatever else is multiplied with them. Fewer than LEAST rows or columns are padded with zeros.
    """
    m, n = len(a), b.shape[1]
    if a.dtype != torch.float32 and a.shape[1] > TRANSPOSED:
        a = a.contiguous()
    if m >= LEAST and n >= LEAST:
        return a @ b
    a, b = F.pad(a, (0, 0, 0, max(0, LEAST - m))), F.pad(b, (0, max(0, LEAST - n)))
    # a copy: autograd forbids writing to a view of what this returns
    return (a @ b)[:m, :n].clone(memory_format=torch.contiguous_format)


def sum_of_products(
    pairs: Iterable[tuple[Float[Tensor, "m k"], Float[Tensor, "k n"]]], leaves: int
) -> Float[Tensor, "m n"]:
    """Return the sum of a @ b over `leaves` pairs (a, b), added in the fixed order of a tree
    (neighbours first).
    """
    return _tree((product(a, b) for a, b in pairs), leaves)


def _tree(parts: Iterable[Tensor], leaves: int) -> Tensor:
    """Return the sum of `leaves` tensors, which are overwritten, in the fixed order of a tree
    (neighbours first). Asserts that there are so many.
    """
    tree, total = Tree(leaves), None
    for i, part in enumerate(parts):
        total = tree.add(i, part)
    assert total is not None, f"fewer than {leaves} leaves"
    return total


def weight_gradient(
    g: Float[Tensor, "tokens out"], x: Float[Tensor, "tokens in"], leaf: int
) -> Float[Tensor, "out in"]:
    """Return the weight gradient g^T x, computed per `leaf` tokens and added in the fixed order of
    a tree; the last leaf may be shorter.
    """
    pairs = ((a.t(), b) for a, b in zip(g.split(leaf), x.split(leaf), strict=True))
    return sum_of_products(pairs, -(-len(x) // leaf))


def sum_leaves(
    g: Float[Tensor, "rows out"], x: Float[Tensor, "rows in"] | None, leaves: Sequence[int]
) -> Float[Tensor, "*shape"] | None:
    """Return g^T x [out, in], or without x the sum of the rows of g [out], computed per leaf and
    added in the fixed order of a tree; None where there are no rows. `leaves`: the numbers of rows
    of consecutive leaves; one without rows is zeros.
    """
    tree, total = Tree(len(leaves)), None
    xs = [None] * len(leaves) if x is None else x.split(list(leaves))
    for i, (a, b) in enumerate(zip(g.split(list(leaves)), xs, strict=True)):
        leaf = None
        if len(a):
            leaf = add_pairs(widen(a), 0) if b is None else product(a.t(), b)
        total = tree.add(i, leaf)
    return total


def sum_tokens(x: Float[Tensor, " tokens *rest"], leaf: int) -> Float[Tensor, " *rest"]:
    """Return the sum of x over tokens (dim 0), in the fixed order of a tree within each `leaf` of
    tokens, then of one over leaves; half precision is added in fp32. Raises RuntimeError where
    `leaf` does not divide the tokens.
    """
    return add_pairs(add_pairs(widen(x).reshape(-1, leaf, *x.shape[1:]), 1), 0)


def add_pairs(x: Float[Tensor, "*shape"], dim: int) -> Float[Tensor, "*rest"]:
    """Return the sum of x over `dim` in the fixed order of a tree, by elementwise additions:
    torch's own sum over rows takes another order where the number of columns is another one.
    """
    while (n := x.shape[dim]) > 1:
        even = n // 2 * 2
        pairs = x.narrow(dim, 0, even).unflatten(dim, (-1, 2))
        added = pairs.select(dim + 1, 0) + pairs.select(dim + 1, 1)
        x = added if even == n else torch.cat((added, x.narrow(dim, even, 1)), dim)
    return x.select(dim, 0)


class _SumOver(TypedFunction):
    """`add_pairs` with a gradient, that of each addend."""

    @staticmethod
    def forward(ctx: Context[tuple[torch.Size, int]], x: Tensor, dim: int) -> Tensor:
        """Return the sum of x over `dim`."""
        ctx.kept = x.shape, dim
        return add_pairs(x, dim)

    @staticmethod
    def backward(ctx: Context[tuple[torch.Size, int]], g: Tensor) -> tuple[Tensor, None]:
        """Return the gradient of x, a view of g."""
        shape, dim = ctx.kept
        return g.unsqueeze(dim).expand(shape), None


def sum_over(x: Float[Tensor, "*shape"], dim: int) -> Float[Tensor, "*rest"]:
    """Return `add_pairs` of x over `dim`, with autograd."""
    return _SumOver.apply(x, dim)


class _Copies(TypedFunction):
    """Autograd of `copies`."""

    @staticmethod
    def forward(ctx: Context[None], x: Tensor, number: int) -> tuple[Tensor, ...]:
        """Return `number` views of x."""
        return tuple(x.view_as(x) for _ in range(number))

    @staticmethod
    def backward(ctx: Context[None], *grads: Tensor) -> tuple[Tensor, None]:
        """Return the gradient of x."""
        return add_pairs(torch.stack(grads), 0), None


def copies(x: Float[Tensor, "*any"], number: int) -> tuple[Float[Tensor, "*any"], ...]:
    """Return `number` views of x with autograd: their gradients, which all must have, are added in
    the fixed order of a tree, where autograd's order follows from its graph.
    """
    return _Copies.apply(x, number)


class _AddBias(TypedFunction):
    """y + bias, whose gradient is added by `sum_tokens`."""

    @staticmethod
    def forward(ctx: Context[int], y: Tensor, bias: Tensor, leaf: int) -> Tensor:
        """Return y + bias."""
        ctx.kept = leaf
        return y + bias

    @staticmethod
    def backward(ctx: Context[int], g: Tensor) -> tuple[Tensor, Tensor | None, None]:
        """Return the gradients of y and, where needed, of the bias."""
        return g, sum_tokens(g, ctx.kept) if ctx.needs_input_grad[1] else None, None


def add_bias(
    y: Float[Tensor, "tokens out"], bias: Float[Tensor, " out"], leaf: int
) -> Float[Tensor, "tokens out"]:
    """Return y + bias with autograd, the bias's gradient added over leaves of `leaf` tokens."""
    return _AddBias.apply(y, bias, leaf)


def sum_blocks(x: Float[Tensor, "n size"], block: int) -> Float[Tensor, " n"]:
    """Return the sum of each row of x, in the fixed order of a tree over sums of `block` columns;
    the last block may be shorter.
    """
    parts = x.split(block, dim=1)
    return _tree((part.contiguous().sum(-1) for part in parts), len(parts))


class _SiLU(TypedFunction):
    """x / (1 + exp(-x)); backward g s (1 + x (1 - s)), s = 1 / (1 + exp(-x))."""

    @staticmethod
    def forward(ctx: Context[None], x: Tensor) -> Tensor:
        """Return x sigmoid(x), and keep x for backward."""
        ctx.save_for_backward(x)
        return x / torch.exp(-x).add_(1)

    @staticmethod
    def backward(ctx: Context[None], g: Tensor) -> Tensor:
        """Return the gradient of x."""
        (x,) = ctx.saved_tensors
        s = torch.exp(-x).add_(1).reciprocal_()
        return (1 - s).mul_(x).add_(1).mul_(s).mul_(g)


def silu(x: Float[Tensor, "*any"]) -> Float[Tensor, "*any"]:
    """Return x sigmoid(x), with autograd, bitwise independent of x's other elements."""
    return _SiLU.apply(x) if x.dtype == torch.float32 else F.silu(x)


class _Sigmoid(TypedFunction):
    """s = 1 / (1 + exp(-x)); backward g s (1 - s), also where exp(-x) is infinite."""

    @staticmethod
    def forward(ctx: Context[None], x: Tensor) -> Tensor:
        """Return sigmoid(x), and keep it for backward."""
        s = torch.exp(-x).add_(1).reciprocal_()
        ctx.save_for_backward(s)
        return s

    @staticmethod
    def backward(ctx: Context[None], g: Tensor) -> Tensor:
        """Return the gradient of x."""
        (s,) = ctx.saved_tensors
        return (1 - s).mul_(s).mul_(g)


def sigmoid(x: Float[Tensor, "*any"]) -> Float[Tensor, "*any"]:
    """Return 1 / (1 + exp(-x)), with autograd, in x's dtype, bitwise independent of x's other
    elements.
    """
    return _Sigmoid.apply(widen(x)).to(x.dtype)


def gelu(x: Float[Tensor, "*any"]) -> Float[Tensor, "*any"]:
    """Return x Phi(x), Phi the normal distribution function, with autograd, in x's dtype, bitwise
    independent of x's other elements.
    """
    wide = widen(x)
    return (wide * (0.5 * (1 + torch.erf(wide * math.sqrt(0.5))))).to(x.dtype)


def gelu_tanh(x: Float[Tensor, "*any"]) -> Float[Tensor, "*any"]:
    """Return GELU's approximation by tanh, with autograd, in x's dtype, bitwise independent of x's
    other elements.
    """
    wide = widen(x)
    inner = math.sqrt(2 / math.pi) * (wide + 0.044715 * (wide * wide * wide))
    return (wide * (0.5 * (1 + torch.tanh(inner)))).to(x.dtype)


ACTIVATIONS: Mapping[str, Callable[[Tensor], Tensor]] = {
    "silu": silu,
    "gelu": gelu,
    "gelu_tanh": gelu_tanh,
    "relu": F.relu,
}
"""The activations of ops/elementwise.py."""


class _Embedding(TypedFunction):
    """Rows of a table; its gradient is added token by token within a leaf, and by a tree over
    leaves.
    """

    @staticmethod
    def forward(ctx: Context[tuple[int, int]], tokens: Tensor, weight: Tensor, leaf: int) -> Tensor:
        """Return the rows of the table `weight` that `tokens` name."""
        ctx.kept = len(weight), leaf
        ctx.save_for_backward(tokens)
        return F.embedding(tokens, weight)

    @staticmethod
    def backward(ctx: Context[tuple[int, int]], g: Tensor) -> tuple[None, Tensor, None]:
        """Return the gradient of the table, in fp32 or wider."""
        (tokens,), (rows, leaf) = ctx.saved_tensors, ctx.kept
        sequences = list(zip(tokens.split(leaf), g.split(leaf), strict=True))
        parts = (
            widen(g.new_zeros(rows, g.shape[1])).index_add_(0, token_rows, widen(part))
            for token_rows, part in sequences
        )
        return None, _tree(parts, len(sequences)), None


def embedding(
    tokens: Int64[Tensor, " tokens"], weight: Float[Tensor, "rows hidden"], leaf: int
) -> Float[Tensor, "tokens hidden"]:
    """Return the rows of `weight` that `tokens` name, with autograd: the table's gradient is added
    token by token within each leaf of `leaf` tokens, and in the fixed order of a tree over leaves.
    """
    return _Embedding.apply(tokens, weight, leaf)
