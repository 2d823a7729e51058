"""Phases of PPO: what each token of an answer is worth, from the answer's reward, the KL from the
model that the run begins with, and a critic that is asked before it learns from the same answers.

    reward at the last token - kl_coef KL at each    ->  rewards of tokens
    those, values of the critic                      ->  GAE  ->  advantages, returns

All ranks know all answers, so the mean and the variance of whitening are of the whole phase.
"""

from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from jaxtyping import Float, Float64
from torch import Tensor

from dolmen.model.decoder import Decoder
from dolmen.objectives import advantage, forward
from dolmen.objectives.ppo import RETURN, VALUE
from dolmen.ops.loss import IGNORED
from dolmen.rl.config import RolloutConfig
from dolmen.rl.environment import Turns
from dolmen.rl.iteration import Models, Phases, Setup
from dolmen.rl.ppo_config import PPOConfig
from dolmen.rl.prompts import PromptLoader
from dolmen.rl.rollout import Drawn
from dolmen.rl.scoring import Judging
from dolmen.rl.targets import Coefficient


@dataclass(frozen=True, eq=False)
class Valued(Drawn):
    """With what a critic had to say."""

    values: Float[Tensor, "answers length"]
    """Of each label, what the critic expected at the token before it, when the phase began."""
    returns: Float[Tensor, "answers length"]
    kl_coef: Float64[Tensor, " one"]
    """With which the KL was taken from rewards."""

    others: ClassVar[dict[str, tuple[int, ...]]] = {"kl_coef": (1,)}

    @property
    def numbers(self) -> dict[str, Tensor]:
        return {**super().numbers, VALUE: self.values, RETURN: self.returns}

    @property
    def here(self) -> Tensor:
        """What is learned from."""
        return self.labels != IGNORED

    def explained(self) -> float:
        """The share of the returns' variance that the critic had foretold: 1 is all, 0 none, and
        less than that worse than their mean.
        """
        returns, left = self.returns[self.here], (self.returns - self.values)[self.here]
        spread = returns.var(unbiased=False)
        return float(1 - left.var(unbiased=False) / spread) if spread > 0 else 0.0

    def entropy(self) -> float:
        """An estimate of the policy's, in nats per token, from those that it drew."""
        return float(-self.old[self.here].mean()) if self.here.any() else 0.0


class ValuedPhases(Phases):
    """What `train_steps` reads, of a run with a critic."""

    kept = Valued

    def __init__(
        self,
        config: RolloutConfig,
        loader: PromptLoader,
        models: Models,
        judging: Judging,
        setup: Setup,
        ppo: PPOConfig,
        critic: Decoder,
        coefficient: Coefficient,
        turns: Turns | None = None,
    ):
        """`coefficient` is moved as a phase begins, so that of all times it is known for the
        next.
        """
        super().__init__(config, loader, models, judging, setup, turns)
        self.ppo, self.critic, self.coefficient = ppo, critic, coefficient

    def learned(self, made: Drawn) -> Valued:
        good = ~made.rewards.isnan()
        made = replace(made, labels=torch.where(good[:, None], made.labels, IGNORED))
        made = self.remembered(made)
        reference = made.old
        if self.models.reference is not None:
            reference = self.log_probabilities(self.models.reference, made)
            made = replace(made, reference=reference)
        values = self.asked(forward.values, self.critic, made)
        return valued(made, reference, values, self.ppo, self.coefficient.value)

    def begun(self, phase: Drawn) -> None:
        super().begun(phase)
        assert isinstance(phase, Valued)
        used, away = float(phase.kl_coef), self.away(phase)
        self.coefficient.value = self.coefficient.after(used, away, self.answers)
        self.told |= {
            "rollout/kl_coef": used,
            "rollout/kl_per_answer": away,
            "rollout/explained_variance": phase.explained(),
            "rollout/entropy": phase.entropy(),
        }

    def away(self, phase: Valued) -> float:
        """The mean over answers of the sum of their tokens' KL from the reference."""
        if self.models.reference is None or not phase.here.any():
            return 0.0
        off = torch.where(phase.here, phase.old - phase.reference, 0.0)
        found = advantage.estimated(off, self.ppo.kl).sum(1)
        return float(found[phase.here.any(1)].mean())


def valued(
    made: Drawn, reference: Tensor, values: Tensor, ppo: PPOConfig, kl_coef: float
) -> Valued:
    """`made`, which has rewards and log-probabilities, with advantages and returns; `values` may
    stand anywhere.
    """
    here = made.labels != IGNORED
    rewards = advantage.token_rewards(
        made.rewards.nan_to_num(),  # of an answer that is left out
        made.old,
        reference,
        here,
        kl=ppo.kl,
        kl_coef=kl_coef,
        clip=ppo.reward_clip,
    )
    advantages, returns = advantage.gae(rewards, values, here, gamma=ppo.gamma, lam=ppo.lam)
    if ppo.whiten:
        advantages = advantage.whitened(advantages, here)
    known = {**vars(made), "advantages": advantages}
    return Valued(
        **known,
        values=torch.where(here, values, 0.0),
        returns=returns,
        kl_coef=torch.tensor([kl_coef], dtype=torch.float64),
    )
