"""Runs as one page that opens anywhere: HTML with its data, its style and its script in it, and
nothing to fetch (page.html is its frame, chart.js draws curves, page.js figures, tables.js the
rest).

Everything that comes from a run's files is in one block of JSON, in which nothing can end it; the
script sets it as text. A policy in the page's head lets no other script run.
"""

import base64
import hashlib
import json
from html import escape
from pathlib import Path
from typing import Any, NamedTuple

from dolmen.core.messages import os_error_as_value, plural
from dolmen.files import gate, write
from dolmen.pages.page import figure as figure_html
from dolmen.pages.page import fill
from dolmen.watching.run import WatchedRun, differing, labels

HERE = Path(__file__).parent
SCRIPTS = ("chart.js", "page.js", "tables.js")


class Figure(NamedTuple):
    """A figure of the page."""

    name: str
    """Name of the figure in page.js."""
    caption: str


class Group(NamedTuple):
    """Figures under one heading; small ones share a row, wide ones have one of their own."""

    heading: str
    figures: tuple[Figure, ...]


GROUPS = (
    Group(
        "Rollouts",
        (
            Figure("reward", "Mean reward of the completions of an iteration."),
            Figure("length", "Mean number of tokens of a completion."),
            Figure("finished", "Fraction of completions that end with an EOS token."),
        ),
    ),
    Group(
        "Loss",
        (
            Figure(
                "loss",
                "Training loss: all values, and a running mean over a twentieth of those shown. "
                "Open marks: validation loss. A cross at the top is a loss that was not finite.",
            ),
        ),
    ),
    Group(
        "Training",
        (
            Figure("rate", "Learning rate."),
            Figure("norm", "Gradient norm before clipping."),
            Figure("skipped", "Skipped steps (loss or gradient not finite, or a spike)."),
            Figure(
                "life",
                "Starts (bars) and checkpoints: filled marks are on disk, open ones have been "
                "deleted. Hatched: steps that were repeated after a restart.",
            ),
        ),
    ),
    Group(
        "Speed and memory",
        (
            Figure("speed", "Tokens per second of all processes, without validation."),
            Figure(
                "mfu", "Model FLOPs utilization, relative to the datasheet's or the measured peak."
            ),
            Figure("held", "Peak memory of the first rank so far."),
            Figure("ranks", "Peak memory of every rank, at the last report."),
        ),
    ),
    Group(
        "Experts",
        (
            Figure(
                "busiest", "Load of the busiest expert relative to the mean, in the worst layer."
            ),
            Figure("loads", "Tokens per expert (columns) and layer (rows) in one step."),
        ),
    ),
)
WIDE = ("loss", "life")
"""Figures that take the width of the page."""


class Watched:
    """Runs whose files are read anew for each page. Raises ValueError for a folder without a
    run.
    """

    def __init__(self, folders: list[Path]):
        names = labels(folders)
        self.runs = [WatchedRun(folder, name) for folder, name in zip(folders, names, strict=True)]

    def data(self) -> dict[str, Any]:
        """Read what is new, and return the data that the page draws: all runs, and the options that
        differ.
        """
        for run in self.runs:
            run.read()
        runs = [run.as_dict() for run in self.runs]
        return {"runs": runs, "differs": differing(runs)}

    def page(self, every: float | None = None) -> str:
        """Return the page as HTML. With `every`, for a page that is served, its script polls for
        new data every so many seconds; None for a file.
        """
        # the page is one file: style, script and data are written into it
        script = "\n".join(gate.read_text(HERE / name, gate.MIB) for name in SCRIPTS)
        # the hash by which the policy allows this script
        digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
        connect = "" if every is None else "; connect-src 'self'"
        names = ", ".join(run.label for run in self.runs)
        return fill(
            HERE / "page.html",
            gate.read_text(HERE / "page.css", gate.MIB),
            # the only script that may run is ours, by its hash; nothing may be fetched
            policy=f"default-src 'none'; style-src 'unsafe-inline'; img-src data:; "
            f"script-src 'sha256-{digest}'; base-uri 'none'; form-action 'none'{connect}",
            title=escape(names if len(self.runs) <= 4 else plural(len(self.runs), "run")),
            under=escape(", ".join(str(run.folder) for run in self.runs)),
            live="" if every is None else f' data-every="{every:g}"',
            figures="\n".join(map(_group, GROUPS)),
            data=escape_script_json(self.data()),
            script=script,
        )


def escape_script_json(value: Any) -> str:
    """Return JSON that can stand in a script element: characters that could end it are escaped."""
    # "</script>" in a prompt would end the element: no "<" is left
    text = json.dumps(value, allow_nan=False, separators=(",", ":"))
    return text.replace("&", "\\u0026").replace("<", "\\u003c").replace(">", "\\u003e")


def write_page(folders: list[Path], to: Path) -> Path:
    """Write the page of the runs in `folders` to a new file and return its path. Raises ValueError
    for a folder without a run, for a file that exists, and where it cannot be written.
    """
    to = write.check_new("--out", to)
    # folders are checked before the file is made
    watched = Watched(folders)
    with os_error_as_value(f"--out {to}"):
        write.replace(to, watched.page(), lasting=False)
    return to


def _group(group: Group) -> str:
    """Return the HTML of a group of figures: small ones in a grid, then wide ones."""
    wide = "\n".join(_figure(figure) for figure in group.figures if figure.name in WIDE)
    small = "\n".join(_figure(figure) for figure in group.figures if figure.name not in WIDE)
    grid = f'<div class="grid">\n{small}\n</div>\n' if small else ""
    return f"<section>\n<h2>{escape(group.heading)}</h2>\n{grid}{wide}\n</section>"


def _figure(figure: Figure) -> str:
    """Return the HTML of an empty figure, which the script fills."""
    empty = '<div class="plot"></div>\n<p class="read"></p>'
    return figure_html(figure.name, empty, escape(figure.caption))
