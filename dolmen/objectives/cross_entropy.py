"""The loss of pretraining and of fine-tuning: the cross-entropy of the next token, by weights of
tokens where a batch has any.
"""

from dataclasses import dataclass
from typing import ClassVar

from jaxtyping import Float
from torch import Tensor

from dolmen.data.batch import Batch
from dolmen.model import tree
from dolmen.model.head import Logits
from dolmen.objectives.objective import Judged


@dataclass(frozen=True)
class CrossEntropy:
    """Mean over real tokens of -log p(label), weighted."""

    names: ClassVar[tuple[str, ...]] = ()
    head: ClassVar[type] = tree.Head

    def count(self, batch: Batch) -> float:
        return batch.weight

    def __call__(self, hidden: Float[Tensor, "_ hidden"], head: Logits, batch: Batch) -> Judged:
        return Judged(head.cross_entropy(hidden, batch.labels, batch.weights))
