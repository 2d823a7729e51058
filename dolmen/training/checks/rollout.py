"""Rules on runs that learn from their own completions (GRPO, PPO): rewards, environment, layout of
generation, critic.
"""

from collections.abc import Mapping
from dataclasses import replace

from dolmen.conversion.source import ModelSource
from dolmen.core.device import visible_gpus
from dolmen.core.messages import plural
from dolmen.families import compare_fields
from dolmen.model.layout import Layout
from dolmen.model.spec import ModelSpec
from dolmen.rl import function_worker, rewards
from dolmen.rl.config import GROUP_ESTIMATORS, CriticConfig, PPOConfig, RolloutConfig
from dolmen.rl.targets import MAX_KL_ERROR
from dolmen.serving.request import check_compile, check_int8
from dolmen.serving.speculation import check_draft
from dolmen.training.config import RunConfig, TrainConfig
from dolmen.training.resolve import ResolvedRun

REPLACED_BY_CRITIC = (
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


def check_rollout(resolved: ResolvedRun) -> None:
    """Raise ValueError if objective, kind of data, rewards, environment and rollout options do not
    fit together; and for options of rollouts in other runs than RL. The layout is not checked.
    """
    run = resolved.config
    rewarded = bool(run.reward) or (run.objective.name == "grpo" and run.rollout.distills)
    requirements = [run.objective.uses_rollouts, run.data.rows == "prompts", rewarded]
    if not any(requirements):
        if run.environment is not None:
            raise ValueError(
                f"--environment {run.environment} is for RL: use dolmen train grpo or ppo, or "
                "leave it out"
            )
        if run.rollout != RolloutConfig():
            raise ValueError(
                "--rollout.* options are for RL: use dolmen train grpo or ppo, or leave them out"
            )
        return
    if all(requirements[:2]) and not rewarded:
        raise ValueError(
            f"{run.objective.name} needs --reward: exact, gsm8k, stub, regex:PATTERN, "
            "MODULE:FUNCTION or the folder of a reward model"
        )
    if not all(requirements):
        raise ValueError(
            f"objective.name {run.objective.name}, data.rows {run.data.rows} and reward "
            f"{' '.join(run.reward) or 'none'} do not fit together: grpo and ppo need --data.rows "
            "prompts and a reward (--reward exact, gsm8k, stub, regex:PATTERN, MODULE:FUNCTION or "
            "the folder of a reward model)"
        )
    if run.objective.name == "grpo":
        check_group_size(run.rollout)
    if run.rollout.distills and (run.reward or run.objective.reference is None):
        raise ValueError(
            "rollout.advantage-estimator distillation needs --objective.reference (the teacher) "
            f"and no --reward: objective.reference is {run.objective.reference or 'none'}, reward "
            f"{' '.join(run.reward) or 'none'}"
        )
    if run.rollout.needs_reference and run.init is None and run.objective.reference is None:
        raise ValueError(
            f"rollout.beta ({run.rollout.beta}) or reward-kl-coef ({run.rollout.reward_kl_coef}) "
            "needs a reference model, but the initial model is random: give --init or "
            "--objective.reference, or leave it out"
        )
    if run.rollout.temperature != 1 and run.spec.head.soft_cap is not None:
        raise ValueError(
            f"rollout.temperature ({run.rollout.temperature}) is not supported for logits with a "
            f"soft cap ({run.spec.head.soft_cap}): use 1"
        )
    if run.rollout.routing_replay:
        _check_replay(run.train, run.spec)
    _check_rewards(resolved)
    # raises ValueError where the iteration does not fit the batch, or is too far off-policy
    run.rollout.updates(run.train.global_batch_size)
    device = "cuda" if visible_gpus(run.train.device) else "cpu"
    if run.rollout.weights == "int8":
        _check_int8(run, device)
    if resolved.draft is not None:
        check_draft(resolved.draft.spec, run.spec)
    if run.rollout.compile:
        check_compile(run.rollout.tp or run.layout.tp, device, "rollout.")


def _check_rewards(resolved: ResolvedRun) -> None:
    """Raise ValueError for names of --environment and --reward that are not well formed or unknown,
    and for a reward model that has no scalar head, another vocabulary, or max_position_embeddings
    <= the run's sequence length, as a prompt with its completion may have one token more. User
    functions are not imported yet.
    """
    run, tokenizer = resolved.config, resolved.config.data.tokenizer or resolved.tokenizer
    if run.environment is not None:
        function_worker.check_function_name(run.environment, "environment")
    for _, name in rewards.parse_rewards(run.reward):
        if not rewards.is_reward_model(name):
            rewards.make_reward_function(name, run.rollout.timeout_seconds)
    for name, source in resolved.rewards.items():
        rewards.check_reward_model(name, source, run.spec, tokenizer)
        most = source.spec.max_position_embeddings
        if most <= run.sequence_length:
            raise ValueError(
                f"reward {name} reads {most} tokens (max_position_embeddings), but a prompt with "
                "its completion may have one more than train.sequence-length "
                f"({run.sequence_length}): set --train.sequence-length {most - 1} or less"
            )


def _check_replay(train: TrainConfig, model: ModelSpec) -> None:
    """Raise ValueError if a run with rollout.routing-replay (which is set) has a `model` without
    experts, a compiled model, or router biases that move between updates (train.router.balance bias
    with a bias-rate over 0).
    """
    if not model.experts:
        raise ValueError(
            "rollout.routing-replay is for MoE models, but the model has no experts: leave it out"
        )
    if train.compile:
        raise ValueError(
            "rollout.routing-replay and train.compile exclude each other: leave one of the two out"
        )
    router = train.router
    if router.balance == "bias" and router.bias_rate:
        raise ValueError(
            "rollout.routing-replay fixes the routing for an iteration, so train.router.balance "
            f"bias (bias-rate {router.bias_rate:g}) would adjust biases without effect: use "
            "--train.router.balance loss, or --train.router.bias-rate 0"
        )


def _check_int8(run: RunConfig, device: str) -> None:
    """Raise ValueError if a run with rollout.weights int8 (which is set) is not GRPO, does not
    correct for the other probabilities by importance sampling, or has a model or `device` (cpu or
    cuda) that cannot compute in int8.
    """
    if run.objective.name != "grpo":
        raise ValueError(
            "rollout.weights int8 needs rollout.importance-sampling-cap, which objective.name "
            f"{run.objective.name} does not have: leave it out"
        )
    if run.rollout.importance_sampling_cap is None:
        raise ValueError(
            "rollout.weights int8 samples from other probabilities than are trained on: correct "
            "for it with --rollout.importance-sampling-cap 2, or leave it out"
        )
    check_int8(run.spec, device, sharded=False)


def check_rollout_layout(run: RunConfig, reward_models: Mapping[str, ModelSource]) -> None:
    """Raise ValueError if the tensor parallelism of rollouts (--rollout.tp, else the layout's) does
    not divide the number of processes, or does not fit the model, or the run's layout does not
    divide one of the reward models (name -> source).
    """
    world, tp = run.layout.world, run.rollout.tp or run.layout.tp
    if world % tp:
        raise ValueError(
            f"rollout.tp ({tp}) is not a divisor of the run's "
            f"{plural(world, 'process', 'processes')}: set another --rollout.tp"
        )
    layouts = {f"--rollout.tp {tp}": (Layout(tp=tp, dp=world // tp), run.spec)}
    layouts |= {f"--reward {n}": (run.layout, source.spec) for n, source in reward_models.items()}
    for option, (layout, spec) in layouts.items():
        try:
            layout.check_model(spec)
        except ValueError as error:
            raise ValueError(f"{option}: {error}") from None


def check_group_size(config: RolloutConfig) -> None:
    """Raise ValueError if there is one completion per prompt (--rollout.num-generations 1), and the
    advantage estimator compares the completions of a prompt, or groups with equal rewards are to be
    resampled.
    """
    if config.num_generations < 2 and config.advantage_estimator in GROUP_ESTIMATORS:
        raise ValueError(
            f"rollout.num-generations ({config.num_generations}) must be at least 2: "
            f"rollout.advantage-estimator {config.advantage_estimator} compares completions of a "
            "prompt; use reinforce-plus-plus for single completions"
        )
    if config.num_generations < 2 and config.max_resamples:
        raise ValueError(
            f"rollout.max-resamples ({config.max_resamples}) replaces groups with equal rewards, "
            f"but with rollout.num-generations {config.num_generations} every group has equal "
            "rewards: set --rollout.max-resamples 0, or more generations"
        )


def check_ppo(resolved: ResolvedRun) -> None:
    """Raise ValueError for options of PPO with another objective, for options of GRPO with PPO, for
    a warm-up as long as the run, a KL horizon that may flip the coefficient's sign, and a critic
    that does not fit.
    """
    run = resolved.config
    if run.objective.name != "ppo":
        for section, default in (("ppo", PPOConfig()), ("critic", CriticConfig())):
            if vars(run)[section] != default:
                raise ValueError(
                    f"{section} is for PPO, but objective.name is {run.objective.name}: use "
                    "dolmen train ppo, or leave it out"
                )
        return
    for name in REPLACED_BY_CRITIC:
        value = vars(run.rollout)[name]
        if value != vars(RolloutConfig)[name]:
            raise ValueError(
                f"rollout.{name.replace('_', '-')} is {value}, which is for grpo: leave it out "
                "(see --ppo.*)"
            )
    if run.critic.warmup_steps and run.steps is not None and run.critic.warmup_steps >= run.steps:
        raise ValueError(
            f"critic.warmup-steps ({run.critic.warmup_steps}) covers all of the run's {run.steps} "
            "steps, so the policy is never trained: use fewer, or more --train.steps"
        )
    completions = run.rollout.completions(run.train.global_batch_size)
    if run.ppo.kl_target is not None and run.ppo.kl_horizon <= MAX_KL_ERROR * completions:
        raise ValueError(
            f"ppo.kl-horizon ({run.ppo.kl_horizon:g}) is too short: an iteration of {completions} "
            "completions could make ppo.kl-coef negative; use more than "
            f"{MAX_KL_ERROR * completions:g}"
        )
    check_critic(resolved)


def check_critic(resolved: ResolvedRun) -> None:
    """Raise ValueError if the model of --critic.init has another vocabulary size or shape than the
    policy (their heads may differ).
    """
    run = resolved.config
    if run.critic.init is None or resolved.critic is None:
        return
    run.spec.check_same_vocabulary(f"critic.init {run.critic.init}", resolved.critic.spec)
    if differences := _shape_differences(run, resolved.critic):
        raise ValueError(
            f"critic.init {run.critic.init} has another shape than the model ({differences}): "
            "give one of the model's shape, or leave it out to start from the model's weights"
        )


def _shape_differences(run: RunConfig, source: ModelSource) -> str:
    """Return a text about the fields in which the shape of the model `source` differs from the
    run's model, ignoring the head; "" if it does not differ.
    """
    # any head will do, as the critic gets a scalar one
    body = replace(source.spec, head=run.spec.head)
    if body.params == run.spec.params:
        return ""
    fields = [f"{n} {a}, here {b}" for n, a, b in compare_fields(source.model, run.known_model)]
    return "; ".join(fields[:3]) or "other parameters"
