"""Checks the options of lm_eval's tasks before anything is loaded, and tabulates
their scores. Only harness.py imports lm_eval.
"""

from collections.abc import Mapping
from importlib.util import find_spec

from rich.table import Table

from dolmen.data.tokenizer import PreTrainedTokenizer
from dolmen.evaluation.config import TasksConfig
from dolmen.evaluation.model import Loaded

Scores = Mapping[str, Mapping[str, float]]
"""Task -> metric, as lm_eval names both -> number."""


def check_tasks(config: TasksConfig) -> None:
    """Raise ValueError where --tasks is empty, lm_eval is not installed, or it does not know a
    task.
    """
    if not config.names:
        raise ValueError("--tasks is empty: give comma-separated names")
    if find_spec("lm_eval") is None:
        raise ValueError(
            "--tasks needs lm_eval, which is not installed: pip install 'dolmen[tasks]'"
        )
    from dolmen.evaluation import harness  # an extra, and seconds to import

    harness.load_task_manager(config)


def scores(loaded: Loaded, tokenizer: PreTrainedTokenizer, config: TasksConfig) -> Scores:
    """Run the configured lm_eval tasks and return task -> metric -> value (see harness.scores).
    Collective.
    """
    from dolmen.evaluation import harness  # an extra, and seconds to import

    return harness.scores(loaded, tokenizer, config)


def table(results: Scores) -> Table:
    """Return the scores as a table for a rich console."""
    grid = Table("task", "metric", box=None, padding=(0, 2, 0, 0))
    grid.add_column("", justify="right")
    for task, numbers in results.items():
        for name, value in numbers.items():
            grid.add_row(task, name.removesuffix(",none"), f"{value:.4f}")
    return grid
