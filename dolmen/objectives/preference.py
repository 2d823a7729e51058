"""Preference optimisation: DPO and its variants, as losses and as objectives of a run.

A policy that learns from comparisons: the objectives of a run that call the losses
below. The reference is asked first (objectives/forward.py), and what it says of each token
comes with the batch.

Losses of comparisons, without a reward model: pure functions of log-probabilities summed over
answers, of a policy and of a reference.
"""

import math
from dataclasses import dataclass
from typing import ClassVar

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Shaped
from torch import Tensor

from dolmen.data.batch import SIDE, Batch
from dolmen.model import spec
from dolmen.model.head import Logits
from dolmen.objectives import pairs
from dolmen.objectives.config import SIMPO_MARGIN, Alone, Kind, check_dpo
from dolmen.objectives.masked import Metrics
from dolmen.objectives.objective import Judged, Objective
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
    head: ClassVar[type] = spec.Head

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
    head: ClassVar[type] = spec.Head

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
    head: ClassVar[type] = spec.Head

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


Lengths = tuple[Shaped[Tensor, "*pairs"], Shaped[Tensor, "*pairs"]]
"""Tokens of the chosen and of the rejected answers."""

EXO_SMOOTHING = 1e-3


def simpo(
    policy_chosen: Float[Tensor, " pairs"],
    policy_rejected: Float[Tensor, " pairs"],
    *,
    lengths: Lengths,
    beta: float = 2.0,
    gamma: float = SIMPO_MARGIN,
    label_smoothing: float = 0.0,
) -> tuple[Float[Tensor, ""], Metrics]:
    """Simple preference optimisation (2405.14734, equation 6), which compares with no reference:
    mean over pairs of

        d = beta (log p(chosen) / |chosen| - log p(rejected) / |rejected|) - gamma
        -(1 - s) log sigmoid(d) - s log sigmoid(-d)

    of log-probabilities summed over answers of so many tokens. TRL's CPOTrainer (`loss_type`
    simpo, `simpo_gamma`; gamma there is divided by beta and multiplied again), and OpenRLHF has it
    not. Metrics: pairs.METRICS of the rewards, beta times the means, and their means.
    """
    check_dpo(beta, "simpo", label_smoothing)
    c, r = (
        mean_over_tokens(policy_chosen, lengths[0]),
        mean_over_tokens(policy_rejected, lengths[1]),
    )
    losses = reference_free_losses(c, r, "simpo", beta, gamma, label_smoothing)
    return losses.mean(), pairs.told(beta * c, beta * r)


def orpo(
    policy_chosen: Float[Tensor, " pairs"],
    policy_rejected: Float[Tensor, " pairs"],
    *,
    lengths: Lengths,
    beta: float = 0.1,
) -> tuple[Float[Tensor, ""], Metrics]:
    """Odds ratio preference optimisation (2403.07691, equations 6 and 7), which compares with no
    reference: with c and r the mean log-probabilities of the tokens of both answers, mean over
    pairs of

        -c - beta log sigmoid(log odds(c) - log odds(r)),    log odds(x) = x - log(1 - exp(x))

    TRL's ORPOTrainer has the same odds, and in the place of -c the mean over all tokens of all
    chosen texts, prompts too; the paper's is of the answer, as here. Metrics as of `simpo`.
    """
    check_dpo(beta, "orpo", 0.0)
    c, r = (
        mean_over_tokens(policy_chosen, lengths[0]),
        mean_over_tokens(policy_rejected, lengths[1]),
    )
    return reference_free_losses(c, r, "orpo", beta, 0.0, 0.0).mean(), pairs.told(
        beta * c, beta * r
    )


def mean_over_tokens(
    summed: Float[Tensor, "*pairs"], length: Shaped[Tensor, "*pairs"]
) -> Float[Tensor, "*pairs"]:
    """The mean over an answer's tokens."""
    return summed / length.clamp(min=1)


def reference_free_losses(
    c: Float[Tensor, "*pairs"],
    r: Float[Tensor, "*pairs"],
    kind: Alone,
    beta: float,
    gamma: float,
    s: float,
) -> Float[Tensor, "*pairs"]:
    """`simpo` and `orpo` of each pair, from the mean log-probabilities of tokens."""
    match kind:
        case "simpo":
            return smoothed(beta * (c - r) - gamma, s)
        case "orpo":
            return -c - beta * F.logsigmoid(log_odds(c) - log_odds(r))
    raise AssertionError(kind)


def smoothed(d: Float[Tensor, "*pairs"], s: float) -> Float[Tensor, "*pairs"]:
    """-log sigmoid(d), of a share s of the pairs the other way round."""
    return -(1 - s) * F.logsigmoid(d) - s * F.logsigmoid(-d)


def log_odds(log_p: Float[Tensor, "*pairs"]) -> Float[Tensor, "*pairs"]:
    """log(p / (1 - p)); of a p of 1 that of the largest below it, so that no gradient is NaN."""
    bounded = log_p.clamp(max=-torch.finfo(log_p.dtype).eps)
    return bounded - torch.log(-torch.expm1(bounded))


def kto(
    policy: Float[Tensor, " answers"],
    reference: Float[Tensor, " answers"],
    desirable: Shaped[Tensor, " answers"],
    *,
    kl: Float[Tensor, ""] | float,
    beta: float = 0.1,
    desirable_weight: float = 1.0,
    undesirable_weight: float = 1.0,
) -> tuple[Float[Tensor, ""], Metrics]:
    """Kahneman-Tversky optimisation (2402.01306, equation 8), of single answers that are wanted or
    not: with h the log-ratio policy - reference of an answer, and z = max(0, kl), which no gradient
    flows through, mean over answers of

        desirable_weight   (1 - sigmoid(beta (h - z)))      where it is wanted
        undesirable_weight (1 - sigmoid(beta (z - h)))      where it is not

    `kl` is the mean log-ratio of answers to prompts that are not their own. TRL's KTOTrainer
    (`loss_type` kto), OpenRLHF's KTOLoss. Metrics: the mean rewards beta h of those that are
    `desirable` and of those that are not, and z.
    """
    check_dpo(beta, "kto", 0.0)
    ratio, wanted = policy - reference, desirable != 0
    zero = torch.as_tensor(kl, dtype=ratio.dtype, device=ratio.device)
    losses = kto_losses(ratio, wanted, zero, beta, desirable_weight, undesirable_weight)
    rewards = beta * ratio.detach()
    told = {
        "desirable": torch.where(wanted, rewards, 0.0).sum() / wanted.sum().clamp(min=1),
        "undesirable": torch.where(wanted, 0.0, rewards).sum() / (~wanted).sum().clamp(min=1),
        "kl": zero.detach().clamp(min=0),
    }
    return losses.mean(), told


def kto_losses(
    ratio: Float[Tensor, "*answers"],
    wanted: Bool[Tensor, "*answers"],
    kl: Float[Tensor, "*#answers"],
    beta: float,
    desirable_weight: float,
    undesirable_weight: float,
) -> Float[Tensor, "*answers"]:
    """`kto` of each answer, from its log-ratio of the policy to the reference."""
    zero = kl.detach().clamp(min=0)
    good = desirable_weight * torch.sigmoid(-beta * (ratio - zero))
    bad = undesirable_weight * torch.sigmoid(-beta * (zero - ratio))
    return torch.where(wanted, good, bad)


def dpo(
    policy_chosen: Float[Tensor, " pairs"],
    policy_rejected: Float[Tensor, " pairs"],
    reference_chosen: Float[Tensor, " pairs"],
    reference_rejected: Float[Tensor, " pairs"],
    *,
    beta: float = 0.1,
    kind: Kind = "sigmoid",
    label_smoothing: float = 0.0,
    rpo_alpha: float = 0.0,
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

    To any of them `rpo_alpha` adds what SFT of the chosen answer costs (2404.19733, equation 1),
    rpo_alpha -log p(chosen) / |chosen|, which needs `lengths` too. TRL (`rpo_alpha`) has its mean
    over all tokens of a batch in the place of that over pairs.

    Metrics: pairs.METRICS of the rewards beta c and beta r, and their means.
    """
    chosen, rejected = policy_chosen - reference_chosen, policy_rejected - reference_rejected
    check_dpo(beta, kind, label_smoothing, rpo_alpha)
    if kind == "ipo" and lengths is None:
        raise ValueError("ipo divides log-ratios by tokens: give lengths=(chosen, rejected)")
    losses = dpo_losses(chosen, rejected, beta, kind, label_smoothing, lengths)
    if rpo_alpha:
        if lengths is None:
            raise ValueError("rpo_alpha is of a mean over tokens: give lengths=(chosen, rejected)")
        losses = losses - rpo_alpha * mean_over_tokens(policy_chosen, lengths[0])
    return losses.mean(), pairs.told(beta * chosen, beta * rejected)


def dpo_losses(
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
            return smoothed(d, s)
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
