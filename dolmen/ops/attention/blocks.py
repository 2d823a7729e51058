"""Attention in blocks of queries, each against the keys it can see, with the softmax between two
products (FlashAttention's algebra, 2307.08691). No autograd here: blockwise.py has it.

    forward    S = scores(Q K^T)        P = exp(S - maximum)       weighted = P V
               total = sum of P, log_sum = maximum + log of it, one number per row
               out = weighted / total, of all blocks at once, where it is needed next
    backward   P = exp(S - log_sum)     formed again, a block at a time
               dV = P^T g               dS = P (g V^T - delta), where delta = sum of g out, per row
               dQ = dS' K               dS' = dS by the derivative of `scores`
               dK = dS'^T Q

Everywhere n = batch * kv_heads and rows = queries * group: a key-value head's queries are rows of
one product, (query, head) by (key), so that no key or value is repeated:

    Q [n, rows, size]    K [n, keys, size]    V [n, keys, value size]    S [n, rows, keys]
"""

import math
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

from dolmen.core.device import to_device
from dolmen.ops.attention.spec import seen, visible
from dolmen.ops.elementwise import Accumulate, accumulate

BLOCK = 64  # queries at once: the triangle wastes half a block per row
WHOLE = 128  # where no document ends between them: fewer sums of dK and dV, and larger products
BLOCKS = 16  # most blocks of a sequence, while they hold few scores:
SCORES = 2**20  # of one head at once, so that memory does not grow with length^2


class Rule(NamedTuple):
    """How query-key products become scores. Holds only numbers and tensors, so that it unpacks into
    the arguments of blockwise.py's operators: `f(*rule)`, `Rule(*arguments)`.
    """

    group: int
    """Queries' heads per key-value head."""
    offset: int
    """The key that the first query is at."""
    scale: float
    soft_cap: float | None
    slopes: Sequence[float] | None
    """ALiBi slopes of each head: those of the first key-value head, of the second, ..."""
    window: int | None
    starts: Tensor | None
    """[batch, queries]: where each query's document begins, as an index among the keys."""
    host_starts: Tensor | None
    """`starts` on the host, to size blocks by."""
    reach: Tensor | None
    """[batch, queries]: where the prefix of each query's document ends, as an index among the keys;
    with starts alone.
    """
    host_reach: Tensor | None
    """`reach` on the host, to size blocks by."""


class ScoreRule(NamedTuple):
    """How the products of one block become its scores."""

    scale: float
    soft_cap: float | None
    alibi: tuple[Tensor, Tensor] | None
    """Slopes [kv_heads, 1, group, 1], and distances [queries, 1, keys], 0 and below where a key is
    seen: their products are added. None: nothing is.
    """
    mask: Tensor | None
    """0 or -inf to add, [rows, keys], with starts [batch, 1, rows, keys]; None: 0."""


# Of the keys only a run is multiplied with a block of queries, those that one of them may see:
#
#                     key   0   1   2   3   4   5   6   7   8   9
#                                start                   stop
#     query first           .   .   o   o   o   x   *   *   .   .       x   the key it is at
#                           .   .   *   o   o   o   x   *   .   .       o   keys it sees beside
#     query end - 1         .   .   *   *   o   o   o   x   .   .       *   multiplied, and masked
#
# A query is at key `query + offset`. `stop` is behind the key of the last one, or behind the
# longest prefix that any of them sees; `start` is where the window of the first begins, or the
# oldest document that any of them belongs to, whichever is later. Nothing is left between the two
# where all keys come after these queries, or all before their windows and documents: of a ring's
# pieces and of documents there are such blocks.
#
# The mask adds -inf to what is multiplied and not seen. It takes long to make, beside one product.
# But where the last query is at the last key, as in whole sequences and with a cache, and all is
# one document, a key is seen or not by how far back from the query it is. Then blocks, laid on each
# other so that their last queries and last keys meet, have one mask: that of the largest is made,
# and each block takes as many of its last rows and columns as it has itself.


def _blocks(
    q: Tensor, keys: int, rule: Rule, size: int | None
) -> Iterator[tuple[slice, tuple[slice, ScoreRule] | None]]:
    """Yield, per block of queries in order, the slice of its rows (query, head) in Q, and a pair:
    the slice of keys to multiply them with, and how the products become scores; None in place of
    the pair where no query of the block sees any key. `size`: queries of a block; None:
    `block_size`.
    """
    group, queries, device = rule.group, q.shape[1] // rule.group, q.device
    size = size or block_size(queries, keys, rule.starts is not None)
    same_mask = rule.starts is None and rule.offset == keys - queries
    shared = _shared_mask(min(size, queries), keys, rule, device) if same_mask else None
    wide = torch.promote_types(q.dtype, torch.float32)
    slopes = None
    if rule.slopes is not None:
        slopes = to_device(torch.tensor(rule.slopes, dtype=wide), device).view(-1, 1, group, 1)
    for mine, theirs in _runs(queries, keys, size, rule):
        rows = slice(mine.start * group, mine.stop * group)
        if not theirs:
            yield rows, None
            continue
        if shared is None:
            mask = _mask(mine, theirs, rule, device)
        else:
            mask = shared[-len(mine) * group :, -len(theirs) :]
        alibi = None if slopes is None else (slopes, _distances(mine, theirs, rule, slopes))
        scores = ScoreRule(rule.scale, rule.soft_cap, alibi, mask)
        yield rows, (slice(theirs.start, theirs.stop), scores)


def block_size(queries: int, keys: int, documents: bool = False) -> int:
    """Return the number of queries in a block."""
    least = BLOCK if documents else WHOLE
    return max(BLOCK, min(max(least, -(-queries // BLOCKS)), SCORES // keys))


def _runs(queries: int, keys: int, size: int, rule: Rule) -> Iterator[tuple[range, range]]:
    """Yield, per block of at most `size` queries, its queries and the keys from the first to the
    last that one of them sees, both as ranges; the keys are empty where they see none.
    """
    blocks = [range(first, min(first + size, queries)) for first in range(0, queries, size)]
    seen = zip(_oldest(queries, size, rule), _furthest(blocks, keys, rule), strict=True)
    for mine, (oldest, furthest) in zip(blocks, seen, strict=True):
        edge = 0 if rule.window is None else mine.start + rule.offset - rule.window + 1
        stop = min(keys, max(mine.stop + rule.offset, furthest))
        yield mine, range(max(0, oldest, edge), stop)


def _oldest(queries: int, size: int, rule: Rule) -> list[int]:
    """Return, per block of `size` queries, the index of the first key of the oldest document that a
    query of it belongs to: that of its first query, in any sequence, as starts never fall. 0 for
    each without documents, and for fake tensors.
    """
    # a fake tensor has no values: as if all began at 0
    if rule.host_starts is None or type(rule.host_starts) is not Tensor:
        return [0] * -(-queries // size)
    return rule.host_starts[:, ::size].amin(0).tolist()


def _furthest(blocks: list[range], keys: int, rule: Rule) -> list[int]:
    """Return, per block, the index behind the furthest prefix that a query of it sees: that of its
    last query, in any sequence, as reach never falls. 0 for each without prefixes, the number of
    keys for fake tensors.
    """
    if rule.host_reach is None:
        return [0] * len(blocks)
    if type(rule.host_reach) is not Tensor:
        return [keys] * len(blocks)
    return rule.host_reach[:, [mine[-1] for mine in blocks]].amax(0).tolist()


def _shared_mask(queries: int, keys: int, rule: Rule, device: torch.device) -> Tensor:
    """Return the additive mask (0 or -inf), [rows, keys], of the largest block, whose last query is
    at the last key; smaller blocks take its last rows and columns.
    """
    if rule.window is not None:
        keys = min(keys, queries + rule.window - 1)
    allowed = visible(queries, keys, rule.window, device)
    return torch.where(allowed, 0.0, -math.inf).repeat_interleave(rule.group, 0)


def _mask(queries: range, keys: range, rule: Rule, device: torch.device) -> Tensor | None:
    """Return the additive mask (0 or -inf) of these queries, whose positions `rule.offset` shifts,
    and keys: [rows, keys], rule.group consecutive rows for each query; with documents [batch, 1,
    rows, keys]. None where every query sees every key, without documents.
    """
    starts, reach, window = rule.starts, rule.reach, rule.window
    first, stop = queries.start + rule.offset, queries.stop + rule.offset
    if (
        starts is None
        and first >= keys.stop - 1
        and (window is None or keys.start > stop - 1 - window)
    ):
        return None
    allowed = seen(
        torch.arange(first, stop, device=device),
        torch.arange(keys.start, keys.stop, device=device),
        window,
        *(None if t is None else t[:, queries.start : queries.stop] for t in (starts, reach)),
    )
    mask = torch.where(allowed, 0.0, -math.inf).repeat_interleave(rule.group, -2)
    return mask if starts is None else mask[:, None]


def _distances(queries: range, keys: range, rule: Rule, like: Tensor) -> Tensor:
    """Return ALiBi's distances [queries, 1, keys], in the dtype and on the device of `like`: key
    index minus the key index of the query, which is its own index plus `rule.offset`. Negative for
    earlier keys, 0 for the query's own, positive for later ones.
    """
    first, stop = queries.start + rule.offset, queries.stop + rule.offset
    at = torch.arange(first, stop, device=like.device, dtype=like.dtype)
    columns = torch.arange(keys.start, keys.stop, device=like.device, dtype=like.dtype)
    return columns - at[:, None, None]


def _apply_soft_cap(qk: Tensor, how: ScoreRule) -> Tensor:
    """Return tanh(scale qk / soft_cap) of products qk where there is a cap (without its outer
    factor), else qk itself; in fp32 or wider.
    """
    qk = qk if qk.dtype == torch.float64 else qk.float()
    return qk if how.soft_cap is None else (qk * (how.scale / how.soft_cap)).tanh_()


def _scores(bounded: Tensor, how: ScoreRule) -> Tensor:
    """Return the scores [n, rows, keys] from products that `_apply_soft_cap` has bounded: scaled,
    with ALiBi added, -inf where not seen; a new tensor.
    """
    scores, mask = bounded, how.mask
    factor = how.scale if how.soft_cap is None else how.soft_cap
    if how.alibi is not None:
        slopes, distances = how.alibi
        scores, factor = scores * factor, 1.0
        (kv_heads, _, group, _), keys = slopes.shape, scores.shape[2]
        by_head = scores.view(-1, kv_heads, scores.shape[1] // group, group, keys)
        by_head.addcmul_(slopes, distances)
    if mask is None:
        return scores * factor
    if mask.dim() == 2:
        return torch.add(mask, scores, alpha=factor)
    scores = scores.unflatten(0, (mask.shape[0], -1))
    return torch.add(mask, scores, alpha=factor).flatten(0, 1)


def exponentials(qk: Tensor, how: ScoreRule) -> tuple[Tensor, Tensor, Tensor]:
    """Return, for products qk [n, rows, keys] of one block, exp(scores - maximum of the row) in
    qk's dtype, its row sums [n, rows, 1], and the log of the row sums of exp(scores). Rows that see
    nothing have 0, 0 and -inf.
    """
    s = _scores(_apply_soft_cap(qk, how), how)
    maximum = s.amax(-1, keepdim=True).clamp(min=torch.finfo(s.dtype).min)
    e = s.sub_(maximum).exp_()
    total = e.sum(-1, keepdim=True)
    return e.to(qk.dtype), total, maximum + total.log()


def gradient(
    qk: Tensor, dp: Tensor, log_sum: Tensor, delta: Tensor, how: ScoreRule
) -> tuple[Tensor, Tensor]:
    """Return the probabilities, recomputed from qk and log_sum, and the gradient of the products
    qk, from the probabilities' gradient `dp` and `delta`, per row the sum of g times out: both [n,
    rows, keys] in qk's dtype.
    """
    bounded = _apply_soft_cap(qk, how)
    p = _scores(bounded, how).sub_(log_sum).exp_()
    bend = None if how.soft_cap is None else 1 - bounded.square()  # the derivative of tanh
    del bounded  # of half precision a copy, as large as all scores
    ds = dp.to(p.dtype).sub_(delta).mul_(p).mul_(how.scale)
    if bend is not None:
        ds *= bend
    return p.to(qk.dtype), ds.to(qk.dtype)


Exponentials = Callable[[Tensor, ScoreRule], tuple[Tensor, Tensor, Tensor]]
"""`exponentials`, plain or compiled."""
Gradient = Callable[[Tensor, Tensor, Tensor, Tensor, ScoreRule], tuple[Tensor, Tensor]]


def empty_out(q: Tensor, v: Tensor) -> Tensor:
    """Return an uninitialised tensor for the attention output, [..., value size]: with q's strides
    where v's heads are as long. Also called by torch.compile with symbolic sizes, so its shapes are
    compared in `forward`.
    """
    if q.shape[-1] == v.shape[-1]:
        return torch.empty_like(q)
    return q.new_empty((*q.shape[:-1], v.shape[-1]))


def forward(
    q: Float[Tensor, "n rows size"],
    k: Float[Tensor, "n keys size"],
    v: Float[Tensor, "n keys value_size"],
    rule: Rule,
    exponentials: Exponentials = exponentials,
    size: int | None = None,
) -> tuple[
    Float[Tensor, "n rows value_size"], Float[Tensor, "n rows 1"], Float[Tensor, "n rows 1"]
]:
    """Return the attention output before its division, and what divides it: weighted = exp(S -
    maximum) V in q's dtype; total, the row sums (1 where no key is seen); log_sum, the log of the
    sum of exp(S). The latter two are fp32 or wider. `size`: queries of a block; None: `block_size`.
    """
    log_sum = torch.empty_like(q[..., :1], dtype=torch.promote_types(q.dtype, torch.float32))
    weighted, total = empty_out(q, v), torch.empty_like(log_sum)
    for rows, sees in _blocks(q, k.shape[1], rule, size):
        if sees is None:
            weighted[:, rows], total[:, rows], log_sum[:, rows] = 0, 0, -math.inf
            continue
        keys, how = sees
        qk = torch.bmm(q[:, rows], k[:, keys].contiguous().transpose(1, 2))
        e, total[:, rows], log_sum[:, rows] = exponentials(qk, how)
        weighted[:, rows] = torch.bmm(e, v[:, keys])
    # 1 or more, as the maximum is a term; 0 where nothing is seen
    return weighted, total.clamp_(min=1), log_sum


def backward(
    g: Float[Tensor, "n rows value_size"],
    q: Float[Tensor, "n rows size"],
    k: Float[Tensor, "n keys size"],
    v: Float[Tensor, "n keys value_size"],
    delta: Float[Tensor, "n rows 1"],
    log_sum: Float[Tensor, "n rows 1"],
    rule: Rule,
    gradient: Gradient = gradient,
    accumulate: Accumulate = accumulate,
) -> tuple[
    Float[Tensor, "n rows size"], Float[Tensor, "n keys size"], Float[Tensor, "n keys value_size"]
]:
    """Return (dq, dk, dv) of attention from the output's gradient g, recomputing the probabilities
    block by block from log_sum; delta is the row sum of g times out. dq has q's dtype; dk and dv
    are accumulated over blocks in log_sum's (fp32 or wider).
    """
    dq = torch.empty_like(q)
    dk = torch.zeros_like(k, dtype=log_sum.dtype)
    dv = torch.zeros_like(v, dtype=log_sum.dtype)
    for rows, sees in _blocks(q, k.shape[1], rule, None):
        if sees is None:
            dq[:, rows] = 0
            continue
        keys, how = sees
        # once, not in each product
        qs, gs, ks, vs = (t.contiguous() for t in (q[:, rows], g[:, rows], k[:, keys], v[:, keys]))
        qk, dp = torch.bmm(qs, ks.transpose(1, 2)), torch.bmm(gs, vs.transpose(1, 2))
        p, ds = gradient(qk, dp, log_sum[:, rows], delta[:, rows], how)
        dq[:, rows] = torch.bmm(ds, ks)
        parts = torch.bmm(ds.transpose(1, 2), qs), torch.bmm(p.transpose(1, 2), gs)
        accumulate((dk[:, keys], dv[:, keys]), parts)
    return dq, dk, dv
