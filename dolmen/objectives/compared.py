"""A policy that learns from comparisons: the objectives of a run that call the losses of
preference.py. The reference is asked first (objectives/score.py), and what it says of each token
comes with the batch.
"""

from dataclasses import dataclass
from typing import ClassVar

import torch
from jaxtyping import Float
from torch import Tensor

from dolmen.data.batch import SIDE, Batch
from dolmen.model import tree
from dolmen.model.head import Logits
from dolmen.objectives import pairs
from dolmen.objectives.config import SIMPO_MARGIN, Alone, Kind, check_dpo
from dolmen.objectives.objective import Judged, Objective
from dolmen.objectives.preference import (
    dpo_losses,
    kto_losses,
    mean_over_tokens,
    reference_free_losses,
)
from dolmen.ops.loss import IGNORED

REFERENCE = "reference"
"""The number of each token that is its label's log-probability in the other model."""


def compared(batch: Batch) -> None:
    """Raises ValueError for a batch without what the reference says of it."""
    if REFERENCE not in batch.numbers:
        raise ValueError(
            "answers are compared with what another model says of them: a batch needs "
            f"numbers[{REFERENCE!r}], the log-probabilities of its labels in that model"
        )


def log_ratios(
    said: Float[Tensor, "sequences _"], head: Logits, found: pairs.Answers
) -> Float[Tensor, "sequences documents"]:
    """Of each answer, policy to reference, summed over its tokens, of whose labels `said` is the
    policy's log-probability.
    """
    batch = found.batch
    real = head.here(batch.labels) != IGNORED
    ratios = said - head.here(batch.numbers[REFERENCE]) * real
    return head.over_documents(ratios, found.document)


@dataclass(frozen=True)
class DPO:
    """`dpo` of the answers of a batch, whose tokens are those with a label; mean over pairs.

    A batch brings `numbers[REFERENCE]`. Metrics are pairs.REWARDS and pairs.LOGPS.
    """

    beta: float = 0.1
    kind: Kind = "sigmoid"
    label_smoothing: float = 0.0
    rpo_alpha: float = 0.0
    from_reference: bool = False
    """Whether the reference is the model that training starts from."""

    names: ClassVar[tuple[str, ...]] = (*pairs.REWARDS, *pairs.LOGPS)
    head: ClassVar[type] = tree.Head

    def __post_init__(self):
        check_dpo(self.beta, self.kind, self.label_smoothing, self.rpo_alpha)

    def count(self, batch: Batch) -> float:
        compared(batch)
        return pairs.count(batch)

    def __call__(self, hidden: Float[Tensor, "_ hidden"], head: Logits, batch: Batch) -> Judged:
        found = pairs.Pairs(batch)
        said = head.log_probabilities(hidden, batch.labels)
        c, r = found.sides(log_ratios(said, head, found))
        lengths = found.sides(found.lengths)
        losses = dpo_losses(c, r, self.beta, self.kind, self.label_smoothing, lengths)
        logps = found.sides(head.over_documents(said, found.document))
        if self.rpo_alpha:
            losses = losses - self.rpo_alpha * mean_over_tokens(logps.chosen, lengths.chosen)
        return found.preferred(losses, pairs.Sides(self.beta * c, self.beta * r), logps, head)


@dataclass(frozen=True)
class ReferenceFree:
    """`simpo` or `orpo` of the answers of a batch, as DPO without another model."""

    kind: Alone
    beta: float
    gamma: float = SIMPO_MARGIN
    label_smoothing: float = 0.0

    names: ClassVar[tuple[str, ...]] = (*pairs.REWARDS, *pairs.LOGPS)
    head: ClassVar[type] = tree.Head

    def __post_init__(self):
        check_dpo(self.beta, self.kind, self.label_smoothing)

    def count(self, batch: Batch) -> float:
        return pairs.count(batch)

    def __call__(self, hidden: Float[Tensor, "_ hidden"], head: Logits, batch: Batch) -> Judged:
        found = pairs.Pairs(batch)
        summed = head.over_documents(head.log_probabilities(hidden, batch.labels), found.document)
        c, r = found.sides(mean_over_tokens(summed, found.lengths))
        losses = reference_free_losses(c, r, self.kind, self.beta, self.gamma, self.label_smoothing)
        rewards, logps = pairs.Sides(self.beta * c, self.beta * r), found.sides(summed)
        return found.preferred(losses, rewards, logps, head)


@dataclass(frozen=True)
class KTO:
    """`kto` of the answers of a batch, mean over answers. The second of each pair is an answer to
    another prompt (its SIDE is 0), and z is their mean log-ratio over two rows side by side: what
    is packed there decides it, and no layout does. The paper estimates it in a microbatch as well.

    Metrics: the share of answers that are on their side of z, and how far all are beyond it.
    """

    beta: float = 0.1
    desirable_weight: float = 1.0
    undesirable_weight: float = 1.0
    from_reference: bool = False
    """Whether the reference is the model that training starts from."""

    names: ClassVar[tuple[str, ...]] = pairs.METRICS
    head: ClassVar[type] = tree.Head

    def __post_init__(self):
        check_dpo(self.beta, "kto", 0.0)

    def count(self, batch: Batch) -> float:
        compared(batch)
        return pairs.count(batch)

    def __call__(self, hidden: Float[Tensor, "_ hidden"], head: Logits, batch: Batch) -> Judged:
        found = pairs.Pairs(batch)
        said = head.log_probabilities(hidden, batch.labels)
        ratios, side = log_ratios(said, head, found), found.number(SIDE)
        first = side[0::2] != 0  # which of the two rows has the answer of the prompt
        own = torch.where(first, ratios[0::2], ratios[1::2])
        other = torch.where(first, ratios[1::2], ratios[0::2])
        wanted = torch.where(first, side[0::2], side[1::2]) > 0
        answers = found.real.sum(1, keepdim=True).clamp(min=1)
        kl = torch.where(found.real, other, 0.0).sum(1, keepdim=True) / answers
        weights = self.desirable_weight, self.undesirable_weight
        losses = kto_losses(own, wanted, kl, self.beta, *weights)
        zero = kl.detach().clamp(min=0).expand_as(own)
        better = pairs.Sides(torch.where(wanted, own, zero), torch.where(wanted, zero, own))
        scores = pairs.Sides(self.beta * better.chosen, self.beta * better.rejected)
        return found.judged(losses, scores, head)


def decided(objective: Objective, updates: int) -> tuple[str, ...]:
    """Return the names of the metrics that mean something after so many updates: while policy and
    reference have the same weights, only rounding decides which of two rewards is larger.
    """
    match objective:
        case DPO(from_reference=True) | KTO(from_reference=True) if updates == 0:
            return tuple(n for n in objective.names if n not in ("accuracy", pairs.ACCURACY))
    return objective.names
