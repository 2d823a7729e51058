"""Exact numerics over ranks: products of weights that tp splits, gradients of a step, their norm.

Each sum is a tree (core/reduction.py) whose leaves no layout changes (ops/numerics.py). Which axis
splits a sum decides who adds which subtree, and what crosses ranks is added in order
(`--layout.reduction fixed`), neighbours first:

    o, down              heads or width in `tp` leaves: a rank's, then over tp
    dX of q, k, v; of    per leaf (q_j + k_j) + v_j, then a tree over j: a rank's leaves, then
    gate and up          over tp
    dX of the head       blocks of the vocabulary: a rank's, then over tp
    dW                   `cp` leaves of a sequence (pairs of chunks): a rank's, then over cp, for
                         each microbatch; sequences: those of a microbatch, then over microbatches,
                         then over dp
    dW of experts        its rows of a leaf of tokens; then as dW: a rank of ep adds the
                         microbatches of each other's, then ranks, and edp follows
    sinks                tokens, within a pair; then pairs and sequences
    dW of routers and    parts of a pair, as of norms
    MLA's down projections
    shared key of MLA    `tp` leaves of heads: a rank's, then over tp
    dW of q and k norms  tokens, then `tp` leaves of heads: a rank's, then over tp, all within a
                         pair; then pairs and sequences
    dW of norms, biases, the same, of parts of a pair under sequence parallelism, whose ranks are
    learned positions    added for each microbatch
    dK, dV               pairs of chunks of queries: a rank's, then over cp
    loss                 tokens, on a grid on which fp64 additions are exact, so in any order
    gradient norm        the same, on a grid that follows from the largest number

So microbatches and the sequences of a dp rank are powers of two in number: else a rank would hold
no whole subtree. Where cp splits sequences a microbatch is one sequence, as its parts are added
before those of the next. Since (a + b) / count is not a / count + b / count when rounded,
gradients are divided by the count of tokens when they are complete (training/step.py).
"""

import math
from collections.abc import Container, Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
import torch.nn.functional as F
from jaxtyping import Float, Float64
from torch import Tensor, nn

from dolmen.core import collectives, state
from dolmen.core.autograd import Context, TypedFunction
from dolmen.core.mesh import Axis, Mesh
from dolmen.core.reduction import Tree, tree_sum, widen
from dolmen.core.torch_private import sharding
from dolmen.ops import invariant
from dolmen.ops.numerics import Exact
from dolmen.parallel.data import Reduction, units

BITS = 26
"""Bits of each half of a number that is summed exactly: 2^26 of them fit in a sum of fp64."""


@dataclass(frozen=True)
class LeafProduct:
    """The three products of a dense weight by leaves and trees. Each takes lists of one matrix."""

    tokens: int
    """Tokens of a leaf of the weight gradient."""
    inputs: int = 1
    """Leaves of the output, over this rank's inputs."""
    outputs: int = 1
    """Leaves of the input gradient, over this rank's outputs."""

    @staticmethod
    def from_cut(exact: Exact, cut: Literal["inputs", "outputs"] | None, tp: int) -> "LeafProduct":
        """Return the products of a weight whose dim `cut` (None: neither) is split over `tp` ranks,
        with the leaves of `exact` that fall to one rank. A weight that is not split has the smaller
        leaves of tokens that sequence parallelism may split.
        """
        leaves = exact.tp // tp
        match cut:
            case "inputs":
                return LeafProduct(exact.leaf, inputs=leaves)
            case "outputs":
                return LeafProduct(exact.leaf, outputs=leaves)
        return LeafProduct(exact.token_leaf)

    def output(
        self, xs: Sequence[Tensor], weights: Sequence[Tensor]
    ) -> list[Float[Tensor, "tokens out"]]:
        """Return the output x W^T of each (x, weight), added in the fixed order of a tree over
        leaves of the inputs; a partial sum where tp cuts inputs.
        """
        return [self._multiply(x, w.t(), self.inputs) for x, w in zip(xs, weights, strict=True)]

    def input_gradient(
        self, grads: Sequence[Tensor], weights: Sequence[Tensor]
    ) -> list[Float[Tensor, "tokens in"]]:
        """Return the input gradient g W of each (g, weight), added in the fixed order of a tree
        over leaves of the outputs; a partial sum where tp cuts outputs.
        """
        return [self.sum_of_input_gradients([g], [w]) for g, w in zip(grads, weights, strict=True)]

    def weight_gradient(
        self, grads: Sequence[Tensor], xs: Sequence[Tensor]
    ) -> list[Float[Tensor, "out in"]]:
        """Return the weight gradient g^T x of each (g, x), added in the fixed order of a tree over
        leaves of tokens.
        """
        return [
            invariant.weight_gradient(g.to(x.dtype), x, self.tokens)
            for g, x in zip(grads, xs, strict=True)
        ]

    def sum_of_input_gradients(
        self, grads: Sequence[Float[Tensor, "tokens _"]], weights: Sequence[Float[Tensor, "_ in"]]
    ) -> Float[Tensor, "tokens in"]:
        """Return this rank's sum of g W over weights with one input, without a collective: per leaf
        of the outputs first over the weights (widened if several), then in the fixed order of a
        tree over leaves.
        """
        tree, total = Tree(self.outputs), None
        cut = [
            zip(g.to(w.dtype).chunk(self.outputs, 1), w.chunk(self.outputs), strict=True)
            for g, w in zip(grads, weights, strict=True)
        ]
        for i, ((g, w), *rest) in enumerate(zip(*cut, strict=True)):
            leaf = invariant.product(g, w)
            for other_g, other_w in rest:
                leaf = widen(leaf).add_(invariant.product(other_g, other_w))
            total = tree.add(i, leaf)
        assert total is not None
        return total

    def _multiply(self, a: Tensor, b: Tensor, leaves: int) -> Tensor:
        """Return a @ b, the dim that is added over cut into `leaves` equal parts, whose products
        are added in the fixed order of a tree.
        """
        pairs = zip(a.chunk(leaves, 1), b.chunk(leaves), strict=True)
        return invariant.sum_of_products(pairs, leaves)


def sum_heads(
    x: Float[Tensor, "batch length heads size"], exact: Exact, axis: Axis
) -> Float[Tensor, " size"]:
    """Return the sum over tokens and over the heads of all ranks of tp: within a leaf of tokens
    over these, then over leaves of heads, which `axis` splits; then over leaves of tokens.
    """
    per_head = invariant.add_pairs(widen(x).reshape(-1, exact.leaf, *x.shape[2:]), 1)
    leaves = per_head.unflatten(1, (exact.tp // axis.size, -1))
    per_leaf = invariant.add_pairs(invariant.add_pairs(leaves, 2), 1)
    return invariant.add_pairs(collectives.sum_(per_leaf.contiguous(), axis), 0)


def sum_sequences(
    x: Float[Tensor, "batch length heads size"], exact: Exact
) -> Float[Tensor, "heads size"]:
    """Return the sum over tokens of x: within a leaf of tokens, then over leaves."""
    return invariant.sum_tokens(x.flatten(0, 1), exact.leaf)


class _ExpandHeads(TypedFunction):
    """Autograd of `expand_heads`."""

    @staticmethod
    def forward(
        ctx: Context[tuple[Exact, Axis]], x: Tensor, heads: int, exact: Exact, axis: Axis
    ) -> Tensor:
        """Return x once for each head, a view."""
        ctx.kept = exact, axis
        return x.expand(-1, -1, heads, -1)

    @staticmethod
    def backward(ctx: Context[tuple[Exact, Axis]], g: Tensor) -> tuple[Tensor, None, None, None]:
        """Return the gradient of x, the sum over the heads of all ranks."""
        exact, axis = ctx.kept
        leaves = widen(g).unflatten(2, (exact.tp // axis.size, -1))
        total = invariant.add_pairs(invariant.add_pairs(leaves, 3), 2)
        return collectives.sum_(total.contiguous(), axis).unsqueeze(2).to(g.dtype), None, None, None


def expand_heads(
    x: Float[Tensor, "batch length 1 size"], heads: int, exact: Exact, axis: Axis
) -> Float[Tensor, "batch length {heads} size"]:
    """Return x, which is the same on every rank of tp, once for each of this rank's `heads`, with
    autograd: gradients are added over leaves of heads, then over ranks (I -> R).
    """
    return _ExpandHeads.apply(x, heads, exact, axis)


class _ExpandTokens(TypedFunction):
    """Autograd of `expand_tokens`."""

    @staticmethod
    def forward(ctx: Context[Exact], x: Tensor, batch: int, length: int, exact: Exact) -> Tensor:
        """Return x once for each token, a view."""
        ctx.kept = exact
        return x.expand(batch, length, -1)

    @staticmethod
    def backward(ctx: Context[Exact], g: Tensor) -> tuple[Tensor, None, None, None]:
        """Return the gradient of x, in fp32 or wider: the sum over tokens, then leaves."""
        return invariant.sum_tokens(g.flatten(0, 1), ctx.kept.leaf), None, None, None


def expand_tokens(
    x: Float[Tensor, " heads"], batch: int, length: int, exact: Exact
) -> Float[Tensor, "{batch} {length} heads"]:
    """Return x once for each of `length` tokens of `batch` sequences, with autograd: gradients are
    added by a tree over the tokens of a leaf, then by one over leaves.
    """
    return _ExpandTokens.apply(x, batch, length, exact)


class ExactReduction(Reduction):
    """Gradients of a step added by a tree over microbatches, in whatever order the schedule makes
    them. Each parameter's is taken from autograd after each backward, whole, and crosses fsdp with
    the last, whatever the stage of ZeRO: 2 and 3 hold P of gradients, too, and a tree of m
    microbatches up to log2(m) P / cp more.
    """

    def __init__(
        self,
        model: nn.Module,
        zero: int,
        split_backward: bool,
        micros: int,
        mesh: Mesh,
        partial: Container[str],
        copies: list[tuple[str, Tensor]],
    ):
        """Start a step of `micros` microbatches. `partial`: names of the parameters whose gradient
        is a partial sum on tp. `copies`: weights by which modules have multiplied in place of
        parameters, with names (`TensorParallel.copy_weight`): a tied head, whose gradient joins
        that of the embedding at the end, and experts, whose gradient is per rank of ep;
        `end_backward` removes those whose gradient it has taken.
        """
        super().__init__(model, zero, split_backward=True)
        if zero == 3 and not split_backward:
            for unit in units(model):
                unit.set_reshard_after_backward(True, recurse=False)
        self.mesh, self.micros, self.partial, self.copies = mesh, micros, partial, copies
        self.names = {p: name for name, p in model.named_parameters()}
        self.trees: dict[str, Tree] = {}
        self.totals: dict[str, Tensor] = {}

    def prepare_backward(self, chunk: Iterable[nn.Module], last_of_chunk: bool, last: bool) -> None:
        """Do nothing: no gradient is sent over fsdp in a backward."""

    def accumulate_weight_gradients(self, last: bool) -> None:
        """Do nothing: `end_backward` takes all gradients, those of weights too."""

    def end_backward(self, micro: int, last: bool) -> None:
        """Take the gradients that a backward of microbatch `micro` has left, sum partial ones over
        tp and all over cp, and add each to its parameter's tree over microbatches; after the `last`
        of the step, set the totals as gradients and reduce them over fsdp. Collective.
        """
        done = [(name, copy) for name, copy in self.copies if copy.grad is not None]
        self.copies[:] = [(name, copy) for name, copy in self.copies if copy.grad is None]
        for name, p in (*self._gradient_holders(), *done):
            if p.grad is not None:
                gradient, p.grad = p.grad, None
                if name in self.partial:
                    gradient = collectives.sum_(gradient.contiguous(), self.mesh.tp)
                total = self.trees.setdefault(name, Tree(self.micros)).add(
                    micro, self._sum_over_cp(gradient)
                )
                if total is not None:
                    self.totals[name] = self._widen_part(total, gradient.shape)
        if last:
            self.copies.clear()  # those of a recomputed forward have no gradient
            for name, p in self._gradient_holders():
                total = self.totals.pop(name, None)
                # of experts a sum for each rank of ep: its microbatches have come together first
                p.grad = tree_sum(total) if total is not None and total.ndim > p.ndim else total
            super().accumulate_weight_gradients(last)
            for head in self.totals.values():
                self._add_tied(head)

    def _sum_over_cp(self, gradient: Tensor) -> Tensor:
        """Return the sum over cp of a gradient, whose ranks have parts of the same sequence: this
        rank's equal part of it, flat. The gradient itself on an axis of size 1. Collective.
        """
        axis = self.mesh.cp
        if axis.size == 1:
            return gradient
        padded = F.pad(gradient.reshape(-1), (0, -gradient.numel() % axis.size))
        return collectives.reduce_scatter(padded, 0, axis)

    def _widen_part(self, part: Tensor, shape: torch.Size) -> Tensor:
        """Return a gradient of `shape` with this rank's `part` of `_sum_over_cp`, and -0.0, which
        changes no sum, in the place of other ranks' parts: fsdp, which is dp x cp, adds them.
        """
        axis = self.mesh.cp
        if axis.size == 1:
            return part
        full = part.new_full((axis.size, len(part)), -0.0)
        full[axis.rank] = part
        return full.view(-1)[: shape.numel()].view(shape)

    def _add_tied(self, head: Tensor) -> None:
        """Add `head`, the gradient that a tied head has left, to that of the embedding, after each
        has been summed over fsdp: (e0 + h0) + (e1 + h1) is not (e0 + e1) + (h0 + h1). Collective
        over fsdp.
        """
        (embedding,) = (p for p, name in self.names.items() if name == "embed.weight")
        rows = collectives.sum_(head, self.mesh.fsdp).chunk(self.mesh.fsdp.size)
        shard = torch.zeros_like(embedding) if embedding.grad is None else embedding.grad
        if self.mesh.fsdp.rank < len(rows):
            state.local_view(shard).add_(rows[self.mesh.fsdp.rank])
        embedding.grad = shard

    def _gradient_holders(self) -> list[tuple[str, Tensor]]:
        """Return the name and the tensor of each parameter that autograd leaves gradients on: the
        copy that FSDP has gathered, or the parameter itself without FSDP.
        """
        if self.root is None:
            return [(name, p) for p, name in self.names.items()]
        copies = [
            (self.names[record.sharded_param], sharding.gathered_copy(record))
            for unit in units(self.root)
            for record in sharding.records(unit)
        ]
        return [(name, copy) for name, copy in copies if copy is not None]


def gradient_norm(
    parameters: Iterable[nn.Parameter], mesh: Mesh, exact: Exact
) -> Float64[Tensor, ""]:
    """Return the Euclidean norm of the model's global gradient, fp64, the same on every rank, with
    bits that no layout changes. Collective over the world.

    Leaves are sums of squares over a row, or over 1 / tp of a row's columns, of which every rank
    has whole ones: ZeRO cuts between rows, tp between leaves.
    """
    leaves = [
        _squares(state.local_view(p.grad), _leaf_columns(p, exact.tp))
        for p in parameters
        # what tp replicates counts once
        if p.grad is not None and (mesh.tp.rank == 0 or state.replication_weight(p.grad) == 1)
    ]
    none = torch.zeros(1, dtype=torch.float64, device=mesh.device)
    return exact_sum(torch.cat([none, *leaves]), mesh).sqrt()


def _leaf_columns(p: Tensor, tp: int) -> int:
    """Return the columns of a leaf of squares, which divide a row of p and each tp rank's part."""
    return math.gcd(p.shape[-1], p.shape[-1] // tp) if p.ndim > 1 else 1


def _squares(gradient: Tensor, columns: int) -> Float64[Tensor, " leaves"]:
    """Return the sum of squares of each `columns` consecutive elements of a row of the gradient,
    added in its dtype, as fp64.
    """
    # not -1 for the rows: a rank's shard may have none
    leaves = gradient.reshape(gradient.numel() // columns, columns)
    return leaves.square().sum(-1).double()


def exact_sum(x: Float64[Tensor, " n"], mesh: Mesh) -> Float64[Tensor, ""]:
    """Return the sum of x, whose elements are at least 0, over all elements and all ranks, with
    bits that depend on no order and no distribution: each is rounded to 2 BITS bits below the
    largest, in two integers, and sums of 2^(53 - BITS) integers of BITS bits are exact. Infinite or
    not a number if one of x is. Collective over the world.
    """
    largest = collectives.reduce_scalar(x.amax(), mesh.world, "max")
    # a power of two above the largest; 1 for zeros and for what is not finite
    _, exponent = torch.frexp(torch.where(largest.isfinite(), largest, 0.0))
    # in fp64: of an integer torch takes the power in fp32
    unit = torch.ldexp(torch.ones_like(largest), exponent.double() - BITS)
    high = (x / unit).round()
    low = ((x / unit - high) * 2.0**BITS).round()
    sums = collectives.reduce_scalar(torch.stack((high.sum(), low.sum())), mesh.world)
    return (sums[0] + sums[1] * 2.0**-BITS) * unit


GRID = 2.0**26
"""Losses of tokens are rounded to multiples of 1 / GRID: 2^27 nats of them are added exactly."""


def round_losses(losses: Float[Tensor, "*any"]) -> Float64[Tensor, "*any"]:
    """Return losses in fp64, rounded to multiples of 2^-26, so that their additions are exact."""
    return (losses.double() * GRID).round() / GRID
