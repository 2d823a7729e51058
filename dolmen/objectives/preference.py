"""Preference optimisation: DPO and its variants, SimPO, ORPO and KTO, as pure losses and as
objectives of a run.

    dpo, simpo, orpo, kto            pure functions of log-probabilities summed over completions
    DPO, ReferenceFreePreference,    objectives: they compute these sums over layouts and call the
    KTO                              same per-pair losses (`dpo_losses`, ...)

The log-probabilities of the reference model are computed before the first step (training/
reference.py) and come with the batch as numbers[REFERENCE], so no second model is held in memory.
Log-ratios are summed token by token, log p - log p_ref: the difference of two sums over hundreds of
tokens would lose digits.
"""

import math
from typing import ClassVar

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Shaped
from torch import Tensor

from dolmen.core.config import config
from dolmen.data.batch import SIDE, Batch
from dolmen.model import spec
from dolmen.model.head import LMHead
from dolmen.objectives import pairs
from dolmen.objectives.config import (
    SIMPO_MARGIN,
    Beta,
    LabelSmoothing,
    PairKind,
    ReferenceFreeKind,
    Weight,
)
from dolmen.objectives.masked import Metrics
from dolmen.objectives.objective import LossOutput, Objective
from dolmen.ops.loss import IGNORED

REFERENCE = "reference"
"""Name of the batch's numbers with each label's log-probability in the reference model."""


def check_reference(batch: Batch) -> None:
    """Raise ValueError for a batch without numbers[REFERENCE], the reference model's
    log-probabilities.
    """
    if REFERENCE not in batch.numbers:
        raise ValueError(
            f"the loss needs a reference model: a batch must have numbers[{REFERENCE!r}], the "
            "log-probabilities of its labels in that model"
        )


def log_ratios(
    logps: Float[Tensor, "sequences _"], head: LMHead, index: pairs.CompletionIndex
) -> Float[Tensor, "sequences documents"]:
    """Return log(policy / reference) of each completion [sequences, documents], summed over its
    tokens. `logps` are the policy's log-probabilities of this rank's labels.
    """
    batch = index.batch
    real = head.local_tokens(batch.labels) != IGNORED
    # token by token: the difference of two sums of hundreds of nats would lose digits
    ratios = logps - head.local_tokens(batch.numbers[REFERENCE]) * real
    return head.sum_per_document(ratios, index.document)


@config()
class DPO:
    """The objective of `dpo` over a batch of pairs: mean over pairs. Reads `numbers[REFERENCE]`.
    Metrics are pairs.REWARDS and pairs.LOGPS.
    """

    beta: Beta = 0.1
    kind: PairKind = "sigmoid"
    label_smoothing: LabelSmoothing = 0.0
    rpo_alpha: Weight = 0.0
    from_reference: bool = False
    """True if the reference is the initial model."""

    head: ClassVar[type] = spec.LMHeadSpec

    @property
    def names(self) -> tuple[str, ...]:
        """The metrics: accuracy, margin and means of the implied rewards, and log-probabilities of
        both sides.
        """
        return (*pairs.REWARDS, *pairs.LOGPS)

    def count(self, batch: Batch) -> float:
        """Return the number of pairs. Raises ValueError without reference log-probabilities."""
        check_reference(batch)
        return pairs.count_pairs(batch)

    def __call__(self, hidden: Float[Tensor, "_ hidden"], head: LMHead, batch: Batch) -> LossOutput:
        """Return the sum of the pairs' losses, and of the metrics of implied rewards and
        log-probabilities.
        """
        index = pairs.PairIndex(batch)
        token_logps = head.log_probabilities(hidden, batch.labels)
        # chosen and rejected: log(policy / reference), summed over tokens
        c, r = index.pair_up(log_ratios(token_logps, head, index))
        lengths = index.pair_up(index.lengths)
        losses = dpo_losses(c, r, self.beta, self.kind, self.label_smoothing, lengths)
        logps = index.pair_up(head.sum_per_document(token_logps, index.document))
        if self.rpo_alpha:
            losses = losses - self.rpo_alpha * mean_over_tokens(logps.chosen, lengths.chosen)
        return index.reward_output(
            losses, pairs.PairValues(self.beta * c, self.beta * r), logps, head
        )


@config()
class ReferenceFreePreference:
    """The objective of `simpo` or `orpo` over a batch of pairs, without a reference model; metrics
    as of DPO.
    """

    kind: ReferenceFreeKind
    beta: Beta
    gamma: Weight = SIMPO_MARGIN
    label_smoothing: LabelSmoothing = 0.0

    head: ClassVar[type] = spec.LMHeadSpec

    @property
    def names(self) -> tuple[str, ...]:
        """The metrics: accuracy, margin and means of the implied rewards, and log-probabilities of
        both sides.
        """
        return (*pairs.REWARDS, *pairs.LOGPS)

    def count(self, batch: Batch) -> float:
        """Return the number of pairs. Raises ValueError for an incomplete pair."""
        return pairs.count_pairs(batch)

    def __call__(self, hidden: Float[Tensor, "_ hidden"], head: LMHead, batch: Batch) -> LossOutput:
        """Return the sum of the pairs' losses, SimPO's or ORPO's, and of the metrics of implied
        rewards and log-probabilities.
        """
        index = pairs.PairIndex(batch)
        summed = head.sum_per_document(head.log_probabilities(hidden, batch.labels), index.document)
        c, r = index.pair_up(mean_over_tokens(summed, index.lengths))
        losses = reference_free_losses(c, r, self.kind, self.beta, self.gamma, self.label_smoothing)
        rewards, logps = pairs.PairValues(self.beta * c, self.beta * r), index.pair_up(summed)
        return index.reward_output(losses, rewards, logps, head)


@config()
class KTO:
    """`kto` of a batch, mean over completions. The second completion of each pair belongs to
    another prompt (its SIDE is 0); the KL estimate z is their mean log-ratio over the two paired
    rows. So packing decides which completions it is estimated from, and no layout does. The paper
    estimates it per microbatch.

    Metrics: the share of completions on the desired side of z, and their mean margin to it.
    """

    beta: Beta = 0.1
    desirable_weight: Weight = 1.0
    undesirable_weight: Weight = 1.0
    from_reference: bool = False
    """True if the reference is the initial model."""

    head: ClassVar[type] = spec.LMHeadSpec

    @property
    def names(self) -> tuple[str, ...]:
        """The metrics: accuracy, the share of completions whose log-ratio is on the desired side of
        the KL estimate, and margin, their mean distance from it on that side, times beta.
        """
        return pairs.METRICS

    def count(self, batch: Batch) -> float:
        """Return the number of completions. Raises ValueError without reference
        log-probabilities.
        """
        check_reference(batch)
        return pairs.count_pairs(batch)

    def __call__(self, hidden: Float[Tensor, "_ hidden"], head: LMHead, batch: Batch) -> LossOutput:
        """Return the sum of the completions' losses, and of accuracy and margin to the KL
        estimate.
        """
        index = pairs.PairIndex(batch)
        logps = head.log_probabilities(hidden, batch.labels)
        ratios, side = log_ratios(logps, head, index), index.number(SIDE)
        # SIDE is 1 or -1 for a desirable or undesirable completion, 0 for a mismatched one
        first = side[0::2] != 0  # which of the two rows has the completion of the prompt
        # the completion of its own prompt, and the one that belongs to another prompt
        matching = torch.where(first, ratios[0::2], ratios[1::2])
        mismatched = torch.where(first, ratios[1::2], ratios[0::2])
        preferred = torch.where(first, side[0::2], side[1::2]) > 0
        completions = index.real.sum(1, keepdim=True).clamp(min=1)
        # z of the paper: one estimate for each pair of rows
        kl = torch.where(index.real, mismatched, 0.0).sum(1, keepdim=True) / completions
        weights = self.desirable_weight, self.undesirable_weight
        losses = kto_losses(matching, preferred, kl, self.beta, *weights)
        # a KL is not negative, its estimate may be; no gradient, as in the paper
        kl_baseline = kl.detach().clamp(min=0).expand_as(matching)
        # margin to z, on the side where the completion belongs
        better = pairs.PairValues(
            torch.where(preferred, matching, kl_baseline),
            torch.where(preferred, kl_baseline, matching),
        )
        scores = pairs.PairValues(self.beta * better.chosen, self.beta * better.rejected)
        return index.score_output(losses, scores, head)


def meaningful_metrics(objective: Objective, updates: int) -> tuple[str, ...]:
    """Return the names of the objective's metrics that carry information after `updates` updates.
    Before the first one, a policy that starts as its reference has log-ratios of 0 up to rounding,
    so accuracies are left out.
    """
    match objective:
        case DPO(from_reference=True) | KTO(from_reference=True) if updates == 0:
            return tuple(n for n in objective.names if n not in ("accuracy", pairs.ACCURACY))
    return objective.names


Lengths = tuple[Shaped[Tensor, "*pairs"], Shaped[Tensor, "*pairs"]]
"""Tokens of the chosen and of the rejected completions."""

EXO_SMOOTHING = 1e-3  # of a label smoothing of 0, whose target distribution has a 0


def simpo(
    policy_chosen: Float[Tensor, " pairs"],
    policy_rejected: Float[Tensor, " pairs"],
    *,
    lengths: Lengths,
    beta: float = 2.0,
    gamma: float = SIMPO_MARGIN,
    label_smoothing: float = 0.0,
) -> tuple[Float[Tensor, ""], Metrics]:
    """Simple preference optimisation (2405.14734, equation 6), without a reference model: mean over
    pairs of

        d = beta (log p(chosen) / |chosen| - log p(rejected) / |rejected|) - gamma
        -(1 - s) log sigmoid(d) - s log sigmoid(-d)

    from log-probabilities summed over completions of these `lengths` in tokens. TRL's CPOTrainer
    (`loss_type` simpo, `simpo_gamma`; gamma there is divided by beta and multiplied again); not in
    OpenRLHF. Metrics: accuracy and margin of the rewards (beta times the means per token), and the
    mean rewards. Raises ValueError for hyperparameters out of range.
    """
    ReferenceFreePreference("simpo", beta, gamma, label_smoothing)  # raises ValueError
    c, r = (
        mean_over_tokens(policy_chosen, lengths[0]),
        mean_over_tokens(policy_rejected, lengths[1]),
    )
    losses = reference_free_losses(c, r, "simpo", beta, gamma, label_smoothing)
    return losses.mean(), pairs.mean_metrics(beta * c, beta * r)


def orpo(
    policy_chosen: Float[Tensor, " pairs"],
    policy_rejected: Float[Tensor, " pairs"],
    *,
    lengths: Lengths,
    beta: float = 0.1,
) -> tuple[Float[Tensor, ""], Metrics]:
    """Odds ratio preference optimisation (2403.07691, equations 6 and 7), without a reference
    model: with c and r the mean log-probabilities per token of both completions, mean over pairs of

        -c - beta log sigmoid(log odds(c) - log odds(r)),    log odds(x) = x - log(1 - exp(x))

    TRL's ORPOTrainer has the same odds; its -c is a mean over all tokens of all chosen texts,
    prompts included, where the paper's and ours is over the completion. Metrics: accuracy and
    margin of the rewards beta c and beta r, and the mean rewards.
    """
    ReferenceFreePreference("orpo", beta)  # raises ValueError
    c, r = (
        mean_over_tokens(policy_chosen, lengths[0]),
        mean_over_tokens(policy_rejected, lengths[1]),
    )
    return reference_free_losses(c, r, "orpo", beta, 0.0, 0.0).mean(), pairs.mean_metrics(
        beta * c, beta * r
    )


def mean_over_tokens(
    summed: Float[Tensor, "*pairs"], length: Shaped[Tensor, "*pairs"]
) -> Float[Tensor, "*pairs"]:
    """Return sums over completions divided by their lengths in tokens; 0 for empty completions."""
    return summed / length.clamp(min=1)


def reference_free_losses(
    c: Float[Tensor, "*pairs"],
    r: Float[Tensor, "*pairs"],
    kind: ReferenceFreeKind,
    beta: float,
    gamma: float,
    s: float,
) -> Float[Tensor, "*pairs"]:
    """Return the loss of each pair, SimPO's or ORPO's by `kind`, from the mean log-probabilities
    per token c (chosen) and r (rejected); s is the label smoothing, gamma the margin, of SimPO
    alone.
    """
    match kind:
        # 2405.14734, equation 6
        case "simpo":
            return smoothed_sigmoid_loss(beta * (c - r) - gamma, s)
        # 2403.07691, equations 6 and 7: cross-entropy of the chosen completion, plus the odds ratio
        case "orpo":
            return -c - beta * F.logsigmoid(log_odds(c) - log_odds(r))
    raise AssertionError(kind)


def smoothed_sigmoid_loss(d: Float[Tensor, "*pairs"], s: float) -> Float[Tensor, "*pairs"]:
    """Return -(1 - s) log sigmoid(d) - s log sigmoid(-d), the sigmoid loss with label smoothing
    s.
    """
    return -(1 - s) * F.logsigmoid(d) - s * F.logsigmoid(-d)


def log_odds(log_p: Float[Tensor, "*pairs"]) -> Float[Tensor, "*pairs"]:
    """Return log(p / (1 - p)) of probabilities given as log p. p = 1 is replaced by the largest p
    below 1, so that the gradient is finite.
    """
    # log(1 - exp(x)) by expm1 keeps the digits of probabilities near 1
    bounded = log_p.clamp(max=-torch.finfo(log_p.dtype).eps)
    return bounded - torch.log(-torch.expm1(bounded))


def kto(
    policy: Float[Tensor, " completions"],
    reference: Float[Tensor, " completions"],
    desirable: Shaped[Tensor, " completions"],
    *,
    kl: Float[Tensor, ""] | float,
    beta: float = 0.1,
    desirable_weight: float = 1.0,
    undesirable_weight: float = 1.0,
) -> tuple[Float[Tensor, ""], Metrics]:
    """Kahneman-Tversky optimisation (2402.01306, equation 8), of single completions, each desirable
    or not: with h the log-ratio policy - reference and z = max(0, kl), which is detached, mean over
    completions of

        desirable_weight   (1 - sigmoid(beta (h - z)))      where it is desirable
        undesirable_weight (1 - sigmoid(beta (z - h)))      where it is not

    `kl` is the mean log-ratio of completions paired with prompts of others. TRL's KTOTrainer
    (`loss_type` kto), OpenRLHF's KTOLoss. Metrics: the mean rewards beta h of those that are
    `desirable` and of those that are not, and z.
    """
    KTO(beta, desirable_weight, undesirable_weight)  # raises ValueError
    ratio, desirable_mask = policy - reference, desirable != 0
    kl_baseline = torch.as_tensor(kl, dtype=ratio.dtype, device=ratio.device)
    losses = kto_losses(
        ratio, desirable_mask, kl_baseline, beta, desirable_weight, undesirable_weight
    )
    rewards = beta * ratio.detach()
    metrics = {
        "desirable": torch.where(desirable_mask, rewards, 0.0).sum()
        / desirable_mask.sum().clamp(min=1),
        "undesirable": torch.where(desirable_mask, 0.0, rewards).sum()
        / (~desirable_mask).sum().clamp(min=1),
        "kl": kl_baseline.detach().clamp(min=0),
    }
    return losses.mean(), metrics


def kto_losses(
    ratio: Float[Tensor, "*completions"],
    desirable: Bool[Tensor, "*completions"],
    kl: Float[Tensor, "*#completions"],
    beta: float,
    desirable_weight: float,
    undesirable_weight: float,
) -> Float[Tensor, "*completions"]:
    """Return KTO's loss of each completion, with h the log-ratio of policy to reference, `ratio`,
    and z = max(0, kl), detached:

       desirable_weight   sigmoid(-beta (h - z))     where it is desirable
       undesirable_weight sigmoid(-beta (z - h))     elsewhere
    """
    kl_baseline = kl.detach().clamp(min=0)
    # 1 - sigmoid(x) = sigmoid(-x), without the loss of digits
    good = desirable_weight * torch.sigmoid(-beta * (ratio - kl_baseline))
    bad = undesirable_weight * torch.sigmoid(-beta * (kl_baseline - ratio))
    return torch.where(desirable, good, bad)


def dpo(
    policy_chosen: Float[Tensor, " pairs"],
    policy_rejected: Float[Tensor, " pairs"],
    reference_chosen: Float[Tensor, " pairs"],
    reference_rejected: Float[Tensor, " pairs"],
    *,
    beta: float = 0.1,
    kind: PairKind = "sigmoid",
    label_smoothing: float = 0.0,
    rpo_alpha: float = 0.0,
    lengths: Lengths | None = None,
) -> tuple[Float[Tensor, ""], Metrics]:
    """Direct preference optimisation and its variants, mean over pairs, from log-probabilities
    summed over completions. With c and r the log-ratios policy - reference of both, d = beta (c -
    r) and s = label_smoothing:

        sigmoid    -(1 - s) log sigmoid(d) - s log sigmoid(-d)    2305.18290, eq. 7; with s cDPO
        robust     (-(1 - s) log sigmoid(d) + s log sigmoid(-d)) / (1 - 2 s)          2403.00409
        hinge      max(0, 1 - d)                                  2305.10425, of DPO's d
        ipo        (c / |chosen| - r / |rejected| - 1 / (2 beta))^2          2310.12036, eq. 17
        sppo       (c - 1 / (2 beta))^2 + (r + 1 / (2 beta))^2    2405.00675, 4.7, of a sure winner
        apo-zero   1 - sigmoid(beta c) + sigmoid(beta r)                     2408.06266, eq. 7
        exo        KL((sigmoid(d), sigmoid(-d)) || (1 - s, s))               2402.00856, eq. 16

    The same formulas are in TRL (dpo_trainer.py, `loss_type`; exo_pair and sppo_hard there);
    OpenRLHF's DPOLoss has sigmoid and ipo, verl none. ipo needs `lengths`: TRL divides log-ratios
    by tokens, as the authors recommend; OpenRLHF and the paper do not, which lengths of 1
    reproduce. In exo, s = 0 becomes 1e-3, as in TRL and recommended by its paper: the target
    distribution must not have a 0. hinge, ipo, sppo and apo-zero ignore s.

    `rpo_alpha` adds the cross-entropy of the chosen completion (2404.19733, equation 1), rpo_alpha
    times -log p(chosen) / |chosen|, which needs `lengths` too. TRL (`rpo_alpha`) takes the mean
    over all tokens of the batch instead of over pairs.

    Metrics: accuracy and margin of the rewards beta c and beta r, and the mean rewards. Raises
    ValueError for hyperparameters out of range and for missing `lengths`.
    """
    chosen, rejected = policy_chosen - reference_chosen, policy_rejected - reference_rejected
    DPO(beta, kind, label_smoothing, rpo_alpha)  # raises ValueError
    if kind == "ipo" and lengths is None:
        raise ValueError(
            "ipo divides log-ratios by the number of tokens: give lengths=(chosen, rejected)"
        )
    losses = dpo_losses(chosen, rejected, beta, kind, label_smoothing, lengths)
    if rpo_alpha:
        if lengths is None:
            raise ValueError("rpo_alpha needs a mean over tokens: give lengths=(chosen, rejected)")
        losses = losses - rpo_alpha * mean_over_tokens(policy_chosen, lengths[0])
    return losses.mean(), pairs.mean_metrics(beta * chosen, beta * rejected)


def dpo_losses(
    c: Float[Tensor, "*pairs"],
    r: Float[Tensor, "*pairs"],
    beta: float,
    kind: PairKind,
    s: float,
    lengths: Lengths | None,
) -> Float[Tensor, "*pairs"]:
    """Return the loss of each pair by the formula of `kind` (sigmoid, robust, hinge, ipo, sppo,
    apo-zero, exo), from the log-ratios of policy to reference c (chosen) and r (rejected); s is the
    label smoothing. `lengths` in tokens are read by ipo alone.
    """
    d = beta * (c - r)
    match kind:
        # 2305.18290, equation 7; with label smoothing it is cDPO
        case "sigmoid":
            return smoothed_sigmoid_loss(d, s)
        # 2403.00409: unbiased under labels that are swapped with probability s
        case "robust":
            return (-(1 - s) * F.logsigmoid(d) + s * F.logsigmoid(-d)) / (1 - 2 * s)
        # 2305.10425 (SLiC): no gradient beyond a margin of 1
        case "hinge":
            return torch.relu(1 - d)
        # 2310.12036, equation 17: a target of 1 / (2 beta) for the difference, and not as large as
        # possible
        case "ipo":
            assert lengths is not None
            chosen_length, rejected_length = (length.clamp(min=1) for length in lengths)
            return (c / chosen_length - r / rejected_length - 1 / (2 * beta)).square()
        # 2405.00675, equation 4.7, for a probability of winning of 1
        case "sppo":
            return (c - 1 / (2 * beta)).square() + (r + 1 / (2 * beta)).square()
        # 2408.06266, equation 7: raises the chosen and lowers the rejected one, each by itself
        case "apo-zero":
            return torch.sigmoid(-beta * c) + torch.sigmoid(beta * r)
        case "exo":
            s = s or EXO_SMOOTHING
            # reverse KL of the distributions (sigmoid(d), sigmoid(-d)) and (1 - s, s)
            right = d.sigmoid() * (F.logsigmoid(d) - math.log1p(-s))
            return right + (-d).sigmoid() * (F.logsigmoid(-d) - math.log(s))
    raise AssertionError(kind)
