"""Turns rewards and log-probabilities of a rollout into advantages; the KL coefficient.

The coefficient of the KL in rewards, which may hold that KL at a target.

From rewards and log-probabilities of a phase to what each token is to learn.
"""

from dataclasses import replace

import torch
from jaxtyping import Float
from torch import Tensor

from dolmen.objectives import advantage
from dolmen.ops.loss import IGNORED
from dolmen.rl.config import RolloutConfig
from dolmen.rl.rollout import Drawn

MOST = 0.2  # of the target, that a phase's KL is taken to be off (1909.08593, section 2.2)


class Coefficient:
    """Of the KL in rewards, and how it moves (1909.08593, section 2.2; TRL's and verl's
    AdaptiveKLController): after a phase of n answers with a mean KL per answer of d,

        value (1 + clip((d - target) / target, -0.2, 0.2) n / horizon)
    """

    def __init__(self, value: float, target: float | None, horizon: float):
        self.value, self.target, self.horizon = value, target, horizon

    def after(self, used: float, kl: float, answers: int) -> float:
        """What it is once a phase with the value `used` has had that KL."""
        if self.target is None:
            return self.value
        off = max(-MOST, min(MOST, (kl - self.target) / self.target))
        return used * (1 + off * answers / self.horizon)


EPS = 1e-4  # of group normalisation, as TRL's


def with_advantages(made: Drawn, config: RolloutConfig) -> Drawn:
    """`made`, of `config.samples` consecutive answers to each prompt, which has all else. An answer
    without a reward has no advantage, and is none that others are compared with.
    """
    here = made.labels != IGNORED
    good = ~made.rewards.isnan()
    rewards = _of_tokens(made, config) * (here & good[:, None])
    groups = torch.arange(len(good)) // config.samples
    scores = made.rewards.clone()
    if config.reward_kl and config.advantage in ("group", "leave-one-out"):
        scores += rewards.sum(1)
    match config.advantage:
        case "group":
            scores[good] = advantage.group_normalised(
                scores[good], groups[good], eps=EPS, scale=config.scale
            )
        case "leave-one-out":
            scores[good] = advantage.leave_one_out(scores[good], groups[good])
        case "reinforce-baseline":
            scores[good] = advantage.group_normalised(scores[good], groups[good], scale="none")
    scores = torch.where(good, scores, 0.0)
    if config.taught:
        found = advantage.taught(made.old, made.reference, here)
    elif config.advantage in ("group", "leave-one-out"):
        found = scores[:, None] * here
    else:
        last = advantage.last(here)
        found = advantage.reinforce(rewards + scores[:, None] * last, here & good[:, None])
    if config.importance_cap is not None:
        found = found * advantage.importance(
            made.old, made.sampled, here, cap=config.importance_cap
        )
    return replace(made, advantages=found)


def _of_tokens(made: Drawn, config: RolloutConfig) -> Float[Tensor, "answers length"]:
    """The KL that is a part of the reward, of each token; it may stand anywhere."""
    return -config.reward_kl * advantage.kl(made.old, made.reference, estimator="k1")
