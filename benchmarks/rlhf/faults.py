"""What is claimed of GRPO is to fail with each of these, which are put in from outside.

off by one     training takes of each token the log-probability of the one before
shuffled       a phase's advantages are dealt out anew among its answers
flipped        an advantage has the other sign
no KL          beta is a millionth: nothing holds the policy, and its KL is still told
"""

from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from benchmarks.rlhf.stages import FOLDER
from dolmen.model.head import Logits
from dolmen.objectives import advantage

SEEDS = (0, 1, 2)
FAULTS = ("sound", "off by one", "shuffled", "flipped", "no KL")
WORDS = {"no KL": ("--rollout.beta", "1e-6")}


def folder(name: str, seed: int) -> Path:
    """Of a run with a fault."""
    return FOLDER / "controls" / f"{name.replace(' ', '-')}-{seed}"


def put_in(name: str) -> AbstractContextManager[Any]:
    """Within it, the program has the fault."""
    judged, normalised = Logits.log_probabilities, advantage.group_normalised
    chance = torch.Generator().manual_seed(0)

    def of_the_one_before(self: Logits, hidden: Tensor, labels: Tensor, *more: Any) -> Tensor:
        return judged(self, hidden, labels.roll(1, 1), *more)

    def shuffled(scores: Tensor, *more: Any, **options: Any) -> Tensor:
        found = normalised(scores, *more, **options)
        return found[torch.randperm(len(found), generator=chance)]

    def flipped(*given: Any, **options: Any) -> Tensor:
        return -normalised(*given, **options)

    match name:
        case "off by one":
            return mock.patch.object(Logits, "log_probabilities", of_the_one_before)
        case "shuffled":
            return mock.patch.object(advantage, "group_normalised", shuffled)
        case "flipped":
            return mock.patch.object(advantage, "group_normalised", flipped)
    return nullcontext()
