"""What an objective is: how the last stage of a pipeline turns hidden vectors into a number to
descend.

    count = objective.count(batch)                    on the host, of this rank's rows, in time
    judged = objective(hidden, head, microbatch)      on the last stage, in the model's forward
    the loss is the sum of judged.total over all ranks and microbatches / the sum of count

The count is known from the batch before anything is computed, so it divides the loss before
backward, and gradients are summed and never averaged.

The loss of pretraining and of fine-tuning: the cross-entropy of the next token, by weights of
tokens where a batch has any.
"""

from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple, Protocol

from jaxtyping import Float
from torch import Tensor

from dolmen.data.batch import Batch
from dolmen.model import spec
from dolmen.model.head import Logits
from dolmen.model.spec import Tree


class Judged(NamedTuple):
    """Of one microbatch: sums over the tokens that this rank of cp has, the same on all of tp."""

    total: Float[Tensor, ""]
    """To go backward from."""
    metrics: tuple[Float[Tensor, ""], ...] = ()
    """By the objective's `names`, without gradient; what is told is their sum over the count."""


class Objective(Protocol):
    """A frozen value: its knobs are its fields."""

    names: ClassVar[tuple[str, ...]]
    """Of the metrics, beside the loss."""
    head: ClassVar[type]
    """The component of the tree that it is given: spec.Head, spec.Scalar."""

    def count(self, batch: Batch) -> float:
        """What the sum is to be divided by, of a batch on the CPU. Raises ValueError for a batch
        that it cannot judge.
        """
        ...

    def __call__(self, hidden: Float[Tensor, "_ hidden"], head: Any, batch: Batch) -> Judged:
        """Of a microbatch, on the device. `hidden` are the last hidden vectors of this rank's
        tokens, and `head` is a Head of model/head.py.
        """
        ...


def check(objective: Objective, tree: Tree) -> None:
    """Raises ValueError where the head of the model is another than the objective is given."""
    check_end(f"the objective {objective}", objective.head, tree)


def check_end(asked: str, kind: type, tree: Tree) -> None:
    """Raises ValueError, with what was asked, where a model ends in another component than
    `kind`.
    """
    if not isinstance(tree.head, kind):
        raise ValueError(
            f"{asked} is for a model that ends in {kind.__name__}, and this one ends in {tree.head}"
        )


@dataclass(frozen=True)
class CrossEntropy:
    """Mean over real tokens of -log p(label), weighted."""

    names: ClassVar[tuple[str, ...]] = ()
    head: ClassVar[type] = spec.Head

    def count(self, batch: Batch) -> float:
        return batch.weight

    def __call__(self, hidden: Float[Tensor, "_ hidden"], head: Logits, batch: Batch) -> Judged:
        return Judged(head.cross_entropy(hidden, batch.labels, batch.weights))
