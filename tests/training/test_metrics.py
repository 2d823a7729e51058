"""metrics.jsonl, TensorBoard and loss.png: the record of a run."""

import json
import math
from itertools import count
from types import SimpleNamespace

import pytest
from matplotlib.figure import Figure

from dolmen.training import metrics
from dolmen.training.metrics import MetricsFile, TensorBoard, TrackedRun, plot, read_metrics


def row(step: int, **more) -> dict:
    return {
        "step": step,
        "loss": 5.0 / step,
        "lr": 1e-3,
        "tokens": step * 64,
        "time": 1e9 + step,
        **more,
    }


def write(file, *rows, at: int = 0) -> None:
    out = MetricsFile(file, at)
    for r in rows:
        out.write(r)
    out.close()


def test_rows_are_whole_lines_as_they_are_written(tmp_path):
    """Who reads during the run, or after a kill, finds every row that was written."""
    out = MetricsFile(tmp_path / "m.jsonl", 0)
    for step in (1, 2):
        out.write(row(step))
        assert read_metrics(tmp_path / "m.jsonl") == [row(i + 1) for i in range(step)]
    assert [json.loads(line) for line in (tmp_path / "m.jsonl").read_text().splitlines()] == [
        row(1),
        row(2),
    ]


def test_cut_back_to_the_resumed_step(tmp_path):
    """Rows of later steps, validations too, and a last line that a crash cut short go; those before
    stay byte for byte.
    """
    file = tmp_path / "m.jsonl"
    write(
        file,
        row(1),
        row(2),
        {"step": 2, "val_loss": 4.0},
        row(3),
        {"step": 3, "val_loss": 3.9},
        row(4),
    )
    before = file.read_text()
    file.write_text(before + '{"step": 5, "lo')
    write(file, row(3, again=1.0), at=2)
    assert (
        file.read_text()
        == "".join(before.splitlines(keepends=True)[:3]) + json.dumps(row(3, again=1.0)) + "\n"
    )
    write(file, at=0)
    assert file.read_text() == "" and list(tmp_path.iterdir()) == [file]
    assert read_metrics(tmp_path / "none.jsonl") == []


@pytest.mark.parametrize(
    "line", ('{"step": "x"}', '{"step": 3, "loss": 1.0}', "[" * 200_000, '{"step": 3, "loss": "x"}')
)
def test_a_damaged_line_ends_the_record_and_the_file_is_kept(tmp_path, line):
    file = tmp_path / "m.jsonl"
    write(file, row(1), row(2))
    file.write_text(file.read_text() + line + "\n" + json.dumps(row(4)) + "\n")
    before = file.read_text()
    assert read_metrics(file) == [row(1), row(2)]
    write(file, row(3), at=2)
    assert read_metrics(file) == [row(1), row(2), row(3)]
    assert (tmp_path / "m.damaged.jsonl").read_text() == before
    plot(file, tmp_path / "m.png", "m")
    file.write_text(line + "\n" + json.dumps(row(4)) + "\n")
    write(file, at=2)
    assert (tmp_path / "m.damaged.jsonl").read_text() == before
    assert (tmp_path / "m.damaged-2.jsonl").exists()


def test_json_has_no_word_for_infinity(tmp_path):
    write(
        tmp_path / "m.jsonl",
        row(1, grad_norm=math.inf),
        row(2) | {"loss": math.nan},
        row(3, grad_norm=-math.inf),
    )

    def refuse(word):
        raise ValueError(word)

    found = [
        json.loads(line, parse_constant=refuse)
        for line in (tmp_path / "m.jsonl").read_text().splitlines()
    ]
    assert [r.get("grad_norm", 0) for r in found] == [None, 0, None] and found[1]["loss"] is None


@pytest.mark.filterwarnings("error")  # a run would print them
def test_the_plot(tmp_path):
    """Of any record: with validations, without, of one step, of a diverged run; and of
    none, none.
    """
    for name, rows in {
        "whole": [row(i) for i in range(1, 50)] + [{"step": 10, "val_loss": 3.0}],
        "one": [row(1)],
        "diverged": [
            row(1),
            row(2) | {"loss": math.nan},
            {"step": 2, "val_loss": math.nan},
            row(3),
        ],
    }.items():
        write(tmp_path / f"{name}.jsonl", *rows)
        plot(tmp_path / f"{name}.jsonl", tmp_path / f"{name}.png", "a title")
        assert (tmp_path / f"{name}.png").read_bytes()[:4] == b"\x89PNG"
    write(tmp_path / "empty.jsonl")
    plot(tmp_path / "empty.jsonl", tmp_path / "empty.png", "a title")
    assert not (tmp_path / "empty.png").exists()


def test_the_learning_rate_does_not_cross_the_legend():
    """It is on the axes that are drawn last, and covers what is below."""
    figure = Figure()
    metrics._paint_losses(figure, [row(i) for i in range(1, 9)], "a title")
    losses, rate = figure.axes
    assert losses.get_legend() is None and losses.get_zorder() <= rate.get_zorder()
    frame = rate.get_legend().get_frame()
    assert frame.get_visible() and frame.get_facecolor()[3] > 0.8


def test_the_running_mean():
    assert metrics._smooth([3.0] * 40) == pytest.approx([3.0] * 40)
    assert metrics._smooth([2.0])[0] == 2.0
    step = metrics._smooth([0.0] * 100 + [1.0] * 100)  # over a twentieth, 10 steps: e-fold in 10
    assert (
        step[99] == pytest.approx(0, abs=1e-6)
        and step[109] == pytest.approx(1 - 0.9**10, rel=1e-3)
        and step[199] > 0.9999
    )


def tracked(out, step):
    return TrackedRun(out, "run", "0" * 16, step, {})


def test_tensorboard_has_the_same_numbers_once(tmp_path, monkeypatch):
    """A resumed run purges what it does again. Its file is of a later second, as a run's is: of one
    second, the tenth file of a process would be read before the ninth.
    """
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
    from tensorboard.summary.writer import event_file_writer

    clock = SimpleNamespace(time=count(1_800_000_000).__next__)
    monkeypatch.setattr(event_file_writer, "time", clock)
    for start, steps in ((0, (1, 2, 3)), (2, (3, 4))):
        board = TensorBoard(tracked(tmp_path, start))
        for step in steps:
            board.write(row(step) | {"loss": float(step + 10 * start)})
        board.close()
    events = EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    assert set(events.Tags()["scalars"]) == {"loss", "lr", "tokens"}
    assert [(e.step, e.value) for e in events.Scalars("loss")] == [
        (1, 1.0),
        (2, 2.0),
        (3, 23.0),
        (4, 24.0),
    ]


def test_tensorboard_has_completions_as_text(tmp_path):
    """At the first update that reads them; what is in them is no markup."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    row = {"step": 3, "prompt": "Once\n# a title", "completion": "*upon*", "tokens": 2}
    board = TensorBoard(tracked(tmp_path, 0))
    board.write_completions(
        [{**row, "finished": True, "reward": 0.5}, {**row, "step": 7, "finished": False}]
    )
    board.close()
    events = EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    (tag,) = events.Tags()["tensors"]
    found = {e.step: e.tensor_proto.string_val[0].decode() for e in events.Tensors(tag)}
    texts = "\n\nprompt:\n\n    Once\n    # a title\n\ncompletion:\n\n    *upon*"
    assert tag == "completions/text_summary" and found == {
        4: f"**reward 0.5, 2 tokens, finished**{texts}",
        8: f"**no reward, 2 tokens, truncated**{texts}",
    }
