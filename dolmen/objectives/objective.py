"""The interface of objectives, by which the last pipeline stage turns hidden vectors into a loss;
and the losses of next tokens (pretraining, fine-tuning) and of masked tokens (encoders).

    count = objective.count(batch)                    on the host, this rank's rows, before forward
    output = objective(hidden, head, microbatch)      on the last stage, inside the model's forward
    loss = sum of output.total over all ranks and microbatches / sum of count

Every loss is a quotient of two global sums. The count follows from the batch alone, so it is known
before anything is computed, divides the loss before backward, and gradients over dp are summed and
never averaged. A rank with fewer real tokens therefore weighs less, exactly as its rows would in
one process, and neither the number of microbatches nor padding changes the result.
"""

from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple, Protocol

import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor

from dolmen.data.batch import FOLLOWS, Batch
from dolmen.model import spec
from dolmen.model.head import LMHead
from dolmen.model.spec import ModelSpec


class LossOutput(NamedTuple):
    """The loss of a microbatch: sums over this rank's tokens, partial over cp and equal over tp."""

    total: Float[Tensor, ""]
    """The summed loss, with its graph."""
    metrics: tuple[Float[Tensor, ""], ...] = ()
    """Sums without gradient, in the order of the objective's `names`."""


class Objective(Protocol):
    """A loss of a run. Frozen: its hyperparameters are its fields."""

    head: ClassVar[type]
    """The head that the model must have: spec.LMHeadSpec (logits) or spec.ScalarHeadSpec."""

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the metrics besides the loss; metrics of terms that are switched off are
        missing.
        """
        ...

    def count(self, batch: Batch) -> float:
        """Return this rank's share of the divisor of the loss, from a batch on the CPU. Raises
        ValueError for a batch that lacks what the loss reads.
        """
        ...

    def __call__(self, hidden: Float[Tensor, "_ hidden"], head: Any, batch: Batch) -> LossOutput:
        """Return the loss of a microbatch on the device. `hidden` are the last hidden vectors of
        this rank's tokens, `head` the model's head function (model/head.py).
        """
        ...


def check(objective: Objective, model_spec: ModelSpec) -> None:
    """Raise ValueError where the model's head is not of the kind that the objective reads."""
    check_head(f"the objective {objective}", objective.head, model_spec)


def check_head(user: str, kind: type, model_spec: ModelSpec) -> None:
    """Raise ValueError, naming the `user` of the head, where the model's head is not an instance of
    `kind`.
    """
    if not isinstance(model_spec.head, kind):
        raise ValueError(
            f"{user} needs a model with head {kind.__name__}, but this one has {model_spec.head}"
        )


@dataclass(frozen=True)
class CrossEntropy:
    """Cross-entropy of the next token: mean over real tokens of -log p(label), weighted where the
    batch has weights.
    """

    head: ClassVar[type] = spec.LMHeadSpec

    @property
    def names(self) -> tuple[str, ...]:
        """No metrics besides the loss."""
        return ()

    def count(self, batch: Batch) -> float:
        """Return the summed weight of the labels: their number, where the batch has no weights."""
        return batch.weight

    def __call__(self, hidden: Float[Tensor, "_ hidden"], head: LMHead, batch: Batch) -> LossOutput:
        """Return the sum over this rank's labels of weight times -log p; no metrics."""
        return LossOutput(head.cross_entropy(hidden, batch.labels, batch.weights))


@dataclass(frozen=True)
class MaskedLM:
    """Masked language modelling, and next-sentence prediction where the head has it (1810.04805,
    section 3.1): mean over masked tokens, the only ones with a label, of -log p(label), and of
    pairs of texts

        follows * -log sigmoid(numbers[FOLLOWS] * score),    score > 0: the second follows

    where numbers[FOLLOWS] is 1 or -1 at one token per pair, and 0 elsewhere. Both are divided by
    the number of masked tokens, so a pair counts as `follows` of them. With the masked tokens per
    pair as `follows`, the loss is the sum of two means, as in BERT. Metrics: both terms, if any.
    """

    follows: float = 0.0

    head: ClassVar[type] = spec.LMHeadSpec

    @property
    def names(self) -> tuple[str, ...]:
        """The metrics: with next-sentence prediction "filled" and "follows", the terms of the loss
        for masked tokens and for pairs; else none.
        """
        return ("filled", "follows") if self.follows else ()

    def count(self, batch: Batch) -> float:
        """Return the summed weight of the masked tokens. Raises ValueError without labels of
        next-sentence prediction where that is trained.
        """
        if self.follows and FOLLOWS not in batch.numbers:
            raise ValueError(f"next-sentence prediction needs numbers[{FOLLOWS!r}]")
        return batch.weight

    def __call__(self, hidden: Float[Tensor, "_ hidden"], head: LMHead, batch: Batch) -> LossOutput:
        """Return the sum over this rank's masked tokens of -log p(label), plus, if next-sentence
        prediction is trained, `follows` times its loss summed over pairs, and these terms as
        metrics.
        """
        # labels are IGNORED but at masked tokens
        masked_loss = head.cross_entropy(hidden, batch.labels, batch.weights)
        if not self.follows:
            return LossOutput(masked_loss)
        # labels are 1 or -1 at one token per pair and 0 elsewhere, which drops all other tokens
        scores, labels = head.follows(hidden), head.local_tokens(batch.numbers[FOLLOWS])
        pairs = self.follows * (-F.logsigmoid(labels * scores) * labels.abs()).sum()
        return LossOutput(masked_loss + pairs, (masked_loss.detach(), pairs.detach()))
