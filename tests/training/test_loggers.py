"""--log.to: W&B and trackio get the numbers of metrics.jsonl, and no program of others ends a
run.
"""

import json
import sqlite3
import sys
import threading
from types import SimpleNamespace

import pytest
import tinyrun
from tinyrun import dolmen, rows

from dolmen.training import metrics
from dolmen.training.config import LogConfig
from dolmen.training.metrics import TrackedRun, TrackerThread

material, one_thread = tinyrun.material, tinyrun.one_thread


@pytest.fixture
def run(tmp_path) -> TrackedRun:
    return TrackedRun(tmp_path, "tiny", "0123456789abcdef", 0, {"name": "tiny"})


class Program:
    """One that fails where it is told to."""

    notice = ""

    def __init__(self, fails: str):
        self.fails, self.calls = fails, []
        self.does("begin")

    def does(self, what: str) -> None:
        self.calls.append(what)
        if what == self.fails:
            raise OSError(f"no room\nto {what}")

    def write(self, row) -> None:
        self.does("write")

    def write_completions(self, rows) -> None:
        self.does(f"write {len(rows)} completions")

    def close(self) -> None:
        self.does("close")


@pytest.mark.parametrize("fails", ("begin", "write", "close", ""))
def test_a_program_that_fails_gets_no_more_and_is_told_once(run, monkeypatch, fails):
    said, made = [], []

    def make(_: TrackedRun) -> Program:
        made.append(Program(fails))
        return made[0]

    monkeypatch.setitem(metrics.TRACKERS, "wandb", make)
    guarded = TrackerThread("wandb", run, said.append)
    for step in (1, 2):
        guarded.write({"step": step})
    guarded.close()
    guarded.thread.join()
    reported = [f"WARNING: wandb is no longer logged to (OSError: no room to {fails}); "]
    assert said == [reported[0] + "metrics.jsonl has all metrics"] * bool(fails)
    after = {"begin": [], "write": ["begin", "write"]}
    assert not made or made[0].calls == after.get(fails, ["begin", "write", "write", "close"])


COMPLETION = {
    "step": 3,
    "prompt": "Once",
    "completion": "upon",
    "reward": 0.5,
    "tokens": 1,
    "finished": True,
}


def test_completions_come_before_the_row_that_follows(run, monkeypatch):
    made = Program("")
    monkeypatch.setitem(metrics.TRACKERS, "wandb", lambda _: made)
    guarded = TrackerThread("wandb", run, print)
    guarded.write_completions([COMPLETION, COMPLETION])
    guarded.write({"step": 4})
    guarded.close()
    assert made.calls == ["begin", "write 2 completions", "write", "close"]


def test_the_programs_that_are_asked_for():
    assert LogConfig().trackers == ("tensorboard",)
    assert LogConfig(to=("tensorboard,wandb, trackio",)).trackers == metrics.TRACKER_NAMES
    assert LogConfig(to=("wandb", "wandb,trackio")).trackers == ("wandb", "trackio")
    assert LogConfig(to=("none",)).trackers == LogConfig(to=()).trackers == ()
    for word in ("tensorbord", "none,wandb", ""):
        with pytest.raises(ValueError, match="log.to has"):
            LogConfig(to=(word,))


def test_one_that_is_not_installed_is_refused(material, tmp_path, monkeypatch):
    monkeypatch.setattr(metrics, "find_spec", lambda name: None if name == "wandb" else name)
    words = ("train", material.file, "--out", tmp_path / "run", "--log.to", "tensorboard,wandb")
    result = dolmen(*words)
    assert result.code == 2 and result.err.count("\n") == 1 and not (tmp_path / "run").exists()
    assert "log.to has wandb, which is not installed: pip install 'dolmen[log]'" in result.words


@pytest.mark.parametrize(
    "mode, key, step, want",
    [
        ("online", True, 0, (None, None)),
        ("online", True, 3, (None, "allow")),
        ("online", False, 0, ("offline", None)),
        ("online", False, 3, ("offline", None)),
        ("offline", False, 3, (None, None)),
    ],
)
def test_wandb_asks_for_no_key(run, monkeypatch, mode, key, step, want):
    """Without one it is offline, whoever watches; what the environment says it obeys."""
    requested, written = [], []

    def init(**options):
        requested.append(options)
        settings = SimpleNamespace(sync_dir="here")
        return SimpleNamespace(settings=settings, log=lambda row, step: written.append((step, row)))

    fake = SimpleNamespace(
        Table=lambda columns, data: [columns, *data],
        setup=lambda: SimpleNamespace(settings=SimpleNamespace(mode=mode, project=None)),
        login=lambda prompt, verify: key and not (prompt or verify),
        init=init,
        Settings=dict,
    )
    monkeypatch.setitem(sys.modules, "wandb", fake)
    made = metrics.WandB(run._replace(step=step))
    assert (requested[0]["mode"], requested[0]["resume"]) == want
    assert (requested[0]["project"], requested[0]["id"]) == ("dolmen", run.identity)
    assert ("wandb sync here" in made.notice) == (want[0] == "offline")
    made.write({"step": 4, "time": 1.0, "loss": 2.0})
    failed = {name: value for name, value in COMPLETION.items() if name != "reward"}
    made.write_completions([COMPLETION, failed, {**COMPLETION, "step": 7}])
    reported = ["Once", "upon", 0.5, 1, True]
    columns = ["step", "prompt", "completion", "reward", "tokens", "finished"]
    assert written == [
        (4, {"loss": 2.0}),
        (4, {"completions": [columns, [4, *reported], [4, "Once", "upon", None, 1, True]]}),
        (8, {"completions": [columns, [8, *reported]]}),
    ]


def test_a_run_waits_for_no_program(run, monkeypatch):
    """One that hangs as it begins, and whose rows are too many then."""
    go, said = threading.Event(), []
    monkeypatch.setitem(metrics.TRACKERS, "trackio", lambda _: go.wait())
    monkeypatch.setattr(metrics, "CLOSE_SECONDS", 0.01)
    monkeypatch.setattr(metrics, "MAX_QUEUED", 2)
    slow, full = (TrackerThread("trackio", run, said.append) for _ in range(2))
    slow.close()
    for step in range(4):
        full.write({"step": step})
    full.close()
    go.set()
    assert ["within 0.01 s" in said[0], "2 rows behind" in said[1], len(said)] == [True, True, 2]
    slow.thread.join()
    full.rows.get()
    full.rows.put(None)
    full.thread.join()


@pytest.mark.slow
def test_trackio_has_the_same_numbers(material, tmp_path, monkeypatch):
    """Without a network; a resumed run is the same run."""
    pytest.importorskip("trackio")
    for module in ("trackio.utils", "trackio.sqlite_storage"):
        monkeypatch.setattr(f"{module}.TRACKIO_DIR", tmp_path / "trackio")
    out = tmp_path / "run"
    options = ("--out", out, "--log.to", "trackio")
    first = dolmen("train", material.file, *options, "--train.steps", 3)
    assert first.code == 0 and not (out / "tensorboard").exists()
    second = dolmen("train", material.file, *options, "--resume")
    assert second.code == 0 and "no longer logged" not in first.out + second.out
    found = sqlite3.connect(tmp_path / "trackio" / "dolmen.db").execute(
        "select run_name, step, metrics from metrics order by id"
    )
    reported = [(name, step, json.loads(text)) for name, step, text in found]
    written = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    assert len({name for name, *_ in reported}) == 1 and len(rows(out)) == 6
    again = [{**row, "step": step} for _, step, row in reported]
    assert again == [{n: v for n, v in row.items() if n != "time"} for row in written]
