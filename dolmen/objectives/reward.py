"""What trains a model that ends in one number for each token: a reward model by comparisons, a
value model by numbers.
"""

from dataclasses import dataclass
from typing import ClassVar

from jaxtyping import Float
from torch import Tensor

from dolmen.data.batch import Batch
from dolmen.model import tree
from dolmen.model.head import Values
from dolmen.objectives import pairs
from dolmen.objectives.objective import Judged
from dolmen.ops.loss import IGNORED

TARGET = "target"
"""The number of each token that its value should be."""


@dataclass(frozen=True)
class Preferred:
    """The reward of a sequence is the number of its last token with a real label; of two, the
    chosen one's is to be larger (Bradley and Terry, 1952; 2203.02155, equation 1): mean over pairs
    of

        -log sigmoid(r(chosen) - r(rejected))

    Metrics are those of pairs.METRICS, of r.
    """

    names: ClassVar[tuple[str, ...]] = pairs.METRICS
    head: ClassVar[type] = tree.Scalar

    def count(self, batch: Batch) -> float:
        return pairs.count(batch)

    def __call__(self, hidden: Float[Tensor, "_ hidden"], head: Values, batch: Batch) -> Judged:
        rewards = head.values(hidden) * head.here(pairs.last_real(batch.labels))
        return pairs.judge(head.over_sequence(rewards), head)


@dataclass(frozen=True)
class SquaredError:
    """Mean over tokens with a real label, weighted, of (value - target)^2 / 2; a batch brings
    `numbers[TARGET]`.
    """

    names: ClassVar[tuple[str, ...]] = ()
    head: ClassVar[type] = tree.Scalar

    def count(self, batch: Batch) -> float:
        if TARGET not in batch.numbers:
            raise ValueError(f"values have targets: a batch needs numbers[{TARGET!r}]")
        return batch.weight

    def __call__(self, hidden: Float[Tensor, "_ hidden"], head: Values, batch: Batch) -> Judged:
        off = head.values(hidden) - head.here(batch.numbers[TARGET])
        weights = (head.here(batch.labels) != IGNORED).to(off.dtype)
        if batch.weights is not None:
            weights = weights * head.here(batch.weights)
        return Judged((off.square() * weights).sum() / 2)
