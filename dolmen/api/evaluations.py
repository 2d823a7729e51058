"""How good a model is: `evaluate`, `evaluate_tasks`."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from dolmen.api.asked import DATA, asked_of, value_errors
from dolmen.conversion.source import open_source
from dolmen.evaluation import perplexity
from dolmen.evaluation import tasks as harnessed
from dolmen.evaluation.config import EvaluateConfig
from dolmen.families import unknown

OF_COMMAND = ("json", "device", "layout")
"""Options of `dolmen evaluate` without an effect in this process."""
OF_TASKS = ("tasks", "num_fewshot", "limit", "apply_chat_template", "tasks_path")


def evaluate(
    source: str | Path,
    path: str | Path | Sequence[str | Path],
    *,
    progress: bool = True,
    **options: Any,
) -> perplexity.Evaluation:
    """`dolmen evaluate SOURCE --data.path PATH` in this process, on the CPU: how well a model (a
    transformers directory, hub id, run or checkpoint) foretells a text, over all of it. `path` is
    what --data.path takes, or several; options are those of the command. `progress` shows a bar on
    stderr. Raises ValueError on bad input.

        print(dolmen.evaluate("path/to/model", "book.txt").bits_per_byte)
    """
    with value_errors(DATA):
        asked = asked_of(
            EvaluateConfig, (*OF_COMMAND, *OF_TASKS), source=source, path=path, **options
        )
        text = perplexity.prepared(asked, progress)
        unknown.warn(open_source(asked.source).model)
        return perplexity.measured(asked, text, progress=progress)


def evaluate_tasks(
    source: str | Path,
    tasks: str | Sequence[str],
    **options: Any,
) -> Mapping[str, Mapping[str, float]]:
    """`dolmen evaluate SOURCE --tasks TASKS` in this process, on the CPU: task -> metric, as
    lm_eval names both -> number. Options are those of the command. Raises ValueError on bad input,
    and where lm_eval is not installed.

        dolmen.evaluate_tasks("path/to/model", "arc_easy,piqa")["piqa"]["acc,none"]
    """
    with value_errors(DATA):
        names = tasks if isinstance(tasks, str) else ",".join(tasks)
        asked = asked_of(EvaluateConfig, OF_COMMAND, source=source, tasks=names, **options)
        harnessed.check(asked)
        unknown.warn(open_source(asked.source).model)
        found = perplexity.load(asked)
        return harnessed.scores(found, perplexity.tokenizer_of(asked), asked)
