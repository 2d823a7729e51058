"""What an encoder is trained to (Devlin et al., 1810.04805, section 3.1): to fill in masked tokens
and, of two texts in a sequence, to say whether the second follows the first.
"""

from dataclasses import dataclass
from typing import ClassVar

import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor

from dolmen.data.batch import FOLLOWS, Batch
from dolmen.model import spec
from dolmen.model.head import Logits
from dolmen.objectives.objective import Judged


@dataclass(frozen=True)
class Filling:
    """Mean over masked tokens, which alone have labels, of -log p(label), and of pairs of texts

        follows * -log sigmoid(numbers[FOLLOWS] * score),    score > 0: the second follows

    where the batch says 1 or -1 of a token, once per pair, and 0 of all others. Both are divided by
    the masked tokens: a pair counts as `follows` of them. Where that is how many there are per
    pair, the loss is the sum of two means, as in BERT. Metrics are the two parts of it.
    """

    follows: float = 0.0

    names: ClassVar[tuple[str, ...]] = ("filled", "follows")
    head: ClassVar[type] = spec.Head

    def count(self, batch: Batch) -> float:
        if self.follows and FOLLOWS not in batch.numbers:
            raise ValueError(f"pairs of texts are judged: a batch needs numbers[{FOLLOWS!r}]")
        return batch.weight

    def __call__(self, hidden: Float[Tensor, "_ hidden"], head: Logits, batch: Batch) -> Judged:
        filled = head.cross_entropy(hidden, batch.labels, batch.weights)
        if not self.follows:
            return Judged(filled, (filled.detach(), filled.detach() * 0))
        scores, said = head.follows(hidden), head.here(batch.numbers[FOLLOWS])
        pairs = self.follows * (-F.logsigmoid(said * scores) * said.abs()).sum()
        return Judged(filled + pairs, (filled.detach(), pairs.detach()))
