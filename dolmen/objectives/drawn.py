"""What a policy learns from answers that it has drawn: `policy.group` over layouts.

A batch brings of each token, beside the labels of answers, numbers: its log-probability when it was
drawn, its answer's advantage and, where the KL counts, its log-probability in the reference.
"""

from dataclasses import dataclass
from typing import ClassVar

from jaxtyping import Float
from torch import Tensor

from dolmen.data.batch import Batch
from dolmen.model import tree
from dolmen.model.head import Logits
from dolmen.objectives import policy
from dolmen.objectives.objective import Judged
from dolmen.objectives.policy import Kind, Level
from dolmen.ops.loss import IGNORED

OLD, ADVANTAGE, REFERENCE = "old", "advantage", "reference"
BY_TOKENS = ("bnpo", "dapo", "cispo")
"""Kinds whose mean is over tokens; that of others is over rows."""


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

    names: ClassVar[tuple[str, ...]] = ("clip_fraction", "ratio", "kl_k3", "reference_kl")
    head: ClassVar[type] = tree.Head

    def count(self, batch: Batch) -> float:
        needed = (OLD, ADVANTAGE, REFERENCE) if self.beta else (OLD, ADVANTAGE)
        if missing := [name for name in needed if name not in batch.numbers]:
            raise ValueError(
                f"answers are learned from by numbers of their tokens, and a batch has none of "
                f"{', '.join(missing)}"
            )
        return batch.real_tokens if self.kind in BY_TOKENS else len(batch.labels)

    def __call__(self, hidden: Float[Tensor, "_ hidden"], head: Logits, batch: Batch) -> Judged:
        new = head.whole(head.log_probabilities(hidden, batch.labels, self.temperature))
        here, old = batch.labels != IGNORED, batch.numbers[OLD]
        mean, metrics = policy.group(
            new,
            old,
            batch.numbers[REFERENCE] if self.beta else None,
            batch.numbers[ADVANTAGE],
            here,
            kind=self.kind,
            beta=self.beta,
            clip_low=self.clip_low,
            clip_high=self.clip_high,
            level=self.level,
            max_length=self.max_length,
        )
        size = here.sum() if self.kind in BY_TOKENS else len(here)
        metrics.setdefault("reference_kl", new.new_zeros(()))
        # a metric is told as its sum over the count: of one that is a mean over tokens, by rows,
        # the mean over microbatches
        told = tuple(head.shared(metrics[name] * size) for name in self.names)
        return Judged(head.shared(mean * size), told)
