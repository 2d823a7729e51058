"""Which rules a run is checked by, in order: before any process starts and before anything is
written.
"""

from dolmen.training import loggers
from dolmen.training.checks import evaluation, length, model, objective, precision, rollout
from dolmen.training.config import RunConfig
from dolmen.training.resolve import ResolvedRun


def validate(resolved: ResolvedRun) -> None:
    """Raises ValueError or KeyError for a run that cannot be trained."""
    validate_computation(resolved)
    model.check_adapter(resolved.config)
    check_programs(resolved.config)
    model.check_init(resolved)
    model.check_moments(resolved)
    model.check_new_rows(resolved)


def validate_computation(resolved: ResolvedRun) -> None:
    """Raises ValueError for what cannot be computed, whatever the initial model and the data are:
    all that a dry run checks.
    """
    config = resolved.config
    evaluation.check_finish(config)
    if config.tree.blanks is not None:
        config.tree.blanks.check()
    length.check_length(config)
    rollout.check_rollout(resolved)
    rollout.check_ppo(resolved)
    objective.check_objective(resolved)
    precision.check_layout(config)
    precision.check_precision(config)


def check_programs(config: RunConfig) -> None:
    """Raises ValueError where a program that is to get numbers is not installed."""
    if lacking := loggers.missing(config.log.programs):
        raise ValueError(
            f"log.to has {lacking[0]}, which is not installed: pip install 'dolmen[log]', or leave "
            "it out of --log.to"
        )
