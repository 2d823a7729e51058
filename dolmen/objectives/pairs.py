"""Of two answers to a prompt, one is preferred: rows 2 i and 2 i + 1 of a batch are a pair, the
chosen sequence and the rejected one. Labels that are IGNORED, those of a prompt, do not count.
"""

import numpy as np
import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int64
from torch import Tensor

from dolmen.data.batch import Batch
from dolmen.model.head import Head
from dolmen.objectives.objective import Judged
from dolmen.ops.loss import IGNORED

METRICS = ("accuracy", "margin")
"""The share of pairs whose chosen sequence has the larger score, and the mean difference."""


def count(batch: Batch) -> int:
    """Pairs of a batch on the CPU. Raises ValueError for half a pair, and for a sequence without a
    real label.
    """
    rows = len(batch.labels)
    if rows % 2:
        raise ValueError(
            f"{rows} sequences are not divisible into pairs: use an even --train.microbatch-size"
        )
    empty = np.flatnonzero((batch.labels.numpy() == IGNORED).all(1))
    if len(empty):
        raise ValueError(
            f"sequence {empty[0]} of a batch of pairs has no token to judge: all its labels are "
            f"{IGNORED}"
        )
    return rows // 2


def judge(scores: Float[Tensor, " sequences"], head: Head) -> Judged:
    """The sum over pairs of -log sigmoid(score of the chosen - score of the rejected), from scores
    that every rank of cp has.
    """
    margins = scores[0::2] - scores[1::2]
    told = (margins > 0).to(margins.dtype), margins.detach()
    metrics = tuple(head.shared(each.sum()) for each in told)
    return Judged(head.shared(-F.logsigmoid(margins).sum()), metrics)


def last_real(
    labels: Int64[Tensor, "sequences length"],
) -> Bool[Tensor, "sequences length"]:
    """Where the last label of each sequence is that is not IGNORED."""
    places = torch.arange(labels.shape[1], device=labels.device)
    last = torch.where(labels == IGNORED, -1, places).amax(1, keepdim=True)
    return places == last
