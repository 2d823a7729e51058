"""A plan as one page that opens anywhere: HTML with its pictures in it, no script and nothing to
fetch (report.html is its frame, figures.py draws).

Also checks all output files before the search, and writes --as-recipe.
"""

import shlex
from collections.abc import Callable
from dataclasses import replace
from html import escape
from pathlib import Path
from typing import Any, NamedTuple

import yaml

from dolmen.core.config import to_dict
from dolmen.core.filesystem import expand
from dolmen.core.log import size
from dolmen.core.messages import escape as printable
from dolmen.core.messages import os_error_as_value, plural
from dolmen.files import gate, write
from dolmen.pages import page as page_parts
from dolmen.pages.picture import inline_svg
from dolmen.planning import figures
from dolmen.planning.config import PlanConfig
from dolmen.planning.plan import Plan, command_options
from dolmen.planning.question import Question
from dolmen.planning.step import Estimate

FRAME = Path(__file__).with_name("report.html")
NAME = "index.html"


class ReportFigure(NamedTuple):
    """A figure of the report, with its heading and caption."""

    heading: str
    paint: Callable[[Any, Plan], None]
    """Draws the plan on a matplotlib figure."""
    caption: str


FIGURES = (
    ReportFigure(
        "Which layout",
        figures.paint_ranking,
        "Predicted time of a step, the fastest layouts first. The line is the 90 % interval of "
        "the time itself; errors of similar layouts are mostly alike. MFU counts only the "
        "floating-point operations of the model, relative to the datasheet's peak; memory is that "
        "of the fullest GPU.",
    ),
    ReportFigure(
        "Parts of a step",
        figures.paint_step,
        "Computation first, then communication that nothing hides (by axis of the mesh), then the "
        "bubble, in which a pipeline rank waits for others, and the optimizer.",
    ),
    ReportFigure(
        "Memory of a GPU",
        figures.paint_memory,
        "The fullest GPU of each pipeline rank at its fullest moment, for the best layout, below "
        "the limit of the device (dashed).",
    ),
    ReportFigure(
        "Memory along the schedule",
        figures.paint_memory_course,
        "Memory over the time of a step: activations are allocated by each forward and freed by "
        "its backward.",
    ),
    ReportFigure(
        "The schedule",
        figures.paint_timeline,
        "Actions of each pipeline rank over time. Numbers are microbatches. Of a long steady "
        "state only a part is simulated, and of more actions than fit the picture only the "
        "beginning and the end are shown.",
    ),
    ReportFigure(
        "Traffic",
        figures.paint_traffic,
        "Bytes that one GPU sends in a step over each tier of the network, by mesh axis, and how "
        "long its link is busy with them, overlapped with computation or not.",
    ),
    ReportFigure(
        "GPUs, days and cost",
        figures.paint_front,
        "Each point is the best layout for a number of GPUs, trained for the token budget; filled "
        "points are on the Pareto front: no smaller fleet is as fast. Failures, restarts and "
        "checkpoints are not counted. Cost of owned nodes: depreciation and power.",
    ),
    ReportFigure(
        "The cluster",
        figures.paint_cluster,
        "How the GPUs of this plan are wired, from the highest switches that they need down to the "
        "GPUs of one node.",
    ),
)


def page_path(report: str) -> Path:
    """Return the file of the page for a value of --report: the value if it ends in .html, else
    index.html in this folder.
    """
    path = expand(report)
    return path if path.suffix == ".html" else path / NAME


def write_report(plan: Plan, to: Path) -> None:
    """Write the page to the file `to`, whose folder is created if necessary. Raises OSError."""
    # `check` has found that the page does not exist
    to.parent.mkdir(parents=True, exist_ok=True)
    # can be written again at any time, so no fsync
    write.replace(to, page(plan), lasting=False)


def page(plan: Plan) -> str:
    """Return the report of a plan as an HTML page."""
    drawings = "\n".join(
        _figure_html(number, figure, plan) for number, figure in enumerate(FIGURES, 1)
    )
    cluster = plan.cluster
    under = (
        f"{plural(plan.gpus, 'GPU')} of {cluster.name} ({cluster.device.name}), "
        f"{plan.global_batch_size:,} sequences of {plan.sequence_length:,} tokens per step"
    )
    return page_parts.fill(
        FRAME,
        title=escape(f"{plan.model} on {cluster.name}"),
        under=escape(under),
        summary=_summary(plan),
        figures=drawings,
    )


def _figure_html(number: int, figure: ReportFigure, plan: Plan) -> str:
    """Return heading, drawing and caption of a figure as HTML."""
    caption = f"<b>Figure {number}.</b> {escape(figure.caption)}"
    picture = inline_svg(figure.heading, figure.paint, plan)
    return f"<h2>{escape(figure.heading)}</h2>\n{page_parts.figure(number, picture, caption)}"


def _summary(plan: Plan) -> str:
    """Return the plan's main numbers as an HTML table, and the options of the best layout."""
    # ranked by predicted time
    best = plan.ranked[0]
    estimate, days = best.estimate, plan.days(best.estimate)
    # GiB
    free = (plan.cluster.device.memory - best.fullest) / 2**30
    # the numbers that a reader looks for first
    rows = {
        "parameters": f"{size(plan.parameters)} ({plan.parameters:,})",
        "best layout": f"{best.words}, bound by {best.bound}",
        "step": f"{_format_interval(estimate)} s, MFU {best.mfu:.1%}",
        "tokens per second": f"{plan.step_tokens / estimate.seconds:,.0f}",
        "memory of the fullest GPU": f"{best.fullest / 2**30:.1f} GiB, {free:.1f} GiB free",
        f"{size(plan.budget)} tokens": f"{_format_interval(days)} days",
        "layouts considered": f"{plan.considered:,}",
    }
    return f"{page_parts.table(rows.items())}\n<pre>{escape(command_options(best.layout))}</pre>"


def _format_interval(estimate: Estimate) -> str:
    """Format an estimate as "value (low to high)", three digits each."""
    return f"{estimate.seconds:.3g} ({estimate.low:.3g} to {estimate.high:.3g})"


RECIPE = "# Written by dolmen plan --as-recipe."
TOKENIZER = ("tokenizer.json", "tokenizer.model", "tokenizer_config.json")
"""Files of which a folder of transformers with a tokenizer has one."""


def check(options: PlanConfig) -> None:
    """Raise ValueError for a `dolmen plan` output file (--as-recipe, --json, --report) that exists
    or cannot be written, before anything is planned.
    """
    if options.as_recipe is not None:
        write.check_new("--as-recipe", options.as_recipe)
    write.check_json(options.json)
    if options.report is not None:
        write.check_new("--report", page_path(options.report), parents=True)


def write_recipe(question: Question, plan: Plan, file: Path) -> str:
    """Write the first layout as a run for the plan's tokens to `file`. Returns the command that
    trains it, with placeholders for data and tokenizer if they are missing. Raises ValueError where
    it cannot be written.
    """
    run = question.run_with_layout(plan.ranked[0].layout)
    if plan.tokens:
        # one length, that of the plan
        train = replace(run.train, tokens=plan.tokens, steps=None, epochs=None)
        run = replace(run, train=train)
    folder = Path(question.name)
    if run.data.tokenizer is None and any((folder / name).is_file() for name in TOKENIZER):
        # the model's folder has one
        run = replace(run, data=replace(run.data, tokenizer=str(folder.absolute())))
    # in the order of the options, as people read them
    text = gate.seal_yaml(yaml.safe_dump(to_dict(run), sort_keys=False))
    text = f"{RECIPE}\n{text}"
    with os_error_as_value(f"--as-recipe {file}"):
        write.replace(file, text)
    words = ["" if run.data.path else " --data.path TEXT"]
    words.append("" if run.data.tokenizer or run.init else " --data.tokenizer FOLDER")
    return f"dolmen train {shlex.quote(printable(file))}{''.join(words)}"
