"""Which token each text of a step goes on with: its scores through its own options, and the numbers
that come of it told to all ranks.

Texts with the same options are rows of one call. The last stage of a pipeline has the scores; what
it makes of them, a few numbers per token, all others are told.
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

TOKEN, CLOSE, FINITE, OWN = range(4)  # columns; from OWN on those of sample.log_probabilities


@dataclass(frozen=True)
class Choice:
    """What was chosen."""

    token: int
    close: bool
    """Another one lay within `sample.CLOSE`."""
    finite: bool
    """Whether the scores were numbers; else the token means nothing."""
    logprob: LogProb | None


@dataclass(frozen=True, eq=False)
class Made:
    """One forward, and what is to be chosen of it."""

    parts: Mapping[int, Part]
    asked: Sequence[tuple[int, Row]]
    """Texts whose next token is asked for, in the order of the scores."""
    scores: Scores | None
    """On the last stage."""

    @cached_property
    def draws(self) -> list[tuple[int, Row, int]]:
        """Each token that is to be chosen: the index of its scores, its text and sample."""
        return [
            (i, row, number)
            for i, (_, row) in enumerate(self.asked)
            if row.request.options.max_new_tokens
            for number in row.samples
        ]

    @property
    def top(self) -> int:
        """Log-probabilities of so many likeliest tokens are made for all draws."""
        return max((row.request.top for _, row, _ in self.draws), default=0)

    @property
    def labelled(self) -> dict[int, Part]:
        """Texts in which log-probabilities of the prompt are asked for."""
        return {key: part for key, part in self.parts.items() if part.labels}

    @property
    def shapes(self) -> list[tuple[int, int]]:
        """Of the tensors of `numbers`."""
        own = [(len(part.labels), 1 + 2 * part.top) for part in self.labelled.values()]
        return [(len(self.draws), OWN + 1 + 2 * self.top), *own]

    def numbers(self, never: list[int], tp: Axis) -> list[Float[Tensor, "_ _"]]:
        """Columns of each draw, and of each text with labels those of its labels, in fp64: the same
        on every rank of `tp`. `never`: ids that are not chosen. On the last stage.
        """
        assert self.scores is not None, "the last stage has the scores"
        return [
            choose(self.draws, self.scores.following, never, tp, self.top),
            *(self.scores.labelled[key] for key in self.labelled),
        ]

    def read(
        self, told: Iterator[list[list[float]]]
    ) -> tuple[dict[int, list[Choice]], dict[int, list[LogProb]]]:
        """Of each text whose next token is asked for, what was chosen for its samples (none, where
        none was to be); and of each that has labels, their log-probabilities. Takes from `told` the
        values of `numbers`.
        """
        choices: dict[int, list[Choice]] = {key: [] for key, _ in self.asked}
        keys = [key for key, _ in self.asked]
        for (i, row, _), values in zip(self.draws, next(told), strict=True):
            choices[keys[i]].append(_choice(values, row))
        labelled = {
            key: [_log_prob(values, part.top) for values in next(told)]
            for key, part in self.labelled.items()
        }
        return choices, labelled


def _choice(numbers: Sequence[float], row: Row) -> Choice:
    asked, top = row.request.logprobs is not None, row.request.top
    logprob = _log_prob(numbers[OWN:], top) if asked else None
    close, finite = bool(numbers[CLOSE]), bool(numbers[FINITE])
    return Choice(int(numbers[TOKEN]), close, finite, logprob)


def _log_prob(numbers: Sequence[float], top: int) -> LogProb:
    """A row of `sample.log_probabilities`, of which the first `top` others are wanted."""
    own, *others = numbers
    half = len(others) // 2
    best = zip(others[half:], others[:half], strict=True)
    return LogProb(own, tuple((int(token), value) for token, value in best)[:top])


def told(
    made: Sequence[Made], never: list[int], tp: Axis, pp: Axis, device: torch.device
) -> Iterator[list[list[float]]]:
    """The values of all `numbers`, one tensor after the other, on every rank of `pp`."""
    shapes = [shape for each in made for shape in each.shapes]
    if pp.rank == pp.size - 1:
        flat = torch.cat([n.flatten() for each in made for n in each.numbers(never, tp)])
    else:
        count = sum(rows * columns for rows, columns in shapes)
        flat = torch.zeros(count, dtype=torch.float64, device=device)
    values = iter(read_back(collectives.reduce_scalar(flat, pp)))
    for rows, columns in shapes:
        yield [[next(values) for _ in range(columns)] for _ in range(rows)]


def choose(
    draws: Sequence[tuple[int, Row, int]],
    following: Float[Tensor, "texts vocabulary"],
    never: list[int],
    tp: Axis,
    top: int,
) -> Float[Tensor, "draws numbers"]:
    """The columns of each draw, with the log-probabilities of `top` tokens."""
    size = (len(draws), OWN + 1 + 2 * top)
    out = torch.zeros(size, dtype=torch.float64, device=following.device)
    alike: dict[tuple[Options, LogProbabilities | None], list[int]] = {}
    for i, (_, row, _) in enumerate(draws):
        alike.setdefault((row.request.options, row.request.logprobs), []).append(i)
    for (options, kind), places in alike.items():
        own = [draws[i] for i in places]
        raw = _of(following, [index for index, _, _ in own])
        rows = [(row, number) for _, row, number in own]
        at = send(torch.tensor(places), out.device)
        out[at] = _chosen(rows, raw, options, kind, never, tp, top)
    return out


def _of(scores: Tensor, indices: list[int]) -> Tensor:
    """These rows; the scores themselves where it is all of them in order."""
    if indices == list(range(len(scores))):
        return scores
    return scores[send(torch.tensor(indices), scores.device)]


def _chosen(
    draws: Sequence[tuple[Row, int]],
    raw: Float[Tensor, "draws vocabulary"],
    options: Options,
    kind: LogProbabilities | None,
    never: list[int],
    tp: Axis,
    top: int,
) -> Float[Tensor, "draws numbers"]:
    scores = raw
    if never:
        scores = raw.clone()
        scores[:, never] = -math.inf
    texts = [row.text for row, _ in draws]
    prompts = [len(row.request.tokens) for row, _ in draws]
    scores = sample.penalised(scores, texts, options, prompts)
    uniforms = [
        sample.uniform(row.request.seed, row.request.id, number, len(row.new))
        for row, number in draws
    ]
    drawn = send(torch.tensor(uniforms, dtype=torch.float64), raw.device)
    tokens, close, final = sample.choose(scores, drawn, options)
    # all ranks have the same scores, but sums on a GPU may differ in the last bit from run to run:
    # agree on one
    tokens = collectives.reduce_scalar(tokens, tp, "max")
    columns = (tokens, close, scores.amax(-1).isfinite())
    out = torch.stack([column.double() for column in columns], 1)
    if kind is None:
        return torch.cat((out, out.new_zeros((len(out), 1 + 2 * top))), 1)
    of = raw if kind == "raw" else final
    return torch.cat((out, sample.log_probabilities(of, tokens, top)), 1)
