"""What a run may be told of what it is trained to. Knows nothing of torch."""

import math
from dataclasses import dataclass
from typing import Literal

from dolmen.core.paths import refuse_empty

Kind = Literal["sigmoid", "ipo", "hinge", "robust", "sppo", "apo-zero", "exo"]


@dataclass(frozen=True)
class ObjectiveConfig:
    """What the model is trained to."""

    name: Literal["tokens", "dpo"] = "tokens"
    """tokens: the next ones, or those that are masked; dpo: of two answers the preferred one, for
    --data.rows pairs.
    """
    beta: float = 0.1
    """dpo: how much the log-ratio of the model to the reference counts; the smaller, the further it
    may go.
    """
    kind: Kind = "sigmoid"
    """dpo: the loss of a pair."""
    label_smoothing: float = 0.0
    """dpo: the share of pairs that are taken to be the wrong way round, of sigmoid, robust and
    exo.
    """
    reference: str | None = None
    """dpo: the model that is compared with: a transformers directory, a hub id or a run. Default:
    the model that the run begins with.
    """

    def __post_init__(self):
        refuse_empty("objective.reference", self.reference)
        if self.name == "dpo":
            check_dpo(self.beta, self.kind, self.label_smoothing)
        own = (self.beta, self.kind, self.label_smoothing, self.reference)
        if self.name == "tokens" and own != (0.1, "sigmoid", 0.0, None):
            raise ValueError(
                "objective.beta, kind, label-smoothing and reference are of dpo: use "
                "--objective.name dpo, or leave them out"
            )


def check_dpo(beta: float, kind: Kind, label_smoothing: float) -> None:
    """Raises ValueError for what no preference is trained by."""
    if kind not in Kind.__args__:
        raise ValueError(f"kind is {kind!r}: it must be one of {Kind.__args__}")
    if not (math.isfinite(beta) and beta > 0):
        raise ValueError(f"beta is {beta}: it must be over 0")
    if not 0 <= label_smoothing < 0.5:
        raise ValueError(
            f"label_smoothing is {label_smoothing}: it is the share of pairs the wrong way round, "
            "so it must be 0 or more and below 0.5"
        )
