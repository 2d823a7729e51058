"""Losses of models with a scalar head: of a reward model, from pairs of completions.

pairwise               pure function of the scores of completions
PairwiseRewardLoss     the objective of a run: reads scores at the last token of each completion
"""

from dataclasses import dataclass
from typing import ClassVar

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor

from dolmen.data.batch import MARGIN, Batch
from dolmen.model import spec
from dolmen.model.head import ScalarHead
from dolmen.objectives import pairs
from dolmen.objectives.masked import Metrics
from dolmen.objectives.objective import LossOutput


def pairwise(
    chosen: Float[Tensor, " pairs"],
    rejected: Float[Tensor, " pairs"],
    *,
    margin: Float[Tensor, " pairs"] | float | None = None,
    center: float | None = None,
) -> tuple[Float[Tensor, ""], Metrics]:
    """The Bradley-Terry loss of a reward model (2203.02155, equation 1), with a `margin` by which
    the chosen score should be larger (2307.09288, equation 2), and a penalty that centres scores at
    0 (2312.09244): mean over pairs of

        -log sigmoid(chosen - rejected - margin) + center (chosen + rejected)^2

    TRL's RewardTrainer (`center_rewards_coefficient`), and OpenRLHF's PairWiseLoss, without
    centring; not in verl. Metrics: the share of pairs whose chosen score is larger, the mean
    difference (without margins), and both mean scores.
    """
    losses = reward_losses(chosen, rejected, margin, center)
    return losses.mean(), pairs.mean_metrics(chosen, rejected)


def reward_losses(
    chosen: Float[Tensor, "*pairs"],
    rejected: Float[Tensor, "*pairs"],
    margin: Float[Tensor, "*pairs"] | float | None,
    center: float | None,
) -> Float[Tensor, "*pairs"]:
    """Return the loss of each pair: -log sigmoid(chosen - rejected - margin) + center (chosen +
    rejected)^2; None is no margin, or no centring.
    """
    margins = chosen - rejected
    losses = -F.logsigmoid(margins if margin is None else margins - margin)
    # the loss depends on differences alone: without the penalty scores may drift
    return losses + center * (chosen + rejected).square() if center else losses


@dataclass(frozen=True)
class PairwiseRewardLoss:
    """The objective of `pairwise` over a batch: mean over pairs. The score of a completion is the
    head's number at its last token with a real label. Metrics are pairs.METRICS.
    """

    center: float = 0.0
    """Weight of (chosen + rejected)^2, which centres scores at 0."""
    margin: float = 0.0
    """Target margin; numbers[MARGIN] of the batch is added to it."""

    head: ClassVar[type] = spec.ScalarHeadSpec

    @property
    def names(self) -> tuple[str, ...]:
        """The metrics: accuracy and margin."""
        return pairs.METRICS

    def count(self, batch: Batch) -> float:
        """Return the number of pairs. Raises ValueError for an incomplete pair."""
        return pairs.count_pairs(batch)

    def __call__(
        self, hidden: Float[Tensor, "_ hidden"], head: ScalarHead, batch: Batch
    ) -> LossOutput:
        """Return the sum of the pairs' losses, and of accuracy and margin: the score of a
        completion is the head's number at its last labelled token.
        """
        index = pairs.PairIndex(batch)
        # 0 at all other tokens, so that a sum per document is the score at its last token
        here = head.values(hidden) * head.local_tokens(index.is_last)
        rewards = index.pair_up(head.sum_per_document(here, index.document))
        margin: Tensor | float = self.margin
        if MARGIN in batch.numbers:
            margin = margin + index.pair_up(index.number(MARGIN)).chosen
        losses = reward_losses(rewards.chosen, rewards.rejected, margin, self.center)
        return self.pair_output(index, losses, rewards, head)

    def pair_output(
        self, index: pairs.PairIndex, losses: Tensor, rewards: pairs.PairValues, head: ScalarHead
    ) -> LossOutput:
        """Return the sums over pairs of `losses` and of the metrics accuracy and margin; subclasses
        add metrics. Each cp rank returns its share of the sums.
        """
        return index.score_output(losses, rewards, head)


BINS = 10  # of confidence, which is between 1 / 2 and 1


@dataclass(frozen=True)
class CalibratedRewardLoss(PairwiseRewardLoss):
    """PairwiseRewardLoss with metrics for calibration: the share of pairs in each of BINS equal
    bins of confidence, sigmoid(|chosen - rejected|), and the share that is also ranked correctly.
    """

    @property
    def names(self) -> tuple[str, ...]:
        """The metrics: accuracy, margin, and for each bin I of confidence (0 to 9) "sure I", the
        share of pairs in it, and "right I", the share of pairs that are in it and ranked correctly.
        """
        return (*pairs.METRICS, *(f"{name} {i}" for name in ("sure", "right") for i in range(BINS)))

    def pair_output(
        self, index: pairs.PairIndex, losses: Tensor, rewards: pairs.PairValues, head: ScalarHead
    ) -> LossOutput:
        """Return the sums over pairs of `losses`, of accuracy and margin, and, for each bin of
        confidence, of the pairs in it and of those that are also ranked correctly.
        """
        output = super().pair_output(index, losses, rewards, head)
        margins = (rewards.chosen - rewards.rejected).detach()
        # confidence is in [1 / 2, 1): stretched to [0, 1) before it is cut into bins
        confidence = 2 * torch.sigmoid(margins.abs()) - 1
        bin_index = (confidence * BINS).long().clamp(max=BINS - 1)
        indicators = [(bin_index == i).to(margins.dtype) for i in range(BINS)]
        # of each bin, the pairs that are also ranked correctly
        indicators += [value * (margins > 0) for value in indicators]
        return output._replace(
            metrics=(
                *output.metrics,
                *(head.divide_over_cp(index.total(value)) for value in indicators),
            )
        )
