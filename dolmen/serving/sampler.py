"""Sample the next token of each sequence of an engine step, and send it to all pipeline stages.

    logits on the last stage -> penalties, temperature, top-k, top-p of each request -> token
    -> a row of numbers per token (TOKEN, CLOSE, FINITE, log-probabilities) -> every stage

Only the last stage has logits. Every rank must take the same token, so the last stage turns what
it sampled into a few numbers per token, which one all-reduce over pp brings to the others: these
add zeros. Sequences whose requests have the same sampling options are rows of one call.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from jaxtyping import Float
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


@dataclass(frozen=True, eq=False)
class ForwardOutput:
    """One forward of an engine step, and the tokens to sample from it."""

    chunks: Mapping[int, SequenceChunk]
    """Sequence -> what was read of it."""
    sampled: Sequence[tuple[int, SequenceGroup]]
    """Sequences whose next token is wanted, in the order of their logits."""
    logits: RunnerOutput | None
    """Logits, on the last pipeline stage; None on others."""

    @cached_property
    def draws(self) -> list[tuple[int, SequenceGroup, int]]:
        """One entry per token to be sampled: index of its row of logits, group, and sample number.
        A group that has not forked yet has one per sample; max_new_tokens 0 has none.
        """
        return [
            (i, group, number)
            # the samples of a prompt that has just been read share one row of logits
            for i, (_, group) in enumerate(self.sampled)
            if group.request.params.max_new_tokens
            for number in group.samples
        ]

    @property
    def top(self) -> int:
        """Number of most likely tokens whose log-probabilities are computed for every row: the most
        that any request needs.
        """
        return max((group.request.top for _, group, _ in self.draws), default=0)

    @property
    def labelled(self) -> dict[int, SequenceChunk]:
        """Chunks of the sequences that need log-probabilities of their prompt."""
        return {key: chunk for key, chunk in self.chunks.items() if chunk.labels}

    @property
    def shapes(self) -> list[tuple[int, int]]:
        """Shapes of the tensors that `tensors` returns."""
        prompts = [(len(part.labels), 1 + 2 * part.top) for part in self.labelled.values()]
        return [(len(self.draws), LOGPROBS + 1 + 2 * self.top), *prompts]

    def tensors(self, never: list[int], tp: Axis) -> list[Float[Tensor, "_ _"]]:
        """Sample on the last stage: return one row of numbers per sampled token, then a tensor per
        prompt with the log-probabilities of its labels, all in fp64.

        Every rank of `tp` gets the same numbers. `never`: token ids that are not sampled.
        """
        assert self.logits is not None, "the last stage has the logits"
        return [
            sample_tokens(self.draws, self.logits.following, never, tp, self.top),
            *(self.logits.labelled[key] for key in self.labelled),
        ]

    def parse(
        self, values: Iterator[list[list[float]]]
    ) -> tuple[dict[int, list[SampledToken]], dict[int, list[LogProb]]]:
        """Return the sampled tokens and the prompt log-probabilities, each by sequence key.

        Takes from `values` one list of rows for each of `shapes`. A sequence with max_new_tokens 0
        has no tokens.
        """
        keys = [key for key, _ in self.sampled]
        tokens: dict[int, list[SampledToken]] = {key: [] for key in keys}
        for (i, group, _), numbers in zip(self.draws, next(values), strict=True):
            tokens[keys[i]].append(_parse_token(numbers, group))
        labelled = {
            key: [_parse_logprob(numbers, part.top) for numbers in next(values)]
            for key, part in self.labelled.items()
        }
        return tokens, labelled


def _parse_token(numbers: Sequence[float], group: SequenceGroup) -> SampledToken:
    """Parse a row of numbers (the columns TOKEN, CLOSE, FINITE, then log-probabilities) to a
    sampled token; its log-probability is None if not requested.
    """
    wanted = group.request.logprobs is not None
    logprob = _parse_logprob(numbers[LOGPROBS:], group.request.top) if wanted else None
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
    draws: Sequence[tuple[int, SequenceGroup, int]],
    logits: Float[Tensor, "sequences vocabulary"],
    never: list[int],
    tp: Axis,
    top: int,
) -> Float[Tensor, "draws numbers"]:
    """Sample a token for each of `draws` (index of the logits, group, sample number).

    Returns the columns TOKEN, CLOSE, FINITE and log-probabilities of `top` tokens. Draws with equal
    sampling options are sampled in one call. `never`: token ids that are not sampled.
    """
    by_params: dict[tuple[SamplingParams, LogProbabilities | None], list[int]] = {}
    for i, (_, group, _) in enumerate(draws):
        by_params.setdefault((group.request.params, group.request.logprobs), []).append(i)
    places, parts = [], []
    for (params, kind), members in by_params.items():
        some = [draws[i] for i in members]
        raw = _rows(logits, [index for index, _, _ in some])
        rows = [(group, number) for _, group, number in some]
        places += members
        parts.append(_sample_group(rows, raw, params, kind, never, tp, top))
    if len(parts) == 1:  # a server's requests mostly have the same options
        return parts[0]
    out = logits.new_empty((len(draws), LOGPROBS + 1 + 2 * top), dtype=torch.float64)
    if parts:
        out[to_device(torch.tensor(places), out.device)] = torch.cat(parts)
    return out


def _rows(logits: Tensor, indices: list[int]) -> Tensor:
    """Return the rows of these indices; `logits` itself, without a copy, if they are all in
    order.
    """
    if indices == list(range(len(logits))):
        return logits
    return logits[to_device(torch.tensor(indices), logits.device)]


def _sample_group(
    draws: Sequence[tuple[SequenceGroup, int]],
    raw: Float[Tensor, "draws vocabulary"],
    params: SamplingParams,
    kind: LogProbabilities | None,
    never: list[int],
    tp: Axis,
    top: int,
) -> Float[Tensor, "draws numbers"]:
    """Sample a token for each draw, all with the same `params`; see `sample_tokens`. `kind`:
    log-probabilities of the raw logits, or of those after penalties and warpers; None: columns of
    0.
    """
    logits = raw
    if never:
        # `raw` stays as it is, for log-probabilities of the model's own distribution
        logits = raw.clone()
        logits[:, never] = -math.inf
    sequences = [group.tokens for group, _ in draws]
    prompts = [len(group.request.tokens) for group, _ in draws]
    logits = sampling.apply_penalties(logits, sequences, params, prompts)
    uniform = None
    if params.temperature:
        # a uniform per token that follows from the request alone: preemption and batching change
        # nothing
        uniforms = [
            sampling.uniform(group.request.seed, group.request.id, number, len(group.new_tokens))
            for group, number in draws
        ]
        uniform = to_device(torch.tensor(uniforms, dtype=torch.float64), raw.device)
    tokens, close, processed = sampling.select_tokens(logits, uniform, params)
    # all ranks have the same logits, but sums on a GPU may differ in the last bit from run to run:
    # agree on one token
    tokens = collectives.reduce_scalar(tokens, tp, "max")
    columns = (tokens, close, logits.amax(-1).isfinite())
    out = torch.stack([column.double() for column in columns], 1)
    if kind is None:
        return torch.cat((out, out.new_zeros((len(out), 1 + 2 * top))), 1)
    of = raw if kind == "raw" else processed
    return torch.cat((out, sampling.log_probabilities(of, tokens, top)), 1)
