"""Sample the next token of each sequence of an engine step, and send it to all pipeline stages.

    logits on the last stage -> penalties, temperature, top-k, top-p of each request -> token
    -> a row of numbers per token (TOKEN, CLOSE, FINITE, log-probabilities) -> every stage

A sequence with drafts has a row of logits for each of them and one more (speculation.py).

Only the last stage has logits. Every rank must take the same token, so the last stage turns what
it sampled into a few numbers per token, which one all-reduce over pp brings to the others: these
add zeros. Sequences whose requests have the same sampling options are rows of one call.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import torch
from jaxtyping import Bool, Float, Int64
from torch import Tensor

from dolmen.core import collectives
from dolmen.core.device import read_back, to_device
from dolmen.core.mesh import Axis
from dolmen.serving import sampling
from dolmen.serving.model_runner import RunnerOutput, SequenceChunk
from dolmen.serving.request import LogProb, LogProbabilities, SamplingParams
from dolmen.serving.scheduler import SequenceGroup

TOKEN, CLOSE, FINITE, LOGPROBS = range(4)
"""Columns of a sampled token; from LOGPROBS on those of `sampling.log_probabilities`."""


@dataclass(frozen=True)
class SampledToken:
    """The next token of one sample, known to every rank."""

    token: int
    close: bool
    """Another token's score lay within `sampling.CLOSE`."""
    finite: bool
    """True if all logits were finite; otherwise the token is meaningless."""
    logprob: LogProb | None
    """Its log-probability and those of the most likely tokens; None if not requested."""


class Draw(NamedTuple):
    """A token to be sampled."""

    row: int
    """Index of its logits."""
    group: SequenceGroup
    sample: int
    """Number of the sample within the request."""
    drafts: Sequence[int] = ()
    """Drafts between the group's tokens and this one."""

    @property
    def tokens(self) -> list[int]:
        """Tokens before this one: prompt, new tokens and drafts."""
        return [*self.group.tokens, *self.drafts] if self.drafts else self.group.tokens

    def uniform(self, draft: bool) -> float:
        """Return the uniform number in [0, 1) that selects the token: a hash of the request's seed
        and id, the sample and the position. `draft`: the number that selects its draft instead.
        """
        request = self.group.request
        step = len(self.group.new_tokens) + len(self.drafts)
        return sampling.uniform(request.seed, request.id, self.sample, step, draft)


@dataclass(frozen=True, eq=False)
class ForwardOutput:
    """One forward of an engine step, and the tokens to sample from it."""

    chunks: Mapping[int, SequenceChunk]
    """Sequence -> what was read of it."""
    sampled: Sequence[tuple[int, SequenceGroup]]
    """Sequences whose next token is wanted, in the order of their logits."""
    logits: RunnerOutput | None
    """Logits, on the last pipeline stage; None on others."""
    block: int | None = None
    """Tokens of the vocabulary in a leaf of a sum of exponentials; None without exact numerics."""

    @cached_property
    def draws(self) -> list[Draw]:
        """One entry per token to be sampled: per sequence whose next token is wanted one; per
        sample for a prompt that has just been read; with n drafts n + 1 per sequence; none for
        max_new_tokens 0.
        """
        out, row = [], 0
        for key, group in self.sampled:
            drafts = group.drafted[: self.chunks[key].drafts]
            if group.request.params.max_new_tokens:
                out += [
                    # the samples of a prompt that has just been read share one row of logits
                    Draw(row + i, group, number, drafts[:i])
                    for number in group.samples
                    for i in range(len(drafts) + 1)
                ]
            row += len(drafts) + 1
        return out

    @property
    def top(self) -> int:
        """Number of most likely tokens whose log-probabilities are computed for every row: the most
        that any request needs.
        """
        return max((draw.group.request.top for draw in self.draws), default=0)

    @property
    def labelled(self) -> dict[int, SequenceChunk]:
        """Sequence -> chunk, of the sequences that need log-probabilities of their prompt."""
        return {key: chunk for key, chunk in self.chunks.items() if chunk.labels}

    @property
    def shapes(self) -> list[tuple[int, int]]:
        """Shapes of the tensors that `tensors` returns."""
        prompts = [(len(part.labels), 1 + 2 * part.top) for part in self.labelled.values()]
        return [(len(self.draws), LOGPROBS + 1 + 2 * self.top), *prompts]

    def tensors(self, never: list[int], tp: Axis) -> list[Float[Tensor, "_ _"]]:
        """Sample the tokens of this forward on the last stage: return one row of numbers per
        sampled token (`sample_tokens`), then a tensor per prompt with the log-probabilities of its
        labels, all in fp64.

        Every rank of `tp` gets the same numbers. `never`: token ids that are not sampled.
        """
        assert self.logits is not None, "the last stage has the logits"
        return [
            sample_tokens(self.draws, self.logits.following, never, tp, self.top, self.block),
            *(self.logits.labelled[key] for key in self.labelled),
        ]

    def parse(
        self, values: Iterator[list[list[float]]]
    ) -> tuple[dict[int, list[SampledToken]], dict[int, list[LogProb]]]:
        """Return the sampled tokens and the prompt log-probabilities, each by sequence key.

        Takes from `values` one list of rows for each of `shapes`. A sequence with max_new_tokens 0
        has no tokens, one with drafts also those that follow them.
        """
        keys = {id(group): key for key, group in self.sampled}
        tokens: dict[int, list[SampledToken]] = {key: [] for key in keys.values()}
        for draw, numbers in zip(self.draws, next(values), strict=True):
            tokens[keys[id(draw.group)]].append(_parse_token(numbers, draw.group))
        labelled = {
            key: [_parse_logprob(numbers, part.top) for numbers in next(values)]
            for key, part in self.labelled.items()
        }
        return tokens, labelled


def _parse_token(numbers: Sequence[float], group: SequenceGroup) -> SampledToken:
    """Parse a row of numbers (token id, near tie, finite logits, then log-probabilities) to a
    sampled token; its log-probability is None if not requested.
    """
    with_logprobs = group.request.logprobs is not None
    logprob = _parse_logprob(numbers[LOGPROBS:], group.request.top) if with_logprobs else None
    close, finite = bool(numbers[CLOSE]), bool(numbers[FINITE])
    return SampledToken(int(numbers[TOKEN]), close, finite, logprob)


def _parse_logprob(numbers: Sequence[float], top: int) -> LogProb:
    """Parse a row of `sampling.log_probabilities`: the token's own, the other tokens' values, their
    ids. Only the first `top` of these others are returned.
    """
    label, *rest = numbers
    half = len(rest) // 2
    best = zip(rest[half:], rest[:half], strict=True)
    return LogProb(label, tuple((int(token), value) for token, value in best)[:top])


def broadcast(
    outputs: Sequence[ForwardOutput], never: list[int], tp: Axis, pp: Axis, device: torch.device
) -> Iterator[list[list[float]]]:
    """Bring the sampled numbers of `outputs` from the last stage to every rank of `pp`, by one
    all-reduce. Yields for each tensor of each output its rows as lists.
    """
    shapes = [shape for output in outputs for shape in output.shapes]
    if pp.rank == pp.size - 1:
        flat = torch.cat([t.flatten() for output in outputs for t in output.tensors(never, tp)])
    else:
        count = sum(rows * columns for rows, columns in shapes)
        # zeros on all other stages: the sum over pp is the last stage's numbers
        flat = torch.zeros(count, dtype=torch.float64, device=device)
    # one transfer to the host per step, not one per sequence
    values = iter(read_back(collectives.reduce_scalar(flat, pp)))
    for rows, columns in shapes:
        yield [[next(values) for _ in range(columns)] for _ in range(rows)]


def sample_tokens(
    draws: Sequence[Draw],
    logits: Float[Tensor, "sequences vocabulary"],
    never: list[int],
    tp: Axis,
    top: int,
    block: int | None = None,
) -> Float[Tensor, "draws numbers"]:
    """Sample a token for each of `draws`, whose options may differ: those with equal options are
    sampled together.

    Returns a row per draw: token id, 1 if it was a near tie with another token, 1 if all its logits
    were finite, then log-probabilities of it and of the `top` most likely tokens, with the ids of
    these (0 if not requested). `never`: token ids that are not sampled. `block`: see
    `ForwardOutput`.
    """
    places, parts = [], []
    for members, some, raw in _group_by_options(draws, logits):
        places += members
        parts.append(_sample_group(some, raw, never, tp, top, block))
    if len(parts) == 1:  # a server's requests mostly have the same options
        return parts[0]
    out = logits.new_empty((len(draws), LOGPROBS + 1 + 2 * top), dtype=torch.float64)
    if parts:
        out[to_device(torch.tensor(places), out.device)] = torch.cat(parts)
    return out


def sample_drafts(
    draws: Sequence[Draw], logits: Float[Tensor, "rows vocabulary"]
) -> tuple[Int64[Tensor, " draws"], list[Float[Tensor, " vocabulary"] | None]]:
    """Sample a draft for each of `draws`. Returns the tokens, and for each the processed logits
    that it was sampled from (None: greedy decoding).
    """
    tokens = torch.empty(len(draws), dtype=torch.int64, device=logits.device)
    scores: list[Tensor | None] = [None] * len(draws)
    for indices, some, raw in _group_by_options(draws, logits):
        chosen, _, processed, _ = _select(some, raw, [], draft=True)
        tokens[to_device(torch.tensor(indices), logits.device)] = chosen
        if some[0].group.request.params.temperature:
            for i, row in zip(indices, processed, strict=True):
                scores[i] = row
    return tokens, scores


def _group_by_options(
    draws: Sequence[Draw], logits: Float[Tensor, "rows vocabulary"]
) -> Iterator[tuple[list[int], list[Draw], Float[Tensor, "draws vocabulary"]]]:
    """Yield the draws whose requests have the same sampling options and kind of log-probabilities:
    their indices, themselves, and their rows of `logits`.
    """
    by_params: dict[tuple[SamplingParams, LogProbabilities | None], list[int]] = {}
    for i, draw in enumerate(draws):
        request = draw.group.request
        by_params.setdefault((request.params, request.logprobs), []).append(i)
    for indices in by_params.values():
        some = [draws[i] for i in indices]
        yield indices, some, _rows(logits, [draw.row for draw in some])


def _rows(logits: Tensor, indices: list[int]) -> Tensor:
    """Return the rows of these indices; `logits` itself, without a copy, if they are all in
    order.
    """
    if indices == list(range(len(logits))):
        return logits
    return logits[to_device(torch.tensor(indices), logits.device)]


def _sample_group(
    draws: Sequence[Draw],
    raw: Float[Tensor, "draws vocabulary"],
    never: list[int],
    tp: Axis,
    top: int,
    block: int | None,
) -> Float[Tensor, "draws numbers"]:
    """Sample a token for each draw, all with the same sampling options, from their logits `raw`;
    all ranks of tp take the same token. Returns the rows of `sample_tokens`: token, near tie,
    finite, then log-probabilities, 0 if the requests want none.
    """
    tokens, close, processed, highest = _select(draws, raw, never)
    # all ranks have the same logits, but sums on a GPU may differ in the last bit from run to run:
    # agree on one token
    tokens = collectives.reduce_scalar(tokens, tp, "max")
    columns = (tokens, close, highest.isfinite())
    out = torch.stack([column.double() for column in columns], 1)
    kind = draws[0].group.request.logprobs
    if kind is None:
        return torch.cat((out, out.new_zeros((len(out), 1 + 2 * top))), 1)
    of = raw if kind == "raw" else processed
    numbers = sampling.log_probabilities(of, tokens, top)
    if block is not None:
        # the model's own, with the bits that training gives them
        numbers[:, 0] = sampling.exact_log_probabilities(raw, tokens, block)
    return torch.cat((out, numbers), 1)


def _select(
    draws: Sequence[Draw],
    raw: Float[Tensor, "draws vocabulary"],
    never: list[int],
    draft: bool = False,
) -> tuple[
    Int64[Tensor, " draws"],
    Bool[Tensor, " draws"],
    Float[Tensor, "draws vocabulary"],
    Float[Tensor, " draws"],
]:
    """Select a token for each draw, all with the same options. Returns the tokens, the rows that
    are near ties, the logits with penalties and warpers applied, and the highest logit of each row
    before warpers. `draft`: True samples a new draft; False samples the real token, and verifies
    its draft if it has one.
    """
    params, logits = draws[0].group.request.params, raw
    if never:
        # `raw` stays as it is, for log-probabilities of the model's own distribution
        logits = raw.clone()
        logits[:, never] = -math.inf
    sequences = [draw.tokens for draw in draws]
    prompts = [len(draw.group.request.tokens) for draw in draws]
    logits = sampling.apply_penalties(logits, sequences, params, prompts)
    uniform = proposal = None
    if params.temperature:
        # a uniform per token that follows from the request alone: preemption and batching change
        # nothing
        uniforms = [draw.uniform(draft) for draw in draws]
        uniform = to_device(torch.tensor(uniforms, dtype=torch.float64), raw.device)
        proposal = None if draft else _proposal(draws, raw.device)
    selected = sampling.select_tokens(logits, uniform, params, proposal)
    return *selected, logits.amax(-1)


def _proposal(draws: Sequence[Draw], device: torch.device) -> sampling.Proposal | None:
    """Return the drafts to verify that a draft model has sampled, with their rows and the logits
    that they were sampled from; None if there are none. Drafts of n-grams and of greedy decoding
    are left out.
    """
    rows, tokens, scores = [], [], []
    for i, draw in enumerate(draws):
        draft, place = draw.group.draft, len(draw.drafts)
        # behind the last draft nothing is verified
        if draft is not None and place < len(draft.tokens):
            logits = draft.scores[place]
            if logits is not None:
                rows.append(i)
                tokens.append(draft.tokens[place])
                scores.append(logits)
    if not rows:
        return None
    both = to_device(torch.tensor([rows, tokens]), device)
    return sampling.Proposal(both[0], both[1], torch.stack(scores))
