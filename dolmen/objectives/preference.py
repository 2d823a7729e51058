"""A policy of comparisons, without a reward model: the policy and a reference, two models in one
run. The reference is asked first (objectives/score.py), and what it says of each token comes with
the batch.
"""

from dataclasses import dataclass
from typing import ClassVar

from jaxtyping import Float
from torch import Tensor

from dolmen.data.batch import Batch
from dolmen.model import tree
from dolmen.model.head import Logits
from dolmen.objectives import pairs
from dolmen.objectives.objective import Judged
from dolmen.ops.loss import IGNORED

REFERENCE = "reference"
"""The number of each token that is its label's log-probability in the other model."""


@dataclass(frozen=True)
class DPO:
    """Direct preference optimisation (2305.18290, equation 7), mean over pairs of

        -log sigmoid(r(chosen) - r(rejected))      r = beta sum over tokens of log p - log p_ref

    A batch brings `numbers[REFERENCE]`. Metrics are those of pairs.METRICS, of r.
    """

    beta: float = 0.1

    names: ClassVar[tuple[str, ...]] = pairs.METRICS
    head: ClassVar[type] = tree.Head

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
        return pairs.judge(self.beta * head.over_sequence(ratios), head)
