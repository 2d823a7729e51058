"""What a policy learns from answers that it has drawn: `policy.group` over layouts.

A batch brings of each token, beside the labels of answers, numbers: its log-probability when it was
drawn, its answer's advantage and, where the KL counts, its log-probability in the reference.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar

from jaxtyping import Float
from torch import Tensor

from dolmen.data.batch import Batch
from dolmen.model import spec
from dolmen.model.head import Logits
from dolmen.objectives import policy
from dolmen.objectives.masked import Metrics
from dolmen.objectives.objective import Judged
from dolmen.objectives.policy import Kind, Level
from dolmen.ops.loss import IGNORED

OLD, ADVANTAGE, REFERENCE = "old", "advantage", "reference"
Loss = Callable[[Tensor, slice, Tensor], tuple[Tensor, Metrics]]
"""(new, which rows they are of, what counts) -> the mean, and what is told of it."""
BY_TOKENS = ("bnpo", "dapo", "cispo")
"""Kinds whose mean is over tokens; that of others is over rows."""

NONE = 1e-30
"""Tokens of a batch without any, where all answers were cut, say: its loss is 0, and beside a batch
with tokens it counts as nothing, to the bit.
"""


@dataclass(frozen=True)
class Group:
    """Answers that are compared with others to their prompt (GRPO and kin)."""

    kind: Kind = "grpo"
    level: Level = "token"
    clip_low: float = 0.2
    clip_high: float = 0.2
    beta: float = 0.0
    temperature: float = 1.0
    max_length: int | None = None
    """Of an answer, for dr-grpo."""
    entropy_coef: float = 0.0
    """What a nat of entropy is worth, of Undecided."""

    names: ClassVar[tuple[str, ...]] = ("clip_fraction", "ratio", "kl_k3", "reference_kl")
    head: ClassVar[type] = spec.Head

    def count(self, batch: Batch) -> float:
        needed = (OLD, ADVANTAGE, REFERENCE) if self.beta else (OLD, ADVANTAGE)
        if missing := [name for name in needed if name not in batch.numbers]:
            raise ValueError(
                f"answers are learned from by numbers of their tokens, and a batch has none of "
                f"{', '.join(missing)}"
            )
        return (batch.real_tokens or NONE) if self.kind in BY_TOKENS else len(batch.labels)

    def __call__(self, hidden: Float[Tensor, "_ hidden"], head: Logits, batch: Batch) -> Judged:
        new = head.whole(head.log_probabilities(hidden, batch.labels, self.temperature))
        return self.judged(new, None, head, batch)

    def judged(self, new: Tensor, entropy: Tensor | None, head: Logits, batch: Batch) -> Judged:
        """Of log-probabilities, and maybe entropies, of all tokens."""
        here = batch.labels != IGNORED

        def loss(new: Tensor, rows: slice, here: Tensor) -> tuple[Tensor, Metrics]:
            return policy.group(
                new,
                batch.numbers[OLD][rows],
                batch.numbers[REFERENCE][rows] if self.beta else None,
                batch.numbers[ADVANTAGE][rows],
                here,
                kind=self.kind,
                beta=self.beta,
                clip_low=self.clip_low,
                clip_high=self.clip_high,
                level=self.level,
                max_length=self.max_length,
                entropy=None if entropy is None else entropy[rows],
                entropy_coef=self.entropy_coef,
            )

        mean, _ = loss(new, slice(None), here)
        size = here.sum() if self.kind in BY_TOKENS else len(here)
        told = tuple(head.shared(one) for one in self._told(loss, new.detach(), batch))
        return Judged(head.shared(mean * size), told)

    def _told(self, loss: Loss, new: Tensor, batch: Batch) -> list[Tensor]:
        """Sums of what each answer says by itself, a mean over its tokens, over answers or over
        tokens as the loss counts: so no microbatch decides a metric.
        """
        sums = [new.new_zeros(()) for _ in self.names]
        for row in range(len(new)):
            own = slice(row, row + 1)
            here = batch.labels[own] != IGNORED
            metrics = loss(new[own], own, here)[1]
            weight = here.sum() if self.kind in BY_TOKENS else 1
            for total, name in zip(sums, self.names, strict=True):
                if name in metrics:
                    total.add_(metrics[name] * weight)
        return sums


@dataclass(frozen=True)
class Undecided(Group):
    """The same, which is paid for the entropy of its distributions."""

    names: ClassVar[tuple[str, ...]] = (*Group.names, "entropy")

    def __call__(self, hidden: Float[Tensor, "_ hidden"], head: Logits, batch: Batch) -> Judged:
        new, entropy = head.with_entropy(hidden, batch.labels, self.temperature)
        return self.judged(head.whole(new), head.whole(entropy), head, batch)
