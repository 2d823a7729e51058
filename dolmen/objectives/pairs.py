"""Of two answers to a prompt, one is preferred: rows 2 i and 2 i + 1 of a batch are a pair, the
chosen sequence and the rejected one. Labels that are IGNORED, those of a prompt, do not count.
"""

import numpy as np
import torch
from jaxtyping import Bool, Float, Int64
from torch import Tensor

from dolmen.data.batch import Batch
from dolmen.model.head import Head
from dolmen.objectives.objective import Judged
from dolmen.objectives.tokens import Metrics
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


def told(chosen: Float[Tensor, " pairs"], rejected: Float[Tensor, " pairs"]) -> Metrics:
    """METRICS of rewards or scores, and the means of these."""
    chosen, rejected = chosen.detach(), rejected.detach()
    margins = chosen - rejected
    return {
        "accuracy": (margins > 0).to(margins.dtype).mean(),
        "margin": margins.mean(),
        "chosen": chosen.mean(),
        "rejected": rejected.mean(),
    }


def judged(found: tuple[Float[Tensor, ""], Metrics], batch: Batch, head: Head) -> Judged:
    """The sums over pairs of what a pure objective has found in the mean over them, from numbers
    that every rank of cp has.
    """
    mean, metrics = found
    rows = len(batch.labels) // 2
    sums = tuple(head.shared(metrics[name] * rows) for name in METRICS)
    return Judged(head.shared(mean * rows), sums)


def last_real(
    labels: Int64[Tensor, "sequences length"],
) -> Bool[Tensor, "sequences length"]:
    """Where the last label of each sequence is that is not IGNORED."""
    places = torch.arange(labels.shape[1], device=labels.device)
    last = torch.where(labels == IGNORED, -1, places).amax(1, keepdim=True)
    return places == last
