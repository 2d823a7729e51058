"""Measuring and comparing models: `evaluate`, `evaluate_tasks`, `verify` and `diff`."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from dolmen.api.options import DATA_KEYWORDS, build_config, value_errors
from dolmen.comparison import diff as comparison
from dolmen.comparison.config import DiffConfig
from dolmen.comparison.diff import DiffReport
from dolmen.conversion.source import open_source
from dolmen.evaluation import model, perplexity
from dolmen.evaluation import tasks as harness
from dolmen.evaluation import verify as verification
from dolmen.evaluation.config import EvaluateConfig, VerifyConfig
from dolmen.evaluation.verify import VerifyReport
from dolmen.families import unknown

COMMAND_ONLY = ("json", "device", "layout")
"""Options of `dolmen evaluate` without an effect in this process."""
TASK_OPTIONS = ("tasks", "num_fewshot", "limit", "apply_chat_template", "tasks_path")


def evaluate(
    source: str | Path,
    path: str | Path | Sequence[str | Path],
    *,
    progress: bool = True,
    **options: Any,
) -> perplexity.Evaluation:
    """Measure loss, perplexity and bits per byte of a model (a transformers directory, hub id, run
    or checkpoint) over all of a text, as `dolmen evaluate SOURCE --data.path PATH` does, in this
    process, on the CPU. `path` is what --data.path takes, or several; options are those of the
    command. `progress` shows a bar on stderr. Raises ValueError on bad input.

        print(dolmen.evaluate("path/to/model", "book.txt").bits_per_byte)
    """
    with value_errors(DATA_KEYWORDS):
        config = build_config(
            EvaluateConfig, (*COMMAND_ONLY, *TASK_OPTIONS), source=source, path=path, **options
        )
        opened = open_source(config.source)
        # tokenized before the model is loaded
        text = perplexity.open_text(opened, config.data, config.window, config.stride, progress)
        unknown.warn(opened.model)
        return perplexity.evaluate(
            model.load(opened, dtype=config.dtype, weights=config.weights), text, progress
        )


def evaluate_tasks(
    source: str | Path,
    tasks: str | Sequence[str],
    **options: Any,
) -> Mapping[str, Mapping[str, float]]:
    """Run tasks of lm_eval on a model, as `dolmen evaluate SOURCE --tasks TASKS` does, in this
    process, on the CPU. Returns task -> metric -> value, by lm_eval's names. `tasks`: names,
    separated by commas or as a list; options are those of the command. Raises ValueError on bad
    input, and where lm_eval is not installed.

        dolmen.evaluate_tasks("path/to/model", "arc_easy,piqa")["piqa"]["acc,none"]
    """
    with value_errors(DATA_KEYWORDS):
        # as --tasks has it
        names = tasks if isinstance(tasks, str) else ",".join(tasks)
        config = build_config(EvaluateConfig, COMMAND_ONLY, source=source, tasks=names, **options)
        harness.check_tasks(config)
        opened = open_source(config.source)
        tokenizer = model.tokenizer_of(config, opened)
        unknown.warn(opened.model)
        # only now: tasks, their data and the tokenizer have been checked
        return harness.scores(
            model.load(opened, dtype=config.dtype, weights=config.weights), tokenizer, config
        )


def verify(folder: str | Path, against: str | Path | None = None, length: int = 64) -> VerifyReport:
    """Compare dolmen's computation of the model in `folder` with that of transformers on the model
    `against` (None: the same folder), on `length` random tokens in float32, in this process:
    logits, loss, gradients and greedy tokens, as `dolmen verify FOLDER` does. `report.ok` is True
    if all differences are within tolerance, `report.rows` has each of them. Raises ValueError on
    bad input.

        assert dolmen.verify("path/to/model").ok
    """
    with value_errors():
        config = build_config(VerifyConfig, folder=folder, against=against, length=length)
        source = open_source(config.folder)
        other = None if config.against is None else open_source(config.against)
        # warns once where both are the same
        for model in (source, other or source):
            unknown.warn(model.model)
        return verification.verify(source, other, length=config.length)


def diff(
    first: str | Path,
    second: str | Path = comparison.THEIRS,
    **options: Any,
) -> DiffReport:
    """Find the first tensor that differs between two computations of a model (weights, activations,
    gradients, an AdamW update, in this order), by default dolmen's and transformers', as `dolmen
    diff FIRST SECOND` does. `options` are those of the command: `a` and
    `b` set how each side is computed, `optimizer` the update, as mappings. `report.ok` is True if
    they agree, `report.first` is the first difference, `print(report)` explains both. Raises
    ValueError on bad input, RuntimeError if a worker process of a layout fails.

        print(dolmen.diff("path/to/model", a={"layout": {"tp": 2}, "dtype": "bfloat16"}))
    """
    with value_errors():
        # the report has as_dict
        config = build_config(DiffConfig, ("json",), first=first, second=second, **options)
        return comparison.diff(config)
