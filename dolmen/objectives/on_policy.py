"""Objectives of on-policy RL over layouts: GRPO and variants (`policy.grpo_loss`), PPO, its critic.

A batch has numbers per token: OLD, its log-probability before the first update of the iteration,
ADVANTAGE, and with a KL term REFERENCE, its log-probability in the reference model.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import ClassVar

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from dolmen.data.batch import Batch
from dolmen.model import spec
from dolmen.model.head import LMHead, ScalarHead
from dolmen.objectives import policy
from dolmen.objectives.masked import Metrics
from dolmen.objectives.objective import LossOutput
from dolmen.objectives.policy import Kind, Level
from dolmen.ops.loss import IGNORED
from dolmen.parallel.exact import round_losses

OLD, ADVANTAGE, REFERENCE = "old", "advantage", "reference"
LossFunction = Callable[[Tensor, slice, Tensor], tuple[Tensor, Metrics]]
"""(new log-probabilities, their rows, valid tokens) -> mean loss and metrics."""
BY_TOKENS = ("bnpo", "dapo", "cispo")
"""Kinds whose mean is over tokens; all others have a mean over rows."""

NO_TOKENS = 1e-30
"""The count of a batch without trained tokens (all completions were truncated, for example): its
loss is 0, and added to the count of a batch with tokens it is lost in rounding.
"""


@dataclass(frozen=True)
class GRPOLoss:
    """The loss of GRPO and its variants, per token or per completion (`policy.grpo_loss`)."""

    kind: Kind = "grpo"
    level: Level = "token"
    clip_low: float = 0.2
    clip_high: float = 0.2
    beta: float = 0.0
    temperature: float = 1.0
    max_length: int | None = None
    """Maximum tokens of a completion, by which dr-grpo divides."""
    entropy_coef: float = 0.0
    """Coefficient of the entropy bonus; over 0 the entropies cost a pass over the logits."""

    head: ClassVar[type] = spec.LMHeadSpec

    @property
    def names(self) -> tuple[str, ...]:
        """The metrics that the loss reports: clip_fraction, ratio, kl_k3, reference_kl if beta is
        not 0, and entropy with a bonus for it.
        """
        kl = ("reference_kl",) if self.beta else ()
        entropy = ("entropy",) if self.entropy_coef else ()
        return ("clip_fraction", "ratio", "kl_k3", *kl, *entropy)

    def count(self, batch: Batch) -> float:
        """Return the divisor of the loss: the number of trained tokens for bnpo, dapo and cispo,
        else of rows. Raises ValueError for a batch without old log-probabilities, advantages, or,
        with a beta, reference log-probabilities.
        """
        # without a KL term no reference is computed
        needed = (OLD, ADVANTAGE, REFERENCE) if self.beta else (OLD, ADVANTAGE)
        tokens = _count(batch, needed)
        return tokens if self.kind in BY_TOKENS else len(batch.labels)

    def __call__(self, hidden: Float[Tensor, "_ hidden"], head: LMHead, batch: Batch) -> LossOutput:
        """Return the sum of the losses and metrics of a microbatch's rows. A mean over a row needs
        the whole row: log-probabilities and entropies are gathered over cp, of whose ranks each
        takes its share of the sum.
        """
        new, entropy = _log_probabilities(self, hidden, head, batch)
        new = head.gather_tokens(new)
        entropy = None if entropy is None else head.gather_tokens(entropy)
        valid = batch.labels != IGNORED

        def loss(new: Tensor, rows: slice, valid: Tensor) -> tuple[Tensor, Metrics]:
            """Return mean loss and metrics of some rows."""
            return policy.grpo_loss(
                new,
                batch.numbers[OLD][rows],
                batch.numbers[REFERENCE][rows] if self.beta else None,
                batch.numbers[ADVANTAGE][rows],
                valid,
                kind=self.kind,
                beta=self.beta,
                clip_low=self.clip_low,
                clip_high=self.clip_high,
                level=self.level,
                max_length=self.max_length,
                entropy=None if entropy is None else entropy[rows],
                entropy_coef=self.entropy_coef,
            )

        mean, _ = loss(new, slice(None), valid)
        # the mean becomes a sum, which the step divides by the global count
        size = valid.sum() if self.kind in BY_TOKENS else len(valid)
        exact = head.split.kernels.exact is not None
        metrics = tuple(
            head.divide_over_cp(metric)
            for metric in self._row_metrics(loss, new.detach(), batch, exact)
        )
        total = head.divide_over_cp(mean * size)
        if exact:
            losses = [
                loss(row, slice(i, i + 1), valid[i : i + 1])[0]
                for i, row in enumerate(new.detach().split(1))
            ]
            # the gradient of the sum, and a value that does not depend on the order of rows
            total = (total - total.detach()).double() + round_losses(torch.stack(losses)).sum()
        return LossOutput(total, metrics)

    def _row_metrics(
        self, loss: LossFunction, new: Tensor, batch: Batch, exact: bool
    ) -> list[Tensor]:
        """Return the sum over rows of each metric in `names`, computed of each row by itself and,
        for bnpo, dapo and cispo, times its trained tokens. Row by row, so that the split into
        microbatches does not change a metric. `exact`: nor its last bits.
        """
        sums = [new.new_zeros((), dtype=torch.float64 if exact else None) for _ in self.names]
        for row in range(len(new)):
            row_slice = slice(row, row + 1)
            valid = batch.labels[row_slice] != IGNORED
            metrics = loss(new[row_slice], row_slice, valid)[1]
            weight = valid.sum() if self.kind in BY_TOKENS else 1
            for total, name in zip(sums, self.names, strict=True):
                if name in metrics:
                    value = metrics[name] * weight
                    total.add_(round_losses(value) if exact else value)
        return sums


# The objectives of PPO over layouts: of the policy (`policy.ppo_loss`) and of the critic
# (`policy.value_loss`). Both are means over all tokens of the global batch.
#
# A batch has numbers per token: for the policy OLD, its log-probability before the first update of
# the iteration, and ADVANTAGE; for the critic VALUE, its value at that time, and RETURN.

VALUE, RETURN = "value", "return"


@dataclass(frozen=True)
class PPOPolicyLoss:
    """PPO's clipped surrogate loss of a policy."""

    clip_low: float = 0.2
    clip_high: float = 0.2
    dual_clip: float | None = None
    temperature: float = 1.0
    entropy_coef: float = 0.0
    """Coefficient of the entropy bonus; over 0 the entropies cost a pass over the logits."""

    head: ClassVar[type] = spec.LMHeadSpec

    @property
    def names(self) -> tuple[str, ...]:
        """The metrics that the loss reports: clip_fraction, ratio, kl_k1, kl_k3,
        dual_clip_fraction with a dual clip, and entropy with a bonus for it.
        """
        dual = () if self.dual_clip is None else ("dual_clip_fraction",)
        entropy = ("entropy",) if self.entropy_coef else ()
        return ("clip_fraction", "ratio", "kl_k1", "kl_k3", *dual, *entropy)

    def count(self, batch: Batch) -> float:
        """Return the number of trained tokens, by which the loss is divided. Raises ValueError for
        a batch without old log-probabilities or advantages.
        """
        return _count(batch, (OLD, ADVANTAGE))

    def __call__(self, hidden: Float[Tensor, "_ hidden"], head: LMHead, batch: Batch) -> LossOutput:
        """Return the sums of PPO's loss (clipped, with dual clip and entropy bonus; no KL to a
        reference) and of its metrics over this rank's labelled tokens.
        """
        new, entropy = _log_probabilities(self, hidden, head, batch)
        old, advantages = (head.local_tokens(batch.numbers[name]) for name in (OLD, ADVANTAGE))
        valid = head.local_tokens(batch.labels) != IGNORED
        mean, metrics = policy.ppo_loss(
            new,
            old,
            advantages,
            valid,
            clip_low=self.clip_low,
            clip_high=self.clip_high,
            dual_clip=self.dual_clip,
            entropy=entropy,
            entropy_coef=self.entropy_coef,
        )
        return _sum_output(mean, metrics, self.names, valid)


@dataclass(frozen=True)
class PPOValueLoss:
    """The clipped squared error of a critic's values to returns."""

    clip: float | None = 0.2

    head: ClassVar[type] = spec.ScalarHeadSpec

    @property
    def names(self) -> tuple[str, ...]:
        """The metrics that the loss reports: clip_fraction and squared_error."""
        return ("clip_fraction", "squared_error")

    def count(self, batch: Batch) -> float:
        """Return the number of trained tokens, by which the loss is divided. Raises ValueError for
        a batch without old values or returns.
        """
        return _count(batch, (VALUE, RETURN))

    def __call__(
        self, hidden: Float[Tensor, "_ hidden"], head: ScalarHead, batch: Batch
    ) -> LossOutput:
        """Return the sum over this rank's tokens of the clipped squared error of the critic's
        values, and of its metrics.
        """
        old, returns = (head.local_tokens(batch.numbers[name]) for name in (VALUE, RETURN))
        valid = head.local_tokens(batch.labels) != IGNORED
        mean, metrics = policy.value_loss(head.values(hidden), old, returns, valid, clip=self.clip)
        return _sum_output(mean, metrics, self.names, valid)


def _log_probabilities(
    loss: GRPOLoss | PPOPolicyLoss, hidden: Float[Tensor, "_ hidden"], head: LMHead, batch: Batch
) -> tuple[Float[Tensor, "sequences here"], Float[Tensor, "sequences here"] | None]:
    """Return the log-probability of each label of this rank's tokens, and, where the loss has a
    bonus for it, the entropy of its distribution.
    """
    if loss.entropy_coef:
        return head.log_probabilities_and_entropy(hidden, batch.labels, loss.temperature)
    return head.log_probabilities(hidden, batch.labels, loss.temperature), None


def _count(batch: Batch, needed: Iterable[str]) -> float:
    """Return the number of trained tokens of the batch, or NO_TOKENS (1e-30) where it has none, so
    that nothing is divided by 0. Raises ValueError where the batch lacks one of the `needed`
    numbers.
    """
    if missing := [name for name in needed if name not in batch.numbers]:
        raise ValueError(f"the loss needs numbers that the batch lacks: {', '.join(missing)}")
    return batch.real_tokens or NO_TOKENS


def _sum_output(
    mean: Tensor, metrics: Metrics, names: Iterable[str], valid: Bool[Tensor, "sequences here"]
) -> LossOutput:
    """Return means over this rank's valid tokens as sums over them, the metrics in the order of
    `names`.
    """
    # means over local tokens have different weights: sums do not, and the step divides by the count
    size = valid.sum()
    return LossOutput(mean * size, tuple(metrics[name] * size for name in names))
