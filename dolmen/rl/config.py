"""Options of reinforcement learning: --rollout, --ppo and --critic. Imports no torch."""

from typing import Annotated, Literal

from pydantic import Field

from dolmen.core.config import AboveZero, Count, Name, NonNegative, Positive, config
from dolmen.serving.config import SpeculativeConfig

AdvantageEstimator = Literal[
    "grpo", "rloo", "reinforce-plus-plus", "reinforce-plus-plus-baseline", "distillation"
]
GROUP_ESTIMATORS = ("grpo", "rloo", "reinforce-plus-plus-baseline")
"""Estimators that compare a completion with the others of its prompt."""
LossType = Literal["grpo", "bnpo", "dr-grpo", "dapo", "gspo", "cispo"]
KLEstimator = Literal["k1", "k2", "k3"]


@config("rollout")
class RolloutConfig:
    """How completions are generated, rewarded and learned from (--objective.name grpo, and ppo with
    --ppo and --critic).

    Each rollout iteration generates completions with the current weights and then trains on all of
    them `epochs` times, --train.global-batch-size in an update.
    """

    num_generations: Positive = 8
    """Completions per prompt: the group whose mean reward is GRPO's baseline."""
    prompts: Positive | None = None
    """Prompts per rollout iteration. Default: as many as make one update."""
    epochs: Positive = 1
    """Passes over the completions of an iteration."""
    max_new_tokens: Positive = 128
    """Maximum tokens of a completion."""
    temperature: AboveZero = 1.0
    """Sampling temperature, also of the log-probabilities in the loss."""
    loss_type: LossType = "grpo"
    """Policy loss. The formulas are those of `grpo_loss` in objectives/policy.py."""
    importance_sampling_level: Literal["token", "sequence"] = "token"
    """Level of the ratio of new to old probability: per token or per completion."""
    clip_low: NonNegative = 0.2
    """The ratio is clipped below at 1 - clip_low."""
    clip_high: NonNegative = 0.2
    """The ratio is clipped above at 1 + clip_high."""
    beta: NonNegative = 0.0
    """Weight of the KL (k3) from the reference model in the loss. 0 does not compute it."""
    advantage_estimator: AdvantageEstimator = "grpo"
    """Advantage of a completion. grpo: its reward minus the mean of its group, scaled by
    --rollout.scale-rewards. rloo: its reward minus the mean of the others of its group.
    reinforce-plus-plus: the sum of its rewards from each token on, whitened over all tokens of the
    iteration. reinforce-plus-plus-baseline: the same of rewards minus the mean of their group.
    distillation: per token, how much more likely --objective.reference finds it, without a reward
    (on-policy distillation).
    """
    entropy_coef: NonNegative = 0.0
    """Coefficient of the entropy bonus of each token's distribution."""
    scale_rewards: Literal["group", "batch", "none"] = "group"
    """Standard deviation that grpo divides by: that of the group, of all rewards of the iteration,
    or none (Dr. GRPO).
    """
    reward_kl_coef: NonNegative = 0.0
    """Weight of the KL (k1) from the reference model in the reward: per token for
    reinforce-plus-plus and its baseline variant, else summed over the completion.
    """
    max_resamples: Count = 0
    """Rounds in which groups with equal rewards, which have no gradient, are replaced by other
    prompts (DAPO's dynamic sampling). 0 trains on them as they are.
    """
    overlong_buffer: Count = 0
    """Length in tokens of the buffer before --rollout.max-new-tokens in which the reward falls
    linearly, to a penalty of 1 at the end (DAPO's soft overlong punishment). 0 is no penalty.
    """
    overlong_penalty_factor: NonNegative = 1.0
    """Factor of the overlong penalty."""
    mask_truncated_completions: bool = False
    """Mask completions that were truncated at --rollout.max-new-tokens out of the loss. Their
    rewards still count in the baseline of their group.
    """
    importance_sampling_cap: AboveZero | None = None
    """Correct for the difference between trainer and generator: multiply each token's advantage by
    the ratio of its probability in training to that in sampling, capped at this (truncated
    importance sampling; 2 is usual). Default: no correction.
    """
    max_off_policy_steps: Count | None = None
    """Maximum updates between sampling a completion and learning from it. An iteration with more
    updates is an error. Default: one less than the updates of an iteration.
    """
    tp: Positive | None = None
    """Tensor-parallel size of the model copies that generate. Default: --layout.tp. They get the
    current weights at the beginning of each iteration.
    """
    max_num_seqs: Positive = 64
    """Completions that one model copy generates at the same time."""
    weights: Literal["stated", "int8"] = "stated"
    """Weights of the model copies that generate. stated: those of the policy. int8: products of
    8-bit integers, on a CPU; the sampling probabilities are then not the policy's, which needs
    --rollout.importance-sampling-cap.
    """
    compile: bool = False
    """Compile the decode steps of rollouts, as --compile of `dolmen generate` does."""
    speculative: SpeculativeConfig = SpeculativeConfig()
    offload: Literal["none", "cpu"] = "none"
    """Placement of models while they are not in use. none: on the device. cpu: in pinned host
    memory (optimizers and all weights but the generator's during generation; the reference, reward
    and generation models during updates).
    """
    routing_replay: bool = False
    """Mixture-of-experts models: route each token of an update to the experts that it was routed to
    when old log-probabilities were computed (routing replay, 2507.18071), so that ratios compare
    the same network. Gate weights and the router's gradient are current.
    """
    max_turns: Positive = 8
    """Maximum calls of --environment per completion."""
    timeout_seconds: AboveZero = 10.0
    """Time limit of a call of a reward or environment function. Then its process is killed and
    started again.
    """
    on_failure: Literal["stop", "zero", "leave-out"] = "stop"
    """Action if a reward function raises, takes too long or does not return a finite number: stop
    the run, use a reward of 0, or leave the completion out of the loss. Failures are counted and
    logged. If an environment fails, the run stops (stop) or the completion ends.
    """

    log_completions: Count = 4
    """Completions of each iteration that are added to rollouts/completions.jsonl and logged to
    TensorBoard, W&B and trackio; `dolmen show` shows them. 0 logs none; all completions of the last
    iterations are in rollouts/ anyway.
    """

    def __post_init__(self):
        """Raise ValueError for rewards' options with distillation, which has none, and for an
        overlong_buffer above max_new_tokens.
        """
        if self.distills and (self.max_resamples or self.overlong_buffer or self.reward_kl_coef):
            raise ValueError(
                "rollout.advantage-estimator distillation has no rewards: leave out "
                f"rollout.max-resamples ({self.max_resamples}), rollout.overlong-buffer "
                f"({self.overlong_buffer}) and rollout.reward-kl-coef ({self.reward_kl_coef:g})"
            )
        if self.overlong_buffer > self.max_new_tokens:
            raise ValueError(
                f"rollout.overlong-buffer ({self.overlong_buffer}) exceeds rollout.max-new-tokens "
                f"({self.max_new_tokens}): set it to {self.max_new_tokens} or less"
            )

    def completions(self, global_batch_size: int) -> int:
        """Return the number of completions of an iteration: prompts times completions per prompt.
        Raises ValueError where it is not divisible by the global batch size.
        """
        prompts = self.prompts or max(1, global_batch_size // self.num_generations)
        total = prompts * self.num_generations
        if total % global_batch_size:
            raise ValueError(
                f"a rollout iteration has {total} completions (rollout.prompts {prompts} x "
                f"rollout.num-generations {self.num_generations}), which is not divisible by "
                f"train.global-batch-size ({global_batch_size}): set --train.global-batch-size "
                f"{total}, or other --rollout.prompts"
            )
        return total

    def updates(self, global_batch_size: int) -> int:
        """Return the number of optimizer updates of an iteration, over all its epochs. Raises
        ValueError where the last one is more than max_off_policy_steps off-policy.
        """
        updates = self.epochs * self.completions(global_batch_size) // global_batch_size
        if self.max_off_policy_steps is not None and updates - 1 > self.max_off_policy_steps:
            raise ValueError(
                f"a rollout iteration has {updates} updates (rollout.prompts, num-generations and "
                f"epochs), so that its last one is {updates - 1} updates off-policy, but "
                f"rollout.max-off-policy-steps is {self.max_off_policy_steps}: use fewer prompts "
                f"or epochs, or set --rollout.max-off-policy-steps {updates - 1}"
            )
        return updates

    @property
    def needs_reference(self) -> bool:
        """True if a reference model is needed: a KL term in loss or rewards, or distillation."""
        return bool(self.beta or self.reward_kl_coef or self.distills)

    @property
    def distills(self) -> bool:
        """True for on-policy distillation: the reference model is a teacher, and there is no
        reward.
        """
        return self.advantage_estimator == "distillation"


@config("ppo")
class PPOConfig:
    """How advantages and the policy loss of PPO are computed (--objective.name ppo). The ratio is
    clipped by --rollout.clip-low and clip-high.
    """

    kl_estimator: KLEstimator = "k1"
    """Estimator of each token's KL from the reference model (objectives/advantage.py: `kl`)."""
    kl_coef: NonNegative = 0.05
    """Coefficient of the KL penalty in each token's reward. 0, without a target, does not compute
    it.
    """
    kl_target: AboveZero | None = None
    """Target KL per completion, in nats: kl_coef is adapted to hold it, by at most a fifth of
    completions / kl_horizon per iteration (1909.08593). Default: kl_coef stays.
    """
    kl_horizon: AboveZero = 10000.0
    """Horizon of the adaptive KL coefficient in completions: the larger, the slower it adapts."""
    reward_clip: AboveZero | None = None
    """Clip rewards to -reward_clip .. reward_clip. The KL penalty is not clipped. Default: no clip.
    """
    gamma: Annotated[float, Field(ge=0, le=1)] = 1.0
    """Discount per token of generalised advantage estimation."""
    lam: Annotated[float, Field(ge=0, le=1)] = 0.95
    """Lambda of generalised advantage estimation: 1 is Monte Carlo returns minus values, 0 one-step
    temporal differences.
    """
    whiten_advantages: bool = True
    """Normalise advantages to mean 0 and variance 1 over all tokens of an iteration."""
    dual_clip: Annotated[float, Field(gt=1)] | None = None
    """Dual-clip PPO: where an advantage is negative, bound the loss at this many times it
    (1912.09729); over 1. Default: no bound.
    """
    pretraining_coef: NonNegative = 0.0
    """Coefficient of the cross-entropy of pretraining text in the policy's loss (PPO-ptx,
    2203.02155, with 27.8). 0 reads no text.
    """
    pretraining_path: tuple[Name, ...] = ()
    """Pretraining text of PPO-ptx, given like --data.path: --train.global-batch-size sequences of
    --train.sequence-length in each update.
    """

    def __post_init__(self):
        """Raise ValueError for only one of pretraining_coef and pretraining_path, and for a
        kl_target with a kl_coef of 0.
        """
        if bool(self.pretraining_coef) != bool(self.pretraining_path):
            paths = " ".join(self.pretraining_path) or "none"
            raise ValueError(
                f"ppo.pretraining-coef ({self.pretraining_coef:g}) is the weight of the text of "
                f"ppo.pretraining-path ({paths}): give both, or neither"
            )
        if self.kl_target is not None and not self.kl_coef:
            raise ValueError(
                f"ppo.kl-target ({self.kl_target:g}) adapts ppo.kl-coef by factors, but that is "
                "0: set --ppo.kl-coef to an initial value such as 0.05"
            )

    @property
    def needs_reference(self) -> bool:
        """True if a reference model is needed, for the KL penalty."""
        return self.kl_coef > 0


@config("critic")
class CriticConfig:
    """The critic of PPO, which predicts the return from each token on: a model of the policy's
    shape with a scalar head in place of logits, in the same layout, with its own optimizer.
    """

    init: Name | None = None
    """Initial model of the critic; unset, a copy of the policy's. A reward model or any model of
    the policy's shape and vocabulary: a transformers directory, a hub id or a run.
    """
    lr: NonNegative | None = None
    """Peak learning rate of the critic; all else is as --optimizer. Default: --optimizer.lr."""
    warmup_steps: Count = 0
    """Steps at the beginning in which only the critic learns."""
    clip: NonNegative | None = 0.2
    """Value clipping: how far a value may move in the loss from the one at sampling time."""
