"""Tensor parallelism (1909.08053) with or without sequence parallelism (2205.05198): a
column-parallel linear carries a row-parallel one, and activations cross the tp axis only on
entering and leaving the pair.

    x [tokens, hidden]   I@tp                      | S(0)@tp under sequence parallelism
      | enter            copy                      | all-gather
      |                  (backward: all-reduce)    | (backward: reduce-scatter)
      | columns          y_i = x W_i^T, W_i S(0)@tp: this rank's heads, or its part of the
      |                  feed-forward width
      | rows             y = x W^T, W S(1)@tp: a partial sum, P@tp
      v leave            all-reduce                | reduce-scatter
                         (backward: nothing)       | (backward: all-gather)

The input-gradient collective runs while the weight-gradient products do. Under sequence parallelism
only the sharded input is kept, and gathered once more in backward, while the input gradient is
computed. Where a pipeline schedule splits the backward, the weight gradients are not computed there
at all, but left in `later` for the executor of the schedule (2401.10241).

What a product multiplies by is a `Linear`. Its factors may be rounded to eight bits, or a frozen
one stored in them (quantized_product.py), which changes none of the above. A LoRA adapter
(2106.09685) is two more products and sends nothing: A shares the input of its base weight, and B x
is added before anything leaves.

    columns    h = x A^T, A whole: alike on every rank, its gradient and A's are P@tp
               y_i += scale h B_i^T, B cut as W is over its outputs, S(0)@tp
    rows       h = x A^T, A cut as W is over its inputs, S(1)@tp: P@tp
               y += scale h B^T, B whole, P@tp as y is, and so B's gradient
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial, reduce
from operator import add
from typing import Literal, NamedTuple

import torch
import torch.nn.functional as F
from jaxtyping import Float, Shaped
from torch import Tensor

from dolmen.core import collectives, transfers
from dolmen.core.autograd import Context, TypedFunction
from dolmen.core.mesh import Axis
from dolmen.core.reduction import widen
from dolmen.core.torch_private import compute
from dolmen.ops import int8
from dolmen.ops.invariant import add_bias, sum_tokens
from dolmen.ops.numerics import Exact
from dolmen.parallel.exact import LeafProduct
from dolmen.parallel.inference_linear import (
    FusedPart,
    MultiLora,
    PrepackedProduct,
    SplitIntegerLinear,
)
from dolmen.parallel.quantized_product import Int8Product, Product, ProductAxes, Rounding


class Deferred:
    """Weight gradients that backward was not to compute: functions, one for each product, that
    compute them and add them to their parameters'. The one way from the products of a model to the
    executor of its schedule: backward adds, the executor takes after each.
    """

    def __init__(self) -> None:
        """Start with an empty queue."""
        self.products: list[Callable[[], None]] = []

    def add(self, product: Callable[[], None]) -> None:
        """Queue `product`, which computes a weight gradient and adds it to its parameter's."""
        self.products.append(product)

    def take(self) -> list[Callable[[], None]]:
        """Return the products added since the last call, in order."""
        taken, self.products = self.products, []
        return taken


class Adapter(NamedTuple):
    """This rank's part of a LoRA adapter of a frozen weight: y += scale B A x."""

    down: Float[Tensor, "*experts rank in"]
    """A."""
    up: Float[Tensor, "*experts out rank"]
    """B."""
    scale: float
    """Factor of A x, the smallest tensor that it can be multiplied into. (As `alpha` of an addition
    it is lost where torch 2.13 compiles two products and their sum for a CPU.)
    """

    magnitude: Float[Tensor, "*experts out"] | None = None
    """DoRA's magnitude: the length of each row of the weight."""
    over_inputs: bool = False
    """True if tp cuts the inputs of the weight, so that a rank has a part of each row."""

    def merge(self, weight: Float[Tensor, "*experts out in"]) -> Float[Tensor, "*experts out in"]:
        """Return one weight that computes what the weight and this adapter do together: W + scale B
        A, its rows rescaled by `gain` for DoRA; a new tensor. Needs full rows: tp must not cut the
        inputs of `weight`.
        """
        gain = self.gain(weight)
        turned = weight + self.scale * (self.up @ self.down)
        return turned if gain is None else turned * gain.unsqueeze(-1).to(turned.dtype)

    def gain(
        self, weight: Float[Tensor, "*experts out in"], tp: Axis | None = None
    ) -> Float[Tensor, "*experts out"] | None:
        """Return DoRA's factor of each output, magnitude / ||row of W + scale B A||, in fp32 or
        wider; None if the adapter has no magnitude. The row lengths are constants in the gradient
        (2402.09353, section 4.3), and are summed over `tp` where tp cuts the rows.
        """
        if self.magnitude is None:
            return None
        with torch.no_grad():
            # squares of bf16 rows of 4,096 numbers would lose their small terms
            wide = torch.promote_types(weight.dtype, torch.float32)
            turned = weight.to(wide) + self.scale * (self.up.to(wide) @ self.down.to(wide))
            squares = turned.square().sum(-1)
            if self.over_inputs and tp is not None:
                squares = collectives.reduce_scalar(squares, tp)
        # a row of zeros, of a token that pads the vocabulary, stays one
        return self.magnitude.to(wide) / torch.where(squares == 0, 1.0, squares).sqrt()


class Linear(NamedTuple):
    """This rank's weight, bias and adapters of a linear layer."""

    weight: Shaped[Tensor, "*experts out in"]
    bias: Float[Tensor, " out"] | None = None
    adapter: Adapter | None = None
    rounding: Rounding | None = None
    """How its factors are rounded; None: they are not."""
    scale: Float[Tensor, "*experts out"] | None = None
    """Scales of a frozen 8-bit weight (ops/int8.py)."""
    prepacked: PrepackedProduct | None = None
    """Prepacked product with the merged weight, for inference; None: torch's own."""
    several: MultiLora | None = None
    """Further adapters, of which each token has one or none, where no gradient is kept."""
    cut: Literal["inputs", "outputs"] | None = None
    """Dim of the weight that tp splits."""

    def dequantised_weight(self, dtype: torch.dtype) -> Float[Tensor, "*experts out in"]:
        """Return the weight in `dtype` without its adapter: dequantised if it is stored in 8 bits,
        else as it is.
        """
        return (
            self.weight if self.scale is None else int8.dequantise(self.weight, self.scale, dtype)
        )

    def merge(self, dtype: torch.dtype) -> Float[Tensor, "*experts out in"]:
        """Return one weight that computes what the weight and its adapter do together; `dtype` is
        that of x, which an 8-bit weight is dequantised to. Without an adapter the (dequantised)
        weight itself.
        """
        weight = self.dequantised_weight(dtype)
        return weight if self.adapter is None else self.adapter.merge(weight)


@dataclass(frozen=True)
class TensorParallel:
    """The tp axis, and the placement of the residual stream on it between blocks: replicated (I),
    or sharded by tokens (`sequence`, sequence parallelism).
    """

    axis: Axis
    sequence: bool = False
    later: Deferred | None = field(default=None, compare=False)
    """Queue for deferred weight gradients. None: backward computes them."""
    turned: bool = False
    """Transpose a factor of weight gradients first: `Kernels.turned`."""
    tokens: tuple[Axis, ...] = ()
    """Axes other than tp that split the tokens of a microbatch."""
    fp8: Literal["rounded", "scaled_mm"] = "rounded"
    """How products in 8 bits are computed: `Kernels.fp8`."""
    first_expert: int = 0
    """Index of the first local expert."""
    exact: Exact | None = None
    """Leaves of sums: `Kernels.exact`."""
    copies: list[tuple[str, Tensor]] = field(default_factory=list, compare=False)
    """Weights that modules multiply by in place of a parameter, with the name under which exact
    numerics add their gradients (`parallel.exact.ExactReduction`).
    """

    def copy_weight(self, name: str, weight: Tensor, number: int | None = None) -> Tensor:
        """Return `weight` as a leaf of autograd with a gradient of its own in fp32, of which
        `copies` keeps track by `name`. `number`: as a view of that many copies, [number, ...].
        """
        copy = weight.detach() if number is None else weight.detach().expand(number, *weight.shape)
        copy.requires_grad_(weight.requires_grad)
        copy.grad_dtype = torch.promote_types(weight.dtype, torch.float32)
        self.copies.append((name, copy))
        return copy

    @property
    def gathers(self) -> bool:
        """True if the tokens are all-gathered over tp where a block begins: sequence parallelism
        over several ranks.
        """
        return self.sequence and self.axis.size > 1

    @property
    def residual_partial(self) -> bool:
        """True if the gradient of a replicated weight used on the residual stream (norms, output
        biases) is a partial sum.
        """
        return self.gathers

    @property
    def branch_partial(self) -> bool:
        """True if the gradient of a replicated weight used inside a block, on this rank's heads (q
        and k norms, shared k, v), is a partial sum. With exact numerics it is summed over tp where
        it is made, within each sequence (`parallel.exact.sum_heads`).
        """
        return self.axis.size > 1 and self.exact is None

    def product(self, linear: Linear) -> Product | None:
        """Return the object that computes this weight's three products in place of torch's:
        `LeafProduct` with exact numerics, `Int8Product` for a weight stored in 8 bits, `Fp8Product`
        with rounded factors while gradients are enabled (its scales shared over the axes that split
        the weight and the tokens), else None.
        """
        if self.exact is not None:
            return LeafProduct.from_cut(self.exact, linear.cut, self.axis.size)
        if linear.scale is not None:
            return Int8Product(linear.scale)
        rounding = linear.rounding
        if rounding is None or not torch.is_grad_enabled():
            return None
        tokens, mine = self.tokens, (self.axis,)
        match rounding.cut:
            # a row-parallel weight [out, in / tp]: scales along `in` need the maximum over tp
            case "inputs":
                axes = ProductAxes(tokens, inputs=mine)
            case "outputs":
                axes = ProductAxes(tokens, outputs=mine)
            # a weight whole on every rank: under sequence parallelism tp splits its tokens
            case _:
                axes = ProductAxes((*tokens, *mine) if self.gathers else tokens)
        return rounding.build_product(axes, self.fp8, self.first_expert)

    def enter(self, x: Float[Tensor, "here hidden"]) -> Float[Tensor, "tokens hidden"]:
        """Return the residual stream x as a block's input, with autograd: its tokens all-gathered
        over tp (S(0) -> R) under sequence parallelism, else x itself, whose gradient is all-reduced
        in backward (I -> R). `columns` does this by itself.
        """
        return (
            collectives.all_gather(x, 0, self.axis)
            if self.gathers
            else collectives.copy(x, self.axis)
        )

    def gather_input(self, x: Float[Tensor, "here hidden"]) -> Float[Tensor, "tokens hidden"]:
        """Return the residual stream x as a block's input, without autograd: its tokens
        all-gathered over tp under sequence parallelism, else x itself. For functions with their own
        backward.
        """
        return _gather_tokens(x, self.axis if self.gathers else None)

    def gather_replicated(self, x: Float[Tensor, "here hidden"]) -> Float[Tensor, "tokens hidden"]:
        """Return all tokens of the residual stream x for computation that is the same on every rank
        of tp, with autograd: gathered under sequence parallelism (S(0) -> I), else x as a new node
        of the graph. So x has the same nodes at every layout, and their gradients one order.
        """
        return collectives.gather(x, 0, self.axis) if self.gathers else x.view_as(x)

    def split_replicated(self, y: Float[Tensor, "tokens _"]) -> Float[Tensor, "here _"]:
        """Return this rank's tokens of y, which is the same on every rank of tp, with autograd:
        its part under sequence parallelism (I -> S(0)), else y itself.
        """
        return collectives.split(y, 0, self.axis) if self.gathers else y

    def leave(self, y: Shaped[Tensor, "tokens hidden"]) -> Shaped[Tensor, "here hidden"]:
        """Return the sum of a block's partial outputs over tp, with autograd: all tokens,
        all-reduced in y's memory (P -> I), or this rank's tokens by a reduce-scatter (P -> S(0))
        under sequence parallelism. y must be a temporary that nothing else reads. Raises ValueError
        where tp does not divide the tokens that it scatters.
        """
        return (
            collectives.reduce_scatter(y, 0, self.axis)
            if self.sequence
            else collectives.all_reduce_(y, self.axis)
        )

    def start_back(self, dx: Float[Tensor, "tokens hidden"]) -> Float[Tensor, "arriving hidden"]:
        """Start reducing dx, the partial gradient of a block's input, over tp, asynchronously:
        all-reduce in dx's memory, or reduce-scatter of tokens under sequence parallelism.
        `finish_back` takes what this returns.
        """
        if self.axis.size == 1:
            return dx
        if self.sequence:
            return transfers.start_reduce_scatter(dx, self.axis)
        return transfers.start_all_reduce_(dx, self.axis)

    def finish_back(self, dx: Float[Tensor, "arriving hidden"]) -> Float[Tensor, "here hidden"]:
        """Wait for the collective of `start_back`; return the summed dx: all tokens, or this rank's
        under sequence parallelism.
        """
        if self.axis.size == 1:
            return dx
        return (
            transfers.finish_reduce_scatter(dx, self.axis)
            if self.sequence
            else transfers.wait(dx, self.axis)
        )


class _Call(NamedTuple):
    """Arguments of a `_Linear` other than tensors, and its deferred weights."""

    tp: TensorParallel
    enters: bool
    """x comes from the residual stream of several ranks, else it is already this rank's part."""
    deferred: tuple[Tensor, ...]
    """The weights with autograd, if their gradients are deferred and the products take detached
    ones; else ().
    """
    products: tuple[Product | None, ...]
    """8-bit product of each weight; None: torch's own."""

    @property
    def gather(self) -> Axis | None:
        """Axis over which the tokens of x are all-gathered before the products, or None."""
        return self.tp.axis if self.enters and self.tp.sequence else None


class _Linear(TypedFunction):
    """Products that share one input.

    forward            X [tokens, in] = enter(x)        y_i [tokens, out_i] = X W_i^T + b_i
    input gradient     dX [tokens, in] = sum over i of dy_i W_i, then the backward of `enter`
    weight gradients   dW_i [out_i, in] = dy_i^T X      db_i [out_i] = sum of dy_i over tokens

    One collective on the way in serves all W_i; one on the way back overlaps all dW_i. For what is
    frozen, x or a weight, nothing is kept, gathered, multiplied or sent.
    """

    @staticmethod
    def forward(
        ctx: Context[_Call], x: Tensor, call: _Call, *weights_and_biases: Tensor
    ) -> tuple[Tensor, ...]:
        """Return y_i for each weight; keep x only if a weight gradient will need it, and weights
        only if dX will.
        """
        ctx.kept = call
        number = len(call.products)
        weights, biases = weights_and_biases[:number], weights_and_biases[number:]
        wants_dx, wants_dw, _ = _needed_gradients(ctx)
        keeps_x = call.deferred or any(wants_dw)
        ctx.save_for_backward(x if keeps_x else None, *(weights if wants_dx else ()))
        return _products(_gather_tokens(x, call.gather), weights, biases, call)

    @staticmethod
    def backward(ctx: Context[_Call], *grads: Tensor) -> tuple[Tensor | None, ...]:
        """Return the gradients of x, of each weight and of each bias; those of deferred weights are
        queued in `tp.later` instead.
        """
        # What is sent hides behind what is multiplied, so the order of these lines is the overlap:
        #   x is gathered again      while dX is computed, which does not need it
        #   dX is reduced            while all dW and db are computed, as many operations again
        (x, *weights), call = ctx.saved_tensors, ctx.kept
        tp, axis = call.tp, call.gather
        wants_dx, wants_dw, wants_db = _needed_gradients(ctx)
        dx: Tensor | None = None
        dw: list[Tensor | None] = [None] * len(call.products)
        # x S(0)@tp -> whole: dW needs every token, dX none of x
        gathering = (
            transfers.start_all_gather(x, axis) if axis is not None and any(wants_dw) else None
        )
        if wants_dx:
            # added up in place: three products (q, k, v) make one dX, and no sum of three
            dx = _input_gradient(grads, weights, call.products)
        if axis is not None and gathering is not None:
            x = transfers.wait(gathering, axis)
        if dx is not None and call.enters:
            dx = tp.start_back(dx)
        if tp.later is not None and call.deferred:
            tp.later.add(_weight_gradients(call, grads, x))
        else:
            factors = list(zip(grads, call.products, strict=True))
            trained_factors = [g for g, wants in zip(factors, wants_dw, strict=True) if wants]
            gradients = iter(_compute_weight_gradients(trained_factors, x, tp.turned))
            dw = [next(gradients) if wants else None for wants in wants_dw]
        product = call.products[0]
        of_leaves = isinstance(product, LeafProduct)
        sum_over_tokens = partial(sum_tokens, leaf=product.tokens) if of_leaves else _sum_rows
        db = [
            sum_over_tokens(g) if wants else None for g, wants in zip(grads, wants_db, strict=True)
        ]
        if dx is not None and call.enters:
            dx = tp.finish_back(dx)
        return dx, None, *dw, *db


def _needed_gradients(ctx: Context[_Call]) -> tuple[bool, tuple[bool, ...], tuple[bool, ...]]:
    """Return which gradients autograd asks a `_Linear` for: of x, of each weight, of each bias."""
    wants_dx, _, *wants_weights = ctx.needs_input_grad
    number = len(ctx.kept.products)
    return wants_dx, tuple(wants_weights[:number]), tuple(wants_weights[number:])


def _gather_tokens(x: Tensor, axis: Axis | None) -> Tensor:
    """All-gather x along its tokens over `axis` and wait, without autograd; x itself where `axis`
    is None.
    """
    return x if axis is None else transfers.wait(transfers.start_all_gather(x, axis), axis)


def _products(
    x: Tensor, weights: Sequence[Tensor], biases: Sequence[Tensor | None], call: _Call
) -> tuple[Tensor, ...]:
    """Return x W^T + b of each weight, by its entry of `call.products` where that is not None."""
    ys: list[Tensor] = []
    for w, b, product in zip(weights, biases, call.products, strict=True):
        if product is None:
            ys.append(F.linear(x, w, b))
            continue
        # lists of one: 8-bit products also serve stacked experts, one matrix each
        (y,) = product.output([x], [w])
        ys.append(y if b is None else y.add_(b))
    return tuple(ys)


def _input_gradient(
    grads: Sequence[Tensor], weights: Sequence[Tensor], products: Sequence[Product | None]
) -> Tensor:
    """Return the sum over i of g_i W_i, by each weight's product where it has one; accumulated in
    place in the first product's memory.
    """
    if isinstance(products[0], LeafProduct):
        return products[0].sum_of_input_gradients(grads, weights)
    dx: Tensor | None = None
    for g, w, product in zip(grads, weights, products, strict=True):
        if product is not None:
            (part,) = product.input_gradient([g], [w])
            dx = part if dx is None else dx.add_(part)
        elif dx is None:
            dx = g @ w
        else:
            dx.addmm_(g, w)
    assert dx is not None
    return dx


def _sum_rows(g: Tensor) -> Tensor:
    """Return the sum of g over tokens (dim 0): the gradient of a bias."""
    return g.sum(0)


def _weight_gradients(call: _Call, grads: Sequence[Tensor], x: Tensor) -> Callable[[], None]:
    """Return a function that computes the gradients of the call's deferred weights that are not
    frozen, and adds them to the weights' .grad. It holds x as this rank has it, and gathers its
    tokens over tp when called.
    """
    weights = [w for w in call.deferred if w.requires_grad]
    required = [
        (g, product)
        for w, g, product in zip(call.deferred, grads, call.products, strict=True)
        if w.requires_grad
    ]

    def run() -> None:
        """Compute the gradients, and add them to the weights' .grad."""
        # gathered again: under sequence parallelism only this rank's tokens were kept
        full = _gather_tokens(x, call.gather)
        torch.autograd.backward(weights, _compute_weight_gradients(required, full, call.tp.turned))

    return run


def _compute_weight_gradients(
    grads: Sequence[tuple[Tensor, Product | None]], x: Tensor, turned: bool
) -> list[Tensor]:
    """Return the weight gradient g^T x for each (gradient, product): by its 8-bit product, or
    torch's where that is None. `turned`: see `weight_products`.
    """
    plain = iter(weight_products([g for g, product in grads if product is None], x, turned))
    return [
        next(plain) if product is None else product.weight_gradient([g], [x])[0]
        for g, product in grads
    ]


def weight_products(grads: Sequence[Tensor], x: Tensor, turned: bool) -> list[Tensor]:
    """Return the weight gradient g^T x [out, in] for each of `grads` [tokens, out]. `turned`:
    transpose one factor into contiguous memory first, the narrower of x and all `grads` together
    (ops/kernels.py decides where that is faster).
    """
    if not turned:
        return [g.t() @ x for g in grads]
    if sum(g.shape[1] for g in grads) <= x.shape[1]:
        return [compute.transpose_contiguous(g) @ x for g in grads]
    # one transposed x serves all products: (x^T g)^T = g^T x
    turned_x = compute.transpose_contiguous(x)
    return [(turned_x @ g).t() for g in grads]


def _linear(
    x: Tensor, linears: Sequence[Linear], tp: TensorParallel, enters: bool
) -> tuple[Tensor, ...]:
    """Return the products of x with `linears`, their adapters and biases included, x being gathered
    over tp once for all. `enters`: x comes from the residual stream; else it is what a rank
    multiplies. Breaks a compiled graph where factors are rounded to 8 bits.
    """
    if torch.is_grad_enabled() and torch.compiler.is_compiling():
        if any(linear.rounding is not None for linear in linears):
            return _uncompiled(x, linears, tp, enters)
    return _multiply_linears(x, linears, tp, enters)


def _multiply_linears(
    x: Tensor, linears: Sequence[Linear], tp: TensorParallel, enters: bool
) -> tuple[Tensor, ...]:
    """Return the products of x with `linears`: base and adapter-down products share one input, then
    each adapter's up product is added and DoRA's gain applied. Prepacked and multi-LoRA weights
    take the inference path. `enters`: x comes from the residual stream.
    """
    if any(linear.prepacked is not None or linear.several is not None for linear in linears):
        # inference: nothing is kept for a backward, so x enters by a bare all-gather
        return _infer_linears(tp.gather_input(x) if enters else x, linears, tp)
    weights = [linear.weight for linear in linears]
    # of DoRA the gain comes before the bias
    gains = [
        None
        if linear.adapter is None
        else linear.adapter.gain(linear.dequantised_weight(x.dtype), tp.axis)
        for linear in linears
    ]
    biases = [
        linear.bias if gain is None else None for linear, gain in zip(linears, gains, strict=True)
    ]
    adapters = [
        (i, linear.adapter) for i, linear in enumerate(linears) if linear.adapter is not None
    ]
    # A x shares the input of W x, so it rides on the same all-gather; B is applied after
    downs = [adapter.down for _, adapter in adapters]
    none = [None] * len(downs)
    how = [*(tp.product(linear) for linear in linears), *none]
    products = _multiply(x, [*weights, *downs], [*biases, *none], how, tp, enters)
    if not adapters:
        return products
    ys, hs = products[: len(linears)], products[len(linears) :]
    for (i, adapter), h in zip(adapters, hs, strict=True):
        (up,) = _multiply(h * adapter.scale, [adapter.up], [None], [None], tp, enters=False)
        ys[i].add_(up)  # the product just made, which nothing else reads
    return tuple(
        y if gain is None else _apply_gain(y, gain, linear.bias)
        for y, gain, linear in zip(ys, gains, linears, strict=True)
    )


def _apply_gain(y: Tensor, gain: Tensor, bias: Tensor | None) -> Tensor:
    """Return y * gain + bias (if any): DoRA scales a layer's outputs before their bias."""
    y = y * gain.to(y.dtype)
    return y if bias is None else y + bias


def _infer_linears(x: Tensor, linears: Sequence[Linear], tp: TensorParallel) -> tuple[Tensor, ...]:
    """Return x W_i^T + b_i of each weight for inference, by prepacked weights where there are any,
    plus what each token's adapter adds (multi-LoRA). x is what this rank multiplies, already
    gathered over tp. Weights packed as one are multiplied once.
    """
    ys: list[Tensor] = []
    fused, parts = None, ()
    for linear in linears:
        prepacked = linear.prepacked
        if isinstance(prepacked, FusedPart):
            if prepacked.product is not fused:
                fused, parts = prepacked.product, prepacked.split(x)
            y, bias = parts[prepacked.index], linear.bias
        else:
            # an adapter may turn rows of outputs (DoRA), and leaves the bias as it is
            bias = None if linear.several is None else linear.bias
            y = _infer_linear(x, linear if bias is None else linear._replace(bias=None), tp)
        y = y if linear.several is None else linear.several.add_to(y, x)
        ys.append(y if bias is None else y.add_(bias))
    return tuple(ys)


def _infer_linear(x: Tensor, linear: Linear, tp: TensorParallel) -> Tensor:
    """Return x W^T + b of one weight, its own adapter included but no multi-LoRA, by its prepacked
    form if it has one.
    """
    if linear.prepacked is not None:
        return linear.prepacked(x, linear.bias)
    return _multiply_linears(x, [linear._replace(several=None)], tp, enters=False)[0]


# A compiled block ends before products of eight bits and begins again behind them: what delayed
# scaling learns of a step is no value of a graph, nor are the scales that ranks exchange.
_uncompiled = compute.disable_compile(_multiply_linears)


def _multiply(
    x: Tensor,
    weights: Sequence[Tensor],
    biases: Sequence[Tensor | None],
    how: Sequence[Product | None],
    tp: TensorParallel,
    enters: bool,
) -> tuple[Tensor, ...]:
    """Return x W_i^T + b_i, with autograd: by torch's own where nothing is sent, deferred,
    transposed or in 8 bits, else by `_Linear`. `how`: the product that replaces torch's of each
    weight, or None; `enters`: x comes from the residual stream.
    """
    enters = enters and tp.axis.size > 1
    defers = (
        tp.later is not None
        and torch.is_grad_enabled()
        and x.requires_grad
        and any(w.requires_grad for w in weights)
    )
    turns = tp.turned and torch.is_grad_enabled()
    call = _Call(tp, enters, tuple(weights) if defers else (), tuple(how))
    if not enters and not defers and not turns and not any(how):
        # torch's own backward is the same; ours costs the host 30 us per call, 12 without gradients
        return _products(x, weights, biases, call)
    used = [w.detach() for w in weights] if defers else weights
    return _Linear.apply(x, call, *used, *biases)


def columns(
    x: Float[Tensor, "here in"], linears: Sequence[Linear], tp: TensorParallel
) -> tuple[Float[Tensor, "tokens _"], ...]:
    """Return, for each of `linears`, which share the input x, its column-parallel output [tokens,
    out_i / tp], from its local weight [out_i / tp, in], with autograd.

    x is the residual stream: all tokens, the same on every rank of tp, or under sequence
    parallelism this rank's, which are gathered. The outputs are of all tokens, S(1)@tp.
    """
    return _linear(x, linears, tp, enters=True)


def products(
    x: Float[Tensor, "tokens in"], linears: Sequence[Linear], tp: TensorParallel
) -> tuple[Float[Tensor, "tokens _"], ...]:
    """Return, for each of `linears`, which share the input x, its output [tokens, out_i], from its
    weight [out_i, in]; nothing is sent. For column-parallel weights whose input is gathered
    already, or for weights that every rank stores whole and applies to its own tokens.
    """
    return _linear(x, linears, tp, enters=False)


def part_of_rows(
    x: Float[Tensor, "tokens _"], linear: Linear, tp: TensorParallel
) -> Float[Tensor, "tokens out"]:
    """Return a row-parallel product before its sum over tp: this rank's partial sum [tokens, out],
    without the bias. x is [tokens, in / tp] and the weight [out, in / tp], this rank's inputs of
    both.
    """
    plain = linear if linear.bias is None else linear._replace(bias=None)
    return products(x, [plain], tp)[0]


def rows(
    xs: Sequence[Float[Tensor, "tokens _"]], linears: Sequence[Linear], tp: TensorParallel
) -> Float[Tensor, "here out"]:
    """Return the sum over the pairs (x, linear) of row-parallel products, reduced over tp once for
    all of them (`TensorParallel.leave`: all tokens, or this rank's under sequence parallelism),
    plus their biases. Products of integers are reduced one by one, before their scales.
    """
    pairs = list(zip(xs, linears, strict=True))
    if any(isinstance(linear.prepacked, SplitIntegerLinear) for linear in linears):
        y = reduce(add, [_integer_rows(x, linear, tp) for x, linear in pairs])
    else:
        parts = [part_of_rows(x, linear, tp) for x, linear in pairs]
        if tp.exact is None or len(parts) == 1:
            y = tp.leave(reduce(add, parts))
        else:
            # a tree over ranks for each: (a0 + b0) + (a1 + b1) is not (a0 + a1) + (b0 + b1)
            y = reduce(add, [tp.leave(widen(part)) for part in parts])
        # of exact numerics partial sums are fp32, and rounded once
        y = y.to(xs[0].dtype)
    for bias in [linear.bias for linear in linears if linear.bias is not None]:
        y = y + bias if tp.exact is None else add_bias(y, bias, tp.exact.token_leaf)
    return y


def _integer_rows(x: Tensor, linear: Linear, tp: TensorParallel) -> Tensor:
    """Return a row-parallel product of integers, [here, out] without the bias: the sums are reduced
    exactly, so the result is that of a weight that is not cut. Adapters are reduced by themselves.
    """
    product = linear.prepacked
    assert isinstance(product, SplitIntegerLinear)
    scale = product.token_scales(x)
    sums = tp.leave(product.sums(x, scale))
    y = product.apply_scales(sums, local_tokens(scale, tp)).to(x.dtype)
    if linear.several is None:
        return y
    return y + tp.leave(linear.several.add_to(x.new_zeros(len(x), y.shape[1]), x))


def local_tokens(
    per_token: Shaped[Tensor, " tokens *rest"], tp: TensorParallel
) -> Shaped[Tensor, " here *rest"]:
    """Return this rank's tokens of a tensor with a row per token, as the residual stream has them:
    under sequence parallelism its equal part, else all.
    """
    return collectives.local_part(per_token, 0, tp.axis) if tp.gathers else per_token


def gather_token_values(
    per_token: Float[Tensor, " here"], tp: TensorParallel
) -> Float[Tensor, " tokens"]:
    """Return one value per token of all tokens, on every rank of tp, from those that `local_tokens`
    selects, with autograd; the input itself without sequence parallelism. Each rank pads its own
    with zeros and all are summed, so each rank's gradient is its part of the sum's; an all-gather
    as in `enter` (R) would add up every rank's gradient.
    """
    if not tp.gathers:
        return per_token
    # rank r of n puts its tokens at [r here, (r + 1) here) among zeros
    axis, here = tp.axis, per_token.shape[0]
    padding = (axis.rank * here, (axis.size - 1 - axis.rank) * here)
    return collectives.all_reduce_(F.pad(per_token, padding), axis)
