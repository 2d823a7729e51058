"""What a run leaves behind to look at: metrics.jsonl (the record), TensorBoard events and loss.png
(made from it).
"""

import json
import math
import shutil
from collections.abc import Mapping
from io import BytesIO
from pathlib import Path

from dolmen.checkpoint import folders
from dolmen.files import gate, kinds, write

PLACES = ("step", "time")
"""Of a row, what says where its numbers belong."""


def read_metrics(file: Path) -> list[dict]:
    """Rows of metrics.jsonl; from a line on that a crash has cut short or a disk has damaged, none.
    Raises Refused where the place is taken by what is no file.
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
    """metrics.jsonl: one object per logged step, one per validation. Opened at step s it keeps
    the rows up to s, at step 0 none: what a resumed run does again is not told twice. A file with a
    damaged line, the last aside, is kept as metrics.damaged.jsonl (-2, -3): whole rows may come
    after it.
    """

    def __init__(self, file: Path, step: int):
        rows = read_metrics(file)
        kept = [row for row in rows if row["step"] <= step] if step else []
        self.reached = max((row["step"] for row in rows), default=step)
        """The last step that had been told of before."""
        if file.exists() and sum(1 for _ in file.open("rb")) > len(rows) + 1:
            beside = folders.free(file.with_suffix(".damaged.jsonl"))
            with open(file, "rb") as old, open(beside, "xb") as copy:
                shutil.copyfileobj(old, copy)
        write.replace(file, "".join(json.dumps(row) + "\n" for row in kept))
        self.handle = write.append(file)

    def write(self, row: dict) -> None:
        """What is not finite is null: JSON has no word for it."""
        row = {name: value if math.isfinite(value) else None for name, value in row.items()}
        self.handle.write(json.dumps(row, allow_nan=False) + "\n")

    def close(self) -> None:
        self.handle.close()


class TensorBoard:
    """The same numbers as TensorBoard events in `folder`; a resumed run purges what it
    does again.
    """

    told = ""

    def __init__(self, folder: Path, step: int):
        from torch.utils.tensorboard import SummaryWriter

        self.writer = SummaryWriter(str(folder), purge_step=step + 1 if step else None)

    def write(self, row: Mapping[str, float]) -> None:
        for name, value in row.items():
            if name not in PLACES:
                self.writer.add_scalar(name, value, row["step"])

    def close(self) -> None:
        self.writer.close()


def plot(file: Path, to: Path, title: str) -> None:
    """loss.png: training loss, its running mean, validation loss and learning rate against
    tokens.
    """
    rows = read_metrics(file)
    train = [r for r in rows if r.get("loss") is not None]
    if not train:
        return
    tokens = {r["step"]: r["tokens"] for r in train}
    x, y = [r["tokens"] / 1e6 for r in train], [r["loss"] for r in train]
    # 0.4 s to import, for one rank; pyplot would choose a backend for all
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 4.5), dpi=120)
    axis = figure.subplots()
    # room for both axes' labels; a layout that finds it draws everything twice
    figure.subplots_adjust(left=0.09, right=0.88, bottom=0.12, top=0.92)
    axis.plot(x, y, color="#b8c4d6", linewidth=0.8, label="training")
    axis.plot(x, _smooth(y), color="#1f4e8c", linewidth=1.8, label="training, running mean")
    validation = [r for r in rows if r.get("val_loss") is not None and r["step"] in tokens]
    if validation:
        x_held = [tokens[r["step"]] / 1e6 for r in validation]
        held = [r["val_loss"] for r in validation]
        axis.plot(x_held, held, "o-", color="#c4501b", markersize=4, label="held out")
    rate = axis.twinx()
    rate.plot(x, [r["lr"] for r in train], color="#7a9e7e", linewidth=1, linestyle="--")
    rate.set_ylabel("learning rate", color="#5d805f")
    rate.set_ylim(bottom=0)
    axis.set(xlabel="tokens (millions)", ylabel="loss (nats per token)", title=title)
    axis.grid(alpha=0.25)
    axis.legend(loc="upper right", frameon=False)
    image = BytesIO()
    figure.savefig(image)
    write.replace(to, image.getvalue())


def _smooth(values: list[float]) -> list[float]:
    """Exponential running mean over about a twentieth of the run, corrected for its start."""
    keep = 1 - 1 / max(2, len(values) / 20)
    mean, weight, out = 0.0, 0.0, []
    for v in values:
        mean, weight = keep * mean + (1 - keep) * v, keep * weight + 1 - keep
        out.append(mean / weight)
    return out
