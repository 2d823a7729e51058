"""Rules of a run that learns with a critic (PPO), part of the one screen that check.py is."""

from dolmen.rl.config import CriticConfig, PPOConfig, RolloutConfig
from dolmen.rl.targets import MAX_KL_ERROR
from dolmen.training import critic
from dolmen.training.config import RunConfig

OF_GROUPS = (
    "loss_type",
    "importance_sampling_level",
    "beta",
    "advantage_estimator",
    "scale_rewards",
    "reward_kl_coef",
    "max_resamples",
    "importance_sampling_cap",
)
"""Options of --rollout that a critic takes the place of."""


def check_ppo(run: RunConfig) -> None:
    """Raises ValueError where options of PPO stand beside another objective, and the other way
    round, and for a critic that the model cannot have.
    """
    if run.objective.name != "ppo":
        for section, own in (("ppo", PPOConfig()), ("critic", CriticConfig())):
            if vars(run)[section] != own:
                raise ValueError(
                    f"{section} is of a policy that learns with a critic, and objective.name is "
                    f"{run.objective.name}: use dolmen train ppo, or leave it out"
                )
        return
    for name in OF_GROUPS:
        value = vars(run.rollout)[name]
        if value != vars(RolloutConfig)[name]:
            raise ValueError(
                f"rollout.{name.replace('_', '-')} is {value}, which is of grpo: of ppo leave it "
                "out (--ppo says how it learns)"
            )
    if run.critic.warmup_steps and run.steps is not None and run.critic.warmup_steps >= run.steps:
        raise ValueError(
            f"critic.warmup-steps ({run.critic.warmup_steps}) are all of the run's {run.steps} "
            "steps, and the model learns in none: set fewer, or more --train.steps"
        )
    answers = run.rollout.completions(run.train.global_batch_size)
    if run.ppo.kl_target is not None and run.ppo.kl_horizon <= MAX_KL_ERROR * answers:
        raise ValueError(
            f"ppo.kl-horizon ({run.ppo.kl_horizon:g}) is so short that an iteration of {answers} "
            "completions may change the sign of ppo.kl-coef: set one over "
            f"{MAX_KL_ERROR * answers:g}"
        )
    critic.check(run)
