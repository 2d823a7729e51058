"""What a run may be told of PPO, beside its rollouts: of the policy, and of the critic that learns
what to expect. Knows nothing of torch.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from dolmen.core.paths import refuse_empty

Estimator = Literal["k1", "k2", "k3"]


def refuse_outside(section: str, said: Mapping[str, float | None], low: float, most: float) -> None:
    """Raises ValueError for the first of the options that is set, and does not lie in
    [low, most].
    """
    for name, value in said.items():
        if value is not None and not (low <= value <= most and math.isfinite(value)):
            bound = f"at least {low:g}" if most == math.inf else f"from {low:g} to {most:g}"
            raise ValueError(
                f"{section}.{name.replace('_', '-')} is {value}: it must be finite and {bound}"
            )


@dataclass(frozen=True)
class PPOConfig:
    """What an answer's tokens are worth, and how the model learns from it (--objective.name ppo).
    The ratio's bounds are --rollout.clip-low and clip-high.
    """

    kl: Estimator = "k1"
    """The estimator of each token's KL from the model that the run begins with
    (objectives/advantage.py: `kl`).
    """
    kl_coef: float = 0.05
    """What that KL takes from a token's reward, times; 0, without a target: it is not computed."""
    kl_target: float | None = None
    """Nats of KL per answer that kl_coef is moved to hold, up or down by at most a fifth of answers
    / kl_horizon in a phase (1909.08593). Unset: it stays.
    """
    kl_horizon: float = 10000.0
    """Of kl_target, in answers: the larger, the slower."""
    reward_clip: float | None = None
    """A reward counts from -reward_clip up to reward_clip; the KL is not bounded."""
    gamma: float = 1.0
    """By what a reward counts less for each token that it is away."""
    lam: float = 0.95
    """Of generalised advantage estimation: 1 asks the critic for the beginning alone, 0 of each
    token.
    """
    whiten: bool = True
    """Advantages of a phase are brought to mean 0 and variance 1, over all its tokens."""
    dual_clip: float | None = None
    """Where an advantage is negative, the loss is at most so many times it (1912.09729), over 1."""
    pretraining_coef: float = 0.0
    """What the cross-entropy of plain text counts beside the loss of an update, times (2203.02155:
    PPO-ptx, 27.8 there); 0: none is read.
    """
    pretraining_path: tuple[str, ...] = ()
    """That text, given like --data.path: --train.global-batch-size sequences of
    --train.sequence-length in each update.
    """

    def __post_init__(self):
        refuse_empty("ppo.pretraining-path", *self.pretraining_path)
        refuse_outside("ppo", {"pretraining_coef": self.pretraining_coef}, 0, math.inf)
        if bool(self.pretraining_coef) != bool(self.pretraining_path):
            named = " ".join(self.pretraining_path) or "none"
            raise ValueError(
                f"ppo.pretraining-coef ({self.pretraining_coef:g}) weighs the text of "
                f"ppo.pretraining-path ({named}): give both, or neither"
            )
        fractions = {"gamma": self.gamma, "lam": self.lam}
        refuse_outside("ppo", fractions, 0, 1)
        refuse_outside("ppo", {"kl_coef": self.kl_coef}, 0, math.inf)
        over = {
            "kl_target": self.kl_target,
            "kl_horizon": self.kl_horizon,
            "reward_clip": self.reward_clip,
        }
        for name, value in over.items():
            if value is not None and not (math.isfinite(value) and value > 0):
                raise ValueError(
                    f"ppo.{name.replace('_', '-')} is {value}: it must be finite and over 0"
                )
        if self.dual_clip is not None and not 1 < self.dual_clip < math.inf:
            raise ValueError(f"ppo.dual-clip is {self.dual_clip}: it must be finite and over 1")
        if self.kl_target is not None and not self.kl_coef:
            raise ValueError(
                f"ppo.kl-target ({self.kl_target:g}) multiplies ppo.kl-coef, which is 0 and stays "
                "it: set --ppo.kl-coef to what it begins with, such as 0.05"
            )

    @property
    def compares(self) -> bool:
        """Whether a reference is asked."""
        return self.kl_coef > 0


@dataclass(frozen=True)
class CriticConfig:
    """The model that foretells, at each token, what the rest of an answer is worth
    (--objective.name ppo): of the shape of the one that is trained, with one number per token in
    the place of logits, in the same layout, with an optimizer of its own.
    """

    init: str | None = None
    """What it begins with: a reward model or any model of the run's shape and tokens: a
    transformers directory, a hub id or a run. Default: as the model itself begins.
    """
    lr: float | None = None
    """Its peak learning rate; all else is as --optimizer says. Default: --optimizer.lr."""
    warmup_steps: int = 0
    """Steps at the beginning in which it learns alone."""
    clip: float | None = 0.2
    """By how much a value may move from what it was when the answers were drawn, in the loss."""

    def __post_init__(self):
        refuse_empty("critic.init", self.init)
        refuse_outside("critic", {"lr": self.lr, "clip": self.clip}, 0, math.inf)
        refuse_outside("critic", {"warmup_steps": self.warmup_steps}, 0, math.inf)
