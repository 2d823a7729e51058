"""From scores to the next token: pure functions of the scores, of the ids so far, and of one
uniform number per row. In the order and with the formulas of transformers
(`generation/logits_process.py`):

    logit bias -> repetition penalty (1909.05858) -> presence and frequency penalty
    -> no end before min_new_tokens                                               `penalised`
    -> / temperature -> top-k -> top-p (nucleus, 1904.09751) -> min-p (2407.01082)   `warped`
    -> softmax -> cumulative -> its inverse                                            `draw`

At temperature 0 only the first two lines act, and the likeliest token is taken. The uniform number
follows from (seed, id, sample, step) alone: neither batch nor device nor layout changes it.
"""

import hashlib
import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple

import torch
from jaxtyping import Bool, Float, Int64
from torch import Tensor

from dolmen.serving.options import Options

CLOSE = 1e-4
"""Of probability, or of a score: fp32 sums over batches of other shapes differ by 4e-5, so a choice
within this of another one may turn out to be that one."""

NUCLEUS = 1024
"""Likeliest tokens among which a nucleus is looked for first."""

Scores = Float[Tensor, "rows vocabulary"]


def uniform(seed: int, id: int | str, sample: int, step: int) -> float:
    """The number in [0, 1) that chooses token `step` of a sample of the request `id`."""
    text = f"{seed}/{id}/{sample}/{step}".encode(errors="surrogatepass")
    number = int.from_bytes(hashlib.blake2b(text, digest_size=8).digest())
    return (number >> 11) * 2.0**-53


def process(
    scores: Float[Tensor, "rows vocabulary"],
    tokens: Sequence[Sequence[int]],
    options: Options,
    prompts: Sequence[int] | None = None,
) -> Float[Tensor, "rows vocabulary"]:
    """The scores that tokens are drawn by: what is filtered out is -inf. `tokens`: the ids of each
    row so far, prompt and output; `prompts`: how many of them are its prompt (unset: none), which
    presence, frequency and min_new_tokens do not count. `scores` stays as it was.
    """
    return warped(penalised(scores, tokens, options, prompts), options)


def penalised(
    scores: Float[Tensor, "rows vocabulary"],
    tokens: Sequence[Sequence[int]],
    options: Options,
    prompts: Sequence[int] | None = None,
) -> Float[Tensor, "rows vocabulary"]:
    """What acts on greedy choices too: see `process`."""
    begin = prompts or [0] * len(tokens)
    if options.logit_bias:
        scores = scores.clone()
        ids = list(options.logit_bias)
        scores[:, ids] += scores.new_tensor(list(options.logit_bias.values()))
    if options.repetition_penalty != 1:
        penalty, seen = options.repetition_penalty, _counts(scores, tokens) > 0
        scores = torch.where(seen, _smaller(scores, penalty), scores)
    if options.presence_penalty or options.frequency_penalty:
        new = [row[n:] for row, n in zip(tokens, begin, strict=True)]
        counts = _counts(scores, new)
        scores = scores - options.presence_penalty * (counts > 0)
        scores = scores - options.frequency_penalty * counts
    early = [len(row) - n < options.min_new_tokens for row, n in zip(tokens, begin, strict=True)]
    if options.stop and any(early):
        ends = torch.zeros_like(scores, dtype=torch.bool)
        ends[:, list(options.stop)] = True
        scores = scores.masked_fill(ends & scores.new_tensor(early).bool()[:, None], -math.inf)
    return scores


def _smaller(scores: Scores, penalty: float) -> Scores:
    return torch.where(scores < 0, scores * penalty, scores / penalty)


def _counts(scores: Scores, tokens: Sequence[Sequence[int]]) -> Scores:
    """How often each row has each token."""
    rows = [i for i, row in enumerate(tokens) for _ in row]
    at = torch.tensor([rows, [token for row in tokens for token in row]], dtype=torch.int64)
    row, token = at.to(scores.device)
    ones = torch.ones_like(row, dtype=scores.dtype)
    return torch.zeros_like(scores).index_put_((row, token), ones, accumulate=True)


def warped(
    scores: Float[Tensor, "rows vocabulary"], options: Options
) -> Float[Tensor, "rows vocabulary"]:
    """What acts on draws alone: see `process`."""
    if options.temperature == 0:
        return scores
    if options.temperature != 1:
        scores = scores / options.temperature
    for cut in _cuts(options):
        scores = cut.keep(scores)
    return scores


class Cut(NamedTuple):
    """What leaves tokens out."""

    keep: Callable[[Scores], Scores]
    near: Callable[["Edge"], Bool[Tensor, " rows"]]
    """Where scores that are CLOSE to these would leave out more, or fewer."""


class Edge(NamedTuple):
    """Of each row [rows], where a cut has gone through, from its scores before."""

    inside: Tensor
    """The least score that stays."""
    outside: Tensor
    """The largest that goes; -inf: none does."""
    highest: Tensor
    mass: Tensor
    """The probability of all that stays."""
    least: Tensor
    """That of the least of it."""


def _cuts(options: Options) -> list[Cut]:
    """Those that act, in order."""
    out, (k, p, share) = [], (options.top_k, options.top_p, options.min_p)
    if k:
        out.append(Cut(partial(keep_top_k, k=k), _near_top_k))
    if p is not None and p < 1:
        out.append(Cut(partial(keep_top_p, p=p), partial(_near_top_p, p=p)))
    if share:
        out.append(Cut(partial(keep_min_p, p=share), partial(_near_min_p, p=share)))
    return out


def _near_top_k(edge: Edge) -> Bool[Tensor, " rows"]:
    return edge.inside - edge.outside < CLOSE


def _near_top_p(edge: Edge, p: float) -> Bool[Tensor, " rows"]:
    fewer, more = p - (edge.mass - edge.least) < CLOSE, edge.mass - p < CLOSE
    return fewer | more | _near_top_k(edge)


def _near_min_p(edge: Edge, p: float) -> Bool[Tensor, " rows"]:
    at = edge.highest + math.log(p)
    return (edge.inside - at < CLOSE) | (at - edge.outside < CLOSE)


def _loose(before: Scores, after: Scores, cut: Cut) -> Float[Tensor, " rows"]:
    """By how much cumulative probabilities of `after` may move because the cut lies CLOSE to a
    token, which then stays or goes.
    """
    kept = after > -math.inf
    total = before.logsumexp(-1)
    inside = before.masked_fill(~kept, math.inf).amin(-1)
    outside = before.masked_fill(kept, -math.inf).amax(-1)
    mass, least = (after.logsumexp(-1) - total).exp(), (inside - total).exp()
    near = cut.near(Edge(inside, outside, before.amax(-1), mass, least))
    moved = torch.maximum(least, (outside - total).exp()) + CLOSE
    return torch.where(near, moved / mass, 0.0)


def keep_top_k(
    scores: Float[Tensor, "rows vocabulary"], k: int
) -> Float[Tensor, "rows vocabulary"]:
    """With all below the k-th largest of its row at -inf; those equal to it stay."""
    least = scores.topk(min(k, scores.shape[-1]), -1).values[:, -1:]
    return scores.masked_fill(scores < least, -math.inf)


def keep_top_p(
    scores: Float[Tensor, "rows vocabulary"], p: float
) -> Float[Tensor, "rows vocabulary"]:
    """With all at -inf but the fewest most likely tokens that have probability p together; of equal
    ones the first.
    """
    wide = scores.double()
    total = wide.logsumexp(-1, keepdim=True)
    # to order them all takes ten times as long: 263 ms of a core for 32 rows of 32,000, and 30
    best = wide.topk(min(NUCLEUS, scores.shape[-1]), -1).values
    if not bool(((best - total).exp().sum(-1) >= p).all()):
        best = wide.sort(-1, descending=True).values
    probability = (best - total).exp()
    before = probability.cumsum(-1) - probability
    before[:, 0] = 0.0  # the most likely token stays, however small p is
    count = (before < p).sum(-1, keepdim=True)
    least = best.gather(-1, count - 1)
    above, level = wide > least, wide == least
    room = count - above.sum(-1, keepdim=True)
    return scores.masked_fill(~(above | level & (level.cumsum(-1) <= room)), -math.inf)


def keep_min_p(
    scores: Float[Tensor, "rows vocabulary"], p: float
) -> Float[Tensor, "rows vocabulary"]:
    """With all at -inf that have less than p times the probability of their row's likeliest."""
    probability = scores.softmax(-1)
    return scores.masked_fill(probability < p * probability.amax(-1, keepdim=True), -math.inf)


def choose(
    scores: Float[Tensor, "rows vocabulary"], uniforms: Float[Tensor, " rows"], options: Options
) -> tuple[Int64[Tensor, " rows"], Bool[Tensor, " rows"], Float[Tensor, "rows vocabulary"]]:
    """Tokens, and where scores that are CLOSE to these may give others, from scores that are
    `penalised`; with the scores `warped`, up to a constant per row.
    """
    if options.temperature == 0:
        return *greedy(scores), scores
    # the largest at 0: a small temperature then gives 0 and -inf, never inf
    final = scores.double()
    final = (final - final.amax(-1, keepdim=True)) / options.temperature
    loose = torch.zeros_like(final[:, 0])
    for cut in _cuts(options):
        before, final = final, cut.keep(final)
        loose += _loose(before, final, cut)
    tokens, margin = draw(final, uniforms)
    return tokens, margin < CLOSE + loose, final


def greedy(
    scores: Float[Tensor, "rows vocabulary"],
) -> tuple[Int64[Tensor, " rows"], Bool[Tensor, " rows"]]:
    """The most likely token of each row, the first of equal ones; and where the second is CLOSE."""
    if scores.shape[-1] == 1:
        return scores.argmax(-1), torch.zeros_like(scores[:, 0], dtype=torch.bool)
    best = scores.topk(2, -1).values
    return scores.argmax(-1), best[:, 0] - best[:, 1] < CLOSE


def draw(
    scores: Float[Tensor, "rows vocabulary"], uniforms: Float[Tensor, " rows"]
) -> tuple[Int64[Tensor, " rows"], Float[Tensor, " rows"]]:
    """The first token whose cumulative probability exceeds the row's uniform number in [0, 1), in
    fp64: none of probability 0 is drawn. And how far the number is from another token's, inf where
    there is no other.
    """
    cumulative = scores.double().softmax(-1).cumsum(-1)
    total = cumulative[:, -1]
    drawn = uniforms.to(cumulative) * total
    tokens = torch.searchsorted(cumulative, drawn[:, None], right=True)
    tokens = tokens.clamp(max=scores.shape[-1] - 1)  # of scores that are not finite
    upper = cumulative.gather(-1, tokens)[:, 0]
    lower = cumulative.gather(-1, (tokens - 1).clamp(min=0))[:, 0]
    lower = torch.where(tokens[:, 0] == 0, 0.0, lower)
    above = torch.where(upper < total, upper - drawn, math.inf)
    below = torch.where(lower > 0, drawn - lower, math.inf)
    return tokens[:, 0], torch.minimum(above, below)


def log_probabilities(
    scores: Float[Tensor, "rows vocabulary"], tokens: Int64[Tensor, " rows"], top: int
) -> Float[Tensor, "rows numbers"]:
    """log softmax of each row's token, of the `top` likeliest tokens and their ids, in fp64:
    [rows, 1 + 2 top].
    """
    found = scores.double().log_softmax(-1)
    own = found.gather(-1, tokens[:, None])
    if not top:
        return own
    best = found.topk(min(top, found.shape[-1]), -1)
    return torch.cat((own, best.values, best.indices.double()), -1)
