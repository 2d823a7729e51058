"""Mixture of experts on local tensors: which experts a token goes to, its way to them and back, and
the losses that keep them equally busy. Symbols: n tokens, H hidden, E experts, k of them per token,
F an expert's width; m rows of one rank's experts.

    logits [n, E] -> p = softmax -> k largest, a token's (expert, weight) pairs -> n k rows sorted
    by expert
    rows [m, H] -> one product per expert (grouped) -> rows [m, H] -> sum over a token's pairs,
    weighted -> [n, H]
"""

from collections.abc import Iterator, Sequence
from itertools import accumulate
from typing import Literal, NamedTuple

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int32, Int64, Shaped
from torch import Tensor

from dolmen.core import device
from dolmen.core.autograd import Context, TypedFunction
from dolmen.core.reduction import widen
from dolmen.ops import invariant


class Routing(NamedTuple):
    """The router's output, in fp32 or wider."""

    probabilities: Float[Tensor, "n E"]
    """Over all experts, summing to 1."""
    weights: Float[Tensor, "n k"]
    """A token's output is the sum of its experts' outputs times these."""
    experts: Int64[Tensor, "n k"]


def route(
    logits: Float[Tensor, "n E"],
    k: int,
    normalize: bool,
    bias: Float[Tensor, " E"] | None = None,
    *,
    score: Literal["softmax", "sigmoid"] = "softmax",
    scale: float = 1.0,
    groups: int = 1,
    groups_per_token: int = 1,
    group_score: Literal["max", "top2"] = "max",
    experts: Int64[Tensor, "n k"] | None = None,
    exact: bool = False,
) -> Routing:
    """Return the routing of each token: the k experts with the best scores, or `experts` if given,
    whatever they score now, and their weights.

    Scores are the softmax, or (2412.19437 eq. 15) the sigmoid of each logit, whose shares of their
    sum are then the probabilities. `bias` is added for the choice alone (2408.15664). With several
    `groups` of E / groups neighbours, a token's experts come from its best `groups_per_token`: a
    group scores as its best expert (`group_score` max), or its best two together (top2) (2405.04434
    section 2.1.2; 2412.19437 section 2.1.2). `normalize`: the weights of a token sum to 1, before
    `scale` multiplies them. `exact`: bits do not depend on the other tokens.
    """
    if score == "softmax":
        scores = probabilities = logits.softmax(-1)
    else:
        scores = invariant.sigmoid(logits) if exact else logits.sigmoid()
        probabilities = scores / scores.sum(-1, keepdim=True)
    if experts is None:
        # which experts are chosen has no gradient, their scores do
        choice = scores.detach() if bias is None else scores.detach() + bias
        if groups_per_token < groups:
            best = 1 if group_score == "max" else 2
            choice = _best_groups(choice, groups, groups_per_token, best)
        experts = choice.topk(k, -1).indices
    # the weights are without the bias: it steers load, not outputs
    weights = scores.gather(1, experts)
    if normalize:
        weights = weights / weights.sum(-1, keepdim=True)
    return Routing(probabilities, weights if scale == 1 else weights * scale, experts)


def _best_groups(choice: Tensor, groups: int, groups_per_token: int, best: int) -> Tensor:
    """Return choice [n, E] with -inf for the experts outside each token's `groups_per_token` best
    groups; a group scores as the sum of its `best` best experts.
    """
    grouped = choice.view(len(choice), groups, -1)
    totals = grouped.topk(best, -1).values.sum(-1)
    chosen = totals.topk(groups_per_token, -1).indices
    left_out = torch.ones_like(totals, dtype=torch.bool).scatter_(1, chosen, False)
    return grouped.masked_fill(left_out[..., None], -torch.inf).view_as(choice)


class ExpertOrder(NamedTuple):
    """The n k (token, expert) pairs sorted by expert; of equal ones the earlier token first."""

    pairs: Int64[Tensor, " pairs"]
    """The pair at each place; pair i is choice i % k of token i // k."""
    places: Int64[Tensor, " pairs"]
    """The inverse: the place of each pair."""
    counts: Int64[Tensor, " E"]
    """Pairs of each expert."""


def sort(experts: Int64[Tensor, "n k"], number: int) -> ExpertOrder:
    """Return the order of all (token, expert) pairs sorted by expert, of `number` experts, with the
    count of each. The host reads nothing, as it would for `bincount`, whose result is as long as
    the largest value requires.
    """
    sorted, pairs = experts.flatten().sort(stable=True)
    # E binary searches of n k sorted numbers
    ends = torch.searchsorted(sorted, torch.arange(number, device=sorted.device), right=True)
    return ExpertOrder(pairs, inverse(pairs), ends.diff(prepend=ends.new_zeros(1)))


def inverse(permutation: Int64[Tensor, " m"]) -> Int64[Tensor, " m"]:
    """Return the inverse permutation: inverse(p)[p[i]] = i."""
    return torch.empty_like(permutation).scatter_(
        0, permutation, torch.arange(len(permutation), device=permutation.device)
    )


class _Permute(TypedFunction):
    """Autograd of `permute`: a gather each way."""

    @staticmethod
    def forward(ctx: Context[None], x: Tensor, permutation: Tensor, inverted: Tensor) -> Tensor:
        """Return x[permutation]."""
        ctx.save_for_backward(inverted)
        return x[permutation]

    @staticmethod
    def backward(ctx: Context[None], g: Tensor) -> tuple[Tensor, None, None]:
        """Return the gradient gathered by the inverse permutation."""
        return g[ctx.saved_tensors[0]], None, None


class _Spread(TypedFunction):
    """Autograd of `spread`: backward gathers each token's k gradients and adds them."""

    @staticmethod
    def forward(
        ctx: Context[tuple[int, bool]], x: Tensor, pairs: Tensor, places: Tensor, exact: bool
    ) -> Tensor:
        """Return the row of each pair's token, in the order of `pairs`."""
        k = len(pairs) // len(x)
        ctx.kept = k, exact
        ctx.save_for_backward(places)
        # pair i is choice i % k of token i // k
        return x[pairs // k]

    @staticmethod
    def backward(ctx: Context[tuple[int, bool]], g: Tensor) -> tuple[Tensor, None, None, None]:
        """Return, per token, the sum of the gradients of its k rows, gathered by the saved index,
        as they are not side by side.
        """
        k, exact = ctx.kept
        rows = g[ctx.saved_tensors[0]].view(-1, k, g.shape[-1])
        dx = invariant.add_pairs(widen(rows), 1).to(g.dtype) if exact else rows.sum(1)
        return dx, None, None, None


def permute(
    x: Shaped[Tensor, " m *rest"], permutation: Int64[Tensor, " m"], inverted: Int64[Tensor, " m"]
) -> Shaped[Tensor, " m *rest"]:
    """Return x[permutation] along dim 0, with autograd; `inverted` is the inverse permutation.
    Backward is a gather by it, without atomic additions: deterministic.
    """
    return _Permute.apply(x, permutation, inverted)


def spread(
    x: Float[Tensor, "n H"], order: ExpertOrder, exact: bool = False
) -> Float[Tensor, "pairs H"]:
    """Return each token's row of x once per expert it goes to, sorted by expert, with autograd.
    `exact`: gradients of a token are added in a fixed order, in fp32 or wider.
    """
    return _Spread.apply(x, order.pairs, order.places, exact)


def combine(
    rows: Float[Tensor, "pairs H"],
    weights: Float[Tensor, "n k"],
    order: ExpertOrder,
    exact: bool = False,
) -> Float[Tensor, "n H"]:
    """Return, per token, the sum of its experts' output rows (sorted by expert, as `order` says)
    times its routing weights, with autograd, in the rows' dtype. `exact`: products are added in a
    fixed order, in fp32 or wider, and rounded once.
    """
    # back to the order of pairs: [n, k, H]
    expert_rows = permute(rows, order.places, order.pairs).view(*weights.shape, rows.shape[-1])
    if exact:
        return invariant.sum_over(widen(expert_rows) * weights[..., None], 1).to(rows.dtype)
    return (expert_rows * weights.to(rows.dtype)[..., None]).sum(1)


Groups = Sequence[int] | Int32[Tensor, " groups"]
"""Rows that belong together, one group after the other: how many each has, on the host, for one
product each; or where each ends, on the device, for one kernel that does all.
"""


# A sparse layer has nine grouped products in a step: gate, up and down, each forward, by its input
# and by its weight. Both roads compute the same ones. They differ in where it is known how many
# rows a group has: the loop's host, which has waited for the device to say so, or the device alone.


class _Loop(TypedFunction):
    """Autograd of grouped_linear: a product for each group that has rows."""

    @staticmethod
    def forward(
        ctx: Context[Sequence[int]], x: Tensor, weight: Tensor, counts: Sequence[int]
    ) -> Tensor:
        """Return each group's rows of x times its weight transposed, [m, out], from row counts on
        the host.
        """
        ctx.kept = counts
        ctx.save_for_backward(*_save_if_needed(ctx, x, weight))
        return _products(x, weight.transpose(1, 2), counts)

    @staticmethod
    def backward(
        ctx: Context[Sequence[int]], g: Tensor
    ) -> tuple[Tensor | None, Tensor | None, None]:
        """Return the gradients of x and weight, None where not needed."""
        x, weight = ctx.saved_tensors
        wants_dx, wants_dw, _ = ctx.needs_input_grad
        dx = _products(g, weight, ctx.kept) if wants_dx else None
        return dx, _outer_products(g, x, ctx.kept) if wants_dw else None, None


class _Kernel(TypedFunction):
    """grouped_linear, all groups in one kernel, bf16:

        y   [m, out]           x [m, in]     W^T [groups, in, out], columns contiguous
        dx  [m, in]            g [m, out]    W [groups, out, in]
        dW  [groups, out, in]  g^T [out, m], columns contiguous    x [m, in]

    `in` and `out` are multiples of 8, so that every row begins at 16 bytes. Groups of any size need
    no padding, as none of the operands is contiguous along the rows of groups; of an empty group dW
    is zero (CUTLASS 4 on Hopper; on 10.x it is not: pytorch#172439). Without any rows there is
    nothing to launch.
    """

    @staticmethod
    def forward(
        ctx: Context[tuple[torch.Size, torch.Size]], x: Tensor, weight: Tensor, ends: Tensor
    ) -> Tensor:
        """Return each group's rows of x times its weight transposed, [m, out], by one kernel, from
        end offsets on the device.
        """
        ctx.save_for_backward(*_save_if_needed(ctx, x, weight), ends)
        ctx.kept = x.shape, weight.shape
        if len(x) == 0:
            return x.new_empty(0, weight.shape[1])
        return F.grouped_mm(x, weight.transpose(1, 2), offs=ends)

    @staticmethod
    def backward(
        ctx: Context[tuple[torch.Size, torch.Size]], g: Tensor
    ) -> tuple[Tensor | None, Tensor | None, None]:
        """Return the gradients of x and weight, None where not needed."""
        x, weight, ends = ctx.saved_tensors
        wants_dx, wants_dw, _ = ctx.needs_input_grad
        if len(g) == 0:
            dx, dw = (g.new_zeros(shape) for shape in ctx.kept)
            return dx if wants_dx else None, dw if wants_dw else None, None
        g = g.contiguous()
        dx = F.grouped_mm(g, weight, offs=ends) if wants_dx else None
        return dx, F.grouped_mm(g.t(), x, offs=ends) if wants_dw else None, None


def _save_if_needed(ctx: Context, x: Tensor, weight: Tensor) -> tuple[Tensor | None, Tensor | None]:
    """Return (x, weight) as backward needs them: x, or None where the weight needs no gradient; the
    weight, or None where x needs none.
    """
    wants_dx, wants_dw, _ = ctx.needs_input_grad
    return x if wants_dw else None, weight if wants_dx else None


def _products(x: Tensor, weight: Tensor, counts: Sequence[int]) -> Tensor:
    """Return the product of each group of `counts` rows of x [m, in] with its weight [groups, in,
    out]: [m, out].
    """
    out = x.new_empty(len(x), weight.shape[2])
    for i, part, rows in _groups(counts, out, x):
        torch.mm(rows, weight[i], out=part)
    return out


def _outer_products(g: Tensor, x: Tensor, counts: Sequence[int]) -> Tensor:
    """Return g^T x of each group of `counts` rows of g [m, out] and x [m, in]: [groups,
    out, in].
    """
    # zeros, since a group without rows is skipped and has a gradient all the same
    out = x.new_zeros(len(counts), g.shape[1], x.shape[1])
    for i, grad, rows in _groups(counts, g, x):
        torch.mm(grad.t(), rows, out=out[i])
    return out


def _groups(counts: Sequence[int], *tensors: Tensor) -> Iterator[tuple[int, *tuple[Tensor, ...]]]:
    """Yield (index of a group, its `counts` rows of each tensor) for the groups that have rows."""
    for i, parts in enumerate(zip(*(t.split(list(counts)) for t in tensors), strict=True)):
        if counts[i]:
            yield i, *parts


def grouped_linear(
    x: Float[Tensor, "m in"], weight: Float[Tensor, "groups out in"], groups: Groups
) -> Float[Tensor, "m out"]:
    """Return y = x W_e^T with the W of each row's group: the first rows are group 0's and so on.
    Groups may be empty; their weights' gradient is zero. No gradient is computed for a frozen x or
    weight.
    """
    road = _Kernel if isinstance(groups, Tensor) else _Loop
    return road.apply(x, weight, groups)


class _Bias(TypedFunction):
    """Autograd of grouped_bias; `group` is each row's."""

    @staticmethod
    def forward(ctx: Context[int], y: Tensor, bias: Tensor, group: Tensor) -> Tensor:
        """Return y plus, row by row, the bias of the row's group."""
        ctx.kept = len(bias)
        ctx.save_for_backward(group)
        return y + bias[group]

    @staticmethod
    def backward(ctx: Context[int], g: Tensor) -> tuple[Tensor, Tensor | None, None]:
        """Return the gradients of y and bias."""
        (group,) = ctx.saved_tensors
        _, wants_db, _ = ctx.needs_input_grad
        if not wants_db:
            return g, None, None
        # a product with which row is of which group: no atomic additions, so the same every time
        of = torch.arange(ctx.kept, device=g.device)[:, None] == group
        return g, of.to(g.dtype) @ g, None


def grouped_bias(
    y: Float[Tensor, "m out"], bias: Float[Tensor, "groups out"], groups: Groups
) -> Float[Tensor, "m out"]:
    """Return y plus the bias of each row's group, with a deterministic backward."""
    if isinstance(groups, Tensor):
        ends = groups
    else:
        ends = device.to_device(torch.tensor(list(accumulate(groups)), dtype=torch.int32), y.device)
    rows = torch.arange(len(y), device=y.device, dtype=torch.int32)
    return _Bias.apply(y, bias, torch.searchsorted(ends, rows, right=True))


def sequence_counts(
    experts: Int64[Tensor, "n k"], batch: int, number: int
) -> Int64[Tensor, "{batch} {number}"]:
    """Return how many (token, expert) pairs each sequence has of each expert, for `batch` sequences
    of equal length, one after the other, and `number` experts.
    """
    chosen = experts.view(batch, -1, 1)  # of one_hot, a CPU reads the largest
    return (chosen == torch.arange(number, device=experts.device)).sum(1)


def balance_losses(
    probabilities: Float[Tensor, "tokens E"],
    counts: Int64[Tensor, "batch E"],
    length: int,
    k: int,
) -> Float[Tensor, " batch"]:
    """Return the load-balancing loss of each sequence: E / (k T) sum_e count_e mean_t p_te, T =
    `length`: 1 where all experts are equally busy, E / k where k of them do everything (2101.03961
    eq. 4, a sequence at a time as in 2412.19437 eq. 17). Bits do not depend on other sequences.

    `probabilities` are of the tokens here, equally many of each sequence, `counts` of whole
    sequences. Where the tokens here are a part of them, so is the result: it adds up over the
    parts.
    """
    batch, number = counts.shape
    sums = probabilities.view(batch, -1, number).sum(1)
    # E / (k T) times mean_t p = sum_t p / T
    return (sums * counts).sum(-1) * (number / (k * length * length))


def z_losses(logits: Float[Tensor, "tokens E"], batch: int, length: int) -> Float[Tensor, " batch"]:
    """Return the router z-loss of each of `batch` sequences, mean_t logsumexp(logits_t)^2, which
    keeps logits small (2202.08906 eq. 5). Sequences have `length` tokens; for a part of their
    tokens it is that part of the sum. Bits do not depend on other sequences.
    """
    return logits.logsumexp(-1).square().view(batch, -1).sum(-1) / length
