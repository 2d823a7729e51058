"""From rewards and log-probabilities of a phase to what each token is to learn."""

from dataclasses import replace

import torch
from jaxtyping import Float
from torch import Tensor

from dolmen.objectives import advantage
from dolmen.ops.loss import IGNORED
from dolmen.rollouts.config import RolloutConfig
from dolmen.rollouts.drawn import Drawn

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
