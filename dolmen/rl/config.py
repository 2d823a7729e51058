"""What a run may be told of answers that its model draws and learns from. Knows nothing of
torch.
"""

import math
from dataclasses import dataclass
from typing import Literal

Advantage = Literal["group", "leave-one-out", "reinforce", "reinforce-baseline", "teacher"]
COMPARING = ("group", "leave-one-out", "reinforce-baseline")
"""Those that compare an answer with others to its prompt."""
Kind = Literal["grpo", "bnpo", "dr-grpo", "dapo", "gspo", "cispo"]


@dataclass(frozen=True)
class RolloutConfig:
    """What is drawn, how it is judged, and how the model learns from it (--objective.name grpo,
    and ppo with --ppo and --critic).

    A phase draws answers with the weights as they are; then `epochs` times all of them are learned
    from, --train.global-batch-size in an update.
    """

    samples: int = 8
    """Answers to each prompt; of grpo each is compared with the mean of them."""
    prompts: int | None = None
    """Prompts of a phase. Unset: as many as make one update."""
    epochs: int = 1
    """How often the answers of a phase are learned from."""
    max_new_tokens: int = 128
    """Tokens of an answer, at most."""
    temperature: float = 1.0
    """Of what is drawn, and of the log-probabilities that are learned from."""
    kind: Kind = "grpo"
    """The loss of an answer (objectives/policy.py: `group`)."""
    level: Literal["token", "sequence"] = "token"
    """Whether ratios to what was drawn with are of tokens, or of answers."""
    clip_low: float = 0.2
    """A ratio counts down to 1 - clip_low."""
    clip_high: float = 0.2
    """And up to 1 + clip_high."""
    beta: float = 0.0
    """Weight of the KL (k3) from the model that the run begins with; 0: it is not computed."""
    advantage: Advantage = "group"
    """How good an answer is: group: its reward beside those to its prompt (GRPO, --rollout.scale);
    leave-one-out: its reward less the mean of the others to its prompt (RLOO); reinforce: its
    rewards from each token on, at mean 0 and variance 1 over the tokens of a phase (REINFORCE++);
    reinforce-baseline: the same of rewards less the mean of their prompt's; teacher: of each token
    by how much --objective.reference finds it likelier, without a reward (on-policy distillation).
    """
    entropy: float = 0.0
    """What a nat of the entropy of a token's distribution is worth."""
    scale: Literal["group", "batch", "none"] = "group"
    """Whether rewards less their group's mean are divided by its standard deviation, or by that of
    all rewards of a phase.
    """
    reward_kl: float = 0.0
    """Weight of the KL (k1) from the model that the run begins with in the reward: of each token,
    of --rollout.advantage reinforce and reinforce-baseline; of an answer the sum of its tokens'.
    """
    redraws: int = 0
    """How often, at most, an answer of another prompt is drawn for each of those whose group has
    rewards that are all equal, from which nothing is learned (DAPO's dynamic sampling).
    """
    overlong: int = 0
    """Tokens before --rollout.max-new-tokens from which on an answer's reward is the less the
    longer it is, by 1 at the last (DAPO's soft punishment).
    """
    overlong_weight: float = 1.0
    """What that is multiplied by."""
    mask_cut: bool = False
    """Answers that came to --rollout.max-new-tokens are not learned from; their rewards count in
    their group.
    """
    importance_cap: float | None = None
    """Multiply what is learned from a token by the ratio of its probability in training to that
    with which it was drawn, by so much at most (truncated importance sampling; 2 is usual).
    """
    off_policy: int | None = None
    """How many updates the weights that learn from an answer may be ahead of those that drew it: a
    phase of more updates is refused. Unset: one less than the updates of a phase.
    """
    tp: int | None = None
    """Processes that one copy of the drawing model is split over, by columns and rows. Unset: as
    --layout.tp. Its weights are those that are trained, put where they are needed in each phase.
    """
    batch: int = 64
    """Answers that are drawn at once by a copy."""
    idle: Literal["device", "cpu"] = "device"
    """Where models wait that a part of a phase does not read: on the device; or in the CPU's
    memory, pinned: optimizers and all other weights while answers are drawn, the reference, reward
    models and the drawing model while the model learns.
    """
    routing_replay: bool = False
    """Of a model with experts: learn through those that answers' tokens went to when the phase
    began, so that ratios are of one network though the router has moved (Routing Replay,
    2507.18071); their weights, and the router's gradient, are those of now.
    """
    turns: int = 8
    """How often --environment is asked for an answer, at most."""
    limit_seconds: float = 10.0
    """Of a function for an answer or a turn; then its process is ended, and another one started."""
    on_failure: Literal["stop", "zero", "leave-out"] = "stop"
    """Where a reward's function raises, takes too long or gives no finite number: the run ends, the
    reward is 0, or the answer is not learned from. Each is counted and logged. Where an environment
    does, the run ends, or the answer does.
    """

    def __post_init__(self):
        for name in ("samples", "prompts", "epochs", "max_new_tokens", "tp", "batch", "turns"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(
                    f"rollout.{name.replace('_', '-')} is {value}: it must be at least 1"
                )
        if not (math.isfinite(self.temperature) and self.temperature > 0):
            raise ValueError(
                f"rollout.temperature is {self.temperature}: answers are drawn from the model's "
                "own distribution, so it must be over 0"
            )
        for name in ("redraws", "overlong", "off_policy"):
            value = getattr(self, name)
            if value is not None and value < 0:
                raise ValueError(
                    f"rollout.{name.replace('_', '-')} is {value}: it must be 0 or more"
                )
        if self.taught and (self.redraws or self.overlong or self.reward_kl):
            raise ValueError(
                "rollout.advantage teacher has no rewards: leave out rollout.redraws "
                f"({self.redraws}), rollout.overlong ({self.overlong}) and rollout.reward-kl "
                f"({self.reward_kl:g})"
            )
        if self.overlong > self.max_new_tokens:
            raise ValueError(
                f"rollout.overlong ({self.overlong}) is over rollout.max-new-tokens "
                f"({self.max_new_tokens}): it is the last so many of them"
            )
        if self.importance_cap is not None and not self.importance_cap > 0:
            raise ValueError(
                f"rollout.importance-cap is {self.importance_cap}: it must be over 0, or left out"
            )
        for name in ("clip_low", "clip_high", "beta", "entropy", "reward_kl", "overlong_weight"):
            value = getattr(self, name)
            if not (math.isfinite(value) and value >= 0):
                raise ValueError(
                    f"rollout.{name.replace('_', '-')} is {value}: it must be 0 or more"
                )
        if not (math.isfinite(self.limit_seconds) and self.limit_seconds > 0):
            raise ValueError(
                f"rollout.limit-seconds is {self.limit_seconds}: it must be over 0 and finite"
            )

    def answers(self, global_batch_size: int) -> int:
        """Of a phase. Raises ValueError, with the numbers, where they are not whole updates."""
        prompts = self.prompts or max(1, global_batch_size // self.samples)
        total = prompts * self.samples
        if total % global_batch_size:
            raise ValueError(
                f"a phase draws {total} answers (rollout.prompts {prompts} x rollout.samples "
                f"{self.samples}), and train.global-batch-size {global_batch_size} does not divide "
                f"them: set --train.global-batch-size {total}, or other --rollout.prompts"
            )
        return total

    def updates(self, global_batch_size: int) -> int:
        """Of a phase. Raises ValueError where the last is too far from what has drawn."""
        updates = self.epochs * self.answers(global_batch_size) // global_batch_size
        if self.off_policy is not None and updates - 1 > self.off_policy:
            raise ValueError(
                f"a phase has {updates} updates (rollout.prompts, samples and epochs), so that its "
                f"last one learns from answers of {updates - 1} updates before, and "
                f"rollout.off-policy is {self.off_policy}: draw fewer, or set "
                f"--rollout.off-policy {updates - 1}"
            )
        return updates

    @property
    def compares(self) -> bool:
        """Whether a reference is asked."""
        return bool(self.beta or self.reward_kl or self.taught)

    @property
    def taught(self) -> bool:
        """Whether the reference takes the place of a reward."""
        return self.advantage == "teacher"
