"""The embedding, the LM head and its cross-entropy, with the vocabulary split over tp by rows
(1909.08053, section 3).

    vocabulary 10, tp 4:    rows 0-2 | 3-5 | 6-8 | 9      as torch.chunk cuts, nothing is padded

The head and its cross-entropy are one function over the vocabulary-parallel weight. Logits exist
for one chunk of tokens at a time, and their gradient is formed in the same visit, so that [tokens,
vocabulary] is never held and never sent: per token, the maximum, the sum of exponentials and the
label's logit cross the tp axis, three fp32 numbers. The gradient of the sum of losses is ready
after forward; backward scales and sends it. Of a frozen head, or input, there is none.

    forward            X [tokens, hidden] = enter(x), logits [tokens, rows] = X W^T + b
                       with a soft cap, logits = cap tanh(logits / cap), slope = 1 - tanh^2
                       loss = sum over tokens of (log(sum of e^logits) - logits[label]) weight
    of the logits      dlogits [tokens, rows] = (softmax - onehot) weight, times slope
    input gradient     dX [tokens, hidden] = dlogits W, then the backward of `enter`
    weight gradient    dW [rows, hidden] = dlogits^T X, db [rows] = sum of dlogits over tokens
"""

from collections.abc import Callable
from functools import cache, partial
from typing import NamedTuple

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int64
from torch import Tensor

from dolmen.core import collectives, profiling, transfers
from dolmen.core.autograd import Context, TypedFunction
from dolmen.core.mesh import Axis
from dolmen.core.reduction import Tree
from dolmen.ops import invariant, loss
from dolmen.ops.elementwise import accumulate, compile_accumulate
from dolmen.ops.kernels import Kernels
from dolmen.ops.numerics import Exact
from dolmen.parallel.exact import round_losses
from dolmen.parallel.tensor import TensorParallel, weight_products


def _rows(vocab_size: int, axis: Axis) -> int:
    """Return the number of vocabulary rows per rank, vocab_size / ranks rounded up; the last ranks
    may hold fewer, or none.
    """
    return -(-vocab_size // axis.size)


def vocabulary_range(vocab_size: int, axis: Axis) -> tuple[int, int]:
    """Return (first row, number of rows) of this rank's part of the vocabulary over `axis`; the
    last ranks may hold fewer, or none.
    """
    rows = _rows(vocab_size, axis)
    first = min(axis.rank * rows, vocab_size)
    return first, min(rows, vocab_size - first)


def embed(
    tokens: Int64[Tensor, " tokens"],
    weight: Float[Tensor, "rows hidden"],
    vocab_size: int,
    tp: TensorParallel,
) -> Float[Tensor, "here hidden"]:
    """Return the embeddings of `tokens`, of which `weight` has this rank's rows of the vocabulary,
    with autograd: each rank looks up its own, zero elsewhere, and they are summed over tp
    (`TensorParallel.leave`). All tokens, or this rank's (S(0)) under sequence parallelism.
    """
    look_up = F.embedding if tp.exact is None else partial(invariant.embedding, leaf=tp.exact.leaf)
    if tp.axis.size == 1:
        return look_up(tokens, weight)
    first, size = vocabulary_range(vocab_size, tp.axis)
    # ids of other ranks' rows look up row 0, and are multiplied by 0
    row = tokens - first
    mine = (row >= 0) & (row < size)
    return tp.leave(look_up(torch.where(mine, row, 0), weight) * mine[:, None].to(weight.dtype))


def gather_vocabulary(
    logits: Float[Tensor, "*tokens rows"], vocab_size: int, axis: Axis
) -> Float[Tensor, "*tokens {vocab_size}"]:
    """Return logits over the whole vocabulary on every rank of the axis, from this rank's rows of
    it: an all-gather over the last dim. No autograd: for reading and sampling.
    """
    if axis.size == 1:
        return logits
    missing = _rows(vocab_size, axis) - logits.shape[-1]  # an all-gather takes equal parts
    padded = F.pad(logits.detach(), (0, missing)).movedim(-1, 0)
    full = transfers.wait(transfers.start_all_gather(padded, axis), axis)
    return full.movedim(0, -1)[..., :vocab_size]


class LogitsCall(NamedTuple):
    """How logits over the vocabulary-parallel weight are computed: a chunk of tokens at a time, so
    that [tokens, vocabulary] is never held.
    """

    vocab_size: int
    tp: TensorParallel
    at_once: int
    """Elements of a chunk's logits."""
    soft_cap: float | None

    @property
    def block(self) -> int | None:
        """Vocabulary rows of a leaf of a sum of exponentials with exact numerics, else None."""
        return None if self.tp.exact is None else self.tp.exact.block(self.vocab_size)

    def product(self, weight: Tensor) -> Callable[[Tensor, Tensor | None], Tensor] | None:
        """Return the product with `weight` of exact numerics: (x, bias) -> logits; else None."""
        return None if self.tp.exact is None else partial(_invariant_linear, weight)

    @property
    def first(self) -> int:
        """First vocabulary row of this rank."""
        return vocabulary_range(self.vocab_size, self.tp.axis)[0]

    def chunks(self, tokens: int, rows: int) -> list[slice]:
        """Slice `tokens` into chunks of at least one token whose logits, of `rows` local vocabulary
        rows, have at most `at_once` elements, counting a soft cap's slopes, which are as many. With
        exact numerics a chunk is a leaf of tokens.
        """
        if self.tp.exact is not None:
            return [
                slice(at, at + self.tp.exact.leaf) for at in range(0, tokens, self.tp.exact.leaf)
            ]
        tensors = 1 if self.soft_cap is None else 2
        size = max(1, self.at_once // (tensors * rows))
        return [slice(at, at + size) for at in range(0, tokens, size)]


def logits_and_slope(
    x: Float[Tensor, "n hidden"],
    weight: Float[Tensor, "rows hidden"],
    wide: torch.dtype,
    soft_cap: float | None,
    bias: Float[Tensor, " rows"] | None = None,
    product: Callable[[Tensor, Tensor | None], Tensor] | None = None,
) -> tuple[Float[Tensor, "n rows"], Float[Tensor, "n rows"] | None]:
    """Return this rank's logits x W^T + b in the `wide` dtype, soft-capped if there is a cap, and
    the cap's derivative at each (None without). `product`: computes them in its place, from x and
    the bias.
    """
    logits = (F.linear(x, weight, bias) if product is None else product(x, bias)).to(wide)
    return (logits, None) if soft_cap is None else loss.soft_cap_with_slope(logits, soft_cap)


class _LinearCrossEntropy(TypedFunction):
    """Autograd of `linear_cross_entropy`; gradients are formed in forward, scaled and sent in
    backward.
    """

    @staticmethod
    def forward(
        ctx: Context[TensorParallel],
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        labels: Tensor,
        weights: Tensor | None,
        call: LogitsCall,
        differentiate: bool,
        compile: bool,
    ) -> Tensor:
        """Return the sum of losses; visit tokens in chunks and keep the gradients of x, weight and
        bias for a loss gradient of 1. `differentiate`: gradients are enabled; `compile`: fuse the
        passes over a chunk.
        """
        entered = call.tp.gather_input(x)
        total = torch.zeros(
            (), dtype=torch.float32 if x.dtype != torch.float64 else x.dtype, device=x.device
        )
        wants_dx, wants_dw, wants_db = (differentiate and w for w in ctx.needs_input_grad[:3])
        dx = torch.empty_like(entered) if wants_dx else None
        dw = zeros(weight, total.dtype, call.tp) if wants_dw else None
        db = torch.zeros_like(weight[:, 0], dtype=total.dtype) if wants_db else None
        # A chunk of tokens at a time: its logits are formed, judged, turned into their gradient and
        # multiplied into dX and dW, then forgotten. Of 8,192 tokens and 128,256 rows all logits
        # would be 3.9 GiB in fp32, and their gradient as much. dW is a sum over chunks, in fp32.
        visit, add, round_ = (
            (_compiled_chunk(), compile_accumulate(), _compiled_rounded())
            if compile
            else (_chunk, accumulate, _round)
        )
        for rows in call.chunks(len(entered), len(weight)):
            losses, dlogits = visit(
                entered[rows],
                weight,
                labels[rows],
                call.first,
                call.tp.axis,
                wants_dx or wants_dw or wants_db,
                total.dtype,
                call.soft_cap,
                None if weights is None else weights[rows].to(total.dtype),
                bias,
            )
            total += losses.sum()
            if dlogits is None:
                continue
            if dx is not None:
                # a partial sum over this rank's vocabulary rows, P@tp until backward
                dx[rows] = dlogits @ weight
            if dw is not None:
                add((dw,), weight_products([dlogits], entered[rows], call.tp.turned))
            if db is not None:
                db += dlogits.sum(0)
        ctx.kept = call.tp
        gradients = (None if d is None else round_(d, weight.dtype) for d in (dw, db))
        ctx.save_for_backward(dx, *gradients)
        return total

    @staticmethod
    def backward(ctx: Context[TensorParallel], g: Tensor) -> tuple[Tensor | None, ...]:
        """Return the gradients of x, weight and bias that forward has kept, times g; that of x is
        reduced over tp meanwhile.
        """
        dx, *gradients = ctx.saved_tensors
        if dx is not None:
            dx = dx * g.to(dx.dtype)
            # overlaps with the scaling of dW, [rows, hidden]: 1 GiB at 128,256 x 4,096 in bf16
            dx = ctx.kept.start_back(dx)
        gradients = [None if d is None else d * g.to(d.dtype) for d in gradients]
        if dx is not None:
            dx = ctx.kept.finish_back(dx)
        return dx, *gradients, *[None] * 5


class HeadLeafGradients:
    """Gradients of the head with exact numerics, from those of logits, a leaf of tokens at a time:
    of the input by a tree over blocks of the vocabulary, of weight and bias by one over leaves.
    """

    def __init__(self, leaves: int, weight: Float[Tensor, "rows hidden"], exact: Exact, block: int):
        """Prepare sums over so many `leaves` of tokens. A leaf of the vocabulary is `block` rows of
        `weight`.
        """
        self.exact, self.block, self.blocks = exact, block, weight.split(block)
        self.weights, self.biases = Tree(leaves), Tree(leaves)

    def input_gradient(
        self, dlogits: Float[Tensor, "tokens rows"]
    ) -> Float[Tensor, "tokens hidden"]:
        """Return the input gradient of a leaf of tokens, a partial sum over tp."""
        pairs = zip(dlogits.split(self.block, 1), self.blocks, strict=True)
        return invariant.sum_of_products(pairs, len(self.blocks))

    def weight_gradient(
        self, i: int, dlogits: Float[Tensor, "tokens rows"], x: Float[Tensor, "tokens hidden"]
    ) -> Float[Tensor, "rows hidden"] | None:
        """Add leaf i; return the weight gradient of all with the last, else None."""
        return self.weights.add(i, invariant.product(dlogits.t(), x))

    def bias_gradient(
        self, i: int, dlogits: Float[Tensor, "tokens rows"]
    ) -> Float[Tensor, " rows"] | None:
        """Add leaf i; return the bias gradient of all with the last, else None."""
        return self.biases.add(i, invariant.sum_tokens(dlogits, self.exact.leaf))


class _ExactLinearCrossEntropy(_LinearCrossEntropy):
    """The same with exact numerics (parallel/exact.py): a chunk is a leaf of tokens, dX is
    added over blocks of the vocabulary, dW over leaves of tokens, and losses in fp64.
    """

    @staticmethod
    def forward(
        ctx: Context[TensorParallel],
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        labels: Tensor,
        weights: Tensor | None,
        call: LogitsCall,
        differentiate: bool,
        compile: bool,
    ) -> Tensor:
        """Return the sum of losses in fp64; see the base class. Without weights."""
        exact = call.tp.exact
        assert exact is not None and weights is None, "checks/exact.py refuses it"
        entered, block = call.tp.gather_input(x), exact.block(call.vocab_size)
        wants_dx, wants_dw, wants_db = (
            differentiate and wants for wants in ctx.needs_input_grad[:3]
        )
        chunks = call.chunks(len(entered), len(weight))
        total = torch.zeros((), dtype=torch.float64, device=x.device)
        dx = torch.empty_like(entered, dtype=torch.float32) if wants_dx else None
        gradients = HeadLeafGradients(len(chunks), weight, exact, block)
        dw, db = None, None
        for i, rows in enumerate(chunks):
            losses, dlogits = _chunk(
                entered[rows],
                weight,
                labels[rows],
                call.first,
                call.tp.axis,
                wants_dx or wants_dw or wants_db,
                torch.float32,
                call.soft_cap,
                None,
                bias,
                block,
            )
            total += round_losses(losses).sum()
            if dlogits is None:
                continue
            if dx is not None:
                dx[rows] = gradients.input_gradient(dlogits)
            if wants_dw:
                dw = gradients.weight_gradient(i, dlogits, entered[rows])
            if wants_db:
                db = gradients.bias_gradient(i, dlogits)
        ctx.kept = call.tp
        ctx.save_for_backward(dx, dw, db)
        return total


def zeros(
    weight: Float[Tensor, "rows hidden"], dtype: torch.dtype, tp: TensorParallel
) -> Float[Tensor, "rows hidden"]:
    """Return zeros for the weight gradient to be added to, in the memory layout of
    `weight_products`.
    """
    # `weight_products` gives (x^T g)^T where x is the narrower factor: match its strides
    if not tp.turned or len(weight) <= weight.shape[1]:
        return torch.zeros_like(weight, dtype=dtype)
    return torch.zeros_like(weight.t(), dtype=dtype, memory_format=torch.contiguous_format).t()


def _chunk(
    x: Tensor,
    weight: Tensor,
    labels: Tensor,
    first: int,
    axis: Axis,
    want_grad: bool,
    wide: torch.dtype,
    soft_cap: float | None,
    weights: Tensor | None,
    bias: Tensor | None,
    block: int | None = None,
) -> tuple[Tensor, Tensor | None]:
    """Return the losses [n] of n tokens, times `weights` if given, and the gradient of their sum
    with respect to this rank's logits [n, rows], in x's dtype (None unless `want_grad`). A token
    whose label is IGNORED has loss and gradient 0. `block`: add exponentials in the fixed order of
    a tree over so many rows each. Collective over `axis`.
    """
    product = None if block is None else partial(_invariant_linear, weight)
    logits, slope = logits_and_slope(x, weight, wide, soft_cap, bias, product)
    _, e, sums, target = combine_vocabulary(logits, labels, first, axis, block)
    # z - logit, both relative to the maximum
    losses = torch.where(labels == loss.IGNORED, 0.0, sums.log() - target)
    if weights is not None:
        losses = losses * weights
    if not want_grad:
        return losses, None
    return losses, loss.gradient(e, sums, labels, first, x.dtype, slope, weights)


def _invariant_linear(weight: Tensor, x: Tensor, bias: Tensor | None) -> Tensor:
    """Return x W^T, plus the bias if there is one, whose bits depend on no other row or column."""
    logits = invariant.product(x, weight.t())
    return logits if bias is None else logits + bias


def combine_vocabulary(
    logits: Float[Tensor, "n rows"],
    labels: Int64[Tensor, " n"],
    first: int,
    axis: Axis,
    block: int | None = None,
) -> tuple[Float[Tensor, " n"], Float[Tensor, "n rows"], Float[Tensor, " n"], Float[Tensor, " n"]]:
    """Return, over the whole vocabulary, the maximum m of each token, e^(logits - m) of this rank's
    rows (in the logits' memory), the sum of the exponentials, and the label's logit minus m, from
    this rank's logits, whose first vocabulary row is `first`. Two all-reduces over `axis`. `block`:
    add exponentials in the fixed order of a tree over so many rows each.
    """
    # Two all-reduces, not three: the exponentials need the maximum of all ranks, and then their sum
    # and the label's logit, which one rank has and the others give as 0, go together.
    maximum = collectives.reduce_scalar(logits.amax(-1), axis, "max")
    e, own_sum, own_target = loss.exponentials(logits, maximum, labels, first)
    if block is not None:
        own_sum = invariant.sum_blocks(e, block)
    sums, target = collectives.reduce_scalar(torch.stack((own_sum, own_target)), axis)
    return maximum, e, sums, target


def _round(gradient: Tensor, dtype: torch.dtype) -> Tensor:
    """Return a gradient in `dtype` with contiguous rows, as the weight has them."""
    return gradient.to(dtype).contiguous()


@cache
def _compiled_chunk():
    """Return `_chunk` compiled, cached; call it on first use, as inductor takes a second to
    import.
    """
    return torch.compile(_chunk, dynamic=False)


@cache
def _compiled_rounded():
    """Return `_round` compiled, cached; call it on first use."""
    return torch.compile(_round, dynamic=False)


@profiling.record_function_range("loss")
def linear_cross_entropy(
    x: Float[Tensor, "here hidden"],
    weight: Float[Tensor, "rows hidden"],
    labels: Int64[Tensor, " tokens"],
    vocab_size: int,
    tp: TensorParallel,
    compile: bool = False,
    at_once: int = Kernels().logits_at_once,
    soft_cap: float | None = None,
    weights: Float[Tensor, " tokens"] | None = None,
    bias: Float[Tensor, " rows"] | None = None,
) -> Float[Tensor, ""]:
    """Return the sum over tokens of -log softmax(x W^T + b)[label], times each token's weight if
    there are `weights`, with autograd: a scalar, fp32 (fp64 for fp64 input, and with exact
    numerics), the same on every rank of tp. `soft_cap` bounds the logits first.

    x is all tokens, the same on every rank of tp, or this rank's under sequence parallelism; weight
    and bias are this rank's rows of the vocabulary; labels and weights of all tokens, IGNORED
    (-100) where there is no loss. Divide by the global sum of weights, 1 for each real token,
    before backward. `compile` fuses the passes over one chunk's logits, of `at_once` elements.
    """
    call = LogitsCall(vocab_size, tp, at_once, soft_cap)
    function = _LinearCrossEntropy if tp.exact is None else _ExactLinearCrossEntropy
    return function.apply(x, weight, bias, labels, weights, call, torch.is_grad_enabled(), compile)
