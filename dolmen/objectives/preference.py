"""A policy of comparisons, without a reward model: the policy and a reference, two models in one
run. The reference is asked first (objectives/score.py), and what it says of each token comes with
the batch.

    dpo(...)      pure, of log-probabilities summed over answers
    DPO           the objective of a run, which sums them over ranks and calls it
"""

import math
from dataclasses import dataclass
from typing import ClassVar

import torch
import torch.nn.functional as F
from jaxtyping import Float, Shaped
from torch import Tensor

from dolmen.data.batch import Batch
from dolmen.model import tree
from dolmen.model.head import Logits
from dolmen.objectives import pairs
from dolmen.objectives.config import Kind, check_dpo
from dolmen.objectives.objective import Judged
from dolmen.objectives.tokens import Metrics
from dolmen.ops.loss import IGNORED

REFERENCE = "reference"
"""The number of each token that is its label's log-probability in the other model."""

Lengths = tuple[Shaped[Tensor, "*pairs"], Shaped[Tensor, "*pairs"]]
"""Tokens of the chosen and of the rejected answers."""

EXO_SMOOTHING = 1e-3


def dpo(
    policy_chosen: Float[Tensor, " pairs"],
    policy_rejected: Float[Tensor, " pairs"],
    reference_chosen: Float[Tensor, " pairs"],
    reference_rejected: Float[Tensor, " pairs"],
    *,
    beta: float = 0.1,
    kind: Kind = "sigmoid",
    label_smoothing: float = 0.0,
    lengths: Lengths | None = None,
) -> tuple[Float[Tensor, ""], Metrics]:
    """Direct preference optimisation and kin, mean over pairs, of log-probabilities summed over
    answers. With c and r the log-ratios policy - reference of both, d = beta (c - r) and
    s = label_smoothing:

        sigmoid    -(1 - s) log sigmoid(d) - s log sigmoid(-d)    2305.18290, eq. 7; with s cDPO
        robust     (-(1 - s) log sigmoid(d) + s log sigmoid(-d)) / (1 - 2 s)          2403.00409
        hinge      max(0, 1 - d)                                  2305.10425, of DPO's d
        ipo        (c / |chosen| - r / |rejected| - 1 / (2 beta))^2          2310.12036, eq. 17
        sppo       (c - 1 / (2 beta))^2 + (r + 1 / (2 beta))^2    2405.00675, 4.7, of a sure winner
        apo-zero   1 - sigmoid(beta c) + sigmoid(beta r)                     2408.06266, eq. 7
        exo        KL((sigmoid(d), sigmoid(-d)) || (1 - s, s))               2402.00856, eq. 16

    They are TRL's (dpo_trainer.py, `loss_type`; exo_pair and sppo_hard there); OpenRLHF's DPOLoss
    has sigmoid and ipo, verl none. IPO needs `lengths`: TRL divides log-ratios by tokens, as the
    authors recommend; OpenRLHF, as in the paper, does not: lengths of 1 are that. Of exo, s = 0 is
    taken for 1e-3, as TRL did and its paper recommends: the target has no 0. The others know no s.

    Metrics: pairs.METRICS of the rewards beta c and beta r, and their means.
    """
    chosen, rejected = policy_chosen - reference_chosen, policy_rejected - reference_rejected
    check_dpo(beta, kind, label_smoothing)
    if kind == "ipo" and lengths is None:
        raise ValueError("ipo divides log-ratios by tokens: give lengths=(chosen, rejected)")
    losses = losses_of(chosen, rejected, beta, kind, label_smoothing, lengths)
    return losses.mean(), pairs.told(beta * chosen, beta * rejected)


def losses_of(
    c: Float[Tensor, "*pairs"],
    r: Float[Tensor, "*pairs"],
    beta: float,
    kind: Kind,
    s: float,
    lengths: Lengths | None,
) -> Float[Tensor, "*pairs"]:
    """`dpo` of each pair, from the log-ratios of the policy to the reference, which are more exact
    where they are summed token by token.
    """
    d = beta * (c - r)
    match kind:
        case "sigmoid":
            return -(1 - s) * F.logsigmoid(d) - s * F.logsigmoid(-d)
        case "robust":
            return (-(1 - s) * F.logsigmoid(d) + s * F.logsigmoid(-d)) / (1 - 2 * s)
        case "hinge":
            return torch.relu(1 - d)
        case "ipo":
            assert lengths is not None
            long, other = (each.clamp(min=1) for each in lengths)
            return (c / long - r / other - 1 / (2 * beta)).square()
        case "sppo":
            return (c - 1 / (2 * beta)).square() + (r + 1 / (2 * beta)).square()
        case "apo-zero":
            return torch.sigmoid(-beta * c) + torch.sigmoid(beta * r)
        case "exo":
            s = s or EXO_SMOOTHING
            right = d.sigmoid() * (F.logsigmoid(d) - math.log1p(-s))
            return right + (-d).sigmoid() * (F.logsigmoid(-d) - math.log(s))
    raise AssertionError(kind)


@dataclass(frozen=True)
class DPO:
    """`dpo` of the answers of a batch, whose tokens are those with a label; mean over pairs.

    A batch brings `numbers[REFERENCE]`. Metrics are those of pairs.METRICS, of the rewards.
    """

    beta: float = 0.1
    kind: Kind = "sigmoid"
    label_smoothing: float = 0.0

    names: ClassVar[tuple[str, ...]] = pairs.METRICS
    head: ClassVar[type] = tree.Head

    def __post_init__(self):
        check_dpo(self.beta, self.kind, self.label_smoothing)

    def count(self, batch: Batch) -> float:
        if REFERENCE not in batch.numbers:
            raise ValueError(
                f"DPO compares with another model: a batch needs numbers[{REFERENCE!r}], the "
                "log-probabilities of its labels in that model"
            )
        return pairs.count(batch)

    def __call__(self, hidden: Float[Tensor, "_ hidden"], head: Logits, batch: Batch) -> Judged:
        real = head.here(batch.labels) != IGNORED
        ratios = head.log_probabilities(hidden, batch.labels)
        ratios = ratios - head.here(batch.numbers[REFERENCE]) * real
        found = pairs.Pairs(batch)
        c, r = found.sides(head.over_documents(ratios, found.document))
        lengths = found.sides(found.lengths)
        losses = losses_of(c, r, self.beta, self.kind, self.label_smoothing, lengths)
        return found.judged(losses, pairs.Sides(self.beta * c, self.beta * r), head)
