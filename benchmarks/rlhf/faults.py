"""What is claimed of GRPO and of PPO is to fail with each of these, which are put in from outside.

off by one     training takes of each token the log-probability of the one before
shuffled       a phase's advantages are dealt out anew among its answers
flipped        an advantage has the other sign
no KL          its coefficient is a millionth: nothing holds the policy, and its KL is still told
"""

from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from benchmarks.rlhf.stages import FOLDER
from dolmen.model.head import LMHead
from dolmen.objectives import advantage

SEEDS = (0, 1, 2)
FAULTS = ("sound", "off by one", "shuffled", "flipped", "no KL")
UNHELD: Mapping[str, tuple[str, ...]] = {
    "grpo": ("--rollout.beta", "1e-6"),
    "ppo": ("--ppo.kl-coef", "1e-6"),
}
"""Of each recipe with controls the words of "no KL"."""
ADVANTAGES = ("normalize_by_group", "whiten")
"""What is learned from, of GRPO and of PPO."""


def folder(recipe: str, name: str, seed: int) -> Path:
    """Of a run with a fault."""
    return FOLDER / "controls" / f"{recipe}-{name.replace(' ', '-')}-{seed}"


def put_in(name: str) -> ExitStack:
    """Within it, the program has the fault."""
    judged = LMHead.log_probabilities
    chance = torch.Generator().manual_seed(0)

    def of_the_one_before(self: LMHead, hidden: Tensor, labels: Tensor, *more: Any) -> Tensor:
        return judged(self, hidden, labels.roll(1, 1), *more)

    def shuffled(found: Tensor) -> Tensor:
        return found[torch.randperm(len(found), generator=chance)]

    stack = ExitStack()
    match name:
        case "off by one":
            stack.enter_context(mock.patch.object(LMHead, "log_probabilities", of_the_one_before))
        case "shuffled":
            _after_advantages(stack, shuffled)
        case "flipped":
            _after_advantages(stack, torch.neg)
    return stack


def _after_advantages(stack: ExitStack, change: Any) -> None:
    """Whatever is learned from is changed by it, its rows being answers."""
    for of in ADVANTAGES:
        found = vars(advantage)[of]

        def changed(*given: Any, found: Any = found, **options: Any) -> Tensor:
            return change(found(*given, **options))

        stack.enter_context(mock.patch.object(advantage, of, changed))
