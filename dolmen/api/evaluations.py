"""How good a model is: `evaluate`, `evaluate_tasks`."""

from collections.abc import Mapping, Sequence
from pathlib import Path

from dolmen.api.asked import asked_of, value_errors
from dolmen.conversion.source import open_source
from dolmen.evaluation import perplexity
from dolmen.evaluation import tasks as harnessed
from dolmen.evaluation.config import EvaluateConfig
from dolmen.families import unknown
from dolmen.recipes.changed import plain


def evaluate(
    source: str | Path,
    path: str | Path | Sequence[str | Path],
    *,
    window: int | None = None,
    stride: int | None = None,
    dtype: str | None = None,
    tokenizer: str | Path | None = None,
    end_of_text: str | None = None,
    text_field: str = "text",
    cache: str | Path | None = None,
    workers: int | None = None,
    progress: bool = True,
) -> perplexity.Evaluation:
    """`dolmen evaluate SOURCE --data.path PATH` in this process, on the CPU: how well a model (a
    transformers directory, hub id, run or checkpoint) foretells a text, over all of it. `path` is
    what --data.path takes, or several; options are those of the command. `progress` shows a bar on
    stderr. Raises ValueError on bad input.

        print(dolmen.evaluate("path/to/model", "book.txt").bits_per_byte)
    """
    data = {
        "path": path,
        "tokenizer": tokenizer,
        "end_of_text": end_of_text,
        "text_field": text_field,
        "cache": cache,
        "workers": workers,
    }
    with value_errors({f"data.{name}": name for name in data}):
        asked = asked_of(
            EvaluateConfig,
            source=source,
            window=window,
            stride=stride,
            dtype=dtype,
            data={name: plain(value) for name, value in data.items()},
        )
        text = perplexity.prepared(asked, progress)
        unknown.warn(open_source(asked.source).model)
        return perplexity.measured(asked, text, progress=progress)


def evaluate_tasks(
    source: str | Path,
    tasks: str | Sequence[str],
    *,
    num_fewshot: int | None = None,
    limit: float | None = None,
    apply_chat_template: bool = False,
    tasks_path: str | Path | None = None,
    dtype: str | None = None,
    tokenizer: str | Path | None = None,
) -> Mapping[str, Mapping[str, float]]:
    """`dolmen evaluate SOURCE --tasks TASKS` in this process, on the CPU: task -> metric, as
    lm_eval names both -> number. Options are those of the command. Raises ValueError on bad input,
    and where lm_eval is not installed.

        dolmen.evaluate_tasks("path/to/model", "arc_easy,piqa")["piqa"]["acc,none"]
    """
    with value_errors({"data.tokenizer": "tokenizer"}):
        names = tasks if isinstance(tasks, str) else ",".join(tasks)
        asked = asked_of(
            EvaluateConfig,
            source=source,
            tasks=names,
            num_fewshot=num_fewshot,
            limit=limit,
            apply_chat_template=apply_chat_template,
            tasks_path=tasks_path,
            dtype=dtype,
            data={"tokenizer": plain(tokenizer)},
        )
        harnessed.check(asked)
        unknown.warn(open_source(asked.source).model)
        found = perplexity.load(asked)
        return harnessed.scores(found, perplexity.tokenizer_of(asked), asked)
