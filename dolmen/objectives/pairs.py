"""Of two answers to a prompt, one is preferred: the answers of rows 2 i and 2 i + 1 of a batch are
pairs, the first of one row with the first of the other, and so on. Labels that are IGNORED, those
of a prompt, do not count, and a document without any is no answer.

    row 2 i       p p a a a|p p p a a|. .      two answers, and padding
    row 2 i + 1   p p a|p p p a a a a|. .      those that they are compared with

Which of two is preferred, the number SIDE of their tokens says; without it, that of row 2 i.
"""

from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np
import torch
from jaxtyping import Bool, Float, Int64, Shaped
from torch import Tensor

from dolmen.data.batch import SIDE, Batch
from dolmen.model.head import Head
from dolmen.objectives.masked import Metrics
from dolmen.objectives.objective import Judged
from dolmen.ops.loss import IGNORED

METRICS = ("accuracy", "margin")
"""The share of pairs whose chosen sequence has the larger score, and the mean difference."""
ACCURACY = "rewards/accuracies"
REWARDS = (ACCURACY, "rewards/margins", "rewards/chosen", "rewards/rejected")
"""The same of the rewards that a policy implies, and the mean rewards, by TRL's names."""
LOGPS = ("logps/chosen", "logps/rejected")
"""Mean log-probability of completions, summed over their tokens."""


class Sides(NamedTuple):
    """Something of the two answers of each pair, or of what a place has instead of one."""

    chosen: Shaped[Tensor, "rows documents"]
    rejected: Shaped[Tensor, "rows documents"]


@dataclass(frozen=True, eq=False)
class Answers:
    """Where the answers of a batch are. Of each row as many documents are reckoned with as it has
    tokens, so that the host need not be told how many there are.
    """

    batch: Batch

    @cached_property
    def document(self) -> Int64[Tensor, "sequences length"]:
        """Which of its row's documents each token is of."""
        starts, places = self.batch.starts, self._places
        return (starts == places).cumsum(1) - 1

    @cached_property
    def last(self) -> Int64[Tensor, "sequences documents"]:
        """Where the last real label of each document is; -1 where it has none."""
        real = torch.where(self._real, self._places, -1)
        none = torch.full_like(real, -1)
        return none.scatter_reduce(1, self.document, real, "amax")

    @cached_property
    def lengths(self) -> Int64[Tensor, "sequences documents"]:
        """Real labels of each document."""
        real = self._real.long()
        return torch.zeros_like(real).scatter_add(1, self.document, real)

    @cached_property
    def ends(self) -> Bool[Tensor, "sequences length"]:
        """Whether a token has the last real label of its document."""
        return self.last.gather(1, self.document) == self._places

    def number(self, name: str) -> Float[Tensor, "sequences documents"]:
        """Of each answer the number `name` of its last token."""
        return self.batch.numbers[name].gather(1, self.last.clamp(min=0))

    @cached_property
    def _places(self) -> Int64[Tensor, "sequences length"]:
        labels = self.batch.labels
        return torch.arange(labels.shape[1], device=labels.device).expand_as(labels)

    @property
    def _real(self) -> Bool[Tensor, "sequences length"]:
        return self.batch.labels != IGNORED


@dataclass(frozen=True, eq=False)
class Pairs(Answers):
    """The same, two by two."""

    @property
    def real(self) -> Bool[Tensor, "rows documents"]:
        """Where there is a pair."""
        return self.last[0::2] >= 0

    def sides(self, per_answer: Shaped[Tensor, "sequences documents"]) -> Sides:
        first, second = per_answer[0::2], per_answer[1::2]
        if SIDE not in self.batch.numbers:
            return Sides(first, second)
        ahead = self.number(SIDE)[0::2] > 0
        return Sides(torch.where(ahead, first, second), torch.where(ahead, second, first))

    def judged(
        self,
        losses: Float[Tensor, "rows documents"],
        scores: Sides,
        head: Head,
    ) -> Judged:
        """Sums over pairs of their losses and of METRICS, from numbers that every rank of cp
        has.
        """
        metrics = of_pairs(scores.chosen.detach(), scores.rejected.detach())
        return self._sums(losses, [metrics[name] for name in METRICS], head)

    def preferred(
        self,
        losses: Float[Tensor, "rows documents"],
        rewards: Sides,
        logps: Sides,
        head: Head,
    ) -> Judged:
        """Return the sums over pairs of their losses, and of REWARDS and LOGPS."""
        rewards, logps = (Sides(*(x.detach() for x in sides)) for sides in (rewards, logps))
        accuracy, margin = of_pairs(*rewards).values()
        return self._sums(losses, [accuracy, margin, *rewards, *logps], head)

    def _sums(self, losses: Tensor, metrics: list[Tensor], head: Head) -> Judged:
        sums = tuple(head.shared(self.total(each)) for each in metrics)
        return Judged(head.shared(self.total(losses)), sums)

    def total(self, per_pair: Float[Tensor, "rows documents"]) -> Float[Tensor, ""]:
        return torch.where(self.real, per_pair, 0.0).sum()


def count(batch: Batch) -> int:
    """Pairs of a batch on the CPU. Raises ValueError for half a pair, and for an answer without a
    real label.
    """
    rows = len(batch.labels)
    if rows % 2:
        raise ValueError(
            f"{rows} sequences are not divisible into pairs: use an even --train.microbatch-size"
        )
    said = (Answers(batch).last >= 0).numpy()
    alone = np.argwhere(said[0::2] != said[1::2])
    if len(alone):
        row, document = alone[0]
        empty = 2 * row + int(said[2 * row, document])
        raise ValueError(
            f"sequence {empty} of a batch of pairs has no token to judge in document {document}: "
            f"all its labels are {IGNORED}"
        )
    return int(said[0::2].sum())


def of_pairs(
    chosen: Float[Tensor, "*pairs"], rejected: Float[Tensor, "*pairs"]
) -> dict[str, Float[Tensor, "*pairs"]]:
    """METRICS of each pair."""
    margins = chosen - rejected
    return {"accuracy": (margins > 0).to(margins.dtype), "margin": margins}


def told(chosen: Float[Tensor, " pairs"], rejected: Float[Tensor, " pairs"]) -> Metrics:
    """METRICS of rewards or scores, and the means of these."""
    chosen, rejected = chosen.detach(), rejected.detach()
    means = {name: each.mean() for name, each in of_pairs(chosen, rejected).items()}
    return {**means, "chosen": chosen.mean(), "rejected": rejected.mean()}
