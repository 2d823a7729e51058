"""Pairs of completions in packed rows: completion k of row 2 i is paired with completion k of row
2 i + 1. Labels of prompts are IGNORED; a document without other labels is padding.

    row 2 i       p p c c c|p p p c c|. .      p prompt, c completion, | document, . padding
    row 2 i + 1   p p c|p p p c c c c|. .

numbers[SIDE] of a completion's tokens marks which of a pair is preferred; without it, row 2 i is.
"""

from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np
import torch
from jaxtyping import Bool, Float, Int64, Shaped
from torch import Tensor

from dolmen.data.batch import SIDE, Batch
from dolmen.model.head import ModelHead
from dolmen.objectives.masked import Metrics
from dolmen.objectives.objective import LossOutput
from dolmen.ops.loss import IGNORED

METRICS = ("accuracy", "margin")
"""The share of pairs whose chosen sequence has the larger score, and the mean difference."""
ACCURACY = "rewards/accuracies"
REWARDS = (ACCURACY, "rewards/margins", "rewards/chosen", "rewards/rejected")
"""The same of the rewards that a policy implies, and the mean rewards, by TRL's names."""
LOGPS = ("logps/chosen", "logps/rejected")
"""Mean log-probability of completions, summed over their tokens."""


class PairValues(NamedTuple):
    """A value of the chosen and of the rejected completion of each pair; padding where there is no
    pair.
    """

    chosen: Shaped[Tensor, "rows documents"]
    rejected: Shaped[Tensor, "rows documents"]


@dataclass(frozen=True, eq=False)
class CompletionIndex:
    """Finds the completions in the rows of a batch. Tensors per document have as many columns as a
    row has tokens, as the number of documents depends on the data, and reading it would make the
    host wait for the device.
    """

    batch: Batch

    @cached_property
    def document(self) -> Int64[Tensor, "sequences length"]:
        """The index of each token's document (completion or padding) within its row."""
        # a token that is at the start of its document begins the next index
        starts, places = self.batch.starts, self._positions
        return (starts == places).cumsum(1) - 1

    @cached_property
    def last(self) -> Int64[Tensor, "sequences documents"]:
        """The position of the last real label of each document; -1 without one."""
        real = torch.where(self._real, self._positions, -1)
        # scatter with amax: per document the largest position that has a label
        none = torch.full_like(real, -1)
        return none.scatter_reduce(1, self.document, real, "amax")

    @cached_property
    def lengths(self) -> Int64[Tensor, "sequences documents"]:
        """The number of real labels of each document."""
        real = self._real.long()
        return torch.zeros_like(real).scatter_add(1, self.document, real)

    @cached_property
    def is_last(self) -> Bool[Tensor, "sequences length"]:
        """True at the last real label of each document."""
        return self.last.gather(1, self.document) == self._positions

    def number(self, name: str) -> Float[Tensor, "sequences documents"]:
        """Return numbers[name] at the last token of each completion; meaningless for documents
        without one.
        """
        return self.batch.numbers[name].gather(1, self.last.clamp(min=0))

    @cached_property
    def _positions(self) -> Int64[Tensor, "sequences length"]:
        """The position of each token in its row."""
        labels = self.batch.labels
        return torch.arange(labels.shape[1], device=labels.device).expand_as(labels)

    @property
    def _real(self) -> Bool[Tensor, "sequences length"]:
        """True where a token has a label."""
        return self.batch.labels != IGNORED


@dataclass(frozen=True, eq=False)
class PairIndex(CompletionIndex):
    """The completions of rows 2 i and 2 i + 1 as pairs."""

    @property
    def real(self) -> Bool[Tensor, "rows documents"]:
        """True where a document is a completion, not padding."""
        return self.last[0::2] >= 0

    def pair_up(self, values: Shaped[Tensor, "sequences documents"]) -> PairValues:
        """Split a value per completion into those of the chosen and of the rejected completion of
        each pair. Completion k of row 2 i is paired with completion k of row 2 i + 1; the chosen
        one has a positive numbers[SIDE], and without these it is the one in the even row.
        """
        # completion k of row 2 i against completion k of row 2 i + 1
        first, second = values[0::2], values[1::2]
        if SIDE not in self.batch.numbers:
            return PairValues(first, second)
        # the preferred completion may be in either of the two rows
        ahead = self.number(SIDE)[0::2] > 0
        return PairValues(torch.where(ahead, first, second), torch.where(ahead, second, first))

    def score_output(
        self,
        losses: Float[Tensor, "rows documents"],
        scores: PairValues,
        head: ModelHead,
    ) -> LossOutput:
        """Return the sums over pairs of `losses`, and of accuracy (chosen score larger) and margin
        (difference) of `scores`. Every rank of cp has all pairs, so each takes 1 / cp of the sums.
        """
        metrics = pair_scores(scores.chosen.detach(), scores.rejected.detach())
        return self._sums(losses, [metrics[name] for name in METRICS], head)

    def reward_output(
        self,
        losses: Float[Tensor, "rows documents"],
        rewards: PairValues,
        logps: PairValues,
        head: ModelHead,
    ) -> LossOutput:
        """Return the sums over pairs of `losses`, and of accuracy and margin of the rewards, of the
        rewards and of the log-probabilities of both sides. Every rank of cp has all pairs, so each
        takes 1 / cp of the sums.
        """
        rewards, logps = (PairValues(*(x.detach() for x in pair)) for pair in (rewards, logps))
        accuracy, margin = pair_scores(*rewards).values()
        return self._sums(losses, [accuracy, margin, *rewards, *logps], head)

    def _sums(self, losses: Tensor, metrics: list[Tensor], head: ModelHead) -> LossOutput:
        """Return the sums of losses and metrics over pairs, padding left out, times 1 / cp."""
        sums = tuple(head.divide_over_cp(self.total(metric)) for metric in metrics)
        return LossOutput(head.divide_over_cp(self.total(losses)), sums)

    def total(self, per_pair: Float[Tensor, "rows documents"]) -> Float[Tensor, ""]:
        """Return the sum of a value per pair over all real pairs; padding, which may be NaN, is
        left out.
        """
        # torch.where and not a product: padding may be NaN
        return torch.where(self.real, per_pair, 0.0).sum()


def count_pairs(batch: Batch) -> int:
    """Return the number of pairs of a batch on the CPU. Raises ValueError for an odd number of
    rows, and for a completion whose partner has no label.
    """
    rows = len(batch.labels)
    if rows % 2:
        raise ValueError(
            f"{rows} sequences are not divisible into pairs: use an even --train.microbatch-size"
        )
    # on the CPU, before the batch goes to the device
    has_label = (CompletionIndex(batch).last >= 0).numpy()
    unpaired = np.argwhere(has_label[0::2] != has_label[1::2])
    if len(unpaired):
        row, document = unpaired[0]
        # the row of the two that lacks it
        empty = 2 * row + int(has_label[2 * row, document])
        raise ValueError(
            f"sequence {empty} of a batch of pairs has no completion in document {document}: "
            f"all its labels are {IGNORED}"
        )
    return int(has_label[0::2].sum())


def pair_scores(
    chosen: Float[Tensor, "*pairs"], rejected: Float[Tensor, "*pairs"]
) -> dict[str, Float[Tensor, "*pairs"]]:
    """Return, for each pair, "accuracy", 1 where the chosen score is larger, else 0, and "margin",
    the difference of the scores.
    """
    margins = chosen - rejected
    return {"accuracy": (margins > 0).to(margins.dtype), "margin": margins}


def mean_metrics(chosen: Float[Tensor, " pairs"], rejected: Float[Tensor, " pairs"]) -> Metrics:
    """Return the means over pairs of accuracy (1 where the chosen score is larger), margin (the
    difference), and the chosen and the rejected scores, by these names and without gradient.
    """
    chosen, rejected = chosen.detach(), rejected.detach()
    means = {name: scores.mean() for name, scores in pair_scores(chosen, rejected).items()}
    return {**means, "chosen": chosen.mean(), "rejected": rejected.mean()}
