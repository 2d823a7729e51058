"""Sample the next token of each sequence of an engine step, and tell all pipeline stages.

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
from dolmen.core.device import read_back, send
from dolmen.core.mesh import Axis
from dolmen.serving import sample
from dolmen.serving.forward import Part, Scores
from dolmen.serving.options import Options
from dolmen.serving.request import LogProb, LogProbabilities
from dolmen.serving.running import Row

TOKEN, CLOSE, FINITE, LOGPROBS = range(4)
"""Columns of a sampled token; from LOGPROBS on those of `sample.log_probabilities`."""


@dataclass(frozen=True)
class SampledToken:
    """The next token of one sample."""

    token: int
    close: bool
    """Another token's score lay within `sample.CLOSE`."""
    finite: bool
    """Whether the logits were finite; else the token means nothing."""
    logprob: LogProb | None


@dataclass(frozen=True, eq=False)
class ForwardOutput:
    """One forward of an engine step, and the tokens to sample from it."""

    parts: Mapping[int, Part]
    """Sequence -> what was read of it."""
    sampled: Sequence[tuple[int, Row]]
    """Sequences whose next token is wanted, in the order of their logits."""
    scores: Scores | None
    """On the last stage."""

    @cached_property
    def draws(self) -> list[tuple[int, Row, int]]:
        """Index of the logits, sequence and sample number of each token to be sampled."""
        return [
            (i, row, number)
            for i, (_, row) in enumerate(self.sampled)
            if row.request.options.max_new_tokens
            for number in row.samples
        ]

    @property
    def top(self) -> int:
        """Likeliest tokens whose log-probabilities are computed, the most of any request."""
        return max((row.request.top for _, row, _ in self.draws), default=0)

    @property
    def labelled(self) -> dict[int, Part]:
        """Sequences with log-probabilities of their prompt."""
        return {key: part for key, part in self.parts.items() if part.labels}

    @property
    def shapes(self) -> list[tuple[int, int]]:
        """Shapes of the tensors that `tensors` returns."""
        prompts = [(len(part.labels), 1 + 2 * part.top) for part in self.labelled.values()]
        return [(len(self.draws), LOGPROBS + 1 + 2 * self.top), *prompts]

    def tensors(self, never: list[int], tp: Axis) -> list[Float[Tensor, "_ _"]]:
        """Return a row of numbers for each sampled token, and for each prompt's labels, in fp64.

        The same on every rank of `tp`; for the last stage. `never`: token ids that are not sampled.
        """
        assert self.scores is not None, "the last stage has the scores"
        return [
            sample_tokens(self.draws, self.scores.following, never, tp, self.top),
            *(self.scores.labelled[key] for key in self.labelled),
        ]

    def parse(
        self, values: Iterator[list[list[float]]]
    ) -> tuple[dict[int, list[SampledToken]], dict[int, list[LogProb]]]:
        """Return the sampled tokens and the prompt log-probabilities of each sequence.

        Takes from `values` one list of rows for each of `shapes`. A sequence with max_new_tokens 0
        has no tokens.
        """
        keys = [key for key, _ in self.sampled]
        tokens: dict[int, list[SampledToken]] = {key: [] for key in keys}
        for (i, row, _), numbers in zip(self.draws, next(values), strict=True):
            tokens[keys[i]].append(_parse_token(numbers, row))
        labelled = {
            key: [_parse_logprob(numbers, part.top) for numbers in next(values)]
            for key, part in self.labelled.items()
        }
        return tokens, labelled


def _parse_token(numbers: Sequence[float], row: Row) -> SampledToken:
    wanted = row.request.logprobs is not None
    logprob = _parse_logprob(numbers[LOGPROBS:], row.request.top) if wanted else None
    close, finite = bool(numbers[CLOSE]), bool(numbers[FINITE])
    return SampledToken(int(numbers[TOKEN]), close, finite, logprob)


def _parse_logprob(numbers: Sequence[float], top: int) -> LogProb:
    """Parse a row of `sample.log_probabilities`; its first `top` other tokens are kept."""
    label, *others = numbers
    half = len(others) // 2
    best = zip(others[half:], others[:half], strict=True)
    return LogProb(label, tuple((int(token), value) for token, value in best)[:top])


def broadcast(
    outputs: Sequence[ForwardOutput], never: list[int], tp: Axis, pp: Axis, device: torch.device
) -> Iterator[list[list[float]]]:
    """Yield the rows of every tensor of `outputs`, on every rank of `pp`."""
    shapes = [shape for output in outputs for shape in output.shapes]
    if pp.rank == pp.size - 1:
        flat = torch.cat([t.flatten() for output in outputs for t in output.tensors(never, tp)])
    else:
        count = sum(rows * columns for rows, columns in shapes)
        flat = torch.zeros(count, dtype=torch.float64, device=device)
    values = iter(read_back(collectives.reduce_scalar(flat, pp)))
    for rows, columns in shapes:
        yield [[next(values) for _ in range(columns)] for _ in range(rows)]


def sample_tokens(
    draws: Sequence[tuple[int, Row, int]],
    logits: Float[Tensor, "sequences vocabulary"],
    never: list[int],
    tp: Axis,
    top: int,
) -> Float[Tensor, "draws numbers"]:
    """Sample a token for each of `draws` (index of the logits, sequence, sample number).

    Returns the columns TOKEN, CLOSE, FINITE and log-probabilities of `top` tokens. Draws with equal
    sampling options are one call.
    """
    size = (len(draws), LOGPROBS + 1 + 2 * top)
    out = torch.zeros(size, dtype=torch.float64, device=logits.device)
    by_options: dict[tuple[Options, LogProbabilities | None], list[int]] = {}
    for i, (_, row, _) in enumerate(draws):
        by_options.setdefault((row.request.options, row.request.logprobs), []).append(i)
    for (options, kind), places in by_options.items():
        group = [draws[i] for i in places]
        raw = _rows(logits, [index for index, _, _ in group])
        rows = [(row, number) for _, row, number in group]
        at = send(torch.tensor(places), out.device)
        out[at] = _sample_group(rows, raw, options, kind, never, tp, top)
    return out


def _rows(logits: Tensor, indices: list[int]) -> Tensor:
    """These rows, without a copy where it is all of them in order."""
    if indices == list(range(len(logits))):
        return logits
    return logits[send(torch.tensor(indices), logits.device)]


def _sample_group(
    draws: Sequence[tuple[Row, int]],
    raw: Float[Tensor, "draws vocabulary"],
    options: Options,
    kind: LogProbabilities | None,
    never: list[int],
    tp: Axis,
    top: int,
) -> Float[Tensor, "draws numbers"]:
    """Sample with one set of options; `kind`: log-probabilities of raw or of processed logits."""
    logits = raw
    if never:
        logits = raw.clone()
        logits[:, never] = -math.inf
    texts = [row.text for row, _ in draws]
    prompts = [len(row.request.tokens) for row, _ in draws]
    logits = sample.penalised(logits, texts, options, prompts)
    uniforms = [
        sample.uniform(row.request.seed, row.request.id, number, len(row.new))
        for row, number in draws
    ]
    uniform = send(torch.tensor(uniforms, dtype=torch.float64), raw.device)
    tokens, close, processed = sample.choose(logits, uniform, options)
    # all ranks have the same logits, but sums on a GPU may differ in the last bit from run to run:
    # agree on one token
    tokens = collectives.reduce_scalar(tokens, tp, "max")
    columns = (tokens, close, logits.amax(-1).isfinite())
    out = torch.stack([column.double() for column in columns], 1)
    if kind is None:
        return torch.cat((out, out.new_zeros((len(out), 1 + 2 * top))), 1)
    of = raw if kind == "raw" else processed
    return torch.cat((out, sample.log_probabilities(of, tokens, top)), 1)
