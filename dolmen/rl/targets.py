"""Training targets of each token of a rollout: advantages from rewards and log-probabilities,
with a critic also returns; and the adaptive KL coefficient of PPO.
"""

from dataclasses import replace

import torch
from jaxtyping import Float
from torch import Tensor

from dolmen.objectives import advantage
from dolmen.rl.config import PPOConfig, RolloutConfig
from dolmen.rl.rollout import PPORollout, Rollout

MAX_KL_ERROR = 0.2
"""Bound of the relative error that moves the KL coefficient (1909.08593, section 2.2)."""
EPS = 1e-4
"""Added to the standard deviation of a group, as in TRL."""


class KLController:
    """Coefficient of the KL in rewards, adapted to hold a target (1909.08593, section 2.2; TRL's
    and verl's AdaptiveKLController): after n completions with a mean KL per completion of d,

        value (1 + clip((d - target) / target, -0.2, 0.2) n / horizon)
    """

    def __init__(self, value: float, target: float | None, horizon: float):
        """Start at `value`, which stays fixed without a `target` (KL per completion). `horizon` is
        in completions.
        """
        self.value, self.target, self.horizon = value, target, horizon

    def next_value(self, value: float, kl: float, completions: int) -> float:
        """Return the coefficient for the next iteration, after one with coefficient `value`, mean
        KL per completion `kl` and so many completions; the fixed value without a target.
        """
        if self.target is None:
            return self.value
        # proportional control, with a step of at most 20 % per `horizon` completions
        error = max(-MAX_KL_ERROR, min(MAX_KL_ERROR, (kl - self.target) / self.target))
        return value * (1 + error * completions / self.horizon)


def compute_advantages(rollout: Rollout, config: RolloutConfig) -> Rollout:
    """Return the rollout with advantages [completions, length] by config.advantage_estimator, times
    the importance weights if they are capped. For grpo and rloo each `config.num_generations`
    consecutive completions are a group. A completion without a reward has advantage 0, and is not
    part of its group's baseline; distillation uses no rewards.
    """
    trained = rollout.trained
    scored = ~rollout.rewards.isnan()
    kl_rewards = _kl_rewards(rollout, config) * (trained & scored[:, None])
    groups = torch.arange(len(scored)) // config.num_generations
    # of whole completions: their rewards, and the summed KL for estimators of whole completions
    scores = rollout.rewards.clone()
    if config.reward_kl_coef and config.advantage_estimator in ("grpo", "rloo"):
        scores += kl_rewards.sum(1)
    match config.advantage_estimator:
        case "grpo":
            scores[scored] = advantage.normalize_by_group(
                scores[scored], groups[scored], eps=EPS, scale=config.scale_rewards
            )
        case "rloo":
            scores[scored] = advantage.leave_one_out(scores[scored], groups[scored])
        case "reinforce-plus-plus-baseline":
            scores[scored] = advantage.normalize_by_group(
                scores[scored], groups[scored], scale="none"
            )
    scores = torch.where(scored, scores, 0.0)
    if config.distills:
        advantages = advantage.distillation(
            rollout.old_logprobs, rollout.reference_logprobs, trained
        )
    elif config.advantage_estimator in ("grpo", "rloo"):
        advantages = scores[:, None] * trained
    else:
        # REINFORCE++: rewards of tokens, whitened over the iteration
        rewards = kl_rewards + scores[:, None] * advantage.last_token(trained)
        advantages = advantage.reinforce(rewards, trained & scored[:, None])
    # the surrogate is linear in the advantage, so the weight of a token's loss can be put there
    if config.importance_sampling_cap is not None:
        advantages = advantages * advantage.importance_weights(
            rollout.old_logprobs,
            rollout.sampled_logprobs,
            trained,
            cap=config.importance_sampling_cap,
        )
    return replace(rollout, advantages=advantages)


def _kl_rewards(rollout: Rollout, config: RolloutConfig) -> Float[Tensor, "completions length"]:
    """Return -reward_kl_coef times the KL from the reference model (estimator k1), per position,
    also at positions without a label.
    """
    kl = advantage.kl(rollout.old_logprobs, rollout.reference_logprobs, estimator="k1")
    return -config.reward_kl_coef * kl


def compute_ppo_targets(
    rollout: Rollout, reference: Tensor, values: Tensor, ppo: PPOConfig, kl_coef: float
) -> PPORollout:
    """Return the rollout with PPO's targets of each token: rewards (that of the completion at its
    last token, minus kl_coef times the KL from `reference` log-probabilities at each token), and
    from these and the critic's `values` GAE advantages, whitened over the iteration, and returns.
    The values are stored too. All are 0 at positions without a label.
    """
    trained = rollout.trained
    rewards = advantage.token_rewards(
        rollout.rewards.nan_to_num(),  # NaN: no label, so the 0 is not read
        rollout.old_logprobs,
        reference,
        trained,
        kl=ppo.kl_estimator,
        kl_coef=kl_coef,
        clip=ppo.reward_clip,
    )
    advantages, returns = advantage.gae(rewards, values, trained, gamma=ppo.gamma, lam=ppo.lam)
    if ppo.whiten_advantages:
        advantages = advantage.whiten(advantages, trained)
    return PPORollout(
        **{**vars(rollout), "advantages": advantages},
        values=torch.where(trained, values, 0.0),
        returns=returns,
        kl_coef=torch.tensor([kl_coef], dtype=torch.float64),
    )
