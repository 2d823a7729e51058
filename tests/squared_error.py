"""An objective of models with a scalar head that no run has: the squared error to target values."""

from dataclasses import dataclass
from typing import ClassVar

from jaxtyping import Float
from torch import Tensor

from dolmen.data.batch import Batch
from dolmen.model import spec
from dolmen.model.head import ScalarHead
from dolmen.objectives.objective import LossOutput
from dolmen.ops.loss import IGNORED

TARGET = "target"
"""Name of the batch's numbers with the target value of each token."""


@dataclass(frozen=True)
class SquaredError:
    """Mean over tokens with a real label, weighted, of (value - numbers[TARGET])^2 / 2."""

    head: ClassVar[type] = spec.ScalarHeadSpec

    @property
    def names(self) -> tuple[str, ...]:
        """No metrics besides the loss."""
        return ()

    def count(self, batch: Batch) -> float:
        """Return the summed weight of the labels. Raises ValueError for a batch without targets."""
        if TARGET not in batch.numbers:
            raise ValueError(f"the squared error needs targets: a batch needs numbers[{TARGET!r}]")
        return batch.weight

    def __call__(
        self, hidden: Float[Tensor, "_ hidden"], head: ScalarHead, batch: Batch
    ) -> LossOutput:
        """Return half the weighted sum of squared errors over this rank's labels."""
        error = head.values(hidden) - head.local_tokens(batch.numbers[TARGET])
        weights = (head.local_tokens(batch.labels) != IGNORED).to(error.dtype)
        if batch.weights is not None:
            weights = weights * head.local_tokens(batch.weights)
        return LossOutput((error.square() * weights).sum() / 2)
