"""Metrics of a run on disk and elsewhere: metrics.jsonl, history.jsonl, loss.png, and the
experiment trackers of --log.to (TensorBoard, W&B, trackio).

metrics.jsonl is the record: a row per logged step, a row per validation. Everything else can be
made from it. history.jsonl has what is not a number per step: starts, resumes, saves, memory per
rank and load per expert (some ten times per run). `dolmen show` draws both.

    {"step": 0, "time": 1.7e9, "begun": "new", "steps": 500, "processes": 4, ...}
    {"step": 50, "time": 1.7e9, "memory_gib": [1.2, 1.3, 1.2, 1.2], "router_load": {"3": [...]}}
    {"step": 50, "time": 1.7e9, "saved": true}
    {"step": 500, "time": 1.7e9, "ended": "done"}

A run that resumes from step 40 drops later rows of metrics.jsonl, whose steps it repeats.
history.jsonl is append-only: the rows of repeated steps stay, before the row of the new start.

A tracker cannot stop or delay a run: each has a thread, and one that raises, hangs or falls behind
is reported once and gets no more rows. W&B works offline: without a key, and unless WANDB_MODE is
set, it writes to ./wandb, for `wandb sync`. Destinations come from the trackers' own environment
variables (WANDB_DIR, WANDB_PROJECT, TRACKIO_DIR, ...).
"""

import json
import math
import os
import secrets
import shutil
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from importlib.util import find_spec
from itertools import groupby
from operator import itemgetter
from pathlib import Path
from queue import Full, Queue
from threading import Thread
from typing import Any, NamedTuple, Protocol

import torch

from dolmen.checkpoint import folders
from dolmen.core import collectives, device
from dolmen.core.mesh import Mesh
from dolmen.core.messages import plural
from dolmen.files import gate, kinds, write
from dolmen.files.write import Tail
from dolmen.pages import picture
from dolmen.training.config import TRACKER_NAMES

POSITION_FIELDS = ("step", "time")
"""Fields of a row that give its position, not a metric."""


def read_metrics(file: Path) -> list[dict]:
    """Return the rows of a metrics.jsonl up to the first damaged line; [] where the file does not
    exist. Raises Refused where the path is not a file.
    """
    rows: list[dict] = []
    if not file.exists():
        return rows
    try:
        rows.extend(row for _, row in gate.read_json_lines(file, kinds.METRICS_ROW))
    except gate.RefusedLine:
        pass
    return rows


class MetricsFile:
    """metrics.jsonl, opened to append: one object per logged step, one per validation.

    Opened at step s it drops the rows of later steps, which a resumed run repeats; at step 0 it
    drops all. A file with a damaged line before its last one is first copied to
    metrics.damaged.jsonl (-2, -3), as intact rows may follow the damage.
    """

    def __init__(self, file: Path, step: int):
        """Open metrics.jsonl to append to, after dropping the rows of steps after `step`, all for
        0; a file that is damaged before its last line is first copied to metrics.damaged.jsonl.
        """
        rows = read_metrics(file)
        earlier = [row for row in rows if row["step"] <= step] if step else []
        self.reached = max((row["step"] for row in rows), default=step)
        """The last step that had been reported before."""
        # one line more than rows: the last one was cut by a crash, and has nothing after it to keep
        if file.exists() and sum(1 for _ in file.open("rb")) > len(rows) + 1:
            damaged_copy = folders.free(file.with_suffix(".damaged.jsonl"))
            with open(file, "rb") as old, open(damaged_copy, "xb") as copy:
                shutil.copyfileobj(old, copy)
        write.replace(file, "".join(json.dumps(row) + "\n" for row in earlier))
        self.handle = write.append(file)

    def write(self, row: dict) -> None:
        """Append a row to metrics.jsonl; numbers that are not finite become null."""
        row = {name: value if math.isfinite(value) else None for name, value in row.items()}
        self.handle.write(json.dumps(row, allow_nan=False) + "\n")

    def close(self) -> None:
        """Close the file."""
        self.handle.close()


MetricsCallback = Callable[[Mapping[str, float]], None]
"""Called with each row of metrics.jsonl as it is written: `step`, and metrics by name."""


class CallbackWriter:
    """Passes rows of metrics to a function."""

    def __init__(self, function: MetricsCallback):
        """Pass each row of metrics that is written to `function`."""
        self.write = function

    def close(self) -> None:
        """Do nothing: a function needs no closing."""


Completions = Sequence[Mapping[str, Any]]
"""Rows of rollouts/completions.jsonl. Their `step` is that at which their iteration begins: the
first update that reads them is the next one.
"""
COLUMNS = ("step", "prompt", "completion", "reward", "tokens", "finished")


def completion_as_markdown(row: Mapping[str, Any]) -> str:
    """Return a sampled completion as Markdown: reward, length and whether it is finished, then
    prompt and completion as code blocks, so that nothing in them is markup. `row`: of
    completions.jsonl.
    """
    reward = f"reward {row['reward']:.4g}" if "reward" in row else "no reward"
    end = "finished" if row["finished"] else "truncated"
    facts = f"**{reward}, {plural(row['tokens'], 'token')}, {end}**"
    prompt, completion = (
        "\n".join(f"    {line}" for line in row[name].splitlines())
        for name in ("prompt", "completion")
    )
    return "\n\n".join([facts, "prompt:", prompt, "completion:", completion])


class TensorBoard:
    """Writes metrics as TensorBoard events; a run that resumes purges those of later steps."""

    notice = ""

    def __init__(self, run: "TrackedRun"):
        """Open a file of events in the run's folder `tensorboard`; events of steps after the one
        that it resumes from are hidden.
        """
        from torch.utils.tensorboard import SummaryWriter

        # purge_step hides the events of steps that will be repeated
        purge = run.step + 1 if run.step else None
        self.writer = SummaryWriter(str(run.out / FOLDER), purge_step=purge)

    def write(self, row: Mapping[str, float]) -> None:
        """Write each metric of a row as a scalar at the row's step."""
        for name, value in row.items():
            if name not in POSITION_FIELDS:
                self.writer.add_scalar(name, value, row["step"])

    def write_completions(self, rows: Completions) -> None:
        """Write sampled completions as text (Markdown), at the step of the first update of their
        iteration.
        """
        # rows are of few iterations: those sampled since the last logged step
        steps = {row["step"] for row in rows}
        for step in sorted(steps):
            texts = [completion_as_markdown(row) for row in rows if row["step"] == step]
            self.writer.add_text("completions", "\n\n".join(texts), step + 1)

    def close(self) -> None:
        """Write what is pending, and close the file of events."""
        self.writer.close()


def plot(file: Path, to: Path, title: str) -> None:
    """Draw training loss, its running mean, validation loss and learning rate over tokens, from the
    rows of a metrics.jsonl (`file`), and write the picture as PNG to `to`. Nothing is written if
    the file has no training loss.
    """
    rows = read_metrics(file)
    if any(row.get("loss") is not None for row in rows):
        write.replace(to, picture.draw(_paint_losses, rows, title, kind="png"))


def _paint_losses(figure: Any, rows: Sequence[Mapping[str, Any]], title: str) -> None:
    """Draw the losses and learning rates of rows of metrics.jsonl on a matplotlib figure."""
    train = [r for r in rows if r.get("loss") is not None]
    tokens = {r["step"]: r["tokens"] for r in train}
    x, y = [r["tokens"] / 1e6 for r in train], [r["loss"] for r in train]
    figure.set_size_inches(8, 4.5)
    # room for both axes' labels; a layout that finds it draws everything twice
    figure.set_layout_engine(None)
    axis = figure.subplots()
    figure.subplots_adjust(left=0.09, right=0.9, bottom=0.12, top=0.92)
    axis.plot(x, y, color="#b8c4d6", linewidth=0.8, label="training")
    axis.plot(x, _smooth(y), color=picture.BLUE, linewidth=1.8, label="training, running mean")
    validation = [r for r in rows if r.get("val_loss") is not None and r["step"] in tokens]
    if validation:
        x_held = [tokens[r["step"]] / 1e6 for r in validation]
        validation_losses = [r["val_loss"] for r in validation]
        axis.plot(
            x_held, validation_losses, "o-", color=picture.ORANGE, markersize=4, label="held out"
        )
    rate = axis.twinx()
    rate.plot(x, [r["lr"] for r in train], color=picture.GREEN, linewidth=1, linestyle="--")
    rate.set_ylabel("learning rate", color=picture.GREEN)
    rate.set_ylim(bottom=0)
    axis.set(xlabel="tokens (millions)", ylabel="loss (nats per token)", title=title)
    axis.grid()
    # on the upper of both axes and nearly opaque, as the learning rate may cross its words
    rate.legend(
        *axis.get_legend_handles_labels(),
        loc="upper right",
        frameon=True,
        framealpha=0.85,
        facecolor=picture.PAPER,
        edgecolor="none",
    )


def _smooth(values: list[float]) -> list[float]:
    """Return the exponential running mean of the values, over about a twentieth of them, with bias
    correction at the start.
    """
    # bias correction as Adam's: divide by the weight that the mean has received
    keep = 1 - 1 / max(2, len(values) / 20)
    mean, weight, out = 0.0, 0.0, []
    for v in values:
        mean, weight = keep * mean + (1 - keep) * v, keep * weight + 1 - keep
        out.append(mean / weight)
    return out


HISTORY = "history.jsonl"


class HistoryFile:
    """history.jsonl, opened to append rows; with None, on all ranks but the first, nothing is
    written.
    """

    def __init__(self, file: Path | None):
        """Open history.jsonl to append to; a last line that a crash has cut is ended first. None:
        nothing is opened or written.
        """
        self.handle = None if file is None else write.append(file)
        if self.handle is not None and file is not None and _is_cut(file):
            self.handle.write("\n")  # a crash has cut the last row short: it ends here

    def add(self, step: int, row: Mapping[str, Any]) -> None:
        """Append a row with `step`, the time and the entries of `row` (plain values) to
        history.jsonl, on the rank that has opened it. Raises ValueError for NaN and infinity.
        """
        if self.handle is not None:
            full = {"step": step, "time": time.time(), **row}
            self.handle.write(json.dumps(full, allow_nan=False) + "\n")

    def close(self) -> None:
        """Close the file, if it was opened."""
        if self.handle is not None:
            self.handle.close()


def _is_cut(file: Path) -> bool:
    """Return whether the file's last line has no newline, as after a crash while writing."""
    with open(file, "rb") as stream:
        if stream.seek(0, os.SEEK_END) == 0:
            return False
        stream.seek(-1, os.SEEK_END)
        return stream.read(1) != b"\n"


def run_id(file: Path, step: int) -> str:
    """Return the id by which experiment trackers know the run: if it resumes from `step` > 0, the
    last one in its history.jsonl, `file`; otherwise, or without one, a new random id.
    """
    rows = list(Tail(file, kinds.HISTORY_ROW).read()) if step else []
    ids = [row["run_id"] for row in rows if "run_id" in row]
    return ids[-1] if ids else secrets.token_hex(8)


def gather_ranks(value: float, mesh: Mesh) -> list[float]:
    """Return the `value` of every rank, in the order of ranks, on every rank. A collective."""
    # an all-reduce of one-hot rows is a gather for which every backend has a collective
    mine = torch.zeros(mesh.size, dtype=torch.float64, device=mesh.device)
    mine[mesh.rank] = value
    return device.read_back(collectives.reduce_scalar(mine, mesh.world))


PROJECT = "dolmen"
FOLDER = "tensorboard"
CLOSE_SECONDS = 60.0
"""Seconds that a program has at the end of a run."""
MAX_QUEUED = 10_000
"""Rows that it may be behind."""


class TrackedRun(NamedTuple):
    """The description of a run that experiment trackers get."""

    out: Path
    name: str
    identity: str
    """The same in all starts of a run, and in no other (history.jsonl)."""
    step: int
    """The step from which the run resumes: rows of later steps are repeated."""
    config: Mapping[str, Any]


class Logger(Protocol):
    """An experiment tracker."""

    notice: str
    """A message for the user, or an empty string."""

    def write(self, row: Mapping[str, float]) -> None:
        """Log the metrics of a row of metrics.jsonl at the row's step."""
        ...

    def write_completions(self, rows: Completions) -> None:
        """Log rows of sampled completions (prompt, completion, reward, ...)."""
        ...

    def close(self) -> None:
        """Write what is pending, and end the tracker."""
        ...


class _TableTracker:
    """Writes metrics, and tables of completions, through a run of W&B or trackio, which are alike
    in this. `run`: has their function `log`; `table`: makes a table of them.
    """

    run: Any
    table: Callable[..., Any]

    def write(self, row: Mapping[str, float]) -> None:
        """Log the metrics of a row of metrics.jsonl at the row's step."""
        self.run.log(_numbers(row), step=int(row["step"]))

    def write_completions(self, rows: Completions) -> None:
        """Log the sampled completions of each rollout iteration as a table, at the step of its
        first update.
        """
        data = [[row["step"] + 1, *(row.get(name) for name in COLUMNS[1:])] for row in rows]
        for step, group in groupby(data, key=itemgetter(0)):
            table = self.table(columns=list(COLUMNS), data=list(group))
            self.run.log({"completions": table}, step=step)


class WandB(_TableTracker):
    """Weights & Biases. Its steps can only rise, so rows of repeated steps are ignored by it and
    the old ones stay. Without a key the run is recorded offline, and `notice` explains how to
    upload it.
    """

    def __init__(self, run: TrackedRun):
        """Start the run in Weights & Biases, or resume it; offline if there is no API key."""
        import wandb

        self.table = wandb.Table
        settings = wandb.setup().settings
        # the user has set WANDB_MODE: no login is tried
        chosen = settings.mode != "online"  # which it is by itself
        authorized = chosen or wandb.login(prompt=False, verify=False)
        self.run = wandb.init(
            project=settings.project or PROJECT,
            name=run.name,
            id=run.identity,
            resume="allow" if run.step and authorized and not chosen else None,
            mode=None if authorized else "offline",
            config=dict(run.config),
            settings=wandb.Settings(console="off", silent=True),
        )
        where = self.run.settings.sync_dir
        self.notice = (
            ""
            if authorized
            else (
                "wandb: no API key, so the run is recorded offline; upload it with: wandb sync "
                f"{where}"
            )
        )

    def close(self) -> None:
        """Upload what is pending, and end the run in W&B."""
        self.run.finish()


class Trackio(_TableTracker):
    """trackio. Rows of repeated steps are added to those that it has: it keeps both."""

    notice = ""

    def __init__(self, run: TrackedRun):
        """Start the run in trackio, or resume it."""
        import trackio

        self.table = trackio.Table
        self.run = trackio.init(
            project=PROJECT,
            # trackio identifies runs by name, so the name has to be unique
            name=f"{run.name}-{run.identity[:6]}",
            config=dict(run.config),
            resume="allow" if run.step else "never",
            embed=False,
            auto_log_gpu=False,
            auto_log_cpu=False,
        )

    def close(self) -> None:
        """End the run in trackio."""
        import trackio

        trackio.finish()  # of itself, the run would be finished once more as Python ends


TRACKERS: dict[str, Callable[[TrackedRun], Logger]] = dict(
    zip(TRACKER_NAMES, (TensorBoard, WandB, Trackio), strict=True)
)


class TrackerThread:
    """Runs one tracker of TRACKERS in a thread of its own, fed by a queue: the run never waits for
    it, except CLOSE_SECONDS at its end. The first error, or a queue that is full, ends it; `report`
    is called once with the reason.
    """

    def __init__(self, name: str, run: TrackedRun, report: Callable[[str], None]):
        """Start the thread of the tracker `name` (tensorboard, wandb or trackio) for the run.
        `report`: called with messages for the user.
        """
        self.name, self.report = name, report
        self.failed = False
        # daemon: a tracker that hangs does not keep the process alive
        self.rows: Queue[Mapping[str, float] | Completions | None] = Queue(MAX_QUEUED)
        self.thread = Thread(target=self._live, args=(run,), name=f"log to {name}", daemon=True)
        self.thread.start()

    def write(self, row: Mapping[str, float]) -> None:
        """Queue a row of metrics for the tracker's thread, without waiting."""
        self._enqueue(row)

    def write_completions(self, rows: Completions) -> None:
        """Queue rows of sampled completions for the tracker's thread, without waiting."""
        self._enqueue(rows)

    def _enqueue(self, row: Mapping[str, float] | Completions) -> None:
        """Queue a row of metrics or rows of completions without waiting. A full queue ends the
        tracker with a warning; after that nothing is queued.
        """
        if self.failed:
            return
        try:
            self.rows.put_nowait(row)
        except Full:
            self._fail(f"it is {MAX_QUEUED:,} rows behind")

    def close(self) -> None:
        """Let the tracker's thread write what is queued and close, and wait for it for 60 s at
        most; report a tracker that has not ended by then.
        """
        if self.failed:
            return
        try:
            self.rows.put_nowait(None)
        except Full:
            return self._fail(f"it is {MAX_QUEUED:,} rows behind")
        # None, queued above, ends the thread when all before it is written
        self.thread.join(CLOSE_SECONDS)
        if self.thread.is_alive():
            self._fail(f"it has not ended within {CLOSE_SECONDS:g} s")

    def _live(self, run: TrackedRun) -> None:
        """Run the tracker's thread: open the tracker, write what is queued until None comes, close
        it. Any exception is reported and ends the thread.
        """
        try:
            logger = TRACKERS[self.name](run)
            if logger.notice:
                self.report(logger.notice)
            while (row := self.rows.get()) is not None:
                if isinstance(row, Mapping):
                    logger.write(row)
                else:
                    logger.write_completions(row)
            logger.close()
        except Exception as error:  # of a program of others, that a run does not depend on
            self._fail(" ".join(f"{type(error).__name__}: {error}".split())[:300])

    def _fail(self, why: str) -> None:
        """Queue no more rows for the tracker, and report the reason `why`; only the first call does
        anything.
        """
        if not self.failed:
            self.failed = True
            self.report(
                f"WARNING: {self.name} is no longer logged to ({why}); metrics.jsonl has all "
                "metrics"
            )


def not_installed(names: Iterable[str]) -> list[str]:
    """Return those of the trackers, by package name, whose package is not installed."""
    return [name for name in names if find_spec(name) is None]


def _numbers(row: Mapping[str, float]) -> dict[str, float]:
    """Return the metrics of a row of metrics.jsonl, without its step and time."""
    return {name: value for name, value in row.items() if name not in POSITION_FIELDS}
