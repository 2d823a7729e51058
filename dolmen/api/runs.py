"""A run, and the page of several: `train`, `show`."""

import math
from os import PathLike
from pathlib import Path, PosixPath
from typing import Any

from dolmen.api.asked import asked_of, in_keywords, value_errors
from dolmen.core.filesystem import expand
from dolmen.core.messages import BadInput
from dolmen.recipes.changed import request
from dolmen.training import worker
from dolmen.training.config import RunConfig
from dolmen.training.metrics import read_metrics
from dolmen.watching import page
from dolmen.watching.config import ShowConfig


class RunFolder(PosixPath):
    """The folder of a run, a Path, with the numbers that the run has recorded so far."""

    @property
    def history(self) -> list[dict[str, Any]]:
        """The rows of metrics.jsonl: `step`, `loss`, `grad_norm`, `lr` and so on of each logged
        step, `val_loss` of each validation. A number that is not finite is None.
        """
        return read_metrics(self / "metrics.jsonl")

    @property
    def losses(self) -> list[float]:
        """The training loss of each logged step (`log.every`), those before a resume included; NaN
        where it was not finite.
        """
        losses = [row["loss"] for row in self.history if "loss" in row]
        return [math.nan if loss is None else loss for loss in losses]


def train(recipe: str | PathLike | RunConfig, **changes: Any) -> RunFolder:
    """Train a recipe, the run of a YAML file or a RunConfig, with `changes`: options of `dolmen
    train` as keywords, those of a section in a mapping. Returns the run's folder, a Path that has
    `losses`, the training loss of each logged step, and `history`, all rows of metrics.jsonl.

        run = dolmen.train("quickstart", train={"steps": 50}, layout={"tp": 1}, overwrite=True)
        print(run.losses[0], run.losses[-1])

    Starts as many processes as the layout needs; a run of one process is this process. Raises
    ValueError on bad input, KeyboardInterrupt after Ctrl-C and SystemExit after SIGTERM (saved
    first), RuntimeError if another process fails, and what is raised in this one.
    """
    with value_errors():
        asked = request(recipe, changes)
    try:
        code = worker.run(asked)
    except BadInput as error:
        raise ValueError(in_keywords(str(error), {})) from None
    if code == 130:
        raise KeyboardInterrupt
    if code == 143:
        raise SystemExit(code)
    if code:
        raise RuntimeError(f"the run ended with exit code {code}")
    return RunFolder(asked.out)


def show(*runs: str | PathLike, out: str | PathLike = "show.html") -> Path:
    """`dolmen show RUN ...`: the page of these runs, in the file `out`, which is returned. Raises
    ValueError for a folder that holds no run, and a file that is no such page.

        dolmen.show("runs/one", "runs/two", out="both.html")
    """
    with value_errors({"out": "out"}):
        asked = asked_of(ShowConfig, runs=[str(one) for one in runs], out=out)
        return page.write_page([expand(name) for name in asked.runs], Path(asked.out))
