"""Rules on the length of a run and of its sequences, said once."""

from dataclasses import replace

from dolmen.training import folder
from dolmen.training.config import RunConfig


def check_length(config: RunConfig) -> None:
    """Raises ValueError for a sequence that is longer than the model's, for two options that say
    different things of the length of the run or of its warm-up, and for a step to be profiled that
    never comes.
    """
    config.check_length()
    check_agreement(config)
    if config.steps is not None:
        check_profile(config, config.steps)


def check_agreement(config: RunConfig) -> None:
    """Raises ValueError, with the numbers, where two options say different things of how long the
    run or its warm-up is.
    """
    train, optimizer, each = config.train, config.optimizer, config.tokens_per_step
    a_step = (
        f"a step has {each:,} tokens ({train.global_batch_size} sequences of "
        f"{config.sequence_length})"
    )
    if train.epochs is not None and (train.steps is not None or train.tokens is not None):
        other = "tokens" if train.steps is None else "steps"
        raise ValueError(
            f"train.epochs ({train.epochs:g}) and train.{other} ({getattr(train, other):,g}) each "
            f"say how long the run is: leave one out, or set --train.{other} None"
        )
    if train.steps is not None and train.tokens is not None:
        steps = replace(config, train=replace(train, steps=None)).steps
        if steps != train.steps:
            raise ValueError(
                f"train.steps is {train.steps:,}, and train.tokens ({train.tokens:,g}) are "
                f"{steps:,}: {a_step}; leave one out, or set --train.steps {steps}"
            )
    if optimizer.warmup_steps and optimizer.warmup_tokens is not None:
        if config.warmup_steps != optimizer.warmup_steps:
            raise ValueError(
                f"optimizer.warmup-steps is {optimizer.warmup_steps:,}, and "
                f"optimizer.warmup-tokens ({optimizer.warmup_tokens:,g}) are "
                f"{config.warmup_steps:,g}: {a_step}; leave one out, or set "
                "--optimizer.warmup-steps 0"
            )


def check_profile(config: RunConfig, steps: int) -> None:
    """Raises Unusable where a run of so many steps never comes to the one to be profiled."""
    if config.log.profile is not None and config.log.profile > steps:
        raise folder.Unusable(
            f"log.profile ({config.log.profile}) is over the run's {steps} steps: use "
            f"--log.profile {steps} or less, or --train.steps {config.log.profile} or more"
        )
