"""Sampling: pure functions of the logits, of the tokens so far, and of one uniform number per row.

In the order and with the formulas of transformers (`generation/logits_process.py`):

    logit bias -> repetition penalty (1909.05858) -> presence and frequency penalty
    -> no EOS before min_new_tokens                                            `apply_penalties`
    -> / temperature -> top-k -> top-p (1904.09751) -> min-p (2407.01082)      `apply_warpers`
    -> softmax -> cumulative probability -> its inverse at the uniform number  `sample_token`

A token that a draft model has sampled is verified by sampling from a mixture instead
(`condition_on_draft`; speculation.py says why).

At temperature 0 only the first two lines act, and the most likely token is selected. The uniform
number follows from (seed, id, sample, step) alone: neither batch nor device nor layout changes it.
"""

import hashlib
import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple

import torch
from jaxtyping import Bool, Float, Int64
from torch import Tensor

from dolmen.core.reduction import widen
from dolmen.ops import invariant, loss
from dolmen.serving.request import SamplingParams

CLOSE = 1e-4
"""Difference of probabilities or logits: fp32 sums over batches of other shapes differ by 4e-5, so
a token within this of another one may be sampled instead in another batch."""

NUCLEUS = 1024
"""Number of most likely tokens among which the nucleus of top-p is searched first."""

Scores = Float[Tensor, "rows vocabulary"]


class Proposal(NamedTuple):
    """Drafts that were sampled, of some of the rows of a call."""

    rows: Int64[Tensor, " drafts"]
    tokens: Int64[Tensor, " drafts"]
    scores: Float[Tensor, "drafts vocabulary"]
    """Logits, up to a constant, of the distribution of each draft."""


def uniform(seed: int, id: int | str, sample: int, step: int, draft: bool = False) -> float:
    """Return the number in [0, 1) that selects token `step` of sample `sample` of request `id`: 53
    bits of a hash of the four, so that it depends on nothing else. `draft`: another number, which
    selects the draft of the token.
    """
    name = f"{seed}/{id}/{sample}/{step}" + "/draft" * draft
    text = name.encode(errors="surrogatepass")
    # the top 53 bits, as many as a double's mantissa has
    number = int.from_bytes(hashlib.blake2b(text, digest_size=8).digest())
    return (number >> 11) * 2.0**-53


def process(
    scores: Float[Tensor, "rows vocabulary"],
    tokens: Sequence[Sequence[int]],
    params: SamplingParams,
    prompts: Sequence[int] | None = None,
) -> Float[Tensor, "rows vocabulary"]:
    """Apply all of `params` and return the processed logits: filtered tokens get -inf. `scores` is
    not modified.

    `tokens`: ids of each row so far, prompt and output. `prompts`: the length of each row's prompt
    (unset: 0), which presence, frequency and min_new_tokens do not count.
    """
    return apply_warpers(apply_penalties(scores, tokens, params, prompts), params)


def apply_penalties(
    scores: Float[Tensor, "rows vocabulary"],
    tokens: Sequence[Sequence[int]],
    params: SamplingParams,
    prompts: Sequence[int] | None = None,
) -> Float[Tensor, "rows vocabulary"]:
    """Return the logits after logit bias, repetition, presence and frequency penalties, and
    min_new_tokens (stop tokens get -inf before). These act on greedy decoding too. `tokens`: ids of
    each row so far, prompt and output. `prompts`: the length of each row's prompt (unset: 0), which
    presence, frequency and min_new_tokens do not count.
    """
    begin = prompts or [0] * len(tokens)
    if params.logit_bias:
        scores = scores.clone()
        # on a copy: `scores` is the caller's, for raw log-probabilities
        ids = list(params.logit_bias)
        scores[:, ids] += scores.new_tensor(list(params.logit_bias.values()))
    if params.repetition_penalty != 1:
        penalty, seen = params.repetition_penalty, _counts(scores, tokens) > 0
        scores = torch.where(seen, _penalize(scores, penalty), scores)
    if params.presence_penalty or params.frequency_penalty:
        new = [row[n:] for row, n in zip(tokens, begin, strict=True)]
        counts = _counts(scores, new)
        # OpenAI's formula: mu -= presence * (count > 0) + frequency * count
        scores = scores - params.presence_penalty * (counts > 0)
        scores = scores - params.frequency_penalty * counts
    early = [len(row) - n < params.min_new_tokens for row, n in zip(tokens, begin, strict=True)]
    if params.stop and any(early):
        ends = torch.zeros_like(scores, dtype=torch.bool)
        ends[:, list(params.stop)] = True
        scores = scores.masked_fill(ends & scores.new_tensor(early).bool()[:, None], -math.inf)
    return scores


def _penalize(scores: Scores, penalty: float) -> Scores:
    """Apply the repetition penalty to all logits: positive ones are divided by it, negative
    multiplied.
    """
    return torch.where(scores < 0, scores * penalty, scores / penalty)


def _counts(scores: Scores, tokens: Sequence[Sequence[int]]) -> Scores:
    """Return how often each token of the vocabulary occurs in each row."""
    rows = [i for i, row in enumerate(tokens) for _ in row]
    at = torch.tensor([rows, [token for row in tokens for token in row]], dtype=torch.int64)
    row, token = at.to(scores.device)
    ones = torch.ones_like(row, dtype=scores.dtype)
    return torch.zeros_like(scores).index_put_((row, token), ones, accumulate=True)


def apply_warpers(
    scores: Float[Tensor, "rows vocabulary"], params: SamplingParams
) -> Float[Tensor, "rows vocabulary"]:
    """Return the logits after temperature, top-k, top-p and min-p; unchanged at temperature 0."""
    if params.temperature == 0:
        return scores
    if params.temperature != 1:
        scores = scores / params.temperature
    for filter_ in _filters(params):
        scores = filter_.keep(scores)
    return scores


class Filter(NamedTuple):
    """A filter of tokens, and a test whether its edge is uncertain."""

    keep: Callable[[Scores], Scores]
    near: Callable[["Edge"], Bool[Tensor, " rows"]]
    """Rows where logits CLOSE to these would keep more or fewer tokens."""


class Edge(NamedTuple):
    """The edge of a filter in each row, of the logits before it."""

    inside: Tensor
    """Smallest logit that is kept."""
    outside: Tensor
    """Largest logit that is filtered out; -inf: none is."""
    highest: Tensor
    mass: Tensor
    """Probability of all kept tokens."""
    least: Tensor
    """Probability of the least likely kept token."""


def _filters(params: SamplingParams) -> list[Filter]:
    """Return the filters that `params` switches on (top-k, top-p, min-p), in the order in which
    they apply.
    """
    out, (k, p, share) = [], (params.top_k, params.top_p, params.min_p)
    if k:
        out.append(Filter(partial(keep_top_k, k=k), _near_top_k))
    if p is not None and p < 1:
        out.append(Filter(partial(keep_top_p, p=p), partial(_near_top_p, p=p)))
    if share:
        out.append(Filter(partial(keep_min_p, p=share), partial(_near_min_p, p=share)))
    return out


def _near_top_k(edge: Edge) -> Bool[Tensor, " rows"]:
    """Return the rows in which the largest filtered logit is within CLOSE (1e-4) of the smallest
    kept one.
    """
    return edge.inside - edge.outside < CLOSE


def _near_top_p(edge: Edge, p: float) -> Bool[Tensor, " rows"]:
    """Return the rows in which a nearly equal logit could change what top-p keeps: the kept
    probability, with or without the least likely kept token, is within CLOSE (1e-4) of p, or the
    largest filtered logit is within CLOSE of the smallest kept one.
    """
    fewer, more = p - (edge.mass - edge.least) < CLOSE, edge.mass - p < CLOSE
    return fewer | more | _near_top_k(edge)


def _near_min_p(edge: Edge, p: float) -> Bool[Tensor, " rows"]:
    """Return the rows in which the smallest kept or the largest filtered logit is within CLOSE
    (1e-4) of min-p's threshold (highest logit + log p).
    """
    at = edge.highest + math.log(p)
    return (edge.inside - at < CLOSE) | (at - edge.outside < CLOSE)


def _uncertainty(before: Scores, after: Scores, filter_: Filter) -> Float[Tensor, " rows"]:
    """Bound, for each row, by how much cumulative probabilities may move if a token CLOSE (1e-4) to
    the edge of the filter is kept instead of filtered out, or the reverse; 0 where none is close.
    `before` and `after`: logits before and after the filter.
    """
    candidates = after > -math.inf
    total = before.logsumexp(-1)
    inside = before.masked_fill(~candidates, math.inf).amin(-1)
    outside = before.masked_fill(candidates, -math.inf).amax(-1)
    mass, least = (after.logsumexp(-1) - total).exp(), (inside - total).exp()
    near = filter_.near(Edge(inside, outside, before.amax(-1), mass, least))
    # the token at the edge enters or leaves, and all others are normalized by the kept mass
    moved = torch.maximum(least, (outside - total).exp()) + CLOSE
    return torch.where(near, moved / mass, 0.0)


def keep_top_k(
    scores: Float[Tensor, "rows vocabulary"], k: int
) -> Float[Tensor, "rows vocabulary"]:
    """Keep in each row the k largest logits, and those equal to the k-th; set others to -inf."""
    least = scores.topk(min(k, scores.shape[-1]), -1).values[:, -1:]
    return scores.masked_fill(scores < least, -math.inf)


def keep_top_p(
    scores: Float[Tensor, "rows vocabulary"], p: float
) -> Float[Tensor, "rows vocabulary"]:
    """Keep in each row the fewest tokens, most likely first, that together have probability p or
    more (at least one; of equal ones the first); set others to -inf.
    """
    wide = scores.double()
    total = wide.logsumexp(-1, keepdim=True)
    best = _nucleus(wide, total, p) if wide.is_cpu else wide.sort(-1, descending=True).values
    probability = (best - total).exp()
    before = probability.cumsum(-1) - probability
    before[:, 0] = 0.0  # the most likely token stays, however small p is
    count = (before < p).sum(-1, keepdim=True)
    least = best.gather(-1, count - 1)
    above, level = wide > least, wide == least
    room = count - above.sum(-1, keepdim=True)
    return scores.masked_fill(~(above | level & (level.cumsum(-1) <= room)), -math.inf)


def _nucleus(
    wide: Float[Tensor, "rows vocabulary"], total: Float[Tensor, "rows 1"], p: float
) -> Float[Tensor, "rows likeliest"]:
    """Return the largest logits of each row in order, as many as have probability p or more.

    On a CPU it takes a tenth of the time of ordering them all: 30 ms of a core for 32 rows of
    32,000. On a GPU the host would have to wait to see whether there are enough.
    """
    best = wide.topk(min(NUCLEUS, wide.shape[-1]), -1).values
    enough = bool(((best - total).exp().sum(-1) >= p).all())
    return best if enough else wide.sort(-1, descending=True).values


def keep_min_p(
    scores: Float[Tensor, "rows vocabulary"], p: float
) -> Float[Tensor, "rows vocabulary"]:
    """Keep in each row the tokens with at least p times the probability of the most likely one; set
    others to -inf.
    """
    # compared with the most likely token's, so normalization cancels
    probability = scores.softmax(-1)
    return scores.masked_fill(probability < p * probability.amax(-1, keepdim=True), -math.inf)


def select_tokens(
    scores: Float[Tensor, "rows vocabulary"],
    uniforms: Float[Tensor, " rows"] | None,
    params: SamplingParams,
    proposal: Proposal | None = None,
) -> tuple[Int64[Tensor, " rows"], Bool[Tensor, " rows"], Float[Tensor, "rows vocabulary"]]:
    """Select a token per row from logits with penalties applied: the most likely one at temperature
    0, else one sampled with the row's uniform number, after temperature, top-k, top-p and min-p.
    `proposal`: drafts that a draft model sampled, which are verified in their rows.

    Returns the tokens, the rows that are near ties (logits that differ by CLOSE (1e-4) may give
    another token), and the logits with warpers applied, up to a constant per row.
    """
    if params.temperature == 0:
        return *greedy(scores), scores
    # the largest at 0: a small temperature then gives 0 and -inf, never inf
    final = scores.double()
    final = (final - final.amax(-1, keepdim=True)) / params.temperature
    # of probabilities, summed over the filters
    uncertain = torch.zeros_like(final[:, 0])
    for filter_ in _filters(params):
        before, final = final, filter_.keep(final)
        uncertain += _uncertainty(before, final, filter_)
    assert uniforms is not None, "tokens are sampled with uniform numbers"
    sampled_from = final if proposal is None else _verify_drafts(final, proposal)
    tokens, margin = sample_token(sampled_from, uniforms)
    return tokens, margin < CLOSE + uncertain, final


def _verify_drafts(scores: Scores, proposal: Proposal) -> Scores:
    """Return a copy of the processed logits in which the rows with a sampled draft have the
    distribution that rejection sampling gives for it: the draft if it is accepted, else another
    token.
    """
    out, rows = scores.clone(), proposal.rows
    out[rows] = condition_on_draft(scores[rows], proposal.tokens, proposal.scores)
    return out


def condition_on_draft(
    target: Float[Tensor, "rows vocabulary"],
    drafts: Int64[Tensor, " rows"],
    proposal: Float[Tensor, "rows vocabulary"],
) -> Float[Tensor, "rows vocabulary"]:
    """Return the logits, in fp64, of the token that rejection sampling gives where a draft d was
    sampled from q (2211.17192, algorithm 1; 2302.01318, algorithm 2): with p of `target` and q of
    `proposal`, both up to a constant per row,

        P(x) = a [x = d] + (1 - a) max(p(x) - q(x), 0) / Z      a = min(1, p(d) / q(d))

    and Z the sum of the maxima. Its mean over d is p, and x = d exactly if d is accepted, as a < 1
    means that p(d) < q(d).
    """
    p, q = target.double().softmax(-1), proposal.double().softmax(-1)
    at = drafts[:, None]
    q_of_draft = q.gather(-1, at)
    accept = (p.gather(-1, at) / q_of_draft).clamp(max=1)
    rest = (p - q).clamp(min=0)
    # 0 only if p = q, where all drafts are accepted
    total = rest.sum(-1, keepdim=True)
    mixture = (1 - accept) * rest / total.clamp(min=torch.finfo(torch.float64).tiny)
    mixture = mixture.scatter_add(-1, at, accept)
    # another rank of tp, whose sums differ in the last bit, may have drafted the impossible
    return torch.where(q_of_draft > 0, mixture, p).log()


def greedy(
    scores: Float[Tensor, "rows vocabulary"],
) -> tuple[Int64[Tensor, " rows"], Bool[Tensor, " rows"]]:
    """Select the most likely token of each row, the first of equal ones. Also returns the rows in
    which the second largest logit is within CLOSE (1e-4).
    """
    if scores.shape[-1] == 1:
        return scores.argmax(-1), torch.zeros_like(scores[:, 0], dtype=torch.bool)
    best = scores.argmax(-1, keepdim=True)
    # a maximum over all but the best takes half as long as topk of 2
    second = scores.scatter(-1, best, -torch.inf).amax(-1)
    return best[:, 0], scores.gather(-1, best)[:, 0] - second < CLOSE


def sample_token(
    scores: Float[Tensor, "rows vocabulary"], uniforms: Float[Tensor, " rows"]
) -> tuple[Int64[Tensor, " rows"], Float[Tensor, " rows"]]:
    """Select in each row the first token whose cumulative probability exceeds the uniform number in
    [0, 1), computed in fp64; so a token of probability 0 is never selected.

    Also returns how far the number is from the range of another token, inf without another one.
    """
    cumulative = scores.double().softmax(-1).cumsum(-1)
    total = cumulative[:, -1]
    threshold = uniforms.to(cumulative) * total
    tokens = torch.searchsorted(cumulative, threshold[:, None], right=True)
    tokens = tokens.clamp(max=scores.shape[-1] - 1)  # of scores that are not finite
    upper = cumulative.gather(-1, tokens)[:, 0]
    lower = cumulative.gather(-1, (tokens - 1).clamp(min=0))[:, 0]
    lower = torch.where(tokens[:, 0] == 0, 0.0, lower)
    # beyond the last token with probability there is no other range, nor below the first
    above = torch.where(upper < total, upper - threshold, math.inf)
    below = torch.where(lower > 0, threshold - lower, math.inf)
    return tokens[:, 0], torch.minimum(above, below)


def exact_log_probabilities(
    logits: Float[Tensor, "rows vocabulary"], tokens: Int64[Tensor, " rows"], block: int
) -> Float[Tensor, " rows"]:
    """Return the log-probability of each row's token in softmax(logits), fp32, with the bits that
    `parallel.log_probabilities` computes with exact numerics. `block`: tokens in a leaf of the sum
    of exponentials.
    """
    wide = widen(logits).clone()
    e, _, target = loss.exponentials(wide, wide.amax(-1), tokens, 0)
    return target - invariant.sum_blocks(e, block).log()


def log_probabilities(
    scores: Float[Tensor, "rows vocabulary"], tokens: Int64[Tensor, " rows"], top: int
) -> Float[Tensor, "rows numbers"]:
    """Return log-probabilities of each row in fp64, [rows, 1 + 2 top]: that of the row's token,
    those of the `top` most likely tokens, and the ids of these.
    """
    values = scores.double().log_softmax(-1)
    chosen = values.gather(-1, tokens[:, None])
    if not top:
        return chosen
    best = values.topk(min(top, values.shape[-1]), -1)
    return torch.cat((chosen, best.values, best.indices.double()), -1)
