"""What PPO trains two models to, over layouts: a policy to its advantages (`policy.clipped`), a
critic to returns (`policy.value`). Both are means over all tokens of the global batch.

A batch brings of each token, beside the labels of answers, numbers: for the policy its
log-probability when the phase began and its advantage, for the critic its value then and its
return.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import ClassVar

from jaxtyping import Bool, Float
from torch import Tensor

from dolmen.data.batch import Batch
from dolmen.model import spec
from dolmen.model.head import Logits, Values
from dolmen.objectives import policy
from dolmen.objectives.grpo import ADVANTAGE, NONE, OLD
from dolmen.objectives.masked import Metrics
from dolmen.objectives.objective import Judged
from dolmen.ops.loss import IGNORED

VALUE, RETURN = "value", "return"


@dataclass(frozen=True)
class Clipped:
    """A policy that learns from what it has drawn."""

    clip_low: float = 0.2
    clip_high: float = 0.2
    dual_clip: float | None = None
    temperature: float = 1.0
    entropy_coef: float = 0.0
    """What a nat of entropy is worth, of ClippedUndecided."""

    names: ClassVar[tuple[str, ...]] = (
        "clip_fraction",
        "ratio",
        "kl_k1",
        "kl_k3",
        "dual_clip_fraction",
    )
    head: ClassVar[type] = spec.Head

    def count(self, batch: Batch) -> float:
        return _count(batch, (OLD, ADVANTAGE))

    def __call__(self, hidden: Float[Tensor, "_ hidden"], head: Logits, batch: Batch) -> Judged:
        new = head.log_probabilities(hidden, batch.labels, self.temperature)
        return self.judged(new, None, head, batch)

    def judged(self, new: Tensor, entropy: Tensor | None, head: Logits, batch: Batch) -> Judged:
        """Of log-probabilities, and maybe entropies, of this rank's tokens."""
        old, advantages = (head.here(batch.numbers[name]) for name in (OLD, ADVANTAGE))
        here = head.here(batch.labels) != IGNORED
        mean, told = policy.clipped(
            new,
            old,
            advantages,
            here,
            clip_low=self.clip_low,
            clip_high=self.clip_high,
            dual_clip=self.dual_clip,
            entropy=entropy,
            entropy_coef=self.entropy_coef,
        )
        return _summed(mean, told, self.names, here)


@dataclass(frozen=True)
class ClippedUndecided(Clipped):
    """The same, which is paid for the entropy of its distributions."""

    names: ClassVar[tuple[str, ...]] = (*Clipped.names, "entropy")

    def __call__(self, hidden: Float[Tensor, "_ hidden"], head: Logits, batch: Batch) -> Judged:
        new, entropy = head.with_entropy(hidden, batch.labels, self.temperature)
        return self.judged(new, entropy, head, batch)


@dataclass(frozen=True)
class Expected:
    """A critic that learns what a token's answer has been worth from there on."""

    clip: float | None = 0.2

    names: ClassVar[tuple[str, ...]] = ("clip_fraction", "squared_error")
    head: ClassVar[type] = spec.Scalar

    def count(self, batch: Batch) -> float:
        return _count(batch, (VALUE, RETURN))

    def __call__(self, hidden: Float[Tensor, "_ hidden"], head: Values, batch: Batch) -> Judged:
        old, returns = (head.here(batch.numbers[name]) for name in (VALUE, RETURN))
        here = head.here(batch.labels) != IGNORED
        mean, told = policy.value(head.values(hidden), old, returns, here, clip=self.clip)
        return _summed(mean, told, self.names, here)


def _count(batch: Batch, needed: Iterable[str]) -> float:
    if missing := [name for name in needed if name not in batch.numbers]:
        raise ValueError(
            "answers are learned from by numbers of their tokens, and a batch has none of "
            f"{', '.join(missing)}"
        )
    return batch.real_tokens or NONE


def _summed(
    mean: Tensor, told: Metrics, names: Iterable[str], here: Bool[Tensor, "sequences here"]
) -> Judged:
    """Sums over this rank's tokens of what are means over them."""
    size = here.sum()
    return Judged(mean * size, tuple(_or_zero(told, name, mean) * size for name in names))


def _or_zero(told: Metrics, name: str, like: Tensor) -> Tensor:
    return told[name] if name in told else like.new_zeros(())
