"""The objectives of PPO over layouts: of the policy (`policy.ppo_loss`) and of the critic
(`policy.value_loss`). Both are means over all tokens of the global batch.

A batch has numbers per token: for the policy OLD, its log-probability before the first update of
the iteration, and ADVANTAGE; for the critic VALUE, its value at that time, and RETURN.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import ClassVar

from jaxtyping import Bool, Float
from torch import Tensor

from dolmen.data.batch import Batch
from dolmen.model import spec
from dolmen.model.head import LMHead, ScalarHead
from dolmen.objectives import policy
from dolmen.objectives.grpo import ADVANTAGE, NO_TOKENS, OLD
from dolmen.objectives.masked import Metrics
from dolmen.objectives.objective import LossOutput
from dolmen.ops.loss import IGNORED

VALUE, RETURN = "value", "return"


@dataclass(frozen=True)
class PPOPolicyLoss:
    """PPO's clipped surrogate loss of a policy."""

    clip_low: float = 0.2
    clip_high: float = 0.2
    dual_clip: float | None = None
    temperature: float = 1.0
    entropy_coef: float = 0.0
    """Coefficient of the entropy bonus, of PPOWithEntropy."""

    head: ClassVar[type] = spec.LMHeadSpec

    @property
    def names(self) -> tuple[str, ...]:
        """The metrics that the loss reports."""
        dual = () if self.dual_clip is None else ("dual_clip_fraction",)
        return ("clip_fraction", "ratio", "kl_k1", "kl_k3", *dual)

    def count(self, batch: Batch) -> float:
        """Return the number of trained tokens. Raises ValueError for a batch without OLD or
        ADVANTAGE.
        """
        return _count(batch, (OLD, ADVANTAGE))

    def __call__(self, hidden: Float[Tensor, "_ hidden"], head: LMHead, batch: Batch) -> LossOutput:
        """Return the loss of a microbatch."""
        new = head.log_probabilities(hidden, batch.labels, self.temperature)
        return self.compute_loss(new, None, head, batch)

    def compute_loss(
        self, new: Tensor, entropy: Tensor | None, head: LMHead, batch: Batch
    ) -> LossOutput:
        """Return the sum of the losses and metrics of this rank's tokens, from their
        log-probabilities `new` and entropies (or None).
        """
        old, advantages = (head.here(batch.numbers[name]) for name in (OLD, ADVANTAGE))
        valid = head.here(batch.labels) != IGNORED
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
class PPOWithEntropy(PPOPolicyLoss):
    """PPOPolicyLoss minus an entropy bonus."""

    @property
    def names(self) -> tuple[str, ...]:
        """The metrics of PPOPolicyLoss, and "entropy"."""
        return (*super().names, "entropy")

    def __call__(self, hidden: Float[Tensor, "_ hidden"], head: LMHead, batch: Batch) -> LossOutput:
        """Return the loss of a microbatch, with the entropy of each token's distribution."""
        new, entropy = head.log_probabilities_and_entropy(hidden, batch.labels, self.temperature)
        return self.compute_loss(new, entropy, head, batch)


@dataclass(frozen=True)
class PPOValueLoss:
    """The clipped squared error of a critic's values to returns."""

    clip: float | None = 0.2

    head: ClassVar[type] = spec.ScalarHeadSpec

    @property
    def names(self) -> tuple[str, ...]:
        """The metrics that the loss reports."""
        return ("clip_fraction", "squared_error")

    def count(self, batch: Batch) -> float:
        """Return the number of trained tokens. Raises ValueError for a batch without VALUE or
        RETURN.
        """
        return _count(batch, (VALUE, RETURN))

    def __call__(
        self, hidden: Float[Tensor, "_ hidden"], head: ScalarHead, batch: Batch
    ) -> LossOutput:
        """Return the loss of a microbatch."""
        old, returns = (head.here(batch.numbers[name]) for name in (VALUE, RETURN))
        valid = head.here(batch.labels) != IGNORED
        mean, metrics = policy.value_loss(head.values(hidden), old, returns, valid, clip=self.clip)
        return _sum_output(mean, metrics, self.names, valid)


def _count(batch: Batch, needed: Iterable[str]) -> float:
    """Return the number of trained tokens of the batch, or NO_TOKENS (1e-30) where it has none, so
    that nothing is divided by 0. Raises ValueError where the batch lacks one of the `needed`
    numbers.
    """
    if missing := [name for name in needed if name not in batch.numbers]:
        raise ValueError(f"PPO needs numbers per token that the batch lacks: {', '.join(missing)}")
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
