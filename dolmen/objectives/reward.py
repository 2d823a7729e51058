"""What trains a model that ends in one number for each token: a reward model by comparisons, a
value model by numbers.

    pairwise(...)    pure, of the scores of answers
    Preferred        the objective of a run, which takes scores where they lie and calls it
"""

from dataclasses import dataclass
from typing import ClassVar

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor

from dolmen.data.batch import MARGIN, Batch
from dolmen.model import spec
from dolmen.model.head import Values
from dolmen.objectives import pairs
from dolmen.objectives.masked import Metrics
from dolmen.objectives.objective import Judged
from dolmen.ops.loss import IGNORED

TARGET = "target"
"""The number of each token that its value should be."""


def pairwise(
    chosen: Float[Tensor, " pairs"],
    rejected: Float[Tensor, " pairs"],
    *,
    margin: Float[Tensor, " pairs"] | float | None = None,
    center: float | None = None,
) -> tuple[Float[Tensor, ""], Metrics]:
    """Of two answers the chosen one's score is to be larger (Bradley and Terry, 1952; 2203.02155,
    equation 1), by `margin` (2307.09288, equation 2), and both are to be about 0 (2312.09244):
    mean over pairs of

        -log sigmoid(chosen - rejected - margin) + center (chosen + rejected)^2

    TRL's RewardTrainer (`center_rewards_coefficient`), and OpenRLHF's PairWiseLoss, which does not
    centre; verl has none. Metrics: the share of pairs whose chosen score is the larger, the mean
    difference, without margins, and both means.
    """
    losses = losses_of(chosen, rejected, margin, center)
    return losses.mean(), pairs.told(chosen, rejected)


def losses_of(
    chosen: Float[Tensor, "*pairs"],
    rejected: Float[Tensor, "*pairs"],
    margin: Float[Tensor, "*pairs"] | float | None,
    center: float | None,
) -> Float[Tensor, "*pairs"]:
    """`pairwise` of each pair."""
    ahead = chosen - rejected
    losses = -F.logsigmoid(ahead if margin is None else ahead - margin)
    return losses + center * (chosen + rejected).square() if center else losses


@dataclass(frozen=True)
class Preferred:
    """`pairwise` of a batch, mean over pairs, where the reward of an answer is the number of its
    last token with a real label. Metrics are those of pairs.METRICS.
    """

    center: float = 0.0
    """What scores that are not about 0 cost: the weight of (chosen + rejected)^2."""
    margin: float = 0.0
    """By how much the chosen one is to be ahead, and by the number MARGIN of a batch more."""

    names: ClassVar[tuple[str, ...]] = pairs.METRICS
    head: ClassVar[type] = spec.Scalar

    def count(self, batch: Batch) -> float:
        return pairs.count(batch)

    def __call__(self, hidden: Float[Tensor, "_ hidden"], head: Values, batch: Batch) -> Judged:
        found = pairs.Pairs(batch)
        here = head.values(hidden) * head.here(found.ends)
        rewards = found.sides(head.over_documents(here, found.document))
        margin: Tensor | float = self.margin
        if MARGIN in batch.numbers:
            margin = margin + found.sides(found.number(MARGIN)).chosen
        losses = losses_of(rewards.chosen, rewards.rejected, margin, self.center)
        return self.told(found, losses, rewards, head)

    def told(
        self, found: pairs.Pairs, losses: Tensor, rewards: pairs.Sides, head: Values
    ) -> Judged:
        """Sums over pairs."""
        return found.judged(losses, rewards, head)


BINS = 10  # of how sure a reward model is, from 1 / 2 to 1


@dataclass(frozen=True)
class Calibrated(Preferred):
    """The same, and of how many pairs it is how sure which one is preferred, sigmoid(|chosen -
    rejected|), in equal bins, and of how many of these rightly so.
    """

    names: ClassVar[tuple[str, ...]] = (
        *pairs.METRICS,
        *(f"sure {i}" for i in range(BINS)),
        *(f"right {i}" for i in range(BINS)),
    )

    def told(
        self, found: pairs.Pairs, losses: Tensor, rewards: pairs.Sides, head: Values
    ) -> Judged:
        judged = super().told(found, losses, rewards, head)
        ahead = (rewards.chosen - rewards.rejected).detach()
        sure = 2 * torch.sigmoid(ahead.abs()) - 1
        of_bin = (sure * BINS).long().clamp(max=BINS - 1)
        each = [(of_bin == i).to(ahead.dtype) for i in range(BINS)]
        each += [one * (ahead > 0) for one in each]
        return judged._replace(
            metrics=(*judged.metrics, *(head.shared(found.total(one)) for one in each))
        )


@dataclass(frozen=True)
class SquaredError:
    """Mean over tokens with a real label, weighted, of (value - target)^2 / 2; a batch brings
    `numbers[TARGET]`.
    """

    names: ClassVar[tuple[str, ...]] = ()
    head: ClassVar[type] = spec.Scalar

    def count(self, batch: Batch) -> float:
        if TARGET not in batch.numbers:
            raise ValueError(f"values have targets: a batch needs numbers[{TARGET!r}]")
        return batch.weight

    def __call__(self, hidden: Float[Tensor, "_ hidden"], head: Values, batch: Batch) -> Judged:
        off = head.values(hidden) - head.here(batch.numbers[TARGET])
        weights = (head.here(batch.labels) != IGNORED).to(off.dtype)
        if batch.weights is not None:
            weights = weights * head.here(batch.weights)
        return Judged((off.square() * weights).sum() / 2)
